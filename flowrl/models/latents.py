"""How families lay out latents and scale them for their autoencoders."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def pack(latents: Tensor) -> Tensor:
    """[B, C, H, W] as tokens of 2 x 2 patches, [B, H/2 * W/2, 4 C] (FLUX, Qwen-Image)."""
    batch, channels, height, width = latents.shape
    patches = latents.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """What `pack` was given, of `height` and `width` in latents."""
    batch, _, channels = tokens.shape
    patches = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(batch, channels // 4, height, width)


def positions(*sizes: int, device: torch.device) -> Tensor:
    """Coordinates on a grid of these sizes, the last axis fastest: int64 [product of sizes, axes] (FLUX, FLUX.2)."""
    grid: Tensor = torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes))
    return grid


def check_scaling(vae: Any) -> None:
    """Raise ValueError unless an autoencoder's settings hold the numbers by which latents are scaled for it."""
    config = vae.config
    factors = {name: config[name] for name in ("scaling_factor", "batch_norm_eps") if name in config}
    if config.get("shift_factor") is not None:
        factors["shift_factor"] = config["shift_factor"]
    for name, value in factors.items():
        if not _are_numbers([value]):
            raise ValueError(f"config.json has {name}={value!r}, which is no number.")
    for name in () if "scaling_factor" in config else ("latents_mean", "latents_std"):
        values = config.get(name)
        if name in config and not (_are_numbers(values) and len(values) == config["z_dim"]):
            raise ValueError(f"config.json has {name}={values!r}, which is not a number for each channel.")


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(v, int | float) and math.isfinite(v) for v in values)


def unscaled(latents: Tensor, vae: Any) -> Tensor:
    """By the one factor and shift of an `AutoencoderKL` (SD3, FLUX, Z-Image)."""
    shift = vae.config.shift_factor
    scaled: Tensor = latents / vae.config.scaling_factor
    return scaled if shift is None else scaled + shift


def unstandardised(latents: Tensor, vae: Any) -> Tensor:
    """By mean and deviation of every channel, [B, C, F, H, W] (the autoencoders of Wan and Qwen-Image)."""
    mean, std = (
        torch.tensor(values, dtype=latents.dtype, device=latents.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return latents * std + mean
