"""Rewards in whole runs: of latents that are never decoded, and those that fail, in every mode."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import flowrl
from flowrl.rewards.scoring import RewardError
from tests.support.documented import undocumented

SCORERS = "tests.unit.rewards.scorers"
MODES = {
    "sync": (),
    "standalone": ("trainer.layout=standalone",),
    "refill": ("trainer.drop_incomplete_groups=true",),
    "separate_async": ("trainer=separate_async", "trainer.mini_batch_size=2", "algorithm.old_log_prob=rollout"),
}


def component(scorer: str, required: bool = True) -> dict[str, Any]:
    target = "flowrl.rewards.combine.Component"
    return {"_target_": target, "weight": 1.0, "required": required, "scorer": {"_target_": f"{SCORERS}.{scorer}"}}


def train(
    folder: Path, here: Path, components: Mapping[str, Any], *overrides: str, orders: Mapping[str, Any] | None = None
) -> Path:
    """Two steps of two of four prompts; the second of them has `orders` for the reward."""
    prompts = here / "prompts.jsonl"
    lines = [{"prompt": f"word {n}", "metadata": orders or {} if n == 1 else {}} for n in range(4)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cfg = flowrl.load_config(
        [
            *(
                "debug=short",
                "device=cpu",
                f"model.path={folder}",
                "model.max_sequence_length=0",
                "sampler.num_steps=4",
            ),
            *("data.target=none", f"data.train={prompts}", f"trainer.eval.sets.heldout={prompts}", "logger=jsonl"),
            *("~reward", "reward.num_workers=0", "reward.retries=1", "data.num_samples_per_prompt=4"),
            *("deterministic=true", "artifacts.every=1", f"runs={here / 'runs'}", "name=run", *overrides),
        ]
    )
    cfg.reward.components = dict(components)
    return flowrl.train(cfg)


def records(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def manifests(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("manifest.json"))]


# ------------------------------------------------------------------------------------------ latents


def check_latent_run(run_dir: Path) -> None:
    """Trained without pictures, evaluated with them; and the score is that of the latents that were trained on."""
    logged = records(run_dir)
    assert undocumented(logged[-1].keys() - {"step"}, component=["energy"], set=["heldout"]) == []
    assert logged[-1]["train/optimizer_steps"] == 2 and "eval/heldout/energy_mean" in logged[0]
    rollout, evaluation = run_dir / "artifacts/rollouts/000002", run_dir / "artifacts/evaluations/000002"
    assert not list(rollout.rglob("*.png")) and len(list(evaluation.rglob("*.png"))) == 4
    for path in rollout.iterdir():
        kept = load_file(path / "trajectory.safetensors")
        offset = kept["conditions.prompt.embeds"].double().mean().item()
        energy = kept["final_latents"].double().square().mean(dim=(1, 2, 3)).numpy() + offset
        (manifest,) = manifests(path)
        assert [sample["picture"] for sample in manifest["samples"]] == [None] * 4
        np.testing.assert_allclose([sample["rewards"]["energy"] for sample in manifest["samples"]], energy, rtol=1e-9)
    assert (run_dir / "before_after.png").is_file() and (run_dir / "report.html").is_file()


def test_a_reward_of_latents_trains_without_decoding(tiny_folder: Path, tmp_path: Path) -> None:
    options = ("rollout.output=latent", "artifacts.trajectories=true")
    check_latent_run(train(tiny_folder, tmp_path, {"energy": component("Energy")}, *options))


@pytest.mark.campaign
@pytest.mark.parametrize("mode", ["standalone", "separate_async"])
def test_latents_come_from_other_processes(tiny_folder: Path, tmp_path: Path, mode: str) -> None:
    options = ("rollout.output=latent", "artifacts.trajectories=true", "launcher=spawn", "reward.num_workers=1")
    check_latent_run(train(tiny_folder, tmp_path, {"energy": component("Energy")}, *options, *MODES[mode]))


# ------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(mode, marks=pytest.mark.campaign) for mode in list(MODES)[1:])]
)
def test_a_required_reward_that_is_not_finite_stops_the_run_in_every_mode(
    tiny_folder: Path, tmp_path: Path, mode: str
) -> None:
    """Once its retries are spent, with the sample; a refill does not hide it."""
    components = {"style": component("Brightness"), "obedience": component("Obeys")}
    options = ("~trainer.eval.sets.heldout", *MODES[mode])
    message = r"reward component 'obedience' failed on prompt '(\w+)' \(word 1\): .* nan for sample \1:0:0"
    with pytest.raises(RewardError, match=message):
        train(tiny_folder, tmp_path, components, *options, orders={"then": "nan"})


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.campaign), "separate_async"])
def test_an_optional_reward_that_fails_is_dropped_for_its_group_and_counted(
    tiny_folder: Path, tmp_path: Path, mode: str
) -> None:
    """The group is not in the mean of the combined reward, which would be that of another sum.

    One component scores latents, and the other pictures.
    """
    components = {"energy": component("Energy"), "obedience": component("Obeys", required=False)}
    options = ("~trainer.eval.sets.heldout", "rollout.output=both", *MODES[mode])
    run_dir = train(tiny_folder, tmp_path, components, *options, orders={"then": "raise"})
    for record in records(run_dir)[1:]:
        groups = manifests(run_dir / f"artifacts/rollouts/{record['step']:06d}")
        found = [[sample["rewards"] for sample in group["samples"]] for group in groups]
        lacking = [
            group["prompt"]["text"] for group, rewards in zip(groups, found, strict=True) if len(rewards[0]) == 1
        ]
        assert lacking == [group["prompt"]["text"] for group in groups if group["prompt"]["text"] == "word 1"]
        totals = [sum(sample.values()) for rewards in found for sample in rewards if len(sample) == 2]
        assert record["reward/mean"] == pytest.approx(np.mean(totals), rel=1e-12)
    assert len(list(run_dir.rglob("rollouts/*/*/*.png"))) == 16
    dropped = [record.get("reward/score_dropped/obedience", 0) for record in records(run_dir)]
    retried = [record.get("reward/score_retries", 0) for record in records(run_dir)]
    assert sum(dropped) == sum(retried) == 1
