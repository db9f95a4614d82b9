"""Ten and more kills at random moments for each way of running. Run with `pytest -m campaign`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kills import VARIANTS, run

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_survives_anything(tmp_path: Path, variant: str) -> None:
    """What it comes to is bit for bit what an undisturbed run comes to."""
    assert run(variant, 10, seed=1, here=tmp_path)["kills"] >= 10
