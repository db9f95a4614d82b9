"""What only a GPU can show: `pytest -m gpu` on a machine that has one; two tests need two.

Speed and memory at the size of Stable Diffusion 3.5 Medium: `benchmarks/publish.py` and `benchmarks/layouts.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl.config import Config
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.spawn import Spawn
from flowrl.tracking.metrics import Meter
from flowrl.trainers.placement import rollout_places, transport
from flowrl.trainers.rollouts import SeparateRollouts, SharedRollouts
from flowrl.trainers.worker import ActorWorker
from tests.support import tiny
from tests.support.ranks import advantages, configure, ranks, scored, weights

pytestmark = pytest.mark.gpu
one_gpu = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

# A small eps would turn rounding of tiny gradients into signs.
OPTIMIZER = ("actor.optimizer.lr=1e-3", "actor.optimizer.eps=1e-3")


def on_cuda(folder: Path, *overrides: str) -> Config:
    return replace(configure(folder, "model.dtype=float32", *OPTIMIZER, *overrides), device="cuda")


def trained(run: Config) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Two cycles in the run's layout: the weights, and what the last version draws."""
    launcher = Inline() if run.actor.num_ranks == 1 and run.trainer.layout == "shared" else Spawn()
    with ranks(launcher, run) as processes:
        actor = processes.fleet(run)
        rollouts: SharedRollouts | SeparateRollouts = SharedRollouts(actor, run.rollout.report_stuck_s)
        if run.trainer.layout != "shared":
            names = [place.name for place in rollout_places(run)]
            rollouts = SeparateRollouts(run, processes.cluster, names, actor, Meter())
        rollouts.publish(0)
        for cycle in range(2):
            batch = scored(list(rollouts.generate(tiny.groups(4, 4, first=4 * cycle), cycle)))
            actor.update(batch, advantages(batch, seed=cycle))
            rollouts.publish(actor.version)
        drawn = scored(list(rollouts.generate(tiny.groups(4, 2, first=9), 2)))
        assert {group.sampled.sampling.policy_version for group in drawn} == {2}
        latents = [group.sampled.drawn.fetch().trajectory.final_latents.cpu() for group in drawn]
        return processes.all(weights)[0], latents


def assert_same(run: Config, other: Config) -> None:
    (found, drawn), (expected, by_expected) = trained(run), trained(other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-6, rtol=0)
    for here, there in zip(drawn, by_expected, strict=True):
        torch.testing.assert_close(here, there, atol=1e-4, rtol=0)


@one_gpu
@pytest.mark.parametrize(("actor", "mode"), [("lora", "lora"), ("lora", "merged"), ("full", "full")])
def test_two_processes_on_one_gpu_are_one(tiny_folder: Path, actor: str, mode: str) -> None:
    """Colocated, by CUDA IPC, against one process that samples with its own module."""
    colocated = ("trainer.layout=colocated", f"weight_sync.mode={mode}", "weight_sync.bucket_mb=1")
    run = on_cuda(tiny_folder, f"actor={actor}", *colocated)
    assert transport(run) == "cuda_ipc"
    assert_same(run, on_cuda(tiny_folder, f"actor={actor}"))


@one_gpu
def test_offloading_frees_the_device(tiny_folder: Path) -> None:
    """Parameters, optimiser state, average and the old policy; and everything comes back."""
    run = on_cuda(tiny_folder, "actor=full", "algorithm=diffusion_nft", "trainer.eval.use_ema=true")
    with ranks(Inline(), run) as processes:
        fleet = processes.fleet(run)
        batch = scored(list(fleet.generate(tiny.groups(4, 4), 0, 0)))
        fleet.update(batch, advantages(batch))
        del batch
        (before,) = processes.all(weights)
        held = torch.cuda.memory_allocated()
        fleet.offload()
        (size,) = processes.all(trained_bytes)
        assert torch.cuda.memory_allocated() < held - 4.9 * size  # weights, two moments, average, old policy
        fleet.reload()
        (after,) = processes.all(weights)
        assert all(torch.equal(before[name], after[name]) for name in before)


def trained_bytes(worker: ActorWorker) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in worker.actor.parameters.values())


@one_gpu
def test_timesteps_reach_the_model_unrounded(tiny_folder: Path) -> None:
    """bfloat16 would make 912 of 913.7."""
    run = on_cuda(tiny_folder, "actor=full")
    run = replace(run, model=replace(run.model, dtype="bfloat16"))
    with ranks(Inline(), run) as processes:
        processes.fleet(run)
        (seen,) = processes.all(timesteps)
    assert seen.dtype == torch.float32 and seen.tolist() == pytest.approx([913.7], abs=1e-3)


def timesteps(worker: ActorWorker) -> Tensor:
    """What the embedding of time gets in a forward at sigma 0.9137."""
    policy, seen = worker.actor.policy, []
    hook = policy.module.time_text_embed.register_forward_pre_hook(  # type: ignore[union-attr, operator]
        lambda module, arguments: seen.append(arguments[0].detach().cpu())
    )
    prompts = [group.prompt for group in tiny.groups(1, 1)]
    sample = torch.randn(1, *policy.latent_shape(32, 80), device=policy.device)
    with torch.no_grad():
        policy.velocity(sample, torch.tensor([0.9137], device=policy.device), policy.encode(prompts))
    hook.remove()
    return seen[0]


@two_gpus
@pytest.mark.parametrize("actor", ["lora", "full"])
def test_two_gpus_are_one(tiny_folder: Path, actor: str) -> None:
    """FSDP2 and NCCL against one process."""
    assert_same(on_cuda(tiny_folder, f"actor={actor}", "actor.num_ranks=2"), on_cuda(tiny_folder, f"actor={actor}"))


@two_gpus
@pytest.mark.parametrize(("actor", "mode"), [("lora", "lora"), ("lora", "merged"), ("full", "full")])
def test_publishing_from_one_gpu_to_another(tiny_folder: Path, actor: str, mode: str) -> None:
    """Standalone, by NCCL."""
    standalone = ("trainer.layout=standalone", f"weight_sync.mode={mode}", "weight_sync.bucket_mb=1")
    run = on_cuda(tiny_folder, f"actor={actor}", *standalone)
    assert transport(run) == "broadcast"
    assert_same(run, on_cuda(tiny_folder, f"actor={actor}"))
