"""Questions to a vision-language model, and what becomes of its answers.

`recorded_vllm.json` holds what a vLLM server really answered; `tests/integration/test_vllm.py` asks one.
"""

from __future__ import annotations

import base64
import io
import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowrl.config import Config, Data
from flowrl.prompts import Prompt
from flowrl.rewards.parsers import Parser, Rating, Transcription, YesNo
from flowrl.rewards.scoring import FinalError, SelfTimed
from flowrl.rewards.transport import AnswerError
from flowrl.rewards.vlm_judge import VLMJudge, answer_of
from flowrl.types import Scorer
from tests.unit.rewards.servers import Asked, Reply, reply, serving

RECORDED = json.loads((Path(__file__).parent / "recorded_vllm.json").read_text(encoding="utf-8"))
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)
PROMPT = Prompt("p7", 'a {sign} that says "FLOW ART"', "FLOW ART")
OPTIONS: dict[str, Any] = {"url": "http://host/v1", "model": "tiny-vlm", "question": "Good?", "parser": Rating()}


def recorded(name: str) -> Reply:
    return reply(RECORDED[name]["answer"], RECORDED[name]["status"])


def completion(text: Any, finish_reason: str = "stop", **choice: Any) -> Reply:
    choices = [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason, **choice}]
    return reply({"object": "chat.completion", "choices": choices})


@contextmanager
def judge(answer: Any, **options: Any) -> Iterator[VLMJudge]:
    """A loaded judge on a server that answers so: a Reply, or a function of what is asked."""

    def respond(asked: Asked) -> Reply:
        if asked.method == "GET":
            assert asked.path == "/v1/models"
            return recorded("models")
        assert asked.path == "/v1/chat/completions" and asked.headers["content-type"] == "application/json"
        return answer if isinstance(answer, Reply) else answer(asked)

    with serving(respond) as url:
        scorer = VLMJudge(**(OPTIONS | options | {"url": f"{url}/v1"}))
        scorer.load()
        yield scorer


def score(answer: Any, **options: Any) -> float:
    """Of one picture."""
    with judge(answer, **options) as scorer:
        scores = scorer.score(IMAGES[:1], [PROMPT])
    assert scores.dtype == np.float64 and scores.shape == (1,)
    return float(scores[0])


# ------------------------------------------------------------------------------------------ recorded answers


def test_recorded_answers_are_understood() -> None:
    assert score(recorded("rating")) == pytest.approx(7 / 9)  # "Rating: 8."
    assert score(recorded("transcription"), parser=Transcription()) == pytest.approx(1 - 2 / 7)  # "Flow is  art\n"
    listed = RECORDED["yes_no"]["answer"]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    odds = {token["token"]: math.exp(token["logprob"]) for token in listed}
    expected = odds["Yes"] / (odds["Yes"] + odds["No"])
    assert 0.001 < expected < 0.999
    assert score(recorded("yes_no"), parser=YesNo()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cut_rating", {}, "picture 0 of prompt 'p7': max_tokens ended the answer within the rating: 'Rating: 8'"),
        ("neither", {"parser": YesNo()}, "picture 0 of prompt 'p7': the answer begins with neither 'yes' nor 'no'"),
        ("rating", {"parser": YesNo()}, "picture 0 of prompt 'p7': the server gave no log-probabilities"),
        ("too_many_logprobs", {}, "completions answered 400: .*greater than max allowed: 20"),
        ("unknown_model", {}, "completions answered 404: .*model `other` does not exist"),
        ("wrong_token", {}, "completions answered 401: .*Unauthorized"),
    ],
)
def test_recorded_answers_without_a_score_are_errors(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        score(recorded(name), **options)


# ------------------------------------------------------------------------------------------ questions


def asked_by(**options: Any) -> dict[str, Any]:
    """The request for the first picture."""
    bodies: list[dict[str, Any]] = []

    def keep(asked: Asked) -> Reply:
        bodies.append(json.loads(asked.body))
        return recorded("yes_no" if isinstance(options.get("parser"), YesNo) else "rating")

    score(keep, **options)
    (body,) = bodies
    return body


def test_the_question_holds_picture_and_prompt() -> None:
    body = asked_by(
        question="Is {target} in it? {prompt} {target} {}, {not one}", system="Be strict.", parser=Rating(max_tokens=9)
    )
    system, user = body.pop("messages")
    assert body == {"model": "tiny-vlm", "max_tokens": 9, "temperature": 0.0}
    assert system == {"role": "system", "content": "Be strict."}
    picture, text = user["content"]
    assert text == {
        "type": "text",
        "text": 'Is FLOW ART in it? a {sign} that says "FLOW ART" FLOW ART {}, {not one}',
    }
    kind, _, data = picture["image_url"]["url"].partition(",")
    assert user["role"] == "user" and picture["type"] == "image_url" and kind == "data:image/png;base64"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), IMAGES[0])


def test_pictures_as_jpeg() -> None:
    smooth = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None, None] * 4, (64, 64, 3))
    bodies: list[dict[str, Any]] = []

    def keep(asked: Asked) -> Reply:
        bodies.append(json.loads(asked.body))
        return recorded("rating")

    with judge(keep, format="jpeg") as scorer:
        scorer.score(smooth[None], [PROMPT])
    kind, _, data = bodies[0]["messages"][0]["content"][0]["image_url"]["url"].partition(",")
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    assert kind == "data:image/jpeg;base64" and picture.format == "JPEG"
    assert np.abs(np.asarray(picture, dtype=int) - smooth).max() < 8


