"""Whole runs of the command, from configuration to report, with real OCR and a random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

import flowrl
from flowrl.types import DivergedError
from tests.support.documented import undocumented

OCR_FIELDS = ("substring", "min_confidence", "normalise", "recogniser")
WORDS = ["FLOW", "OPEN", "SALE", "MILK", "TAXI"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f'A sign that says "{word}"\n' for word in WORDS))
    return path


def run(tiny_folder: Path, prompts: Path, runs: Path, *overrides: str) -> Path:
    """Two small steps, scored in this process."""
    common = [
        "debug=short",
        f"model.path={tiny_folder}",
        "model.max_sequence_length=0",
        f"data.train={prompts}",
        f"trainer.eval.sets.heldout={prompts}",
        f"runs={runs}",
        "reward.num_workers=0",
        "logger=jsonl",
    ]
    return flowrl.train(flowrl.load_config([*common, *overrides]))


def records(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_everything_a_user_looks_for(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    run_dir = run(
        tiny_folder,
        prompts,
        tmp_path / "runs",
        "artifacts.every=1",
        "artifacts.trajectories=true",
        "reward=jpeg_compressibility",
    )
    assert [record["step"] for record in records(run_dir)] == [0, 1, 2]
    last = records(run_dir)[-1]
    assert undocumented(last.keys() - {"step"}, component=["jpeg_compressibility"], set=["heldout"]) == []
    for name in (
        "reward/mean",
        "reward/jpeg_compressibility_std",
        "reward/group_std_mean",
        "reward/zero_std_ratio",
        "reward/num_groups",
        "perf/score_s",
        "perf/score_hidden_s",
        "perf/score_exposed_s",
        "train/loss",
        "train/ratio_mean",
        "train/ratio_max",
        "train/clip_fraction",
        "train/approx_kl",
        "train/log_prob_abs_diff",
        "train/grad_norm",
        "train/lr",
        "train/optimizer_steps",
        "train/optimizer_skips",
        "train/num_microbatches",
        "train/policy_version",
        "perf/rollout_s",
        "perf/update_s",
        "perf/mem_peak_gb",
        "perf/train_transitions_per_s",
        "perf/train_samples_per_s",
        "eval/heldout/jpeg_compressibility_mean",
        "buffer/submitted",
    ):
        assert name in last, name
    assert last["train/optimizer_steps"] == last["train/policy_version"] == 2
    assert last["buffer/submitted"] == last["buffer/trained"] == 4
    for name in (
        "config.yaml",
        "run.json",
        "summary.json",
        "report.html",
        "before_after.png",
        "final/transformer/config.json",
    ):
        assert (run_dir / name).is_file(), name
    trajectory = load_file(next((run_dir / "artifacts" / "rollouts" / "000002").rglob("trajectory.safetensors")))
    assert trajectory["latents"].shape == (4, 3, 8, 8, 20)


def test_the_same_seed_gives_the_same_numbers(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Metrics (timings and memory apart) and weights, bit for bit; another seed gives others."""
    first, second, other = (
        run(tiny_folder, prompts, tmp_path / name, "reward=jpeg_incompressibility", f"seed={seed}")
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )

    def numbers(run_dir: Path) -> list[dict[str, float]]:
        timed = ("perf/", "reward/score_")
        return [{k: v for k, v in record.items() if not k.startswith(timed)} for record in records(run_dir)]

    assert numbers(first) == numbers(second) != numbers(other)
    name = "final/transformer/diffusion_pytorch_model.safetensors"
    assert (first / name).read_bytes() == (second / name).read_bytes() != (other / name).read_bytes()


@pytest.mark.parametrize("algorithm", ["flow_grpo", "grpo_guard", "diffusion_nft"])
@pytest.mark.parametrize("actor", ["full", "lora"])
def test_every_algorithm_trains_both_ways(
    tiny_folder: Path, prompts: Path, tmp_path: Path, algorithm: str, actor: str
) -> None:
    """Real OCR scores; an illegible model may score 0 throughout, so brightness of a JPEG is rewarded beside it."""
    run_dir = run(
        tiny_folder,
        prompts,
        tmp_path,
        f"algorithm={algorithm}",
        f"actor={actor}",
        "reward=[ocr_line,jpeg_incompressibility]",
        *(f"reward.components.{name}.weight=1" for name in ("ocr", "jpeg_incompressibility")),
        "actor.lora.rank=4",
    )
    last = records(run_dir)[-1]
    assert last["train/optimizer_steps"] == 2 and last["train/grad_norm"] > 0
    assert 0 <= last["eval/heldout/ocr_mean"] <= 1
    weights = "final/pytorch_lora_weights.safetensors" if actor == "lora" else "final/transformer/config.json"
    assert (run_dir / weights).is_file()


