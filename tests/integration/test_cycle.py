"""A step of `separate_async` with four updates, against the same four updates written out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import flowrl
from flowrl.config import Config
from flowrl.flow.dynamics.flow_sde import FlowSDE
from flowrl.flow.noise import Noise
from flowrl.trainers.feed import Feed
from flowrl.trainers.separate_async import SeparateAsyncTrainer
from flowrl.trainers.stages import Stages
from flowrl.types import Drawn, ScoredGroup
from tests.support import tiny

NUM_UPDATES, PROMPTS_EACH = 4, 2
CLIP, RATE, EPS = 5e-3, 1e-3, 1e-6
seen: list[list[ScoredGroup]] = []


@dataclass(frozen=True, kw_only=True)
class Observed(SeparateAsyncTrainer):
    """Shows its batches."""

    def _collect(self, run: Config, stages: Stages, feed: Feed) -> list[ScoredGroup]:
        seen.append(super()._collect(run, stages, feed))
        return seen[-1]


@pytest.fixture
def trained(tiny_folder: Path, tmp_path: Path) -> tuple[list[ScoredGroup], dict[str, Tensor]]:
    """The batch of a run of one step, and the weights after it."""
    seen.clear()
    (tmp_path / "prompts.txt").write_text("".join(f"word {n}\n" for n in range(20)))
    run_dir = flowrl.train(
        flowrl.load_config(
            [
                *("debug=short", "device=cpu", f"model.path={tiny_folder}", "model.max_sequence_length=0"),
                *("data.target=none", f"data.train={tmp_path / 'prompts.txt'}", "~trainer.eval.sets.heldout"),
                *("trainer=separate_async", f"trainer._target_={__name__}.Observed", "trainer.total_steps=1"),
                *("trainer.mini_batch_size=2", "trainer.parameter_sync_step=4", "trainer.num_warmup_batches=0"),
                *("trainer.max_staleness=0", "data.train_batch_size=8", "data.num_samples_per_prompt=3"),
                *("algorithm=flow_grpo", "algorithm.num_updates_per_batch=4", f"algorithm.clip_range={CLIP}"),
                *("sampler/dynamics=flow_sde", "sampler.dynamics.noise_level=0.7", "sampler.num_steps=4"),
                *("reward=jpeg_compressibility", "reward.num_workers=0", "logger=jsonl", "trainer.eval.use_ema=false"),
                *("actor=full", f"actor.optimizer.lr={RATE}", "actor.optimizer.schedule=constant"),
                f"actor.optimizer.eps={EPS}",  # rounding must not decide about parameters without a gradient
                *(f"runs={tmp_path}", "name=run"),
            ]
        )
    )
    (batch,) = seen
    return batch, load_file(next((run_dir / "final").rglob("*.safetensors")))


def test_four_updates_take_their_ratios_to_the_weights_before_the_first(
    tiny_folder: Path, trained: tuple[list[ScoredGroup], dict[str, Tensor]]
) -> None:
    batch, weights = trained
    assert [scored.sampled.group.ordinal for scored in batch] == list(range(8))
    rewards = np.stack([scored.rewards["jpeg_compressibility"] for scored in batch])  # [8, K]
    advantages = torch.from_numpy((rewards - rewards.mean(1, keepdims=True)) / (rewards.std() + 1e-4)).clamp(-5, 5)

    policy, dynamics = tiny.load(tiny_folder), FlowSDE(0.7)
    before = {name: p.detach().clone() for name, p in policy.module.state_dict().items()}
    policy.module.requires_grad_(True)

    def log_probs(place: int) -> Tensor:
        """float64 [K * S] of one group's transitions under the present weights."""
        drawn: Drawn = batch[place].sampled.drawn.fetch()
        path = drawn.trajectory
        sample, following, step = path.latents.flatten(0, 1), path.next_latents.flatten(0, 1), path.step_index.flatten()
        conditions = drawn.conditions.rows(torch.zeros(len(sample), dtype=torch.int64))
        velocity = policy.velocity(sample, path.sigmas[step], conditions)
        return dynamics.log_prob(following, dynamics.transition(sample, velocity, path.sigmas, step))

    with torch.no_grad():
        old = [log_probs(place) for place in range(8)]
    order = Noise.of(0).permutation(8, "order", 1).tolist()
    optimizer = torch.optim.AdamW(policy.module.parameters(), lr=RATE, betas=(0.9, 0.999), eps=EPS, weight_decay=1e-4)
    clipped = []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        losses = []
        for place in order[PROMPTS_EACH * update : PROMPTS_EACH * (update + 1)]:
            ratio = (log_probs(place) - old[place]).exp()
            worth = advantages[place].repeat_interleave(len(ratio) // 3)
            losses.append(torch.maximum(-worth * ratio, -worth * ratio.clamp(1 - CLIP, 1 + CLIP)))
            clipped.append(((ratio - 1).abs() > CLIP).double().mean().item())
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(policy.module.parameters(), 1.0)
        optimizer.step()

    assert clipped[:PROMPTS_EACH] == [0, 0] and 0 < np.mean(clipped) < 1, "the old policy makes a difference"
    found = {name: (weights[name] - value).abs().max().item() for name, value in policy.module.state_dict().items()}
    moved = max((weights[name] - value).abs().max().item() for name, value in before.items())
    assert max(found.values()) <= 1e-6 < 1e-3 < moved, found
