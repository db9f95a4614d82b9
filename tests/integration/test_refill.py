"""Groups that cannot be drawn: evicted, counted and replaced where that is asked for; else the run's own error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import flowrl
from flowrl.config import ConfigError
from flowrl.rewards.scoring import RewardError
from flowrl.rollout.checks import EngineError
from tests.support.documented import undocumented

WORDS = ("FLOW", "OPEN", "SALE", "MILK", "TAXI")
REFILL = "trainer.drop_incomplete_groups=true"
ASYNC = ("trainer=separate_async", "trainer.mini_batch_size=2", "algorithm.old_log_prob=rollout")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f'A sign that says "{word}"\n' for word in WORDS))
    return path


def train(folder: Path, prompts: Path, *overrides: str, words: str = "MILK", way: str = "raise") -> Path:
    """Three steps of two prompts: six of five, so each of them is met."""
    common = [
        *("debug=short", "device=cpu", f"model.path={folder}", "model.max_sequence_length=0", "trainer.total_steps=3"),
        *("data.target=quoted", f"data.train={prompts}", "~trainer.eval.sets.heldout", "sampler.num_steps=4"),
        *("reward=jpeg_compressibility", "reward.num_workers=0", "logger=jsonl", "data.num_samples_per_prompt=2"),
        *(f"runs={prompts.parent / 'runs'}", "name=run", "actor.optimizer.lr=1e-3"),
        *("rollout.engine._target_=tests.support.engines.Illiterate", f"+rollout.engine.way={way}"),
        f"+rollout.engine.words='{words}'",
    ]
    return flowrl.train(flowrl.load_config([*common, *overrides]))


def records(run_dir: Path) -> list[dict[str, float]]:
    logged = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
    for record in logged:
        evicted = sum(count for name, count in record.items() if name.startswith("buffer/evicted_"))
        assert record["buffer/submitted"] == record["buffer/trained"] + evicted + record["buffer/in_flight"]
        assert record["reward/num_groups"] == 2, "every batch is complete"
    names = logged[-1].keys() - {"step"}
    assert undocumented(names, component=["jpeg_compressibility"], reason=["rollout_failed"]) == []
    return logged


@pytest.mark.parametrize(("layout", "way"), [("shared", "raise"), ("standalone", "refuse")])
def test_a_failed_group_is_replaced_by_a_new_prompt(tiny_folder: Path, prompts: Path, layout: str, way: str) -> None:
    logged = records(train(tiny_folder, prompts, f"trainer.layout={layout}", REFILL, way=way))
    assert logged[-1]["buffer/evicted_rollout_failed"] >= 1
    assert logged[-1]["buffer/evicted_rollout_failed"] == sum(record["rollout/refilled"] for record in logged)
    assert max(record["rollout/refill_rounds"] for record in logged) == 1


@pytest.mark.parametrize(
    ("layout", "way", "error"),
    [("shared", "raise", LookupError), ("standalone", "raise", LookupError), ("standalone", "refuse", EngineError)],
)
def test_without_refill_the_first_failure_stops_the_run(
    tiny_folder: Path, prompts: Path, layout: str, way: str, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"MILK|log_probs is not finite"):
        train(tiny_folder, prompts, f"trainer.layout={layout}", way=way)


def test_refill_is_refused_where_ranks_sample_in_step(tiny_folder: Path, prompts: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        train(tiny_folder, prompts, REFILL, "actor.num_ranks=2", "launcher=spawn")
    assert [problem.path for problem in refused.value.problems] == ["trainer.drop_incomplete_groups"]


def test_refill_ends_after_its_rounds_with_the_last_reason(tiny_folder: Path, prompts: Path) -> None:
    rounds = "trainer.max_incomplete_group_refill_rounds=2"
    message = r"after 2 rounds of refill .*The last failure: group 5 \(A sign .* cannot write A sign"
    with pytest.raises(EngineError, match=message) as caught:
        train(tiny_folder, prompts, REFILL, rounds, words=" ".join(WORDS))
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("mode", [(REFILL,), ASYNC], ids=["sync", "separate_async"])
def test_a_required_reward_that_fails_stops_the_run_all_the_same(
    tiny_folder: Path, prompts: Path, mode: tuple[str, ...]
) -> None:
    part = "reward.components.jpeg_compressibility.scorer"
    scorer = (f"{part}._target_=tests.support.scorers.FailsOnMilk", f"~{part}.quality", f"~{part}.scale")
    with pytest.raises(RewardError, match="no milk today"):
        train(tiny_folder, prompts, *mode, *scorer, "reward.retries=0", words="TAXI")


def test_separate_async_always_replaces(tiny_folder: Path, prompts: Path) -> None:
    logged = records(train(tiny_folder, prompts, *ASYNC, "rollout.batch_size=4"))
    assert logged[-1]["buffer/evicted_rollout_failed"] >= 1 and logged[-1]["buffer/trained"] == 6
    assert logged[-1]["buffer/in_flight"] == 0
