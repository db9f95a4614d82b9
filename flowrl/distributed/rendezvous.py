"""How ranks find each other: the first one opens a store on a free port, and the others are told which.

No port is chosen before it is bound, so there is none that somebody else can take meanwhile.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's, with types

Backend = Literal["gloo", "nccl", "cpu:gloo,cuda:nccl"]
ELSEWHERE = ("192.0.2.1", 9)  # reserved for documentation (RFC 5737): there is nobody, and nothing is sent


@dataclass(frozen=True)
class Address:
    """Where a store listens."""

    host: str
    port: int


def node_address() -> str:
    """The address at which other hosts reach this one; 127.0.0.1 if it is on no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def open_store(timeout_s: float, host: str | None = None) -> tuple[TCPStore, Address]:
    """A store that this process serves for as long as it keeps it, on a port that the system chooses.

    Args:
        timeout_s: for others to write what is waited for.
        host: the address that is told; `node_address` unless all are on one host.
    """
    host = host or node_address()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, Address(host, store.port)


def connect(address: Address, timeout_s: float) -> TCPStore:
    """The store of another process. Raises torch's DistNetworkError if it cannot be reached in time."""
    return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join(
    store: Store,
    rank: int,
    world_size: int,
    backend: Backend,
    timeout_s: float,
    device: torch.device | None = None,
) -> None:
    """Make the default process group of `world_size` ranks; returns when all have come.

    Args:
        store: `open_store` on one rank, `connect` on the others.
        rank: 0 to world_size - 1.
        world_size: number of ranks.
        backend: of collectives; "cpu:gloo,cuda:nccl" serves tensors on either device.
        timeout_s: for the ranks to come, and for every collective.
        device: of this rank, for NCCL to use no other.
    """
    dist.init_process_group(
        backend,
        store=PrefixStore("default", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device,
    )


def leave() -> None:
    """Give up the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
