"""What ranks must do with one checkpoint, for several numbers of them: run by `test_ranks.py` in three processes.

The processes form a group of two, then one of three, then one of two again. Every state has the same whole values,
whoever holds which part.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flowrl.distributed.checkpoint.folders import Folders, open_checkpoint
from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.distributed.checkpoint.tensors import TensorStore
from flowrl.distributed.fsdp import full_tensor

TIMEOUT_S = 20.0
WAIT = timedelta(seconds=TIMEOUT_S)
SHARDED = {"five": (5, 3), "one": (1, 4), "none": (0, 2), "vector": (7,), "many": (4, 2, 3)}


def whole_values() -> dict[str, Tensor]:
    """What every state is made of, in plain tensors."""
    generator = torch.Generator().manual_seed(0)
    values = {f"weights.{name}": torch.randn(shape, generator=generator) for name, shape in SHARDED.items()}
    values["weights.half"] = torch.randn(6, 2, generator=generator).bfloat16()
    values["weights.five"][0, 0] = float("nan")
    values["copied"] = torch.randn(3, 2, generator=generator)
    values["step"] = torch.tensor(11.0)
    values["count"] = torch.tensor([3, 4])
    return values


def spread(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of them: weights by their first dimension, `copied` as replicas, the rest ordinary."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"copied": Replicate()} | {key: Shard(0) for key in values if key.startswith("weights.")}
    return {
        key: distribute_tensor(value, mesh, [placements[key]]) if key in placements else value.clone()
        for key, value in values.items()
    }


def blank(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the same shapes, with nothing in them."""
    return {key: torch.zeros_like(value) for key, value in values.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit, NaN included; all ranks must ask."""
    for key, value in expected.items():
        whole = full_tensor(found[key]).contiguous()
        assert whole.shape == value.shape and whole.dtype == value.dtype, key
        assert torch.equal(whole.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key


def own_rng() -> dict[str, Tensor]:
    """What a rank alone has."""
    rank = dist.get_rank()
    return {f"rng.rank_{rank}": torch.full((16,), rank, dtype=torch.uint8)}


def commit(folder: Path, store: TensorStore, tensors: dict[str, Tensor], *, background: bool = True) -> Path:
    """As the driver and the ranks do it together; the files' records are sent to rank 0."""
    folders = Folders(folder)
    temp = [folders.begin(1) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(temp)
    assert temp[0] is not None
    store.save(tensors, temp[0] / "tensors", background=background)
    for tensor in tensors.values():  # training goes on
        if tensor.is_floating_point():
            tensor.fill_(float("inf"))
    records: list = [None] * dist.get_world_size()  # type: ignore[type-arg]
    dist.all_gather_object(records, store.written(wait=True))
    if dist.get_rank() == 0:
        folders.commit(1, temp[0], {}, [record for own in records for record in own], store.keys)
    dist.barrier()
    return folders.path(1)


# ---------------------------------------------------------------------------------------------- checks


def one_rank_loads_on_many(scratch: Path) -> None:
    tensors = blank(spread(whole_values()))
    store().load(tensors, scratch / "by_1" / "step_0000001" / "tensors", without=["rng."])
    assert_same(tensors, whole_values())


def two_ranks_save(scratch: Path) -> None:
    path = commit(scratch / "by_2", store(), spread(whole_values()) | own_rng())
    opened = open_checkpoint(path, verify=True)
    assert opened.keys.keys() == whole_values().keys() | {"rng.rank_0", "rng.rank_1"}
    assert opened.keys["weights.five"].shape == (5, 3)
    stored = sum(record.num_bytes for record in opened.files.values())
    assert stored < sum(value.nbytes for value in whole_values().values()) + 4096  # headers; nothing twice


def the_same_ranks_find_their_own(scratch: Path) -> None:
    path = commit(scratch / "again", store(), spread(whole_values()) | own_rng(), background=False)
    tensors = blank(spread(whole_values()) | own_rng())
    store().load(tensors, path / "tensors")
    assert_same(tensors, whole_values())
    rank = dist.get_rank()
    assert tensors[f"rng.rank_{rank}"].eq(rank).all()


def what_one_rank_refuses_all_refuse(scratch: Path) -> None:
    """No rank waits for one that has given up."""
    tensors = spread(whole_values())
    before = {key: full_tensor(value).clone() for key, value in tensors.items()}
    tensors["step"] = torch.zeros(2) if dist.get_rank() == 1 else torch.tensor(11.0)
    one = store()
    with pytest.raises(CheckpointError, match=r"step is float32 \[2\] on rank 1, and float32 \[\] on another"):
        one.save(tensors, scratch / "differs", background=True)
    tensors["step"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match=r"1 are of another shape or dtype \(step: stored float32 \[\], exp"):
        one.load(tensors, scratch / "by_2" / "step_0000001" / "tensors", without=["rng."])
    del tensors["step"]
    assert_same(tensors, {key: value for key, value in before.items() if key != "step"})
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = {"wide": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)])}
    with pytest.raises(CheckpointError, match=r"rank 0: wide cannot be stored: .* not by its first dim"):
        one.save(columns, scratch / "columns", background=True)


