"""The time of scoring, divided in closed form by a clock of the test's own."""

from __future__ import annotations

import time

import pytest

from flowrl.rewards.exposure import Exposure, Seconds


def test_the_wall_clock_of_scoring_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    exposure = Exposure()
    advance(100)  # nothing is scored
    with exposure.scoring():
        advance(1)
        with exposure.scoring():  # two at once are no longer than one
            advance(2)
            exposure.expose(True)
            advance(4)
        assert exposure.seconds() == Seconds(3, 4), "also in the midst of it"
        advance(8)
        exposure.expose(False)
        exposure.expose(False)
        advance(16)
    exposure.expose(True)
    advance(100)  # waiting for nothing that is scored
    with pytest.raises(KeyError), exposure.scoring():
        advance(32)
        raise KeyError
    advance(100)
    assert exposure.seconds() == Seconds(hidden=1 + 2 + 16, exposed=4 + 8 + 32)
