"""A scorer in a process of its own: it may raise, hang and die."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.prompts import Prompt
from flowrl.rewards import scoring
from flowrl.rewards.combine import Component
from flowrl.rewards.wire import Pictures
from flowrl.serving import pictures as serving
from flowrl.serving.host import Host, LostError, ScoringError
from tests.unit.rewards.scorers import Patient
from tests.unit.serving.served import CannotLoad, Obeys


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(Obeys(), timeout_s=0.5, load_timeout_s=60)
    host.load()
    yield host
    host.close()


@pytest.mark.parametrize(
    ("order", "message", "final"),
    [
        ("raise", r"^RuntimeError: too large$", False),
        ("exit", "^SystemExit: $", False),
        ("refuse", "^FinalError: no target$", True),
    ],
)
def test_what_it_raises_is_told_and_the_next_batch_is_scored(host: Host, order: str, message: str, final: bool) -> None:
    with pytest.raises(ScoringError, match=message) as caught:
        host.score([order])
    assert caught.value.final is final
    assert host.score(["a", "b"]).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("hang", "^the scorer did not answer within 0.5 s and was stopped$"),
        ("die", "^the scorer ended with exit code 3$"),
    ],
)
def test_one_that_is_lost_must_be_loaded_again(host: Host, order: str, message: str) -> None:
    with pytest.raises(LostError, match=message):
        host.score([order])
    with pytest.raises(LostError, match="the scorer is closed"):
        host.score(["a"])
    host.load()
    assert host.score(["a"]).tolist() == [1]


def test_a_scorer_that_bounds_itself_is_not_stopped_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the client of another server: it may take longer than others, and no longer than it says."""
    monkeypatch.setattr(scoring, "MARGIN_S", 0.3)
    slow = Pictures(np.zeros((2, 4, 4, 3), np.uint8), (Prompt("p", "a cat", metadata={"sleep": 0.8}),) * 2)
    for sample_s, message in ((20.0, None), (0.1, r"did not answer within 0\.5 s and was stopped")):
        scorer = Component(scorer=Patient(sample_s=sample_s, load_limit_s=60.0))
        host = Host(serving.Pictures(scorer).served, timeout_s=0.3, load_timeout_s=0.0)
        host.load()
        with pytest.raises(LostError, match=message) if message else nullcontext():
            assert host.score([slow]).tolist() == [1, 1]
        host.close()


def test_what_cannot_be_sent_is_an_error_and_the_next_batch_is_scored(host: Host) -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ScoringError, match="it cannot be sent to the scorer: RecursionError"):
        host.score([deep])
    assert host.score(["a"]).tolist() == [1]


def test_closing_ends_what_hangs(tmp_path: Path) -> None:
    host = Host(Obeys(), timeout_s=60, load_timeout_s=60)
    host.load()
    found: list[Exception] = []
    begun = tmp_path / "begun"

    def ask() -> None:
        try:
            host.score([f"touch {begun}", "hang"])
        except LostError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not begun.exists():
        time.sleep(0.01)
    host.close()
    thread.join(timeout=5)
    assert "killed by SIGKILL" in str(found[0])
    with pytest.raises(LostError, match="the scorer is closed"):
        host.load()


def test_what_cannot_be_loaded_says_why() -> None:
    host = Host(CannotLoad(), timeout_s=5, load_timeout_s=60)
    for _ in range(2):
        with pytest.raises(ScoringError, match=r"FileNotFoundError: no model.onnx"):
            host.load()
    host.close()


def test_a_system_without_a_process_to_spare_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: SpawnProcess) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    host = Host(Obeys(), timeout_s=5, load_timeout_s=60)
    with monkeypatch.context() as patch:
        patch.setattr(SpawnProcess, "start", full)
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(2):
            with pytest.raises(LostError, match=r"the scorer cannot be started: \[Errno 12\] Cannot allocate memory"):
                host.load()
        assert set(os.listdir("/proc/self/fd")) <= before
    host.load()
    assert host.score(["a"]).tolist() == [1]
    host.close()
