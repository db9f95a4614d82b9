"""What every family must do on two ranks as on one, and in a rollout worker: run by `two_ranks.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from flowrl.config import FSDP, LoRA, Optimizer
from flowrl.distributed.checkpointing import checkpoint_blocks
from flowrl.distributed.fsdp import full_tensor, gathered, shard
from flowrl.distributed.lora import add_lora, train_fully, trainable
from flowrl.distributed.optimizer import make_optimizer
from flowrl.distributed.precision import compute_as_trained, matrices
from flowrl.distributed.weight_sync.manifest import Mode
from flowrl.distributed.weight_sync.receiver import Receiver
from flowrl.distributed.weight_sync.sender import Sender
from flowrl.distributed.weight_sync.transports.parcels import Parcels
from flowrl.models.policy import PipelinePolicy
from flowrl.types import InMemory
from tests.support.families import FAMILIES, Family
from tests.unit.distributed.rank_checks import Ranks, shake

ADAPTER = LoRA(rank=3, alpha=6.0)


def families_compute_alike(name: str, mode: str) -> Callable[[Ranks], None]:
    """In bfloat16, to the bit: sharded, on one rank, and in a rollout worker that the sharded weights are published to.

    Neither masters nor timesteps are bfloat16 numbers. Every rank has a micro-batch that the one rank has, too.
    """

    def check(ranks: Ranks) -> None:
        family = FAMILIES[name]
        loaded = replace(family.model, dtype="bfloat16").load(torch.device("cpu"))
        one, many, worker = (_with_own_module(loaded) for _ in range(3))
        for policy in (one, many):
            _make_trainable(policy, mode)
        expected = [_of_family(one, family, rows) for rows in (slice(0, 2), slice(2, 4))]
        sum(output.square().sum() for output in expected).backward()

        shard(many.module, many.blocks, ranks.mesh, FSDP(), torch.bfloat16)
        found = _of_family(many, family, ranks.halves)
        assert found.equal(expected[ranks.mesh.get_rank()])
        found.square().sum().backward()
        for path, parameter in trainable(many.module).items():
            gradient = trainable(one.module)[path].grad
            assert (parameter.grad is None) == (gradient is None), path
            if gradient is not None:
                # FSDP's own nodes change the order in which autograd adds up bfloat16 gradients of what blocks share.
                assert (full_tensor(parameter.grad) - gradient).norm() <= 0.01 * gradient.norm(), path
        with torch.no_grad(), gathered(many.module):
            assert _of_family(many, family, ranks.halves).equal(found)

        if mode == "lora":
            add_lora(worker.module, ADAPTER, worker.lora_targets, seed=0)
        else:
            compute_as_trained(worker.module, worker.blocks, torch.float32)
        _publish(many, worker, "lora" if mode == "lora" else "full")
        with torch.no_grad():
            assert _of_family(worker, family, ranks.halves).equal(found)

    return check


def _with_own_module(policy: PipelinePolicy) -> PipelinePolicy:
    own = copy.copy(policy)
    own.module = copy.deepcopy(policy.module)
    return own


def _make_trainable(policy: PipelinePolicy, mode: str) -> None:
    if mode == "full":
        train_fully(policy.module)
        with torch.no_grad():
            torch._foreach_mul_(list(policy.module.parameters()), 1.003)
    else:
        add_lora(policy.module, ADAPTER, policy.lora_targets, seed=5)
        shake(policy.module)
        checkpoint_blocks(policy.module, policy.blocks)


def _of_family(policy: PipelinePolicy, family: Family, rows: slice) -> Tensor:
    """The velocity of some of four rows, two prompts; the experts of Wan2.2 get two rows each."""
    shape = policy.latent_shape(*family.sizes[0], family.frames)
    sample = torch.randn(4, *shape, generator=torch.Generator().manual_seed(2))[rows]
    text = policy.encode(family.prompts[:2]).rows(torch.tensor([0, 1, 1, 0])[rows])
    return policy.velocity(sample, torch.tensor([0.9137, 0.9532, 0.3014, 0.5173])[rows], text)


def _publish(trainer: PipelinePolicy, worker: PipelinePolicy, mode: Mode) -> None:
    cpu = torch.device("cpu")
    rounded = matrices(trainer.module, trainer.blocks)
    sender = Sender(trainer.module, mode, wire_dtype=torch.bfloat16, rounded=rounded, device=cpu)
    manifest = sender.plan(1)
    buckets = [bucket for _, bucket in sender.stream(manifest, on_host=False)]
    receiver = Receiver(worker.module, device=cpu)
    receiver.expect(manifest)
    receiver.receive(manifest, Parcels(tuple(InMemory(bucket) for bucket in buckets)), 0)
    receiver.commit()


def _note(calls: list[nn.Module], module: nn.Module, _: object) -> None:
    calls.append(module)


def an_expert_without_rows_takes_no_step(ranks: Ranks) -> None:
    """Rows of both of Wan's experts, then of one alone: weights of one rank.

    An expert that no rank has rows for keeps its weights, whatever its averages say.
    """
    family = FAMILIES["wan_a14b"]
    loaded = family.model.load(torch.device("cpu"))
    sample = torch.randn(4, *loaded.latent_shape(16, 16), generator=torch.Generator().manual_seed(2))
    text = loaded.encode([family.prompts[0]] * 4)

    def update(policy: PipelinePolicy, optimizer: torch.optim.AdamW, sigmas: list[float], *micros: slice) -> None:
        optimizer.zero_grad(set_to_none=True)
        for rows in micros:
            output = policy.velocity(sample[rows], torch.tensor(sigmas)[rows], text.rows(torch.arange(4)[rows]))
            output.square().sum().backward()
        optimizer.step()

    for mode, settings in (("lora", FSDP()), ("full", FSDP(reshard_after_forward=False))):
        one, many = _with_own_module(loaded), _with_own_module(loaded)
        for policy in (one, many):
            _make_trainable(policy, mode)
        shard(many.module, many.blocks, ranks.mesh, settings, torch.float32)
        optimizers = [make_optimizer(p.module, Optimizer(lr=1e-3, eps=1e-3, weight_decay=0.1)) for p in (one, many)]
        before: dict[str, Tensor] = {}
        for sigmas, idle in (([0.9, 0.3, 0.95, 0.5], ""), ([0.9] * 4, "transformer_2.")):
            update(one, optimizers[0], sigmas, slice(0, 2), slice(2, 4))
            update(many, optimizers[1], sigmas, ranks.halves)
            after = {name: full_tensor(parameter).clone() for name, parameter in trainable(many.module).items()}
            for name, parameter in trainable(one.module).items():
                torch.testing.assert_close(after[name], parameter.detach(), atol=1e-6, rtol=1e-5, msg=name)
                assert not before or after[name].equal(before[name]) == bool(idle and name.startswith(idle)), name
            before = after


def an_expert_without_rows_runs_for_others(ranks: Ranks) -> None:
    """One rank's rows all go to one of Wan's experts, the other's to the other one; nobody waits for ever."""
    family = FAMILIES["wan_a14b"]
    one = family.model.load(torch.device("cpu"))
    many = _with_own_module(one)
    shard(many.module, many.blocks, ranks.mesh, FSDP(), torch.float32)
    calls: list[nn.Module] = []
    for expert in many.module.children():
        expert.register_forward_pre_hook(partial(_note, calls))
    with torch.no_grad():
        expected = _of_family(one, family, ranks.halves)
        torch.testing.assert_close(_of_family(many, family, ranks.halves), expected, atol=1e-5, rtol=0)
        with gathered(many.module):
            torch.testing.assert_close(_of_family(many, family, ranks.halves), expected, atol=1e-5, rtol=0)
    assert len(calls) == 3, "where all weights are gathered, an expert without rows rests"


FAMILY_CHECKS: dict[str, Callable[[Ranks], None]] = {
    "an_expert_without_rows_takes_no_step": an_expert_without_rows_takes_no_step,
    "an_expert_without_rows_runs_for_others": an_expert_without_rows_runs_for_others,
    **{f"{name}, full": families_compute_alike(name, "full") for name in FAMILIES},
    **{f"{name}, lora": families_compute_alike(name, "lora") for name in ("flux", "qwen_image", "wan")},
}
MORE_CHECKS = {
    f"{name}, lora": families_compute_alike(name, "lora") for name in FAMILIES if f"{name}, lora" not in FAMILY_CHECKS
}
