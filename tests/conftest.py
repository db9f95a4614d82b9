"""Fixtures that several test modules share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SD3 pipeline folder; do not write to it."""
    return tiny.save_random_folder(tmp_path_factory.mktemp("tiny") / "sd3")
