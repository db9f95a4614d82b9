"""How processes find each other and become one process group, without a race for a port."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens."""

    host: str
    port: int


def node_address() -> str:
    """An address of this host that other hosts can reach; the loopback one if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: asks for the interface that would
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def listen(timeout_s: float) -> tuple[dist.TCPStore, Address]:
    """A store that others can join at the address, on a port that the system has chosen; it lives as long as it is held."""
    host = node_address()
    wait = timedelta(seconds=timeout_s)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=wait)
    return store, Address(host, store.port)


def join(store: dist.Store | Address, rank: int, num_ranks: int, device: torch.device, timeout_s: float) -> None:
    """Make the default process group, in which the ranks train. All ranks must come.

    Args:
        store: what `listen` gave, or the address of it.
        rank: of this process.
        num_ranks: of the group.
        device: whose tensors are exchanged; tensors on the host always can be, through gloo.
        timeout_s: for any collective: when a rank is lost, the others end with an error by then.
    """
    wait = timedelta(seconds=timeout_s)
    if isinstance(store, Address):
        store = dist.TCPStore(store.host, store.port, is_master=False, timeout=wait)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=wait)
