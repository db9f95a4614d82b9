"""Questions to the default process group that also have an answer without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor


def num_ranks() -> int:
    """Ranks of the actor; 1 in a process without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum, in place, the same on all ranks."""
    if num_ranks() > 1:
        dist.all_reduce(values)
    return values


@contextmanager
def in_waves(size: int) -> Iterator[None]:
    """`size` ranks of each host at a time, so that the host never holds a copy of the model for every rank."""
    if num_ranks() == 1:
        yield
        return
    wave = local_rank() // size
    waves: list[int] = [0] * num_ranks()
    dist.all_gather_object(waves, wave)
    for now in range(max(waves) + 1):
        if now == wave:
            yield
        dist.barrier()


def local_rank() -> int:
    """Place of this rank among those of its host."""
    import socket

    hosts = [""] * num_ranks()
    dist.all_gather_object(hosts, socket.gethostname())
    rank = dist.get_rank()
    return hosts[:rank].count(hosts[rank])
