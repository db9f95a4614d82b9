"""How families lay out latents and scale them for their autoencoders."""

from __future__ import annotations

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
