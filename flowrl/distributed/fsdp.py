"""One model spread over several ranks (FSDP2), and the few operations that have to know it.

At rest every parameter of a sharded module is a `DTensor`: this rank's slice of the master weights. Inside `gathered`,
and between a forward with gradient and its backward, whole copies stand in their place; writing then would be lost in
silence, so whoever writes or saves asks `assert_writable` first. A module that was never sharded is always at rest,
and all functions here take it as it is: world size 1 has no second path.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flowrl.config import FSDP, ConfigError, Problem
from flowrl.distributed.precision import matrices

GATHERED_SHARE = 0.5
"""How much of the free device memory the gathered copy may take; sampling and decoding need the rest."""

NBYTES = "_flowrl_gathered_nbytes"  # where `shard` leaves on the module what a gathered copy of it takes


def shard(
    module: nn.Module,
    blocks: Sequence[type[nn.Module]],
    mesh: DeviceMesh,
    settings: FSDP,
    param_dtype: torch.dtype | None = None,
) -> None:
    """Spread the parameters of `module` over the ranks of `mesh`, in place.

    Each block gathers its matrices (`precision.matrices`) for its own forward, the root everything else for the whole
    one. Call it last: after adapters, activation checkpointing and compilation. A module on the host moves to the
    mesh's device one unit at a time, so the device never holds the whole. Gradients are the sum over ranks, for a loss
    that each rank has divided by the rows of all.

    Args:
        blocks: classes of the blocks that are gathered one by one.
        mesh: one dimension.
        param_dtype: what matrices of a fully trained model are gathered in, of the root's none: what the forward
            computes in, so that it is the same to the bit as on one rank. Masters keep their dtype. With frozen parts
            (LoRA) everything is gathered as it is: the base has the right dtype already. Inputs are never cast:
            bfloat16 would make 912 of timestep 913.7.

    Raises:
        ValueError: if no block is found.
        ConfigError: for `cpu_offload` with frozen parameters, or without a process group that serves the host.
    """
    # modules() lists parents before their children; a block inside another one is to be sharded first.
    units = [part for part in module.modules() if isinstance(part, tuple(blocks)) and part is not module][::-1]
    if not units:
        names = ", ".join(block.__name__ for block in blocks)
        raise ValueError(f"actor.num_ranks: the model has no block of its classes ({names}) to shard.")
    trained_whole = all(p.requires_grad for p in module.parameters())
    offload = _offload_policy(settings, mesh, trained_whole)
    own = set(matrices(module, blocks).values())
    as_it_is = MixedPrecisionPolicy(reduce_dtype=getattr(torch, settings.reduce_dtype), cast_forward_inputs=False)
    rounded = replace(as_it_is, param_dtype=param_dtype if trained_whole else None)
    gathered_in = rounded.param_dtype
    nbytes = sum(
        p.numel() * (gathered_in if gathered_in and p in own else p.dtype).itemsize for p in module.parameters()
    )
    # Of blocks that return views of what they have computed: writing into those would be wrong, and nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    # The root first: it takes what is in blocks, too, which it could not if they had been sharded.
    for part in (module, *units):
        unit = fully_shard(
            part,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=as_it_is if part is module else rounded,
            offload_policy=offload,
            ignored_params=own if part is module else set(part.parameters()) - own,
        )
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    if not settings.reshard_after_forward:
        _keep_until_backward(module)
    vars(module)[NBYTES] = nbytes


def _offload_policy(settings: FSDP, mesh: DeviceMesh, trained_whole: bool) -> OffloadPolicy:
    if not settings.cpu_offload:
        return OffloadPolicy()
    path = "actor.fsdp.cpu_offload"
    if not trained_whole:
        message = "works in full training only: with LoRA the frozen base would cross the bus in every forward."
        raise ConfigError(Problem(path, message, "Set it to false, or actor.mode=full."))
    backends = dist.get_backend_config(mesh.get_group())
    if "cpu:" not in backends:
        message = f"needs a process group that serves tensors on the host too, got {backends}."
        raise ConfigError(Problem(path, message, "Initialise it with backend cpu:gloo,cuda:nccl."))
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")


def _keep_until_backward(module: nn.Module) -> None:
    """Blocks stay gathered after a forward with gradient; after one without, no backward would come to free them."""
    assert isinstance(module, FSDPModule)

    def keep(*_: Any) -> None:
        if torch.is_grad_enabled():
            module.set_reshard_after_forward(False)

    def rest(*_: Any) -> None:
        if torch.is_grad_enabled():
            module.set_reshard_after_forward(True)

    module.register_forward_pre_hook(keep)
    module.register_forward_hook(rest)


def sharded_units(module: nn.Module) -> list[FSDPModule]:
    """What is gathered as one: the blocks and the root. Empty for a module that is not sharded."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


# ---------------------------------------------------------------------------------------------- gathering


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Inside, all weights are whole on every rank, in the dtype that the model computes in: for many forwards.

    For forwards without gradient. It costs one full copy, which is freed at the end, whatever happens inside; the
    master weights cannot be written meanwhile (`assert_writable`). All ranks must enter. After an error in the middle
    of a forward the weights are at rest and can be saved, but the ranks are out of step: FSDP runs no forward again.
    """
    units = sharded_units(module)
    if not units:
        yield
        return
    assert_writable(module)
    root = units[0]
    root.set_reshard_after_forward(False)  # of all units
    try:
        for unit in units:  # the root's own call would leave the blocks as they are
            unit.unshard()
        yield
    finally:
        root.set_reshard_after_forward(True)
        for unit in units:
            unit.reshard()


def fits_gathered(module: nn.Module, device: torch.device) -> bool:
    """Whether every rank has room for `gathered` now; one answer for all ranks, which must all ask.

    On a CPU always: what is trained there is small.
    """
    mesh = _mesh(module)
    if mesh is None:
        return True
    fits = vars(module)[NBYTES] <= GATHERED_SHARE * free_bytes(device)
    votes = torch.tensor(int(fits), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=mesh.get_group())
    return bool(votes)


def free_bytes(device: torch.device) -> float:
    """What can be allocated: unused device memory, and what torch has reserved but does not use."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def assert_writable(module: nn.Module) -> None:
    """Raise RuntimeError while gathered copies stand in for the master weights: what is written would be lost."""
    if isinstance(module, FSDPModule):
        for name, parameter in module.named_parameters():
            if not isinstance(parameter, DTensor):
                raise RuntimeError(
                    f"{name} is gathered: its master weight can be neither written nor saved inside `gathered`, nor "
                    "between a forward and its backward."
                )


# ---------------------------------------------------------------------------------------------- whole values


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory; of an ordinary tensor, the tensor."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole value on every rank, detached. All ranks must ask, for their tensors in the same order."""
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def full_state(module: nn.Module) -> dict[str, Tensor]:
    """`state_dict()` with whole values in host memory, on the first rank; empty on the others. All must ask."""
    assert_writable(module)
    first = is_first(module)
    state = {}
    for name, value in module.state_dict().items():
        whole = full_tensor(value)  # one at a time on the device
        if first:
            state[name] = whole.cpu()
    return state


def is_first(module: nn.Module) -> bool:
    """Whether this rank is the one that writes files."""
    mesh = _mesh(module)
    return mesh is None or mesh.get_local_rank() == 0


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`.

    Returns the norm before, an ordinary tensor that is the same on all ranks; not finite if any gradient is.
    """
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = full_tensor(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _mesh(module: nn.Module) -> DeviceMesh | None:
    sharded = (p.device_mesh for p in module.parameters() if isinstance(p, DTensor))
    return next(sharded, None)
