"""Whoever waits for long says so."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from flowrl.distributed.launch.stuck import reporting


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_long_wait_is_reported_ever_more_rarely_and_with_what_is_done_then(caplog: pytest.LogCaptureFixture) -> None:
    left, third = iter(range(9, 0, -1)), threading.Event()

    def doing() -> str:
        number = next(left)
        if number == 7:
            third.set()
        return f"{number} are left"

    with caplog.at_level(logging.WARNING), reporting(0.05, doing):
        assert third.wait(20)
    time.sleep(0.5)
    assert said(caplog) == [
        "stuck? For 0.05 s now 9 are left",
        "stuck? For 0.1 s now 8 are left",
        "stuck? For 0.2 s now 7 are left",
    ]


def test_a_short_wait_is_not_and_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with reporting(30.0, lambda: "nobody asks"):
                pass
        with pytest.raises(KeyError), reporting(1e300, lambda: "nobody asks"):
            raise KeyError
    deadline = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert said(caplog) == []
