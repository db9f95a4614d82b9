"""What travels between a server of latent reward models and its clients: one sample there, one score back.

    POST /v1/score      content-type: application/octet-stream      x-drm-protocol-version: 1

The body is one safetensors blob without metadata; every tensor has a leading dimension of 1: `latents` [1, C, h, w] (of
videos [1, C, F, h, w]), `prompt_embeds` [1, L, D], of some families `pooled_prompt_embeds` [1, P], `u` float32 [1] and,
if the noise is to be repeatable, `seeds` int64 [1]. The answer is JSON: `protocol_version` and `raw_scores`, a list of
one number, or `error`. This is the protocol of DiNa-LRM's server; one tensor is added for families whose embeddings are
padded, `prompt_embeds_mask` bool [1, L].

Servers are asked with single samples, and batch for themselves. Free of torch, like everything that workers import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save

from flowrl.rewards.wire import BFLOAT16, WireError, read_blob

VERSION_HEADER = "x-drm-protocol-version"
TEXT = {"prompt_embeds": 3, "pooled_prompt_embeds": 2, "prompt_embeds_mask": 2}  # dimensions
REQUIRED = {"latents", "prompt_embeds", "u"}
KNOWN = REQUIRED | TEXT.keys() | {"seeds"}
FLOATS = (np.float16, np.float32, np.float64)


@dataclass(frozen=True)
class LatentSample:
    """One request."""

    latents: np.ndarray  # float32 [1, C, (F,) h, w]
    text: Mapping[str, np.ndarray]  # prompt_embeds, pooled_prompt_embeds, prompt_embeds_mask: those there are
    u: float  # noise level
    seed: int | None


@dataclass(frozen=True)
class Packed:
    """A body whose tensors are as they came: none of their numbers is looked at."""

    tensors: Mapping[str, np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Of all tensors as float32."""
        return sum(4 * tensor.size for tensor in self.tensors.values())

    def unpacked(self) -> LatentSample:
        """Raises WireError."""
        text = {name: _checked(name, self.tensors[name], TEXT[name]) for name in TEXT if name in self.tensors}
        latents = _checked("latents", self.tensors["latents"], 5 if self.tensors["latents"].ndim == 5 else 4)
        (u,) = _checked("u", self.tensors["u"], 1)
        return LatentSample(latents, text, float(u), _seed(self.tensors.get("seeds")))


def encode(sample: LatentSample) -> bytes:
    """The body of a request."""
    tensors = {"latents": sample.latents, **sample.text, "u": np.array([sample.u], np.float32)}
    if sample.seed is not None:
        tensors["seeds"] = np.array([sample.seed], np.int64)
    return save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()})


def decode(body: bytes) -> LatentSample:
    """What a body holds; floating-point tensors of whatever size as float32. Raises WireError."""
    return read(body).unpacked()


def read(body: bytes) -> Packed:
    """The same before any number is converted."""
    tensors, _ = read_blob(body)
    names = tensors.keys()
    if not names >= REQUIRED or not names <= KNOWN:
        optional = ", ".join(sorted(KNOWN - REQUIRED))
        raise WireError(f"the body must hold {', '.join(sorted(REQUIRED))}, and may {optional}; got {sorted(names)}")
    return Packed(tensors)


def _seed(seeds: np.ndarray | None) -> int | None:
    if seeds is None:
        return None
    if seeds.dtype != np.int64 or seeds.shape != (1,):
        raise WireError(f"seeds must be int64 [1], got {seeds.dtype} {list(seeds.shape)}")
    return int(seeds[0])


def _checked(name: str, tensor: np.ndarray, ndim: int) -> np.ndarray:
    """A mask as it is, all others float32 and finite."""
    if tensor.ndim != ndim or tensor.shape[0] != 1 or tensor.size == 0:
        raise WireError(f"{name} must have {ndim} dimensions, the first of 1, got {list(tensor.shape)}")
    if name.endswith("mask"):
        if tensor.dtype != np.bool_:
            raise WireError(f"{name} must be bool, got {tensor.dtype}")
        return tensor
    if tensor.dtype == BFLOAT16:
        tensor = tensor.view(np.uint16).astype(np.uint32)
        tensor <<= 16  # in place, and not copied again
        tensor = tensor.view(np.float32)
    if tensor.dtype not in FLOATS:
        raise WireError(f"{name} must be of a floating-point dtype, got {tensor.dtype}")
    tensor = tensor.astype(np.float32, copy=False)
    if not np.isfinite(tensor).all():
        raise WireError(f"{name} holds numbers that are not finite")
    return tensor
