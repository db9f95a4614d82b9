"""The benchmark for several GPUs, where there is none: it survives its parts, and one of them is what it says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks.multi_gpu.__main__ import Part, attempt, faults
from benchmarks.multi_gpu.commands import killed
from benchmarks.multi_gpu.setting import SIZES, Bench, Found, models
from tests.integration.test_worker_faults import assert_gone


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(SIZES["tiny"], "cpu", tmp_path)


def good(bench: Bench) -> Found:
    return {"checks": {"one is one": True, "one is two": False}}


def bad(bench: Bench) -> Found:
    raise ValueError("this part is bad")


def crashing(bench: Bench) -> Found:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def endless(bench: Bench) -> Found:
    (bench.folder / "pid").write_text(str(os.getpid()))
    time.sleep(1000)
    raise AssertionError


def test_a_part_that_fails_leaves_a_reason(bench: Bench) -> None:
    deadline = time.monotonic() + 100
    assert faults(attempt("good", Part(good, 30), bench, deadline)) == ["not so: one is two"]
    found = attempt("bad", Part(bad, 30), bench, deadline)
    assert faults(found) == ["ended with exit code 1"] and "ValueError: this part is bad" in found["log"]
    assert faults(attempt("crashing", Part(crashing, 30), bench, deadline)) == ["ended with exit code -11"]


def test_a_part_that_hangs_is_ended_and_shows_where(bench: Bench) -> None:
    found = attempt("endless", Part(endless, 2), bench, time.monotonic() + 100)
    assert faults(found) == ["took longer than 2 s"] and "in endless" in found["log"]
    assert_gone([int((bench.folder / "pid").read_text())])
    assert faults(attempt("late", Part(good, 30), bench, time.monotonic() + 10)) == ["no time was left"]


@pytest.mark.campaign
def test_a_rank_that_is_killed_ends_the_command(bench: Bench) -> None:
    models(bench)
    found = killed(bench)
    assert faults(found) == []
    assert found["message"].startswith("flowrl: worker actor-1 was killed by SIGKILL")
