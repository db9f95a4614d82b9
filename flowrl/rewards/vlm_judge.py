"""A vision-language model as the judge, on any server with OpenAI's chat completions: `vllm serve`, SGLang, a provider.

Each picture is one question. How the answer becomes a number is for a parser to say: `flowrl.rewards.parsers`.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from flowrl.config import Config, Problem
from flowrl.rewards.excerpt import excerpt
from flowrl.rewards.ocr import without_targets
from flowrl.rewards.parsers import Answer, Parser
from flowrl.rewards.scoring import FinalError
from flowrl.rewards.transport import AnswerError, Server

if TYPE_CHECKING:
    from flowrl.prompts import Prompt

FORMATS = ("png", "jpeg")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
ANSWER_BYTES, TOKEN_BYTES = 1_000_000, 10_000  # of an answer, and for each token of it, with its alternatives
HEADERS = {"content-type": "application/json"}


@dataclass(frozen=True, kw_only=True)
class VLMJudge(Server):
    """Scores that a parser makes of a model's answers, at temperature 0, `concurrency` questions at a time.

    See `transport.Server` for the other fields; `url` goes up to and includes `/v1`.

    Args:
        model: its name on the server.
        question: what is asked about each picture; {prompt} and {target} stand for the prompt's.
        parser: one of `flowrl.rewards.parsers`, or your own.
        system: a system message; None sends none.
        format: of the picture in the request: png, which is lossless, or jpeg (quality 95).
        extra_body: further fields of the request, which win over flowrl's own: for Qwen3 models, say,
            {chat_template_kwargs: {enable_thinking: false}}.
    """

    model: str
    question: str
    parser: Any  # a Parser
    system: str | None = None
    format: str = "png"
    extra_body: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.parser, Parser):
            raise ValueError(f"parser must have needs_target, asks() and score(answer, prompt), got {self.parser!r}")
        unknown = sorted(self._placeholders - {"prompt", "target"})
        if unknown:
            raise ValueError(f"question may hold {{prompt}} and {{target}}, got {{{unknown[0]}}}")
        if self.format not in FORMATS:
            raise ValueError(f"format must be {' or '.join(FORMATS)}, got {self.format!r}")

    @property
    def _placeholders(self) -> set[str]:
        return set(PLACEHOLDER.findall(self.question))

    def problems(self, run: Config) -> list[Problem]:
        """Without targets there is nothing to ask for, or to compare with."""
        needed = "target" in self._placeholders or self.parser.needs_target
        return without_targets(run) if needed else []

    def load(self) -> None:
        """Wait until the server is ready. Raises AnswerError if it does not serve `model`."""
        self.connection.wait("/models")
        served = _models(self.connection.get("/models"))
        if self.model not in served:
            names = excerpt(", ".join(served)) or "nothing"
            raise AnswerError(f"{self.url} serves {names}, but not the model {self.model!r}")

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        """float64 [B]. Raises AnswerError for an answer without a score, by the picture and the prompt's id."""
        slots = range(len(images))
        scores = self.connection.map(lambda slot: self._judged(slot, images[slot], prompts[slot]), slots)
        return np.array(scores, dtype=np.float64)

    def _judged(self, slot: int, image: np.ndarray, prompt: Prompt) -> float:
        request = self._request(image, prompt)
        body = json.dumps(request).encode()
        completion = self.connection.post("/chat/completions", body, HEADERS, _most_bytes(request))
        try:
            return float(self.parser.score(answer_of(completion), prompt))
        except AnswerError as error:
            raise AnswerError(f"picture {slot} of prompt {prompt.id!r}: {error}") from error

    def _request(self, image: np.ndarray, prompt: Prompt) -> dict[str, Any]:
        picture = {"type": "image_url", "image_url": {"url": data_url(image, self.format)}}
        user = {"role": "user", "content": [picture, {"type": "text", "text": self._asked(prompt)}]}
        return {
            "model": self.model,
            "messages": [user] if self.system is None else [{"role": "system", "content": self.system}, user],
            "temperature": 0.0,
            **self.parser.asks(),
            **(self.extra_body or {}),
        }

    def _asked(self, prompt: Prompt) -> str:
        words = {"prompt": prompt.text, "target": prompt.target}
        if "target" in self._placeholders and not prompt.target:
            raise FinalError(f"prompt {prompt.id!r} has no target for the question: {prompt.text}")
        return PLACEHOLDER.sub(lambda found: str(words[found[1]]), self.question)


def data_url(image: np.ndarray, file_format: str) -> str:
    """uint8 [H, W, 3] as the URL of a file of the format png or jpeg."""
    buffer = io.BytesIO()
    options = {"compress_level": 1} if file_format == "png" else {"quality": 95}
    Image.fromarray(image).save(buffer, format=file_format, **options)
    return f"data:image/{file_format};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _most_bytes(request: Mapping[str, Any]) -> int:
    """Of an answer. A model that thinks has it in the same number of tokens."""
    limits = [request[name] for name in ("max_tokens", "max_completion_tokens") if isinstance(request.get(name), int)]
    return ANSWER_BYTES + TOKEN_BYTES * max(limits, default=0)


def _models(answer: Mapping[str, Any]) -> list[str]:
    try:
        return [str(model["id"]) for model in answer["data"]]
    except (KeyError, TypeError) as error:
        raise AnswerError(f"/models must answer a list of models, as OpenAI's does, got {sorted(answer)}") from error


def answer_of(completion: Mapping[str, Any]) -> Answer:
    """The first choice of a chat completion. Raises AnswerError for what is none, and for a refusal or no text."""
    try:
        choice = completion["choices"][0]
        text, listed = choice["message"]["content"], (choice.get("logprobs") or {}).get("content") or [{}]
        first = {str(token["token"]): float(token["logprob"]) for token in listed[0].get("top_logprobs", [])}
        is_cut = choice["finish_reason"] == "length"
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"the answer is not a chat completion ({type(error).__name__}: {error})") from error
    if not isinstance(text, str):
        hint = "; if the model thinks first, raise max_tokens or switch that off with extra_body" if is_cut else ""
        raise AnswerError(f"the answer has no text{hint}")
    return Answer(text, is_cut, first)
