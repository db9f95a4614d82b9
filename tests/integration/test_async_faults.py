"""`separate_async` with processes that die, raise, hang or cannot keep up: progress or a clear error."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import flowrl
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.buffer.accounting import BufferFull
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.flow.noise import Noise
from flowrl.rewards.scoring import RewardError
from flowrl.types import Samples, TrainBatch, Velocities

BOUND_S = 120.0
STEPS, BATCH = 4, 2
ENGINES = "tests.support.engines"
OBEYS = "reward.components.jpeg_incompressibility.scorer"


@dataclass(frozen=True, kw_only=True)
class Slow(FlowGRPO):
    """A cycle takes half a second at least."""

    def freeze(self, samples: Samples, velocities: Velocities, noise: Noise) -> TrainBatch:
        time.sleep(0.5)
        return super().freeze(samples, velocities, noise)


@dataclass(frozen=True)
class Case:
    """Prompts with orders for the reward, and the folder of the run."""

    model: Path
    folder: Path

    def train(self, *overrides: str, **orders: object) -> Path:
        """Four steps of two of five prompts; `orders` are what the reward is to do with the third."""
        lines = [{"prompt": f"word {n}", "metadata": orders if n == 2 else {}} for n in range(5)]
        (self.folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        common = [
            *("debug=short", "device=cpu", f"model.path={self.model}", "model.max_sequence_length=0", "launcher=spawn"),
            *("data.target=none", f"data.train={self.folder / 'prompts.jsonl'}", "~trainer.eval.sets.heldout"),
            *("trainer=separate_async", f"trainer.mini_batch_size={BATCH}", f"trainer.total_steps={STEPS}"),
            *("algorithm.old_log_prob=rollout", "data.num_samples_per_prompt=4", "rollout.batch_size=4"),
            *("reward=jpeg_compressibility", "reward.num_workers=0", "logger=jsonl", "sampler.num_steps=4"),
            *("rollout.num_workers=2", f"runs={self.folder}", "name=run"),
        ]
        return flowrl.train(flowrl.load_config([*common, *overrides]))

    def records(self) -> list[dict[str, float]]:
        """Of every step that was finished; the books of each of them close."""
        logged = [json.loads(line) for line in (self.folder / "run/metrics.jsonl").read_text().splitlines()][1:]
        for record in logged:
            evicted = sum(count for name, count in record.items() if name.startswith("buffer/evicted_"))
            assert record["buffer/submitted"] == record["buffer/trained"] + evicted + record["buffer/in_flight"]
            assert record["reward/num_groups"] == BATCH and record["async/staleness_min"] >= 0
        assert [record["buffer/trained"] for record in logged] == [BATCH * (n + 1) for n in range(len(logged))]
        return logged


@pytest.fixture
def case(tiny_folder: Path, tmp_path: Path) -> Case:
    return Case(tiny_folder, tmp_path)


@contextmanager
def in_time() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < BOUND_S


def mortal(folder: Path) -> tuple[str, ...]:
    """A worker is killed by SIGKILL, once, at its second group."""
    engine = (f"rollout.engine._target_={ENGINES}.Mortal", f"+rollout.engine.mark={folder / 'died'}")
    return (*engine, "rollout.batch_size=8", "rollout.num_workers=1")


def test_a_rollout_worker_that_is_killed_is_replaced_and_the_run_goes_on(case: Case) -> None:
    case.train(*mortal(case.folder), "rollout.on_death=restart")
    logged = case.records()
    assert (case.folder / "died").exists() and len(logged) == STEPS
    assert sum(record.get("rollout/restarts", 0) for record in logged) == 1
    assert logged[-1]["buffer/in_flight"] == 0 and not any("evicted" in name for name in logged[-1])


@pytest.mark.campaign
def test_a_rollout_worker_that_is_killed_stops_the_run_if_that_is_the_policy(case: Case) -> None:
    with in_time(), pytest.raises(WorkerDied, match="rollout-0 was killed by SIGKILL"):
        case.train(*mortal(case.folder))
    case.records()


@pytest.mark.campaign
def test_a_group_that_kills_two_workers_is_given_up(case: Case) -> None:
    engine = (f"rollout.engine._target_={ENGINES}.Illiterate", "+rollout.engine.words='2'")
    case.train(*engine, "+rollout.engine.way=kill", "rollout.on_death=restart", "rollout.max_restarts=8")
    last = case.records()[-1]
    assert last["buffer/evicted_rollout_died"] >= 1 and last["buffer/trained"] == STEPS * BATCH


@pytest.mark.campaign
def test_a_rollout_worker_that_hangs_is_reported_killed_and_replaced(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    engine = (f"rollout.engine._target_={ENGINES}.Sleepy", f"+rollout.engine.mark={case.folder / 'slept'}")
    limits = ("rollout.timeout_s=24", "rollout.report_stuck_s=8", "rollout.on_death=restart")
    with caplog.at_level(logging.WARNING):
        case.train(*engine, *limits)
    assert len(case.records()) == STEPS
    said = [record.getMessage() for record in caplog.records]
    assert any("For 8 s now rollout-" in line and "it is killed after 24 s" in line for line in said)
    assert any("For 16 s now rollout-" in line for line in said), "ever more rarely"
    assert any("drew nothing for 24 s (rollout.timeout_s), and was killed" in line for line in said)


# ------------------------------------------------------------------------------------------ rewards

OBEYING = (
    *("reward=[jpeg_compressibility,jpeg_incompressibility]", "reward.num_workers=1", "reward.retries=0"),
    *("reward.components.jpeg_compressibility.weight=1", "reward.components.jpeg_incompressibility.weight=1"),
    *(f"{OBEYS}._target_=tests.unit.rewards.scorers.Obeys", f"~{OBEYS}.quality"),
)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("orders", "message"),
    [({"then": "raise"}, "ZeroDivisionError"), ({"sleep": 600}, "did not answer within 5 s"), ({"then": "exit"}, "3")],
    ids=["raises", "hangs", "dies"],
)
@pytest.mark.parametrize("required", [True, False], ids=["required", "optional"])
def test_a_reward_worker_that_fails(case: Case, orders: dict[str, object], message: str, required: bool) -> None:
    limits = ("reward.timeout_s=5", f"reward.components.jpeg_incompressibility.required={required}")
    with in_time():
        if required:
            with pytest.raises(RewardError, match=f"'jpeg_incompressibility' failed on .*word 2.*{message}"):
                case.train(*OBEYING, *limits, **orders)
            case.records()
        else:
            case.train(*OBEYING, *limits, **orders)
            dropped = [r.get("reward/score_dropped/jpeg_incompressibility", 0) for r in case.records()]
            assert len(dropped) == STEPS and sum(dropped) >= 1


# ------------------------------------------------------------------------------------------ bounds


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("bound", "most"),
    [("buffer.max_groups=null", 2 * BATCH), ("buffer.max_groups=2", 2), ("buffer.max_bytes=400000", 2 * BATCH)],
)
def test_a_slow_actor_is_not_overrun(case: Case, bound: str, most: int) -> None:
    """Neither the pace, one batch ahead, nor the buffer's bounds are exceeded; a full buffer lets the run go on."""
    case.train(f"algorithm._target_={__name__}.Slow", bound)
    logged = case.records()
    assert len(logged) == STEPS and logged[-1]["buffer/in_flight"] == 0
    assert max(record["buffer/in_flight"] for record in logged) <= most
    if "bytes" in bound:  # a group weighs 174 kB
        assert max(record["buffer/bytes"] for record in logged) <= 400_000


@pytest.mark.campaign
def test_a_buffer_that_cannot_hold_a_batch_is_an_error_at_once(case: Case) -> None:
    with in_time(), pytest.raises(BufferFull, match=r"max_bytes=1000\).* cannot hold 2 finished groups: raise"):
        case.train("buffer.max_bytes=1000", "rollout.num_workers=1")
