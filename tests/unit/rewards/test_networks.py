"""What scorers with a network share: files that are no weights, where they are computed, and one of one's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cosine_similarity
from transformers import Dinov2Config, Dinov2Model

from flowrl.build import build
from flowrl.models.byte_tokenizers import clip_tokenizer
from flowrl.models.loading import quiet
from flowrl.prompts import Prompt
from flowrl.rewards.aesthetic import Aesthetic
from flowrl.rewards.networks import NetworkScorer, plain, weights
from flowrl.rewards.scoring import FinalError
from flowrl.types import LoadError, Scorer
from tests.unit.rewards.networks import PICTURES, randomise

GUIDE = Path(__file__).parents[3] / "docs" / "rewards.md"
HALF = [0.5, 0.5, 0.5]


@pytest.mark.parametrize("content", [torch.ones(3), [torch.ones(3)], 5, {"state_dict": torch.ones(3)}], ids=str)
def test_what_torch_saved_may_be_no_dictionary(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "head.pth")
    if isinstance(content, dict):  # one tensor, under a name that others use for all of them
        assert weights(str(tmp_path), "head.pth").keys() == content.keys()
        return
    with pytest.raises(LoadError, match=r"head\.pth: it must hold tensors by name, and holds a (Tensor|list|int)\."):
        weights(str(tmp_path), "head.pth")


def test_names_are_found_under_the_keys_of_training_scripts(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "step": 3}
    for content in (state, {"state_dict": state}, {"model": state}, {"state_dict": {"model": state}}):
        torch.save(content, tmp_path / "head.pt")
        assert list(weights(str(tmp_path), "head.pt")) == ["weight"]


def test_broken_files_are_one_sentence(tmp_path: Path) -> None:
    """Pages, pointers of git-lfs, and every beginning of a sound file in both of torch's formats."""
    torch.save({"weight": torch.ones(2)}, tmp_path / "zip.pt")
    torch.save({"weight": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    broken = [b"", b"<!doctype html>", b"a page", b"version https://git-lfs.github.com/spec/v1\n", b"\x80\x02}q", b"t."]
    for name, step in {"zip.pt": 97, "old.pt": 13}.items():
        sound = (tmp_path / name).read_bytes()
        broken += [sound[:length] for length in range(1, len(sound) - 8, step)]
    for content in broken:
        (tmp_path / "head.pt").write_bytes(content)
        with pytest.raises(LoadError, match=r"head\.pt: ") as caught:
            weights(str(tmp_path), "head.pt")
        assert "\n" not in str(caught.value)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadError, match="device is cuda, but this process sees no GPU"):
        Aesthetic(device="cuda").settled(torch.nn.Linear(1, 1))
    assert Aesthetic(device="auto").settled(torch.nn.Linear(1, 1)).weight.device.type == "cpu"


def test_the_documented_scorer_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file outside the package, written out as docs/rewards.md has it; it sees whole prompts."""
    ((name, text),) = re.findall(r"^```python\n# (extras/likeness\.py)\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "dino"
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    model = randomise(Dinov2Model(Dinov2Config(**sizes)))
    model.save_pretrained(folder)
    settings = {"image_processor_type": "BitImageProcessor", "do_resize": False, "do_center_crop": False}
    settings |= {"image_mean": HALF, "image_std": HALF}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    pictures = PICTURES[:, :28, :28]
    Image.fromarray(pictures[0]).save(tmp_path / "wanted.png")

    scorer = build({"_target_": "extras.likeness.Likeness", "path": str(folder), "batch_size": 2}, "scorer", Scorer)
    assert isinstance(scorer, NetworkScorer)
    scorer.load()
    scores = scorer.score(pictures, [Prompt("p", "a cat", metadata={"reference": str(tmp_path / "wanted.png")})] * 5)
    with torch.no_grad():
        pixels = torch.from_numpy(pictures / 255 * 2 - 1).permute(0, 3, 1, 2).float()
        embeds = model(pixels).pooler_output
    assert scores.dtype == np.float64 and np.ptp(scores) > 0.01
    np.testing.assert_allclose(scores, cosine_similarity(embeds, embeds[:1]).numpy(), atol=1e-5)


def test_padding_that_is_a_word_may_be_written() -> None:
    """In some of CLIP's tokenizers "!" is what texts are padded with; an end of text is still refused."""
    with quiet():
        tokenizer = clip_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "!"})
    assert plain(tokenizer, ["a cat!"]) == ["a cat!"]
    with pytest.raises(FinalError, match=r"must not contain <\|endoftext\|>"):
        plain(tokenizer, ["a cat! <|endoftext|>"])


def test_float32_is_not_rounded_in_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    Aesthetic(path="x", head="y", device="cpu").settled(torch.nn.Linear(1, 1))
    assert not torch.backends.cudnn.allow_tf32
