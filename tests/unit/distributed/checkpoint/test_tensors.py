"""Tensors to files and back: bit for bit, from any shards, beside training, and only if they fit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_by_torch

from flowrl.distributed.checkpoint import shards
from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.distributed.checkpoint.shards import DTYPES, Part, stage, write_shards
from flowrl.distributed.checkpoint.tensors import TensorStore, read_tensors
from flowrl.distributed.offload import HostMemory
from tests.unit.distributed.checkpoint.support import CPU, state_of


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    store = TensorStore(CPU, 10.0)
    store.save(tensors, folder, background=False)
    assert store.written(wait=True)
    return folder


def equal_bits(one: Tensor, other: Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# ---------------------------------------------------------------------------------------------- bit for bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_as_it_was(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(-1, 16)  # NaNs with payloads among them
    stored = bits % 2 == 1 if dtype == torch.bool else bits.view(dtype)
    tensors = {"a.b": stored, "scalar": stored[0, 0].clone(), "empty": stored[:0], "thin": stored[:, :0]}
    found = read_tensors(saved(tmp_path, tensors), "")
    assert found.keys() == tensors.keys()
    assert all(equal_bits(found[key], value) for key, value in tensors.items())


def test_whatever_lies_behind_a_tensor_its_values_are_stored(tmp_path: Path) -> None:
    base = torch.randn(6, 4)
    tensors = {"turned": base.t(), "part": base[1:3, 1:], "same": base, "again": base, "parameter": nn.Parameter(base)}
    found = read_tensors(saved(tmp_path, tensors), "")
    assert all(equal_bits(found[key], value.detach().contiguous()) for key, value in tensors.items())


def test_loading_is_in_place(tmp_path: Path) -> None:
    """Into parameters and views, whose memory others hold."""
    module = nn.Linear(3, 2)
    kept = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    folder = saved(tmp_path, {**module.state_dict(), "view": torch.tensor([5.0, 6.0])})
    memory = torch.zeros(4)
    pointers = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    with torch.no_grad():
        module.weight.zero_()
    TensorStore(CPU, 10.0).load({**dict(module.named_parameters()), "view": memory[1:3]}, folder)
    assert memory.tolist() == [0.0, 5.0, 6.0, 0.0]
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, kept[name]) and parameter.data_ptr() == pointers[name] and parameter.requires_grad


def test_training_may_write_into_what_is_being_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is complete when `save` returns; the files are not."""
    go_on, started = threading.Event(), threading.Event()
    write = shards._write

    def held_up(*arguments: object) -> object:
        started.set()
        assert go_on.wait(10)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "_write", held_up)
    tensors, store = state_of(1.0), TensorStore(CPU, 10.0)
    store.save(tensors, tmp_path / "tensors", background=True)
    assert started.wait(10) and store.written(wait=False) is None
    for tensor in tensors.values():
        tensor.fill_(2.0)
    go_on.set()
    assert [record.path for record in store.written(wait=True) or []] == ["tensors/rank_00000_000.safetensors"]
    assert all((value == 1.0).all() for value in read_tensors(tmp_path / "tensors", "").values())


def test_saves_follow_one_another_in_the_same_memory(tmp_path: Path) -> None:
    """The second waits for the first, whose files it does not touch."""
    store = TensorStore(CPU, 10.0)
    for number in range(4):
        store.save(state_of(float(number)), tmp_path / str(number), background=True)
    assert store.written(wait=True) and len(store._host.chunks) == 1
    for number in range(4):
        found = read_tensors(tmp_path / str(number), "")
        assert all((value == number).all() for value in found.values())


# ---------------------------------------------------------------------------------------------- shards


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]))
def test_any_shards_of_any_shapes_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: torch.dtype
) -> None:
    """As many ranks write them, cut as FSDP cuts, with small files and small pieces of memory."""
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=4))
    world = data.draw(st.integers(1, 4))
    whole = {f"key.{n}": torch.randint(0, 100, shape).to(dtype) for n, shape in enumerate(shapes)}
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "FILE_BYTES", data.draw(st.sampled_from([16, 64, 2**32])))
        for rank in range(world):
            parts = [part for key, value in whole.items() for part in shard(key, value, rank, world)]
            host = HostMemory(pinned=False, chunk_bytes=256)
            write_shards(stage(parts, host), folder, rank)
    found = read_tensors(folder, "key.")
    assert found.keys() == {key.removeprefix("key.") for key in whole}
    assert all(equal_bits(found[key.removeprefix("key.")], value) for key, value in whole.items())