def a_disk_that_refuses_one_rank_is_that_ranks_error(scratch: Path) -> None:
    one = store()
    taken = scratch / "taken"
    taken.mkdir(exist_ok=True)
    (taken / "rank_00001_000.safetensors").touch()
    one.save(spread(whole_values()), taken, background=True)
    if dist.get_rank() == 1:
        with pytest.raises(FileExistsError, match=r"rank_00001_000"):
            one.written(wait=True)
    else:
        assert one.written(wait=True)
    again = commit(scratch / "after", one, spread(whole_values()))
    assert open_checkpoint(again, verify=True).keys == one.keys


def an_error_that_no_one_asked_for_stops_the_next_save(scratch: Path) -> None:
    one = store()
    taken = scratch / "unasked"
    taken.mkdir(exist_ok=True)
    (taken / "rank_00001_000.safetensors").touch()
    one.save(spread(whole_values()), taken, background=True)
    with pytest.raises(CheckpointError, match=r"rank 1: the save before failed: .*rank_00001_000"):
        one.save(spread(whole_values()), scratch / "next", background=True)


def a_sharded_model_and_its_optimizer(scratch: Path) -> None:
    """FSDP2's own parameters and AdamW's state, trained on, saved and found again."""

    def model() -> tuple[dict[str, Tensor], nn.Module]:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        for part in [*module, module]:
            fully_shard(part)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        state = {f"weights.{name}": parameter for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters():
            state |= {f"optimizer.{name}.{slot}": value for slot, value in optimizer.state[parameter].items()}
        return state, module

    state, _ = model()
    kept = {key: full_tensor(value).clone() for key, value in state.items()}
    with torch.no_grad():
        path = commit(scratch / f"model_{dist.get_world_size()}", store(), state)
    fresh, module = model()
    with torch.no_grad():
        for value in fresh.values():
            value.zero_()
    store().load(fresh, path / "tensors")
    assert_same(fresh, kept)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    module(torch.ones(2, 3)).sum().backward()


def three_ranks_read_what_two_saved(scratch: Path) -> None:
    tensors = blank(spread(whole_values()))
    store().load(tensors, scratch / "by_2" / "step_0000001" / "tensors", without=["rng."])
    assert_same(tensors, whole_values())
    with pytest.raises(CheckpointError, match=r"2 are not expected \(rng\.rank_0; rng\.rank_1\)"):
        store().load(tensors, scratch / "by_2" / "step_0000001" / "tensors")


def three_ranks_save(scratch: Path) -> None:
    commit(scratch / "by_3", store(), spread(whole_values()) | own_rng())


def two_ranks_read_what_three_saved(scratch: Path) -> None:
    tensors = blank(spread(whole_values()))
    store().load(tensors, scratch / "by_3" / "step_0000001" / "tensors", without=["rng."])
    assert_same(tensors, whole_values())


def store() -> TensorStore:
    return TensorStore(torch.device("cpu"), TIMEOUT_S)


BY_TWO = (
    one_rank_loads_on_many,
    two_ranks_save,
    the_same_ranks_find_their_own,
    what_one_rank_refuses_all_refuse,
    a_disk_that_refuses_one_rank_is_that_ranks_error,
    an_error_that_no_one_asked_for_stops_the_next_save,
    a_sharded_model_and_its_optimizer,
)
BY_THREE = (
    one_rank_loads_on_many,
    three_ranks_read_what_two_saved,
    a_sharded_model_and_its_optimizer,
    three_ranks_save,
)
BY_TWO_AGAIN = (two_ranks_read_what_three_saved,)
STAGES: tuple[tuple[int, tuple[Callable[[Path], None], ...]], ...] = ((2, BY_TWO), (3, BY_THREE), (2, BY_TWO_AGAIN))
CHECKS = [(stage, check.__name__) for stage, (_, checks) in enumerate(STAGES) for check in checks]
WORLD = 3


def run_checks(rank: int, scratch: Path) -> None:
    """All stages in this process; what became of each check is left in `outcomes-<rank>.json`."""
    outcomes: dict[str, str] = {}
    for stage, (world, checks) in enumerate(STAGES):
        if rank < world:
            rendezvous = dist.FileStore(str(scratch / f"store-{stage}"), world)
            dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=world, timeout=WAIT)
            for check in checks:
                if not _passes(check, scratch, outcomes, f"{stage}.{check.__name__}"):
                    break
            dist.destroy_process_group()
            (scratch / f"done-{stage}-{rank}").touch()
        while not all((scratch / f"done-{stage}-{other}").exists() for other in range(world)):
            time.sleep(0.01)
    (scratch / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))


def _passes(check: Callable[[Path], None], scratch: Path, outcomes: dict[str, str], name: str) -> bool:
    try:
        check(scratch)
    except BaseException:  # reported, and the ranks are out of step from now on
        outcomes[name] = traceback.format_exc()
    else:
        outcomes[name] = ""
    return not outcomes[name]
