"""`trainer=separate_async`: whole runs, against the synchronous trainer and while generation overlaps training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import flowrl
from flowrl.config import ConfigError
from tests.support.documented import undocumented

NOT_COMPARED = ("perf/", "publish/", "async/", "reward/score_")  # times, and what only one of the trainers has


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f'A sign that says "{word}"\n' for word in ("FLOW", "OPEN", "SALE", "MILK", "TAXI")))
    return path


def train(folder: Path, prompts: Path, name: str, *overrides: str) -> Path:
    """Four steps of two prompts."""
    common = [
        *("debug=short", "device=cpu", "deterministic=true", f"model.path={folder}", "model.max_sequence_length=0"),
        *(f"data.train={prompts}", f"trainer.eval.sets.heldout={prompts}", "sampler.num_steps=4"),
        *("reward=jpeg_compressibility", "reward.num_workers=0", "logger=jsonl", "trainer.total_steps=4"),
        *(f"runs={prompts.parent / 'runs'}", f"name={name}", "actor.optimizer.lr=1e-3"),
    ]
    return flowrl.train(flowrl.load_config([*common, *overrides]))


def records(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def compared(run_dir: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in record.items() if not k.startswith(NOT_COMPARED)} for record in records(run_dir)]


COMPATIBLE = (
    "trainer=separate_async",
    "trainer.mini_batch_size=2",
    "trainer.num_warmup_batches=0",
    "trainer.max_staleness=0",
    "trainer.sync_compatible=true",
)


@pytest.mark.parametrize("launcher", ["inline", pytest.param("spawn", marks=pytest.mark.campaign)])
def test_one_worker_without_staleness_is_the_synchronous_trainer(
    tiny_folder: Path, prompts: Path, launcher: str
) -> None:
    """Bit for bit: every metric and every weight."""
    one = train(tiny_folder, prompts, "sync", "trainer.layout=standalone", f"launcher={launcher}")
    other = train(tiny_folder, prompts, "async", *COMPATIBLE, f"launcher={launcher}")
    assert compared(one) == compared(other)
    weights, same = (load_file(next((run / "final").rglob("*.safetensors"))) for run in (one, other))
    assert all((weights[name] == same[name]).all() for name in weights)


def test_generation_overlaps_training(tiny_folder: Path, prompts: Path) -> None:
    overrides = ("trainer=separate_async", "trainer.mini_batch_size=2", "launcher=spawn", "rollout.num_workers=2")
    run_dir = train(tiny_folder, prompts, "free", *overrides, "algorithm.old_log_prob=rollout")
    logged = records(run_dir)[1:]
    assert undocumented(logged[-1].keys() - {"step"}, component=["jpeg_compressibility"], set=["heldout"]) == []
    assert [record["async/staleness_max"] for record in logged][1:] == [1.0] * 3, "batches are one version old"
    assert max(record["async/overlap"] for record in logged) > 0
    for step, record in enumerate(logged, start=1):
        assert record["buffer/trained"] == 2 * step
        assert record["buffer/submitted"] == record["buffer/trained"] + record["buffer/in_flight"]
        assert 0 <= record["async/actor_idle"] <= 1 and 0 <= record["async/rollout_idle"] <= 1

    assert logged[-1]["buffer/in_flight"] == 0, "what no step would use is not drawn"


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("data.train_batch_size", ("trainer.parameter_sync_step=2", "algorithm.num_updates_per_batch=2")),
        ("algorithm.num_updates_per_batch", ("data.train_batch_size=4", "trainer.parameter_sync_step=2")),
        ("trainer.max_staleness", ("trainer.num_warmup_batches=2",)),
        ("trainer.max_failed_rollouts_in_a_row", ("trainer.max_failed_rollouts_in_a_row=-1",)),
        ("trainer.num_warmup_batches", ("trainer.sync_compatible=true",)),
        ("trainer.layout", ("trainer.layout=shared",)),
        ("trainer.mini_batch_size", ("trainer.mini_batch_size=0",)),
    ],
)
def test_what_does_not_add_up_is_refused_with_the_equation(
    tiny_folder: Path, prompts: Path, key: str, overrides: tuple[str, ...]
) -> None:
    common = ("trainer=separate_async", "trainer.mini_batch_size=2", "algorithm.old_log_prob=rollout")
    with pytest.raises(ConfigError) as refused:
        train(tiny_folder, prompts, "never", *common, *overrides)
    assert key in {problem.path for problem in refused.value.problems}
