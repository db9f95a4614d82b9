"""An engine takes a whole version that fits, or nothing; without any process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowrl.config import LoRA
from flowrl.distributed.lora import add_lora
from flowrl.distributed.weight_sync.checksum import verify
from flowrl.distributed.weight_sync.errors import PublishError, TransferError
from flowrl.distributed.weight_sync.manifest import Manifest, Mode
from flowrl.distributed.weight_sync.receiver import Receiver
from flowrl.distributed.weight_sync.sender import Sender
from flowrl.distributed.weight_sync.transports.parcels import Parcels
from flowrl.types import InMemory
from tests.unit.distributed.weight_sync.workers import CPU, make_module, snapshot


def sent(module: nn.Module, mode: Mode, bucket_bytes: int = 4096, wire_dtype: torch.dtype | None = None) -> tuple:
    """(manifest, checksums, link) of version 7."""
    sender = Sender(module, mode, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, device=CPU)
    manifest = sender.plan(7)
    items = list(sender.stream(manifest, on_host=False))
    sums = sum((s for s, _ in items[1:]), start=items[0][0])
    return manifest, sums, Parcels(tuple(InMemory(data) for _, data in items))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_module_arrives_as_it_was_sent(sizes: list[tuple[int, int]], words: int, dtype: torch.dtype) -> None:
    """Bit for bit, however small the buckets are, and not only for contiguous tensors."""
    trainer, engine = (nn.Sequential(*(nn.Linear(*size, dtype=dtype) for size in sizes)) for _ in range(2))
    for layer in engine:
        layer.weight.data = layer.weight.data.T.contiguous().T
    manifest, sums, link = sent(trainer, "full", words * 16)
    receiver = Receiver(engine, device=CPU)
    receiver.expect(manifest)
    verify(manifest, [sums], {"engine": receiver.receive(manifest, link, 0)})
    receiver.commit()
    assert receiver.version == 7
    assert same(snapshot(engine), snapshot(trainer))


@pytest.mark.parametrize("staging", ["device", "host"])
def test_wire_dtype_rounds_once(staging: str) -> None:
    trainer, engine = make_module(0), make_module(1)
    manifest, _, link = sent(trainer, "full", wire_dtype=torch.bfloat16)
    receiver = Receiver(engine, device=CPU, staging=staging)
    receiver.expect(manifest)
    receiver.receive(manifest, link, 0)
    receiver.commit()
    for name, value in snapshot(engine).items():
        expected = snapshot(trainer)[name]
        assert torch.equal(value, expected.bfloat16().float() if expected.is_floating_point() else expected)


def test_nothing_changes_before_commit_and_nothing_after_drop() -> None:
    engine = make_module(1)
    before = snapshot(engine)
    receiver = Receiver(engine, device=CPU, version=3)
    manifest, _, link = sent(make_module(0), "full")
    receiver.expect(manifest)
    receiver.receive(manifest, link, 0)
    receiver.drop()
    with pytest.raises(PublishError, match="no whole version"):
        receiver.commit()
    assert receiver.version == 3 and same(snapshot(engine), before)
    with pytest.raises(PublishError, match="not told to expect"):
        receiver.receive(manifest, link, 0)
    receiver.expect(manifest)
    with pytest.raises(TransferError, match="buckets were sent"):
        receiver.receive(manifest, Parcels(link.handles[1:]), 0)
    with pytest.raises(PublishError, match="no whole version"):
        receiver.commit()


def test_a_commit_that_fails_midway_is_never_sampled_with(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = make_module(0), make_module(1)
    before = snapshot(engine)
    receiver = Receiver(engine, device=CPU, version=3)
    manifest, _, link = sent(trainer, "full")

    def stage() -> None:
        receiver.expect(manifest)
        receiver.receive(manifest, link, 0)

    stage()
    copies: list[int] = []
    copy = torch._foreach_copy_

    def second_fails(to: list[Tensor], values: list[Tensor]) -> None:
        copies.append(1)
        if len(copies) == 2:
            raise torch.OutOfMemoryError("no room")
        copy(to, values)

    monkeypatch.setattr(torch, "_foreach_copy_", second_fails)
    with pytest.raises(torch.OutOfMemoryError):
        receiver.commit()
    assert not same(snapshot(engine), before) and not same(snapshot(engine), snapshot(trainer))
    receiver.drop()
    with pytest.raises(PublishError, match="two versions"):
        _ = receiver.version
    stage()
    receiver.commit()
    assert receiver.version == 7 and same(snapshot(engine), snapshot(trainer))


class NoMemory(TorchDispatchMode):
    """Every operation that would take memory fails: its results must lie in what it was given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves(args) if isinstance(tensor, Tensor)}
        new = [t for t in tree_leaves(found) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given]
        if new:
            raise torch.OutOfMemoryError(f"{func} takes memory")
        return found


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_commit_needs_no_memory_that_could_be_missing(staging: str, wire_dtype: torch.dtype | None) -> None:
    """Else one engine could fail when others have committed. Tensors are split over buckets, and not contiguous."""
    trainer, engine = make_module(0), make_module(1)
    engine[0].up.weight.data = engine[0].up.weight.data.T.contiguous().T
    manifest, _, link = sent(trainer, "full", 1024, wire_dtype)
    receiver = Receiver(engine, device=CPU, staging=staging)
    receiver.expect(manifest)
    receiver.receive(manifest, link, 0)
    with NoMemory():
        receiver.commit()
    for name, value in snapshot(trainer).items():
        expected = value.to(wire_dtype).to(value.dtype) if wire_dtype and value.is_floating_point() else value
        assert torch.equal(snapshot(engine)[name], expected)