def test_parsers_and_users_add_to_the_request() -> None:
    assert asked_by(parser=YesNo()).items() >= {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}.items()
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "top_logprobs": 5, "temperature": 0.5}
    assert asked_by(parser=YesNo(), extra_body=extra).items() >= extra.items()


def test_pictures_keep_their_scores_however_the_answers_come() -> None:
    def count(asked: Asked) -> Reply:
        url = json.loads(asked.body)["messages"][0]["content"][0]["image_url"]["url"]
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
        return completion(f"{int(picture[0, 0, 0])}")

    with judge(count, parser=Rating(low=0, high=255), concurrency=5) as scorer:
        scores = scorer.score(IMAGES, [PROMPT] * 5)
    np.testing.assert_allclose(scores, IMAGES[:, 0, 0, 0] / 255)


# ------------------------------------------------------------------------------------------ bad answers


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (completion(None), "the answer has no text$"),
        (completion(None, "length"), "the answer has no text; if the model thinks first, raise max_tokens"),
        (completion(5), "the answer has no text"),
        (reply({"choices": []}), r"the answer is not a chat completion \(IndexError"),
        (reply({"choices": [None]}), r"the answer is not a chat completion \(TypeError"),
        (reply({"error": "busy"}), r"the answer is not a chat completion \(KeyError"),
        (reply({"choices": [{"message": {"content": "5"}}]}), r"not a chat completion \(KeyError: 'finish_reason'"),
        (completion("5", logprobs={"content": [{"top_logprobs": [{"token": "5"}]}]}), r"\(KeyError: 'logprob'"),
        (completion("5", logprobs=["5"]), r"not a chat completion \(AttributeError"),
        (completion("I will not judge this."), "the answer is no rating: 'I will not judge this.'"),
    ],
)
def test_an_answer_without_a_score_is_an_error_by_the_pictures_name(answer: Reply, message: str) -> None:
    with pytest.raises(AnswerError, match=f"picture 0 of prompt 'p7': .*{message}"):
        score(answer)


def test_the_picture_at_fault_is_named() -> None:
    def dislike_one(asked: Asked) -> Reply:
        return completion("no idea" if len(json.loads(asked.body)["messages"][0]["content"][1]["text"]) > 5 else "5")

    prompts = [Prompt("a", "x"), Prompt("b", "longer"), Prompt("c", "x")]
    with judge(dislike_one, question="{prompt}") as scorer, pytest.raises(AnswerError, match="picture 1 of prompt 'b'"):
        scorer.score(IMAGES[:3], prompts)


def test_an_answer_is_no_longer_than_was_asked_for() -> None:
    """A megabyte, and 10 kB a token: a model that is to think has room for it."""
    long = completion("5", reasoning="z" * 2_500_000)
    assert score(long, extra_body={"max_completion_tokens": 200}) == pytest.approx(4 / 9)
    with pytest.raises(AnswerError, match=r"completions answered 200: .* more than 1640000 bytes"):
        score(long)


def test_an_answer_may_leave_out_log_probabilities() -> None:
    choice = {"message": {"content": "7"}, "finish_reason": "stop"}
    assert answer_of({"choices": [choice]}) == answer_of({"choices": [choice | {"logprobs": None}]})


# ------------------------------------------------------------------------------------------ loading, settings


def test_the_model_must_be_served() -> None:
    with pytest.raises(AnswerError, match="/v1 serves tiny-vlm, but not the model 'gpt'"), judge(Reply(), model="gpt"):
        pass


def test_the_server_must_list_its_models() -> None:
    with serving(lambda asked: reply({"status": "ok"})) as url:
        scorer = VLMJudge(**(OPTIONS | {"url": url}))
        with pytest.raises(AnswerError, match=r"/models must answer a list of models, .* got \['status'\]"):
            scorer.load()


@pytest.mark.parametrize(
    ("parser", "question", "needs"),
    [(Rating(), "{prompt}", False), (Rating(), "{target}?", True), (Transcription(), "Read.", True)],
)
def test_targets_are_needed_where_they_are_used(parser: Parser, question: str, needs: bool) -> None:
    scorer = VLMJudge(**(OPTIONS | {"parser": parser, "question": question}))
    problems = scorer.problems(Config(data=Data(target="none")))
    assert [problem.path for problem in problems] == ["data.target"] * needs
    assert scorer.problems(Config(data=Data(target="quoted"))) == []


def test_a_prompt_without_the_target_that_is_asked_for_is_named() -> None:
    with judge(Reply(), question="{target}?") as scorer, pytest.raises(FinalError, match="prompt 'p' has no target"):
        scorer.score(IMAGES[:1], [Prompt("p", "x")])


def test_is_a_scorer_that_can_be_pickled() -> None:
    scorer = VLMJudge(**OPTIONS)
    assert isinstance(scorer, Scorer) and isinstance(scorer, SelfTimed) and pickle.loads(pickle.dumps(scorer)) == scorer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parser": "rating"}, r"parser must have needs_target, asks\(\) and score"),
        ({"question": "{promt}"}, "question may hold {prompt} and {target}, got {promt}"),
        ({"format": "webp"}, "format must be png or jpeg, got 'webp'"),
        ({"timeout_s": 0.0}, "timeout_s must be greater than 0"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLMJudge(**(OPTIONS | options))