def test_an_optional_reward_that_fails_in_evaluation_does_not_end_the_run(
    tiny_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    """It is missing from that group's scores, counted, and the report is made."""
    run_dir = run(
        tiny_folder,
        prompts,
        tmp_path,
        "reward=[jpeg_incompressibility,ocr_line]",
        *(f"reward.components.{name}.weight=1" for name in ("ocr", "jpeg_incompressibility")),
        "reward.components.ocr.required=false",
        "reward.components.ocr.scorer._target_=tests.support.scorers.FailsOnMilk",
        *(f"~reward.components.ocr.scorer.{key}" for key in OCR_FIELDS),
        "reward.retries=0",
    )
    assert (run_dir / "report.html").is_file() and (run_dir / "before_after.png").is_file()
    assert "eval/heldout/ocr_mean" in records(run_dir)[-1]


@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft"])
def test_evaluation_with_the_training_sampler(tiny_folder: Path, prompts: Path, tmp_path: Path, algorithm: str) -> None:
    """`dynamics=same`: stochastic for policy gradients, deterministic for forward-process algorithms."""
    run_dir = run(
        tiny_folder,
        prompts,
        tmp_path,
        f"algorithm={algorithm}",
        "reward=jpeg_incompressibility",
        "trainer.eval.dynamics=same",
        "+reward@trainer.eval.rewards=jpeg_compressibility",
        "trainer.eval.use_ema=true",
    )
    manifests = [
        json.loads(path.read_text()) for path in (run_dir / "artifacts" / "evaluations").rglob("manifest.json")
    ]
    steps = {str(m["sampling"]["stochastic_steps"]) for m in manifests}
    assert len(steps) == 1 and (steps == {"[]"}) == (algorithm == "diffusion_nft")
    assert {m["samples"][0]["policy_version"] for m in manifests} == {0, 2}
    last = records(run_dir)[-1]
    assert "eval/heldout/jpeg_compressibility_mean" in last and "reward/jpeg_incompressibility_mean" in last
    assert not any(name.endswith("_perfect") for name in last)


def test_what_is_saved_is_what_was_evaluated(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """With the average evaluated, `final/` holds the average; drawn by plain flowrl it gives the last evaluation."""
    options = ["reward=jpeg_incompressibility", "actor.optimizer.lr=1e-3", "actor.ema.decay=0.5"]
    live = run(tiny_folder, prompts, tmp_path / "live", *options, "trainer.eval.use_ema=false")
    averaged = run(tiny_folder, prompts, tmp_path / "averaged", *options, "trainer.eval.use_ema=true")
    name = "final/transformer/diffusion_pytorch_model.safetensors"
    assert (live / name).read_bytes() != (averaged / name).read_bytes()
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    shutil.copytree(averaged / "final" / "transformer", folder / "transformer", dirs_exist_ok=True)
    again = run(folder, prompts, tmp_path / "again", "reward=jpeg_incompressibility")
    key = "eval/heldout/jpeg_incompressibility_mean"
    assert records(again)[0][key] == pytest.approx(records(averaged)[-1][key], abs=1e-6)
    assert records(again)[0][key] != pytest.approx(records(live)[-1][key], abs=1e-6)


def test_a_run_that_never_updates_says_so(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """From rewards that are all 0 nothing can be learnt, and the end must not look like success."""
    with pytest.raises(DivergedError, match="no update was made"):
        run(
            tiny_folder,
            prompts,
            tmp_path,
            "reward=ocr_line",
            "reward.components.ocr.scorer._target_=tests.support.scorers.Indifferent",
            *(f"~reward.components.ocr.scorer.{key}" for key in OCR_FIELDS),
        )
    assert next(tmp_path.rglob("report.html")).is_file()
