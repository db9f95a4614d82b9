"""AdamW and its learning-rate schedule, counted in optimiser steps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flowrl.config import Optimizer
from flowrl.distributed.fsdp import assert_writable, full_tensor
from flowrl.distributed.lora import trainable
from flowrl.distributed.networks import by_network


def make_optimizer(module: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW on the masters of all that is trained in `module`. A step while it is gathered raises RuntimeError.

    A network without a gradient, such as an expert that no row has gone to on any rank, takes no part in a step.
    """
    optimizer = torch.optim.AdamW(
        trainable(module).values(),
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    optimizer.register_step_pre_hook(lambda *_: assert_writable(module))
    optimizer.register_step_pre_hook(lambda *_: leave_out_idle(trainable(module)))
    return optimizer


def leave_out_idle(parameters: Mapping[str, nn.Parameter]) -> None:
    """Of several networks, drop the gradients of those that have none but zeros.

    On one rank an expert without rows has no gradient, on many it has zeros: it runs for other ranks, which may have
    rows. AdamW would go on by its averages and decay its weights where there are zeros, and do nothing where there is
    none. All ranks must ask.
    """
    networks = by_network(parameters)
    if len(networks) == 1:
        return
    for network in networks.values():
        gradients = [parameter.grad for parameter in network.values() if parameter.grad is not None]
        if gradients and full_tensor(torch.nn.utils.get_total_norm(gradients, norm_type=1)) == 0:
            for parameter in network.values():
                parameter.grad = None


def moments(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """AdamW's two averages of every parameter, as `<parameter>.exp_avg` and `<parameter>.exp_avg_sq`.

    Those of a parameter that has had no step yet are made here, zero as its first step would make them.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        found |= {f"{name}.{slot}": state[slot].detach() for slot in ("exp_avg", "exp_avg_sq")}
    return found


def num_steps(optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, int]:
    """How many steps every parameter has had, which AdamW corrects its averages by; `moments` must be there."""
    return {name: int(optimizer.state[parameter]["step"]) for name, parameter in parameters.items()}


def set_num_steps(
    optimizer: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], steps: Mapping[str, int]
) -> None:
    """The reverse. Raises KeyError for a parameter that `steps` lacks."""
    for name, parameter in parameters.items():
        optimizer.state[parameter]["step"].fill_(steps[name])


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
