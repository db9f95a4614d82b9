"""CLIP score against a calculation of its own: pictures by Pillow, tokens by hand, one pair at a time."""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

from flowrl.prompts import Prompt
from flowrl.rewards.clip_score import CLIPScore
from flowrl.rewards.scoring import FinalError
from flowrl.types import LoadError
from tests.unit.rewards.networks import (
    CONTEXT,
    LONG,
    PICTURES,
    PROMPTS,
    TEXTS,
    clip_config,
    clip_cosines,
    clip_ids,
    prepared,
    save_clip,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    save_clip(folder)
    return folder


def loaded(folder: Path, **settings: object) -> CLIPScore:
    scorer = CLIPScore(path=str(folder), device="cpu", **settings)
    scorer.load()
    return scorer


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
def test_is_the_scaled_logit(folder: Path, resample: str) -> None:
    pixels = prepared(PICTURES, Image.Resampling[resample.upper()])
    expected = math.exp(3.0) * clip_cosines(CLIPModel.from_pretrained(folder), pixels, TEXTS) / 30
    scores = loaded(folder, resample=resample, batch_size=2).score(PICTURES, PROMPTS)
    assert scores.dtype == np.float64 and np.ptp(scores) > 0.1
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_batches_and_scale_change_nothing_else(folder: Path) -> None:
    scores = loaded(folder).score(PICTURES, PROMPTS)
    np.testing.assert_allclose(loaded(folder, batch_size=1).score(PICTURES, PROMPTS), scores, atol=1e-6)
    np.testing.assert_allclose(loaded(folder, scale=1.0).score(PICTURES, PROMPTS), 30 * scores, atol=1e-5)


def test_long_prompts_are_cut(folder: Path) -> None:
    assert len(clip_ids(LONG)) == CONTEXT
    scorer = loaded(folder)
    one, other = (type(PROMPTS[0])("p", LONG + end) for end in (" with more", " and other words"))
    assert scorer.score(PICTURES[:1], [one]) == scorer.score(PICTURES[:1], [other])


@pytest.mark.parametrize("sign", ["<|endoftext|>", "<|startoftext|>", "<|EndOfText|>"])
def test_special_tokens_are_refused(folder: Path, sign: str) -> None:
    """The network reads a text up to the first <|endoftext|>."""
    with pytest.raises(FinalError, match=re.escape(f"must not contain {sign.lower()}")):
        loaded(folder).score(PICTURES[:1], [Prompt("p", f"a cat {sign} and a dog")])


def test_as_on_the_hub(tmp_path: Path) -> None:
    """OpenAI's own activation, and an image processor by its name of 2022."""
    config = clip_config()
    config.text_config.hidden_act = config.vision_config.hidden_act = "quick_gelu"
    model = save_clip(tmp_path, config)
    file = tmp_path / "preprocessor_config.json"
    described = json.loads(file.read_text())
    del described["image_processor_type"]
    file.write_text(json.dumps(described | {"feature_extractor_type": "CLIPFeatureExtractor"}))
    expected = math.exp(3.0) * clip_cosines(model, prepared(PICTURES), TEXTS) / 30
    np.testing.assert_allclose(loaded(tmp_path, resample="bicubic").score(PICTURES, PROMPTS), expected, atol=1e-5)


def test_half_precision_is_close(folder: Path) -> None:
    exact = loaded(folder).score(PICTURES, PROMPTS)
    half = loaded(folder, dtype="bfloat16").score(PICTURES, PROMPTS)
    assert half.dtype == np.float64
    np.testing.assert_allclose(half, exact, atol=0.05)
    assert np.abs(half - exact).max() > 1e-6


def test_is_cheap_to_pickle() -> None:
    assert len(pickle.dumps(CLIPScore())) < 1000


def test_absent_and_incomplete_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="/nowhere: there is no such folder or file, and a Hub id has the form"):
        CLIPScore(path="/nowhere").load()
    with pytest.raises(LoadError, match="holds no tokenizer: there is none of tokenizer"):
        CLIPScore(path=str(tmp_path)).load()
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    whole = dict(tensors)
    del tensors["visual_projection.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"1 tensors of CLIPModel are missing, among them visual_projection\.weight"):
        CLIPScore(path=str(tmp_path)).load()
    save_file(
        tensors | {"visual_projection.weight": whole["text_projection.weight"].clone()}, weights, {"format": "pt"}
    )
    with pytest.raises(LoadError, match=r"visual_projection\.weight has shape \[24, 32\] instead of \[24, 40\]"):
        CLIPScore(path=str(tmp_path)).load()
    weights.write_bytes(b"<!doctype html>")
    with pytest.raises(LoadError, match=str(tmp_path)):
        CLIPScore(path=str(tmp_path)).load()
    weights.unlink()
    with pytest.raises(LoadError, match=r"no file named model\.safetensors"):
        CLIPScore(path=str(tmp_path)).load()


def test_hub_ids_and_revisions(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the cache holds them after a download."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(LoadError, match="owner/clip: no folder, and as a Hub id it cannot be had: "):
        CLIPScore(path="owner/clip").load()
    repository = tmp_path / "models--owner--clip"
    shutil.copytree(folder, repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text("c0ffee")
    with pytest.raises(LoadError, match="owner/clip: no folder, and as a Hub id it cannot be had: "):
        CLIPScore(path="owner/clip").load()  # its main branch is not there
    scorer = CLIPScore(path="owner/clip", revision="v1", device="cpu")
    scorer.load()
    np.testing.assert_array_equal(scorer.score(PICTURES, PROMPTS), loaded(folder).score(PICTURES, PROMPTS))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"device": "gpu"}, "device must be auto or cpu or cuda, got 'gpu'"),
        ({"dtype": "int8"}, "dtype must be float32 or bfloat16 or float16, got 'int8'"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"scale": 0.0}, "scale must be greater than 0"),
        ({"scale": math.inf}, "scale must be greater than 0, and finite"),
        ({"resample": "nearest"}, "resample must be bilinear or bicubic, got 'nearest'"),
    ],
)
def test_impossible_settings(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CLIPScore(**setting)
