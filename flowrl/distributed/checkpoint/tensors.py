"""The tensors of a run, from and to the files of a checkpoint, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from flowrl.distributed.checkpoint.folders import tensor_keys
from flowrl.distributed.checkpoint.manifest import CheckpointError, FileRecord, TensorSpec
from flowrl.distributed.checkpoint.shards import own_parts, spec_of, stage, write_shards
from flowrl.distributed.fsdp import local_tensor
from flowrl.distributed.offload import ALIGNMENT, HostMemory
from flowrl.distributed.ranks import num_ranks

T = TypeVar("T")

SHOWN = 3
"""Keys of each kind that a message names."""


class TensorStore:
    """Writes this rank's part of named tensors beside the training, and reads it back.

    Tensors are ordinary ones, equal on every rank that has them, or `DTensor`s sharded by their first dimension. A key
    may be on some ranks only. The copy on the host is allocated once and used by every save: it takes as much memory as
    this rank's part of the state, pinned if `device` is a GPU.

    Args:
        device: where the tensors are.
        timeout_s: how long ranks wait for each other. With several, all must construct the store together.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self.keys: dict[str, TensorSpec] = {}  # of the last save, on all ranks
        self._device = device
        self._host = HostMemory(pinned=device.type == "cuda")
        several = num_ranks() > 1
        self._rank = dist.get_rank() if several else 0
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)) if several else None
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._reserving: futures.Future[None] | None = None
        self._saving: futures.Future[list[FileRecord]] | None = None
        self._asked = True  # for the outcome of the last save

    # ------------------------------------------------------------------------------------------ saving

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to allocate what saving `tensors` will need on the host, beside the training.

        Pinning memory takes half a second for every 10^9 bytes: without this, the first save waits for it.
        """
        if self._host.pinned:
            own = [local_tensor(t) for t in tensors.values() if isinstance(t, DTensor) or self._rank == 0]
            nbytes = sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in own)
            self._reserving = self._thread.submit(self._host.reserve, nbytes)

    def save(self, tensors: Mapping[str, Tensor], folder: Path, *, background: bool) -> None:
        """Copy the tensors to the host; then write, sync and hash this rank's files, which `written` returns.

        A save that is still being written is waited for first. All ranks must call; what can be wrong with the tensors
        is raised on all of them.

        Args:
            tensors: by key.
            folder: `tensors` in what `Folders.begin` gave.
            background: return after the copy: the tensors may then change. Otherwise after the writing.

        Raises CheckpointError for no tensors, or for tensors that cannot be stored or differ between ranks; and if an
        earlier save failed and no one has asked for its outcome.
        """
        problem = self._unasked() or self._unreserved()
        everywhere = self._exchange(_Holding.of(tensors, problem))
        self.keys = _merged(everywhere)
        holders = {key: rank for rank, held in reversed(list(enumerate(everywhere))) for key in held.specs}
        staged = stage(own_parts(tensors, holders, self._rank), self._host)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._asked = False
        self._saving = self._thread.submit(write_shards, staged, folder, self._rank)
        if not background:
            futures.wait([self._saving])

    def written(self, *, wait: bool) -> list[FileRecord] | None:
        """The files of this rank once they are on the disk; None while they are being written, unless `wait`.

        Raises OSError, naming the file, if the disk is full or refuses; another save may follow.
        """
        if self._saving is None:
            raise RuntimeError("written: nothing has been saved yet.")
        if not wait and not self._saving.done():
            return None
        self._asked = True
        return self._saving.result()

    def _unasked(self) -> str:
        """What went wrong with the last save, unless someone knows already."""
        if self._saving is None:
            return ""
        futures.wait([self._saving])
        error = None if self._asked else self._saving.exception()
        self._asked = True
        return "" if error is None else f"the save before failed: {error}"

    def _unreserved(self) -> str:
        """Why there is no room on the host, if there is none."""
        reserving, self._reserving = self._reserving, None
        error = None if reserving is None else reserving.exception()
        return "" if error is None else f"there is no room for a copy on the host: {str(error).splitlines()[0]}"

    # ------------------------------------------------------------------------------------------ loading

    def load(self, tensors: Mapping[str, Tensor], folder: Path, *, without: Sequence[str] = ()) -> None:
        """Read the stored values into `tensors`, in place, whatever number of ranks has stored them.

        All ranks must call, and raise together. What is stored and what is expected must be the same keys, shapes and
        dtypes; nothing is written before that is certain.

        Args:
            tensors: by key.
            folder: `Committed.tensors`.
            without: beginnings of stored keys that may be left unread, such as those of single ranks.

        Raises CheckpointError naming the first keys that are missing, unexpected or different; also for no keys.
        """
        expected = _merged(self._exchange(_Holding.of(tensors)))
        stored = self._together(partial(_Stored.open, folder))
        self._together(partial(_compare, stored, expected, without))
        self._together(partial(stored.read, tensors))

    # ------------------------------------------------------------------------------------------ with other ranks

    def _together(self, work: Callable[[], T]) -> T:
        """What `work` returns, on all ranks; or CheckpointError on all."""
        result: T | None = None
        problem = ""
        try:
            result = work()
        except (CheckpointError, OSError) as error:
            problem = str(error)
        _raise_first(self._exchange(problem))
        return result  # type: ignore[return-value]  # there was no problem

    def _exchange(self, mine: T) -> list[T]:
        """By rank."""
        if self._group is None:
            return [mine]
        theirs = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(theirs, mine, group=self._group)
        return theirs


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Whole tensors in host memory, of all stored keys that begin with `prefix`, by the rest of their keys.

    For one process, whatever number of ranks has stored them. Raises CheckpointError if there is no such key.
    """
    stored = _Stored.open(folder)
    wanted = {key: spec for key, spec in stored.specs.items() if key.startswith(prefix)}
    if not wanted:
        raise CheckpointError(f"{folder} holds no tensor whose key begins with {prefix!r}.")
    tensors = {key: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for key, spec in wanted.items()}
    stored.read(tensors)
    return {key.removeprefix(prefix): value for key, value in tensors.items()}


