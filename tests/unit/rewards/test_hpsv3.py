"""HPSv3 against a calculation of its own: patches, tokens, positions and head by hand around transformers' Qwen2-VL."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from flowrl.prompts import Prompt
from flowrl.rewards.hpsv3 import HPSv3
from flowrl.rewards.scoring import FinalError
from flowrl.types import LoadError
from tests.unit.rewards.networks import MEAN, PICTURES, STD, randomise

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
BYTES = {chr(byte) if 33 <= byte <= 126 else {32: "Ġ", 10: "Ċ"}[byte]: byte for byte in [10, 32, *range(33, 127)]}
IDS = {symbol: i for i, symbol in enumerate(BYTES)}
ALL = {**IDS, **{word: len(IDS) + i for i, word in enumerate([*SPECIAL, "<|Reward|>"])}}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCTION = "Rate it.\nPrompt - {text_prompt}\nRating: <|Reward|>\nEND\n"
PROMPTS = [Prompt("p", "a red cat"), Prompt("q", "dogs {2}"), Prompt("r", "x" * 60)]
GRID = (
    40,
    28,
)  # patches of 14 pixels: 60 by 40 pixels become 560 by 392, the smallest of their shape above 256 * 28**2


def config() -> Qwen2VLConfig:
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": len(ALL) + 50, "rope_scaling": {"type": "mrope"}}
    text["rope_scaling"]["mrope_section"] = [1, 1, 2]
    vision = {"embed_dim": 32, "hidden_size": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 2}
    tokens = {"image_token_id": ALL["<|image_pad|>"], "vision_start_token_id": ALL["<|vision_start|>"]}
    return Qwen2VLConfig(text_config=text, vision_config=vision, **tokens, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def reference() -> nn.ModuleDict:
    network = Qwen2VLForConditionalGeneration(config())
    network.resize_token_embeddings(len(ALL))  # as HPSv3's training did: fewer rows than Qwen2-VL has
    head = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Dropout(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
    return randomise(nn.ModuleDict({"network": network, "head": head}))


@pytest.fixture(scope="module")
def folders(reference: nn.ModuleDict, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The published form: the base with its larger vocabulary, and one file with names of a transformers of 2024."""
    base, path = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("hpsv3")
    config().save_pretrained(base)
    words = Qwen2Tokenizer(vocab=IDS, merges=[])
    words.add_tokens(SPECIAL, special_tokens=True)
    words.chat_template = TEMPLATE
    words.save_pretrained(base)
    described = {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056}
    (base / "preprocessor_config.json").write_text(json.dumps(described | {"image_mean": MEAN, "image_std": STD}))
    state = {}
    for name, tensor in reference["network"].state_dict().items():
        old = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        state[old] = tensor.contiguous()
    state |= {f"rm_head.{name}": tensor for name, tensor in reference["head"].state_dict().items()}
    save_file(state, path / "HPSv3.safetensors")
    (path / "instruction.txt").write_text(INSTRUCTION)
    return {"base": str(base), "path": str(path), "instruction_file": str(path / "instruction.txt")}


def patches(picture: np.ndarray) -> Tensor:
    """[patches, 3 * 2 * 14 * 14]: squares of two by two patches together, each patch twice, for two frames."""
    rows, columns = GRID
    small = Image.fromarray(picture).resize((columns * 14, rows * 14), Image.Resampling.BICUBIC)
    pixels = ((np.asarray(small) / 255 - MEAN) / STD).astype(np.float32)
    found = []
    for top in range(0, rows, 2):
        for left in range(0, columns, 2):
            for row, column in [(0, 0), (0, 1), (1, 0), (1, 1)]:
                y, x = (top + row) * 14, (left + column) * 14
                patch = pixels[y : y + 14, x : x + 14].transpose(2, 0, 1)
                found.append(np.repeat(patch[:, None], 2, axis=1).ravel())
    return torch.from_numpy(np.stack(found))


