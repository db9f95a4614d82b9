"""AdamW and its learning-rate schedule, counted in optimiser steps."""

from __future__ import annotations

import math

import torch
from torch import nn

from flowrl.config import Optimizer
from flowrl.distributed.fsdp import assert_writable
from flowrl.distributed.lora import trainable


def make_optimizer(module: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW on the masters of all that is trained in `module`. A step while it is gathered raises RuntimeError."""
    optimizer = torch.optim.AdamW(
        trainable(module).values(),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    optimizer.register_step_pre_hook(lambda *_: assert_writable(module))
    return optimizer


def learning_rate(config: Optimizer, step: int, total_steps: int) -> float:
    """The rate of optimiser step `step` (0-based): linear warm-up, then the schedule down to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = config.decay_steps if config.decay_steps is not None else total_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps))
    share = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.lr - config.min_lr) * share