def shard(key: str, value: Tensor, rank: int, world: int) -> list[Part]:
    """Rows as FSDP gives them to a rank; what cannot be cut is the first rank's."""
    if value.dim() == 0 or len(value) == 0:
        return [Part(key, (0,) * value.dim(), value)] if rank == 0 else []
    chunks = value.chunk(world)
    begin = sum(len(chunk) for chunk in chunks[:rank])
    return [Part(key, (begin, *[0] * (value.dim() - 1)), chunks[rank])] if rank < len(chunks) else []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_files_itself(tmp_path: Path) -> None:
    """They are those of torch's own safetensors storage; one whole file also of any other reader."""
    value = torch.arange(10.0).view(5, 2)
    for rank, part in enumerate(value.chunk(2)):
        write_shards(stage([Part("a", (3 * rank, 0), part)], HostMemory(pinned=False)), tmp_path / "two", rank)
    found = {"a": torch.zeros(5, 2)}
    load_by_torch(found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "two")), no_dist=True)
    assert torch.equal(found["a"], value)
    [file] = saved(tmp_path / "one", state_of(3.0)).iterdir()
    assert all(equal_bits(found, state_of(3.0)[key]) for key, found in load_file(file).items())


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_shard_is_never_a_hole(tmp_path: Path, lost: int) -> None:
    """The reader by itself would leave the rows of a middle one as they were, and shorten the tensor for the last."""
    for rank in range(3):
        part = Part("a", (2 * rank, 0), torch.full((2, 2), float(rank)))
        write_shards(stage([part], HostMemory(pinned=False)), tmp_path, rank)
    (tmp_path / f"rank_{lost:05d}_000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a is not whole|stored float32 \[4, 2\], expected float32 \[6, 2\]"):
        TensorStore(CPU, 10.0).load({"a": torch.zeros(6, 2)}, tmp_path)


@pytest.mark.parametrize(
    "offsets", ['{"a": {"saved_offsets": [1, 0]}}', '{"a": {"saved_offsets": [0, 2]}}', '{"b": {}}', "[]", "{"]
)
def test_a_header_with_other_offsets(tmp_path: Path, offsets: str) -> None:
    save_file({"a": torch.zeros(2, 2)}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": offsets})
    with pytest.raises(CheckpointError, match=r"a is not whole|says nothing sound of its shards"):
        read_tensors(tmp_path, "")


def test_a_shard_stored_twice(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="a is not whole: shards of it are missing, or overlap"):
        read_tensors(tmp_path, "a")


# ---------------------------------------------------------------------------------------------- what must agree


def changed(**values: Tensor | None) -> dict[str, Tensor]:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(2), "rng.rank_0": torch.zeros(4, dtype=torch.uint8)}
    return {key: value for key, value in {**tensors, **values}.items() if value is not None}


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (changed(b=None), r"1 are not expected \(b\)\."),
        (changed(c=torch.zeros(1)), r"1 are missing \(c\)\."),
        (changed(a=torch.zeros(3, 2)), r"\(a: stored float32 \[2, 3\], expected float32 \[3, 2\]\)"),
        (changed(a=torch.zeros(2, 3).double()), r"\(a: stored float32 \[2, 3\], expected float64 \[2, 3\]\)"),
        ({f"k{n}": torch.zeros(1) for n in range(5)}, r"5 are missing \(k0; k1; k2\), 3 are not expected \(a; b; rng"),
        ({}, "There is no tensor to save or to load"),
    ],
)
def test_nothing_is_loaded_that_does_not_fit(tmp_path: Path, expected: dict[str, Tensor], message: str) -> None:
    folder = saved(tmp_path, {key: torch.ones_like(value) for key, value in changed().items()})
    with pytest.raises(CheckpointError, match=message):
        TensorStore(CPU, 10.0).load(expected, folder)
    assert all((value == 0).all() for value in expected.values())


def test_only_what_is_named_may_stay_unread(tmp_path: Path) -> None:
    folder = saved(tmp_path, changed(a=torch.ones(2, 3)))
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(2)}
    TensorStore(CPU, 10.0).load(tensors, folder, without=["rng."])
    assert tensors["a"].eq(1).all()
    with pytest.raises(CheckpointError, match=r"1 are not expected \(b\)"):
        TensorStore(CPU, 10.0).load({"a": torch.zeros(2, 3)}, folder, without=["rng."])


def test_nothing_to_save_or_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no tensor to save"):
        TensorStore(CPU, 10.0).save({}, tmp_path / "a", background=False)
    with pytest.raises(RuntimeError, match="nothing has been saved yet"):
        TensorStore(CPU, 10.0).written(wait=False)
    with pytest.raises(CheckpointError, match="There is no folder"):
        TensorStore(CPU, 10.0).load(changed(), tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"3 are missing"):
        TensorStore(CPU, 10.0).load(changed(), tmp_path)
    with pytest.raises(CheckpointError, match="no tensor whose key begins with 'ema'"):
        read_tensors(saved(tmp_path / "b", changed()), "ema")


@pytest.mark.parametrize(
    "make",
    [lambda: torch.zeros(2, dtype=torch.complex64), lambda: torch.zeros(2, 2).to_sparse()],
    ids=["complex", "sparse"],
)
def test_what_cannot_be_stored_is_refused(tmp_path: Path, make: Callable[[], Tensor]) -> None:
    with pytest.raises(CheckpointError, match="odd cannot be stored: its dtype is"):
        TensorStore(CPU, 10.0).save({"odd": make()}, tmp_path, background=False)
