"""Several ranks are one: the same pictures, the same updates, whatever the launcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl.config import Config
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.spawn import Spawn
from flowrl.trainers.fleet import ActorFleet
from flowrl.types import Drawn, SampledGroup
from tests.support import tiny
from tests.support.ranks import Ranks, advantages, averages, configure, ranks, scored, weights

# A small eps would turn rounding of tiny gradients into signs.
OPTIMIZER = ("actor.optimizer.lr=1e-3", "actor.optimizer.eps=1e-3")


@pytest.fixture(scope="module")
def two(tiny_folder: Path) -> Iterator[Ranks]:
    """Two processes with a gloo group."""
    with ranks(Spawn(), configure(tiny_folder, "actor.num_ranks=2")) as started:
        yield started


def one(run: Config) -> tuple[Ranks, ActorFleet]:
    """The same run in this process."""
    with ranks(Inline(), run) as started:
        return started, started.fleet(run)


def two_cycles(fleet: ActorFleet, drop: bool = False) -> list[SampledGroup]:
    """Draw and train twice, the second time with what the first has made of the weights."""
    drawn: list[SampledGroup] = []
    for cycle in range(2):
        batch = scored(list(fleet.generate(tiny.groups(4, 4, first=4 * cycle), cycle, fleet.version)))
        given = advantages(batch, seed=cycle)
        if drop:  # leaves 7 samples of 16
            given[:9] = 0
        fleet.update(batch, given)
        drawn += [group.sampled for group in batch]
    return drawn


@pytest.mark.parametrize(
    ("mode", "overrides"),
    [
        ("full", ("actor.micro_batch_size=1", "algorithm.num_updates_per_batch=2", "trainer.eval.use_ema=true")),
        ("full", ("actor.micro_batch_size=64", "actor.gradient_checkpointing=true", "rollout.gather=never")),
        ("full", ("algorithm.drop_zero_advantage=true", "actor.micro_batch_size=3")),
        ("full", ("algorithm=diffusion_nft", "algorithm.num_train_times=2", "rollout.gather=always")),
        ("lora", ("actor.micro_batch_size=5", "algorithm.num_updates_per_batch=2", "trainer.eval.use_ema=true")),
        ("lora", ("algorithm=flow_grpo_kl", "actor.micro_batch_size=64", "actor.gradient_checkpointing=true")),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_two_ranks_are_one(two: Ranks, tiny_folder: Path, mode: str, overrides: tuple[str, ...]) -> None:
    """Invariant 4, over two cycles: pictures, weights, averages and what is logged."""
    drop = "algorithm.drop_zero_advantage=true" in overrides
    common = (f"actor={mode}", *OPTIMIZER, *overrides)
    alone, lone = one(configure(tiny_folder, *common))
    run = configure(tiny_folder, *common, "actor.num_ranks=2")
    fleet = two.fleet(run)
    for here, there in zip(two_cycles(lone, drop), two_cycles(fleet, drop), strict=True):
        same_drawing(here.drawn.fetch(), there.drawn.fetch())
    assert (fleet.version, fleet.num_updates) == (lone.version, lone.num_updates)
    for function in (weights, averages):
        expected, (found, same) = alone.all(function)[0], two.all(function)
        close(found, expected, 1e-6)
        assert all(torch.equal(found[name], same[name]) for name in found), "ranks differ"
    logged, expected = fleet.metrics(), lone.metrics()
    assert logged.keys() == expected.keys()
    for name in ("train/num_rows", "train/num_samples"):
        assert logged[name] == expected[name]
    for name in ("train/loss", "train/grad_norm", "train/log_prob_abs_diff"):
        if name in logged:
            assert logged[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6)


def same_drawing(here: Drawn, there: Drawn) -> None:
    """Noise and order to the bit, values to rounding (matmul kernels differ between batch shapes)."""
    assert here.trajectory.sample_ids == there.trajectory.sample_ids
    assert torch.equal(here.trajectory.step_index, there.trajectory.step_index)
    torch.testing.assert_close(there.trajectory.final_latents, here.trajectory.final_latents, atol=1e-4, rtol=0)


def close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    worst = max((found[name] - expected[name]).abs().max().item() for name in expected) if expected else 0.0
    assert worst <= tolerance


def test_evaluation_shows_every_prompt_once_whatever_the_number_of_ranks(two: Ranks, tiny_folder: Path) -> None:
    """Five prompts on two ranks: one is drawn twice to keep the ranks in step, and shown once."""
    groups = tiny.groups(5, 1)
    _, lone = one(configure(tiny_folder))
    fleet = two.fleet(configure(tiny_folder, "actor.num_ranks=2", "rollout.gather=never"))
    found, expected = ({d.group.ordinal: d.images for d in f.evaluate(groups)} for f in (fleet, lone))
    assert found.keys() == expected.keys() == set(range(5))
    for ordinal, images in expected.items():
        difference = images.astype(int) - found[ordinal].astype(int)  # type: ignore[union-attr]
        assert abs(difference).max() <= 1


def test_saved_weights_are_whole(two: Ranks, tiny_folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    fleet = two.fleet(configure(tiny_folder, "actor=full", "actor.num_ranks=2"))
    fleet.save(tmp_path)
    saved = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    original = load_file(tiny_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    close(saved, original, 0.0)


def test_offload_and_reload_give_back_every_bit(two: Ranks, tiny_folder: Path) -> None:
    fleet = two.fleet(configure(tiny_folder, "actor=full", "actor.num_ranks=2", "trainer.eval.use_ema=true"))
    two_cycles(fleet)
    before = two.all(weights)[0] | two.all(averages)[0]
    fleet.offload()
    fleet.reload()
    after = two.all(weights)[0] | two.all(averages)[0]
    close(after, before, 0.0)
    two_cycles(fleet)  # and training goes on
