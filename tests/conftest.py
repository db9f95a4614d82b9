"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported

import pytest
import torch

from tests.support import tiny

# The models of the tests are so small that a second thread costs more than it gives.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SD3 pipeline folder; do not write to it."""
    return tiny.save_random_folder(tmp_path_factory.mktemp("tiny") / "sd3")
