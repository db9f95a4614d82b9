"""The protocol of latent reward models, as published: names, shapes, dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from safetensors.torch import save as save_torch

from flowrl.rewards.latent_wire import LatentSample, decode, encode, read
from flowrl.rewards.wire import WireError

LATENTS = np.random.default_rng(0).standard_normal((1, 16, 4, 6)).astype(np.float32)
TEXT = {
    "prompt_embeds": np.random.default_rng(1).standard_normal((1, 7, 5)).astype(np.float32),
    "pooled_prompt_embeds": np.random.default_rng(2).standard_normal((1, 3)).astype(np.float32),
}
PUBLISHED: dict[str, np.ndarray] = {"latents": LATENTS, **TEXT, "u": np.array([0.4], np.float32)}


def test_the_body_is_the_published_one() -> None:
    found = load(encode(LatentSample(LATENTS, TEXT, 0.4, 7)))
    expected = {**PUBLISHED, "seeds": np.array([7], np.int64)}
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_without_a_seed_there_is_none() -> None:
    assert "seeds" not in load(encode(LatentSample(LATENTS, TEXT, 0.4, None)))


@pytest.mark.parametrize("seed", [None, -3])
def test_samples_come_out_as_they_went_in(seed: int | None) -> None:
    text = {**TEXT, "prompt_embeds_mask": np.array([[True] * 4 + [False] * 3])}
    found = decode(encode(LatentSample(LATENTS, text, 0.25, seed)))
    assert (found.u, found.seed) == (0.25, seed) and found.text.keys() == text.keys()
    assert np.array_equal(found.latents, LATENTS) and all(np.array_equal(found.text[name], text[name]) for name in text)


def test_videos_have_a_dimension_more() -> None:
    assert decode(encode(LatentSample(LATENTS[:, :, None], TEXT, 0.4, None))).latents.shape == (1, 16, 1, 4, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_clients_may_send_other_dtypes(dtype: torch.dtype) -> None:
    tensors = {name: torch.from_numpy(tensor).to(dtype) for name, tensor in PUBLISHED.items()}
    assert read(save_torch(tensors)).num_bytes == sum(tensor.nbytes for tensor in PUBLISHED.values())  # as float32
    found = decode(save_torch(tensors))
    assert found.latents.dtype == np.float32
    assert np.array_equal(found.latents, tensors["latents"].float().numpy())
    assert np.array_equal(found.text["prompt_embeds"], tensors["prompt_embeds"].float().numpy())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": None}, "the body must hold latents, prompt_embeds, u"),
        ({"prompt_embeds": None}, "the body must hold"),
        ({"u": None}, "the body must hold"),
        ({"images": LATENTS}, "the body must hold"),
        ({"latents": np.repeat(LATENTS, 2, axis=0)}, r"latents must have 4 dimensions, the first of 1, got \[2, 16"),
        ({"latents": LATENTS[0]}, "latents must have 4 dimensions"),
        ({"latents": LATENTS[..., :0]}, "latents must have 4 dimensions"),
        ({"latents": LATENTS.astype(np.int32)}, "latents must be of a floating-point dtype, got int32"),
        ({"latents": np.where(LATENTS > 2, np.nan, LATENTS)}, "latents holds numbers that are not finite"),
        ({"pooled_prompt_embeds": TEXT["prompt_embeds"]}, "pooled_prompt_embeds must have 2 dimensions"),
        ({"prompt_embeds_mask": np.ones((1, 7), np.float32)}, "prompt_embeds_mask must be bool, got float32"),
        ({"u": np.array([np.inf], np.float32)}, "u holds numbers that are not finite"),
        ({"u": np.array([[0.4]], np.float32)}, "u must have 1 dimensions"),
        ({"seeds": np.array([0.0])}, "seeds must be int64"),
        ({"seeds": np.array([1, 2])}, "seeds must be int64"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(changes: dict[str, Any], message: str) -> None:
    tensors = {name: tensor for name, tensor in {**PUBLISHED, **changes}.items() if tensor is not None}
    with pytest.raises(WireError, match=message):
        decode(save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}))
