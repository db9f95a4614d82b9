"""How ranks find each other: the first one opens a store on a free port, and the others are told which.

No port is chosen before it is bound, so there is none that somebody else can take meanwhile.
"""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's, with types

Backend = Literal["gloo", "nccl", "cpu:gloo,cuda:nccl"]
CONNECT_S = 30.0
ELSEWHERE = ("192.0.2.1", 9)  # reserved for documentation (RFC 5737): there is nobody, and nothing is sent


@dataclass(frozen=True)
class Address:
    """Where a store listens."""

    host: str
    port: int


def node_address() -> str:
    """The address at which other hosts reach this one.

    Under Ray it is the one at which Ray's other nodes do; without, that of the default route, and 127.0.0.1 if there is
    none.
    """
    ray: Any = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
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
    """The store of another process, which listens before its address is told.

    Raises ConnectionError, naming the address, if it cannot be reached within `CONNECT_S`.

    Args:
        address: told by `open_store`.
        timeout_s: for others to write what is waited for, and for the connection if that is less.
    """
    patience_s = min(timeout_s, CONNECT_S)
    try:
        store = TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=patience_s))
    except dist.DistError as error:
        raise ConnectionError(
            f"no connection to {address.host}, port {address.port}, within {patience_s:g} s: is that host reached from "
            f"here ({node_address()}), and is the port free to all?"
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def join(store: Store, rank: int, world_size: int, backend: Backend, timeout_s: float) -> None:
    """Make the default process group of `world_size` ranks; returns when all have come.

    Args:
        store: `open_store` on one rank, `connect` on the others.
        rank: 0 to world_size - 1.
        world_size: number of ranks.
        backend: of collectives; "cpu:gloo,cuda:nccl" serves tensors on either device.
        timeout_s: for the ranks to come, and for every collective.
    """
    dist.init_process_group(
        backend,
        store=PrefixStore("default", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
