"""A scorer in a process of its own: it may raise, hang and die."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from flowrl.serving.host import Host, LostError, ScoringError
from tests.unit.serving.served import CannotLoad, Obeys


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host(Obeys(), timeout_s=0.5, load_timeout_s=60)
    yield host
    host.close()


def test_whatever_it_does_the_next_batch_is_scored(host: Host) -> None:
    with pytest.raises(ScoringError, match=r"^RuntimeError: too large$"):
        host.score(["raise"])
    with pytest.raises(ScoringError, match="SystemExit"):
        host.score(["exit"])
    assert host.score(["a", "b"]).tolist() == [1, 1]
    with pytest.raises(LostError, match=r"did not answer within 0.5 s and was stopped"):
        host.score(["hang"])
    with pytest.raises(LostError, match="ended with exit code 3"):
        host.score(["die"])
    assert host.score(["a"]).tolist() == [1]


def test_closing_ends_what_hangs() -> None:
    host = Host(Obeys(), timeout_s=60, load_timeout_s=60)
    host.load()
    found: list[Exception] = []

    def ask() -> None:
        try:
            host.score(["hang"])
        except LostError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.1)
    host.close()
    thread.join(timeout=5)
    assert "killed by SIGKILL" in str(found[0])
    with pytest.raises(LostError, match="the server is ending"):
        host.score(["a"])


def test_what_cannot_be_loaded_says_why() -> None:
    host = Host(CannotLoad(), timeout_s=5, load_timeout_s=60)
    with pytest.raises(ScoringError, match=r"FileNotFoundError: no model.onnx"):
        host.load()
    host.close()