# ---------------------------------------------------------------------------------------------- what is to be the same


@dataclass(frozen=True)
class _Holding:
    """What a rank has, for the others to know."""

    specs: dict[str, TensorSpec]
    problem: str = ""

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], problem: str = "") -> _Holding:
        try:
            return cls({key: spec_of(key, tensor) for key, tensor in tensors.items()}, problem)
        except CheckpointError as error:
            return cls({}, problem or str(error))


def _merged(everywhere: Sequence[_Holding]) -> dict[str, TensorSpec]:
    """All keys of all ranks. Raises CheckpointError if there are none, or if ranks disagree."""
    _raise_first([held.problem for held in everywhere])
    specs: dict[str, TensorSpec] = {}
    for rank, held in enumerate(everywhere):
        for key, spec in held.specs.items():
            if specs.setdefault(key, spec) != spec:
                raise CheckpointError(f"{key} is {spec} on rank {rank}, and {specs[key]} on another.")
    if not specs:
        raise CheckpointError("There is no tensor to save or to load.")
    return specs


def _raise_first(problems: Sequence[str]) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise CheckpointError(problem if len(problems) == 1 else f"rank {rank}: {problem}")


def _compare(stored: _Stored, expected: Mapping[str, TensorSpec], without: Sequence[str]) -> None:
    found = stored.specs
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(k for k in found.keys() - expected.keys() if not k.startswith(tuple(without)))
    other = sorted(key for key in expected.keys() & found.keys() if expected[key] != found[key])
    kinds = {
        "are missing": missing,
        "are not expected": extra,
        "are of another shape or dtype": [f"{key}: stored {found[key]}, expected {expected[key]}" for key in other],
    }
    wrong = [f"{len(keys)} {kind} ({'; '.join(keys[:SHOWN])})" for kind, keys in kinds.items() if keys]
    if wrong:
        raise CheckpointError(f"{stored.folder} does not hold the tensors of this run: {', '.join(wrong)}.")


# ---------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Stored:
    """The tensor files of all ranks that have saved, put together by torch's own reader."""

    folder: Path
    reader: HuggingFaceStorageReader
    metadata: Metadata
    specs: dict[str, TensorSpec]

    @classmethod
    def open(cls, folder: Path) -> _Stored:
        """Read the headers. Raises CheckpointError, naming what is no safetensors file or is not whole."""
        if not folder.is_dir():
            raise CheckpointError(f"There is no folder {folder} with the tensors of a checkpoint.")
        for file in sorted(folder.glob("*.safetensors")):
            tensor_keys(file)
        reader = HuggingFaceStorageReader(str(folder))
        try:
            metadata = reader.read_metadata()
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{folder}: a file's header says nothing sound of its shards ({error}).") from error
        specs = {}
        for key, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata) or not _is_whole(entry):
                raise CheckpointError(f"{folder}: {key} is not whole: shards of it are missing, or overlap.")
            specs[key] = TensorSpec(tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
        return cls(folder, reader, metadata, specs)

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors`, or this rank's shards of them."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self.metadata, is_coordinator=False)
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        try:
            self.reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        except SafetensorError as error:
            raise CheckpointError(f"{self.folder}: {error}.") from error


def _is_whole(entry: TensorStorageMetadata) -> bool:
    """Whether the shards follow one another along the first dimension, and are complete in the others."""
    if not entry.size:
        return len(entry.chunks) == 1
    if any(any(chunk.offsets[1:]) or chunk.sizes[1:] != entry.size[1:] for chunk in entry.chunks):
        return False
    ends = sorted((c.offsets[0], c.offsets[0] + c.sizes[0]) for c in entry.chunks if c.sizes[0] > 0)
    begins = [0, *(end for _, end in ends)]
    return [begin for begin, _ in ends] == begins[:-1] and begins[-1] == entry.size[0]