def ids(text: str) -> list[int]:
    """Byte by byte, special tokens whole."""
    plain = INSTRUCTION.replace("{text_prompt}", text)
    before, after = plain.split("<|Reward|>")
    parts = ["<|im_start|>", *"user\n", "<|vision_start|>", *["<|image_pad|>"] * (GRID[0] * GRID[1] // 4)]
    parts += ["<|vision_end|>", *before, "<|Reward|>", *after, "<|im_end|>", "\n", "<|im_start|>", *"assistant\n"]
    return [ALL[{" ": "Ġ", "\n": "Ċ"}.get(part, part)] for part in parts]


def test_is_the_mean_at_the_reward_token(folders: dict[str, str], reference: nn.ModuleDict) -> None:
    scorer = HPSv3(**folders, dtype="float32", device="cpu", batch_size=2)
    scorer.load()
    scores = scorer.score(PICTURES[:3], PROMPTS)
    expected = []
    for picture, prompt in zip(PICTURES[:3], PROMPTS, strict=True):
        tokens = torch.tensor([ids(prompt.text)])
        with torch.no_grad():
            output = reference["network"].model(
                input_ids=tokens,
                position_ids=torch.arange(tokens.shape[1]).expand(3, 1, -1),  # as text, the picture too
                pixel_values=patches(picture),
                image_grid_thw=torch.tensor([[1, *GRID]]),
            )
            state = output.last_hidden_state[0, tokens[0].tolist().index(ALL["<|Reward|>"])]
            expected.append(float(reference["head"](state)[0]))
    assert np.ptp(scores) > 0.1
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_prompts_with_its_own_tokens_are_refused(folders: dict[str, str]) -> None:
    scorer = HPSv3(**folders, device="cpu")
    scorer.load()
    for token in [*SPECIAL, "<|Reward|>"]:
        with pytest.raises(FinalError, match=rf"the prompt must not contain {re.escape(token)}, which is a sign"):
            scorer.score(PICTURES[:1], [Prompt("p", f"a {token} b")])


def test_the_instruction_of_the_package(
    folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module is read, not executed: here it would fail."""
    own = {name: path for name, path in folders.items() if name != "instruction_file"}
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(LoadError, match="pip install --no-deps hpsv3, or set instruction_file"):
        HPSv3(**own).load()
    module = tmp_path / "hpsv3" / "dataset" / "data_collator_qwen.py"
    module.parent.mkdir(parents=True)
    (tmp_path / "hpsv3" / "__init__.py").touch()
    module.write_text("import deepspeed_of_2024\nINSTRUCTION = 'other'\n")
    with pytest.raises(LoadError, match=r"must contain \{text_prompt\} once and <\|Reward\|> once"):
        HPSv3(**own).load()
    before, end = INSTRUCTION.split("Rating")
    module.write_text(f"import gone\nINSTRUCTION = {before!r}\nprompt_with_special_token = {'Rating' + end!r}\n")
    scores = []
    for settings in (own, folders):
        scorer = HPSv3(**settings, device="cpu")
        scorer.load()
        scores.append(scorer.score(PICTURES[:1], PROMPTS[:1]))
    assert scores[0] == scores[1]


def test_incomplete_folders(folders: dict[str, str], tmp_path: Path, reference: nn.ModuleDict) -> None:
    with pytest.raises(LoadError, match=r"holds no HPSv3_7B\.safetensors"):
        HPSv3(**folders, file="HPSv3_7B.safetensors").load()
    state = {f"rm_head.{name}": tensor for name, tensor in reference["head"].state_dict().items()}
    save_file(state, tmp_path / "HPSv3.safetensors")
    with pytest.raises(LoadError, match="tensors of Qwen2VLModel are missing"):
        HPSv3(**(folders | {"path": str(tmp_path)})).load()
    with pytest.raises(LoadError, match="missing"):
        HPSv3(**(folders | {"instruction_file": "missing.txt"})).load()
