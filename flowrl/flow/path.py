"""The straight path between data and noise, and what a velocity says about both ends.

x_sigma = (1 - sigma) x_0 + sigma eps, sigma from 0 (data) to 1 (noise); the model predicts v ~ dx/dsigma = eps - x_0.
Tensors are [B, ...]; a sigma is a number or [B].
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_computed(tensor: Tensor) -> Tensor:
    """The tensor in the dtype that flowrl computes in: float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def per_sample(values: Tensor | float, like: Tensor) -> Tensor | float:
    """`values` [B] as [B, 1, ...] in the dtype of `like` [B, ...], ready to multiply it; numbers pass through."""
    if not isinstance(values, Tensor) or values.ndim == 0:
        return values
    return values.to(device=like.device, dtype=like.dtype).reshape(-1, *(1,) * (like.ndim - 1))


def interpolate(x_0: Tensor, noise: Tensor, sigma: Tensor | float) -> Tensor:
    """x_sigma, the noised data."""
    sigma = per_sample(sigma, x_0)
    return (1 - sigma) * x_0 + sigma * noise


def velocity_target(x_0: Tensor, noise: Tensor) -> Tensor:
    """dx/dsigma, what the model is trained to predict; the same at every sigma."""
    return noise - x_0


def predicted_x_0(sample: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """The data end of the path: x - sigma v."""
    return sample - per_sample(sigma, sample) * velocity


def predicted_noise(sample: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """The noise end of the path: x + (1 - sigma) v."""
    return sample + (1 - per_sample(sigma, sample)) * velocity


def score(sample: Tensor, velocity: Tensor, sigma: Tensor | float) -> Tensor:
    """The gradient of log p_sigma(x): -eps / sigma. Infinite at sigma = 0."""
    return -predicted_noise(sample, velocity, sigma) / per_sample(sigma, sample)
