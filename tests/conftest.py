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


RAY = ("integration/test_ray_training", "unit/distributed/launch", "unit/buffer")
"""Where clusters of Ray are started: two at once on two cores are slower than their deadlines allow."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For `pytest -n 2 --dist loadgroup`: what one module prepares is prepared once; one cluster at a time."""
    root = Path(__file__).parent
    for item in items:
        module = item.path.relative_to(root).with_suffix("").as_posix()
        item.add_marker(pytest.mark.xdist_group("ray" if module.startswith(RAY) else module))
