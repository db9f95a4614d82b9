"""Tensors leave a device and come back, with the CPU as the device."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flowrl.config import Optimizer
from flowrl.distributed.lora import train_fully
from flowrl.distributed.offload import HostMemory, Offloader, OffloadError, training_state
from flowrl.distributed.optimizer import make_optimizer
from flowrl.distributed.snapshots import Snapshot
from tests.support import tiny

CPU = torch.device("cpu")


def size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_a_training_goes_on_where_it_was(tiny_folder: Path) -> None:
    """Weights as loaded (mapped from a file), buffers, AdamW's state and a snapshot; twice, through the same memory."""
    module = tiny.load(tiny_folder).module
    train_fully(module)
    optimizer, snapshot = make_optimizer(module, Optimizer()), Snapshot(module)

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    offloader = Offloader(CPU)
    for _ in range(2):
        state = training_state(module, optimizer, {"ema": snapshot})
        assert {
            "pos_embed.pos_embed",
            "optimizer.proj_out.weight.exp_avg",
            "snapshots.ema.proj_out.bias",
        } < state.keys()
        before = {name: value.detach().clone() for name, value in state.items()}
        freed = offloader.offload(state)
        assert freed == sum(value.nbytes for value in before.values())
        assert not any(size(value) for value in state.values())
        with pytest.raises(OffloadError, match="off the device already"):
            offloader.offload(state)
        assert offloader.reload() == freed
        assert all(torch.equal(state[name], before[name]) for name in before)
        weight = module.proj_out.weight.detach().clone()
        step()
        assert not torch.equal(module.proj_out.weight, weight)
    assert len(offloader.host.chunks) == 1


def test_a_storage_that_several_share_moves_once_and_stays_shared() -> None:
    whole = torch.arange(12.0)
    tied = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    other.weight = tied.weight
    tensors = {
        "rows": whole[:6],
        "all": whole,
        "a": tied.weight,
        "b": other.weight,
        "elsewhere": torch.ones(3, device="meta"),
    }
    offloader = Offloader(CPU)
    assert offloader.offload(tensors) == 12 * 4 + 4 * 4
    offloader.reload()
    assert torch.equal(whole, torch.arange(12.0))
    tensors["rows"][0] = -1.0
    assert whole[0] == -1.0


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 3000), max_size=8))
def test_any_sizes_fit_into_chunks(sizes: list[int]) -> None:
    """Smaller and larger than a chunk of 1 kB: every piece is nobody else's."""
    tensors = {f"t{i}": torch.randint(256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    offloader = Offloader(CPU)
    offloader.host = HostMemory(pinned=False, chunk_bytes=1024)
    for _ in range(2):
        assert offloader.offload(tensors) == sum(sizes)
        assert offloader.reload() == sum(sizes)
        assert all(torch.equal(tensors[name], before[name]) for name in tensors)


@contextmanager
def little_memory(more: int) -> Iterator[None]:
    """The process may take no more than that many bytes beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_no_room_on_the_way_out_or_back_names_the_tensor() -> None:
    """The process really runs out of memory; nothing is lost by it."""
    tensors = {"small": torch.ones(4), "blocks.7.weight": torch.full((2**25,), 2.0)}  # 128 MB
    offloader = Offloader(CPU)
    with (
        little_memory(2**24),
        pytest.raises(OffloadError, match=r"small cannot leave cpu: its 16 bytes .* host memory"),
    ):
        offloader.offload(tensors)
    assert tensors["small"].tolist() == [1.0] * 4
    offloader.offload(tensors)
    with (
        little_memory(2**24),
        pytest.raises(OffloadError, match=r"^blocks\.7\.weight cannot come back to cpu: no room"),
    ):
        offloader.reload()
    offloader.reload()
    assert bool((tensors["blocks.7.weight"] == 2.0).all())
