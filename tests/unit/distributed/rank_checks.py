"""What two ranks must do as one does: run by `two_ranks.py` in two processes, every rank the same checks in turn.

Each check makes a sharded model and an ordinary one from the same folder, and compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from flowrl.config import FSDP, ConfigError, LoRA, Optimizer
from flowrl.distributed import fsdp
from flowrl.distributed.checkpointing import checkpoint_blocks
from flowrl.distributed.fsdp import (
    assert_writable,
    clip_grad_norm,
    fits_gathered,
    full_state,
    full_tensor,
    gathered,
    local_tensor,
    shard,
)
from flowrl.distributed.lora import add_lora, assert_boundary, save_adapter, train_fully, trainable
from flowrl.distributed.offload import Offloader, training_state
from flowrl.distributed.optimizer import make_optimizer
from flowrl.distributed.precision import matrices
from flowrl.distributed.ranks import in_waves
from flowrl.distributed.snapshots import Snapshot
from flowrl.models.sd3 import SD3Policy
from tests.support import tiny

WORLD = 2
NUM_ROWS = 8
SIGMAS = torch.linspace(0.1, 0.95, NUM_ROWS)


@dataclass(frozen=True)
class Ranks:
    """Where a check runs."""

    folder: Path  # the model's
    scratch: Path
    mesh: DeviceMesh
    done: dict[tuple[object, ...], Trained] = field(default_factory=dict)

    @property
    def rows(self) -> range:
        """This rank's rows of a batch."""
        return range(NUM_ROWS)[self.mesh.get_rank() :: WORLD]

    @property
    def halves(self) -> slice:
        """This rank's rows of a batch of four."""
        return slice(2 * self.mesh.get_rank(), 2 * self.mesh.get_rank() + 2)

    def whole(self, mode: str, *, dtype: str = "float32", checkpointing: bool = False, rank: int = 3) -> SD3Policy:
        """The model on one process, made trainable. A LoRA of rank 3 or 1 does not divide by two ranks."""
        policy = tiny.load(self.folder, dtype=dtype)
        if mode == "full":
            train_fully(policy.module)
        else:
            add_lora(policy.module, LoRA(rank=rank, alpha=2.0 * rank), policy.lora_targets, seed=5)
            shake(policy.module)
        if checkpointing:
            checkpoint_blocks(policy.module, policy.blocks)
        return policy

    def sharded(
        self, mode: str, settings: FSDP | None = None, *, dtype: str = "float32", **options: object
    ) -> SD3Policy:
        """The same, spread over the ranks."""
        policy = self.whole(mode, dtype=dtype, **options)  # type: ignore[arg-type]
        shard(policy.module, policy.blocks, self.mesh, settings or FSDP(), getattr(torch, dtype))
        return policy

    def alone(self, mode: str, *, num_updates: int = 1, **options: object) -> Trained:
        """What one process makes of all rows; made once."""
        key = (mode, num_updates, *options.values())
        if key not in self.done:
            self.done[key] = train(self.whole(mode, **options), range(NUM_ROWS), num_updates)  # type: ignore[arg-type]
        return self.done[key]


