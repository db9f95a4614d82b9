"""Human Preference Score v3 (arXiv 2508.03789): Qwen2-VL-7B with a head instead of words."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.hub import in_one_sentence
from flowrl.rewards.networks import (
    NetworkScorer,
    configuration,
    dtype_of,
    filled,
    image_processor,
    part_of,
    plain,
    pretrained,
    small_files,
    tokenizer,
    weights,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flowrl.prompts import Prompt

REWARD, PICTURE, PROMPT = "<|Reward|>", "<|image_pad|>", "{text_prompt}"
NUM_PIXELS = 256 * 28 * 28
"""Every picture is resized to about as many, keeping its shape: 256 tokens."""


@dataclass(kw_only=True, eq=False)
class HPSv3(NetworkScorer):
    """The mean of the preference that HPSv3 predicts, about 0 to 15.

    Its package needs a transformers of 2024; the same network is computed here with the current one. Its instruction to
    the model belongs to the package: `pip install --no-deps hpsv3` is enough, nothing of it is executed.

    Args:
        file: the weights in `path`.
        base: a folder or Hub id with Qwen2-VL's configuration, tokenizer and image processor.
        instruction_file: a text with {text_prompt} and one <|Reward|> instead of the package's.
    """

    path: str = "MizzenAI/HPSv3"
    dtype: str = "bfloat16"
    batch_size: int = 8
    file: str = "HPSv3.safetensors"
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    instruction_file: str | None = None

    _model: Any = field(init=False, repr=False)
    _head: Any = field(init=False, repr=False)
    _tokenizer: Any = field(init=False, repr=False)
    _image_processor: Any = field(init=False, repr=False)
    _instruction: str = field(init=False, repr=False)
    _reward_id: int = field(init=False, repr=False)

    def load(self) -> None:
        """Read instruction, tokenizer, network and head. Raises LoadError."""
        from transformers import Qwen2VLConfig, Qwen2VLModel

        self._instruction = _instruction(self.instruction_file)
        files = small_files(self.base)
        self._tokenizer = tokenizer(files, padding_side="right")
        self._tokenizer.add_tokens([REWARD], special_tokens=True)
        self._reward_id = self._tokenizer.convert_tokens_to_ids(REWARD)
        self._image_processor = image_processor(files)
        config = configuration(Qwen2VLConfig, files)

        state = weights(self.path, self.file, self.revision)
        language = part_of(state, "model.")
        if "embed_tokens.weight" in language:  # it knows one more token than its base
            config.text_config.vocab_size = language["embed_tokens.weight"].shape[0]
        network = {f"language_model.{name}": tensor for name, tensor in language.items()}
        network |= {f"visual.{name}": tensor for name, tensor in part_of(state, "visual.").items()}
        model = pretrained(Qwen2VLModel, self.path, config=config, state_dict=network, dtype=dtype_of(self.dtype))
        head = filled(_head(config.text_config.hidden_size), part_of(state, "rm_head."), f"{self.path}, {self.file}")
        self._model, self._head = self.settled(model), self.settled(head, "float32")

    def score_batch(self, images: Sequence[np.ndarray], prompts: Sequence[Prompt]) -> Tensor:
        """[b]. Raises FinalError for a prompt that holds one of the model's special tokens."""
        import torch

        texts = plain(self._tokenizer, [prompt.text for prompt in prompts])
        pictures = self._image_processor(
            images,
            size={"shortest_edge": NUM_PIXELS, "longest_edge": NUM_PIXELS},
            input_data_format="channels_last",
            return_tensors="pt",
        ).to(self._model.device)
        merged = self._image_processor.merge_size**2
        chats = [
            self._chat(text, int(grid.prod()) // merged)
            for text, grid in zip(texts, pictures.image_grid_thw, strict=True)
        ]
        tokens = self._tokenizer(chats, padding=True, return_tensors="pt").to(self._model.device)
        # HPSv3 was trained with the positions of plain text, 0, 1, 2 ..., also in the picture: the transformers of its
        # time computed others only for generation.
        positions = torch.arange(tokens.input_ids.shape[1], device=self._model.device)
        states = self._model(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            position_ids=positions.expand(3, *tokens.input_ids.shape),
            pixel_values=pictures.pixel_values.to(self._model.dtype),
            image_grid_thw=pictures.image_grid_thw,
            use_cache=False,
        ).last_hidden_state
        scores: Tensor = self._head(states[tokens.input_ids == self._reward_id].float())[:, 0]  # mean and spread
        return scores

    def _chat(self, text: str, num_tokens: int) -> str:
        """What the model reads."""
        words = self._instruction.replace(PROMPT, text)
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}
        chat: str = self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        return chat.replace(PICTURE, PICTURE * num_tokens)


def _head(width: int) -> nn.Sequential:
    from torch import nn

    return nn.Sequential(
        nn.Linear(width, 1024),
        nn.ReLU(),
        nn.Identity(),  # the published module drops out here
        nn.Linear(1024, 16),
        nn.ReLU(),
        nn.Linear(16, 2),
    )


def _instruction(file: str | None) -> str:
    """The text around the prompt. Raises LoadError if there is none, or not of the form that HPSv3 needs."""
    from flowrl.types import LoadError

    source = Path(file).expanduser() if file else _package_file()
    with in_one_sentence(str(source)):
        text = source.read_text(encoding="utf-8")
    if not file:
        constants = _constants(text)
        text = constants.get("INSTRUCTION", "") + constants.get("prompt_with_special_token", "")
    if text.count(PROMPT) != 1 or text.count(REWARD) != 1:
        raise LoadError(f"{source} must contain {PROMPT} once and {REWARD} once.")
    return text


def _package_file() -> Path:
    from flowrl.types import LoadError

    package = importlib.util.find_spec("hpsv3")
    if package is None or not package.submodule_search_locations:
        raise LoadError(
            "HPSv3's instruction comes with its package, which is not installed: pip install --no-deps hpsv3, or set "
            "instruction_file."
        )
    return Path(package.submodule_search_locations[0]) / "dataset" / "data_collator_qwen.py"


def _constants(source: str) -> dict[str, str]:
    """The texts that a module assigns to names, read without executing it."""
    return {
        node.targets[0].id: node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