def test_an_engine_without_weights_has_no_version() -> None:
    with pytest.raises(PublishError, match="cannot sample yet"):
        _ = Receiver(make_module(0), device=CPU).version


# ---------------------------------------------------------------------------------------------- what does not fit


def refuse(engine: nn.Module, manifest: Manifest, message: str) -> None:
    before = snapshot(engine)
    receiver = Receiver(engine, device=CPU, version=1)
    with pytest.raises(PublishError, match=message):
        receiver.expect(manifest)
    assert receiver.version == 1 and same(snapshot(engine), before)


def test_lora_and_whole_models_are_kept_apart() -> None:
    with_lora, plain = make_module(0, lora=True), make_module(0)
    refuse(with_lora, sent(plain, "full")[0], "holds LoRA")
    refuse(with_lora, sent(with_lora, "merged")[0], "holds LoRA")
    refuse(plain, sent(with_lora, "lora")[0], "holds no LoRA")


def test_names_must_match_one_to_one() -> None:
    manifest = sent(make_module(0), "full")[0]
    refuse(nn.Linear(2, 2), manifest, "none of the 14 published tensors")
    refuse(nn.Sequential(*make_module(0), nn.Linear(2, 2)), manifest, r"2 tensors .* not published: 2\.bias, 2\.weight")
    refuse(make_module(0)[:1], manifest, r"7 published tensors are not in the engine's module: 1\.count")


def test_shapes_dtypes_and_scalings_must_match() -> None:
    engine = make_module(0)
    manifest = sent(engine, "full")[0]
    engine[1].norm = nn.LayerNorm(60)
    refuse(engine, manifest, r"1\.norm\.weight has shape \(61,\) here and \(60,\)")
    counting = make_module(0)
    counting[0].count = torch.tensor(0.0)
    refuse(counting, manifest, r"0\.count is torch\.int64 here and torch\.float32")
    adapter = sent(make_module(0, lora=True), "lora")[0]
    refuse(
        make_module(0, lora=True, rank=4, alpha=8), adapter, r"lora_A\.weight has shape \(3, 13\) here and \(4, 13\)"
    )
    refuse(make_module(0, lora=True, alpha=3), adapter, r"0\.down is scaled by alpha / rank = 2\.0 here and by 1\.0")
    narrow = make_module(0)
    add_lora(narrow, LoRA(rank=3, alpha=6), ["up"], seed=0)
    refuse(narrow, adapter, r"4 published tensors .*0\.down\.lora_A")


def test_names_are_checked_on_the_engines_side_too() -> None:
    manifest = sent(make_module(0), "full")[0]
    first = replace(manifest.entries[0], name="base_model.model.0.up.weight")
    refuse(make_module(0), replace(manifest, entries=(first, *manifest.entries[1:])), "still has a wrapper")


def test_a_rank_that_differs_from_rank_0_says_so() -> None:
    manifest = Sender(make_module(0), "full", device=CPU).plan(1)
    with pytest.raises(PublishError, match=r"differs from what rank 0 has planned .*1\.count"):
        Sender(make_module(0)[:1], "full", device=CPU).send(manifest, Parcels(()))