def shake(module: nn.Module) -> None:
    """lora_B begins at zero, and then lora_A has no gradient."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in trainable(module).items():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=generator)


def velocity(policy: SD3Policy, rows: range) -> Tensor:
    """Of rows of the one batch that all checks use."""
    index = torch.tensor(list(rows))
    sample = torch.randn(NUM_ROWS, 8, 8, 20, generator=torch.Generator().manual_seed(2))[index]
    conditions = policy.encode([group.prompt for group in tiny.groups(NUM_ROWS, 1)]).rows(index)
    return policy.velocity(sample, SIGMAS[index], conditions)


@dataclass(frozen=True)
class Trained:
    """What some updates leave."""

    policy: SD3Policy
    optimizer: torch.optim.AdamW
    ema: Snapshot
    norms: list[float]


def train(policy: SD3Policy, rows: range, num_updates: int = 1) -> Trained:
    """AdamW with clipping and an average, two micro-batches an update; the loss is divided by the rows of all ranks."""
    # A small eps would turn the rounding of tiny gradients into signs.
    optimizer = make_optimizer(policy.module, Optimizer(lr=1e-3, eps=1e-3, weight_decay=0.1))
    ema, norms = Snapshot(policy.module), []
    for _ in range(num_updates):
        optimizer.zero_grad(set_to_none=True)
        for micro in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            with torch.no_grad():
                velocity(policy, micro)  # as `freeze` and `couple` do between updates
            (((velocity(policy, micro) - 1.0) ** 2).flatten(1).mean(1).sum() / NUM_ROWS).backward()
        norms.append(float(clip_grad_norm(trainable(policy.module).values(), max_norm=0.05)))
        optimizer.step()
        ema.blend(0.7)
    return Trained(policy, optimizer, ema, norms)


def agree(mine: Trained, other: Trained, tolerance: float = 1e-6) -> None:
    """Weights, average and gradient norms."""
    parameters, expected = trainable(mine.policy.module), trainable(other.policy.module)
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(full_tensor(parameter), expected[name].detach(), atol=tolerance, rtol=0, msg=name)
        torch.testing.assert_close(full_tensor(mine.ema.values[name]), other.ema.values[name], atol=tolerance, rtol=0)
    assert mine.norms == pytest.approx(other.norms, rel=1e-5)
    assert min(other.norms) > 0.05  # clipping has acted


def _equals_one_rank(mode: str, checkpointing: bool, **settings: bool) -> Callable[[Ranks], None]:
    def check(ranks: Ranks) -> None:
        policy = ranks.sharded(mode, FSDP(**settings), checkpointing=checkpointing)
        assert all(isinstance(p, DTensor) for p in policy.module.parameters())
        assert_boundary(policy.module, mode)
        output = velocity(policy, ranks.rows)  # and here, between forward and backward?
        kept = not any(isinstance(p, DTensor) for p in policy.module.parameters())
        assert kept == (not settings.get("reshard_after_forward", True))
        output.sum().backward()
        assert all(isinstance(p, DTensor) for p in policy.module.parameters())
        agree(train(policy, ranks.rows, 2), ranks.alone(mode, num_updates=2))
        whole = sum(p.numel() for p in policy.module.parameters())
        here = sum(local_tensor(p).numel() for p in policy.module.parameters())
        assert here < 0.6 * whole

    return check


def one_row_of_an_adapter_is_on_one_rank_alone(ranks: Ranks) -> None:
    agree(train(ranks.sharded("lora", rank=1), ranks.rows), ranks.alone("lora", rank=1))


def gathering_changes_nothing_but_speed(ranks: Ranks) -> None:
    """Also as the very first thing that is done with the module, and after an error inside."""
    for mode in ("full", "lora"):
        policy = ranks.sharded(mode)
        expected = velocity(ranks.whole(mode), ranks.rows)
        with torch.no_grad():
            with pytest.raises(OSError, match="before any forward"), gathered(policy.module):
                raise OSError("before any forward")
            with gathered(policy.module):
                assert not any(isinstance(p, DTensor) for p in policy.module.parameters())
                inside = [velocity(policy, ranks.rows) for _ in range(2)]
                assert not any(isinstance(p, DTensor) for p in policy.module.parameters())  # the forwards kept them
            assert all(isinstance(p, DTensor) for p in policy.module.parameters())
            after = velocity(policy, ranks.rows)
            assert all(isinstance(p, DTensor) for p in policy.module.parameters())
        for value in (*inside, after):
            torch.testing.assert_close(value, expected.detach(), atol=1e-6, rtol=0)
        agree(train(policy, ranks.rows), ranks.alone(mode))


def weights_outlive_a_forward_that_fails_inside_gathered(ranks: Ranks) -> None:
    policy = ranks.sharded("full")

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    policy.module.transformer_blocks[1].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(ZeroDivisionError), gathered(policy.module):
        velocity(policy, ranks.rows)
    for name, parameter in ranks.whole("full").module.named_parameters():
        assert torch.equal(full_tensor(policy.module.get_parameter(name)), parameter)
    assert_writable(policy.module)


def nothing_is_written_while_gathered(ranks: Ranks) -> None:
    policy = ranks.sharded("lora")
    trained = train(policy, ranks.rows, num_updates=1)
    refused: list[Callable[[], object]] = [
        lambda: assert_writable(policy.module),
        lambda: trained.ema.blend(0.5),
        lambda: trained.ema.applied().__enter__(),
        lambda: Snapshot(policy.module),
        trained.optimizer.step,
        lambda: save_adapter(policy.module, ranks.scratch / "never"),
        lambda: full_state(policy.module),
        lambda: training_state(policy.module),
        lambda: gathered(policy.module).__enter__(),
    ]
    for write in refused:
        with gathered(policy.module), pytest.raises(RuntimeError, match="is gathered: its master weight"):
            write()
    assert_writable(policy.module)
    assert not (ranks.scratch / "never").exists()
    velocity(policy, ranks.rows)  # outside, after a forward that no backward follows: at rest again
    assert_writable(policy.module)


def snapshots_are_swapped_into_the_forward(ranks: Ranks) -> None:
    for mode, settings in (("full", FSDP()), ("lora", FSDP(reshard_after_forward=False))):
        mine, other = train(ranks.sharded(mode, settings), ranks.rows), ranks.alone(mode)
        with torch.no_grad():
            outputs = []
            for trained in (mine, other):
                before = velocity(trained.policy, ranks.rows)
                with trained.ema.applied():
                    average = velocity(trained.policy, ranks.rows)
                    with gathered(trained.policy.module):
                        again = velocity(trained.policy, ranks.rows)
                outputs.append((before, average, again, velocity(trained.policy, ranks.rows)))
        for here, there in zip(*outputs, strict=True):
            torch.testing.assert_close(here, there, atol=1e-5, rtol=0)
        before, average, again, after = outputs[0]
        assert torch.equal(before, after) and torch.equal(average, again)
        assert (before - average).abs().max() > 1e-4
    base = Snapshot(mine.policy.module)
    base.zero()
    with torch.no_grad(), base.applied():
        plain = velocity(tiny.load(ranks.folder), ranks.rows)
        torch.testing.assert_close(velocity(mine.policy, ranks.rows), plain, atol=1e-6, rtol=0)


def whole_weights_are_saved_by_one_rank(ranks: Ranks) -> None:
    mine, other = ranks.sharded("lora"), ranks.whole("lora")
    save_adapter(mine.module, ranks.scratch / "shards")
    dist.barrier()
    if ranks.mesh.get_rank() == 0:
        save_adapter(other.module, ranks.scratch / "whole")
        saved = [load_file(ranks.scratch / kind / "pytorch_lora_weights.safetensors") for kind in ("shards", "whole")]
        assert saved[0].keys() == saved[1].keys()
        assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    state, expected = full_state(ranks.sharded("full").module), ranks.whole("full").module.state_dict()
    if ranks.mesh.get_rank() == 0:
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    else:
        assert not state


def one_rank_without_room_decides_for_all(ranks: Ranks) -> None:
    policy, device = ranks.sharded("full", dtype="bfloat16"), torch.device("cpu")
    assert fits_gathered(policy.module, device)
    rounded = matrices(policy.module, policy.blocks)
    need = sum(p.numel() * (2 if name in rounded else 4) for name, p in policy.module.named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "free_bytes", lambda _: 2 * need)
        assert fits_gathered(policy.module, device)
        patch.setattr(fsdp, "free_bytes", lambda _: 2 * need - ranks.mesh.get_rank())
        assert not fits_gathered(policy.module, device)


def parameters_kept_on_the_host_train_alike(ranks: Ranks) -> None:
    policy = ranks.sharded("full", FSDP(cpu_offload=True))
    agree(train(policy, ranks.rows), ranks.alone("full"))


def host_offload_is_refused_where_it_cannot_work(ranks: Ranks) -> None:
    with pytest.raises(ConfigError, match=r"actor\.fsdp\.cpu_offload: works in full training only"):
        ranks.sharded("lora", FSDP(cpu_offload=True))
    group = dist.new_group(list(range(WORLD)), backend="cuda:gloo")  # as NCCL alone: nothing for the host
    mesh = DeviceMesh.from_group(group, "cuda", list(range(WORLD)))
    policy = ranks.whole("full")
    with pytest.raises(ConfigError, match=r"serves tensors on the host too, got cuda:gloo"):
        shard(policy.module, policy.blocks, mesh, FSDP(cpu_offload=True))


def ranks_load_and_shard_in_waves(ranks: Ranks) -> None:
    """Neither the mesh nor sharding waits for the other ranks."""
    with in_waves(1):
        policy = ranks.whole("full")
        shard(policy.module, policy.blocks, init_device_mesh("cpu", (WORLD,)), FSDP())
    agree(train(policy, ranks.rows), ranks.alone("full"))


def masters_can_be_made_after_sharding(ranks: Ranks) -> None:
    """Then no process ever holds the whole in float32."""
    policy = tiny.load(ranks.folder, dtype="bfloat16")
    shard(policy.module, policy.blocks, ranks.mesh, FSDP(), torch.bfloat16)
    train_fully(policy.module)
    trained = train(policy, ranks.rows)
    assert {p.dtype for p in policy.module.parameters()} == {torch.float32}
    expected = ranks.alone("full", dtype="bfloat16")
    assert trained.norms == pytest.approx(expected.norms, rel=0.02)


def shards_leave_the_device_and_come_back(ranks: Ranks) -> None:
    for mode in ("full", "lora"):
        mine = train(ranks.sharded(mode), ranks.rows)
        mine.optimizer.zero_grad(set_to_none=True)
        state = training_state(mine.policy.module, mine.optimizer, {"ema": mine.ema})
        before = {name: local_tensor(value).clone() for name, value in state.items()}
        offloader = Offloader(torch.device("cpu"))
        freed = offloader.offload(state)
        assert all(local_tensor(value).untyped_storage().nbytes() == 0 for value in state.values())
        assert freed >= sum(value.nbytes for value in before.values())
        assert offloader.reload() == freed
        assert all(torch.equal(local_tensor(value), before[name]) for name, value in state.items())
        torch.testing.assert_close(
            velocity(mine.policy, ranks.rows),
            velocity(ranks.alone(mode).policy, ranks.rows),
            atol=1e-5,
            rtol=0,
        )


CHECKS: dict[str, Callable[[Ranks], None]] = {
    "lora": _equals_one_rank("lora", checkpointing=False),
    "lora, checkpointing": _equals_one_rank("lora", checkpointing=True),
    "full": _equals_one_rank("full", checkpointing=False),
    "full, checkpointing": _equals_one_rank("full", checkpointing=True),
    "full, kept until backward": _equals_one_rank("full", checkpointing=False, reshard_after_forward=False),
} | {
    check.__name__: check
    for check in (
        one_row_of_an_adapter_is_on_one_rank_alone,
        gathering_changes_nothing_but_speed,
        weights_outlive_a_forward_that_fails_inside_gathered,
        nothing_is_written_while_gathered,
        snapshots_are_swapped_into_the_forward,
        whole_weights_are_saved_by_one_rank,
        one_rank_without_room_decides_for_all,
        parameters_kept_on_the_host_train_alike,
        host_offload_is_refused_where_it_cannot_work,
        ranks_load_and_shard_in_waves,
        masters_can_be_made_after_sharding,
        shards_leave_the_device_and_come_back,
    )
}
