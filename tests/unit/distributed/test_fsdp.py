"""Two ranks do what one does. The checks are in `rank_checks.py` and `family_checks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flowrl.config import FSDP
from flowrl.distributed.fsdp import assert_writable, clip_grad_norm, fits_gathered, full_state, gathered, shard
from tests.unit.distributed.family_checks import FAMILY_CHECKS, MORE_CHECKS
from tests.unit.distributed.rank_checks import CHECKS
from tests.unit.distributed.two_ranks import on_two_ranks

NOT_RUN = "not run: the ranks were out of step after the check before it"


@pytest.fixture(scope="module")
def outcomes(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """By rank, what became of each check."""
    return on_two_ranks(CHECKS | FAMILY_CHECKS, tiny_folder, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("check", CHECKS | FAMILY_CHECKS)
def test_on_two_ranks(outcomes: list[dict[str, str]], check: str) -> None:
    for rank, outcome in enumerate(outcomes):
        error = outcome.get(check, NOT_RUN)
        assert not error, f"rank {rank}: {error}"


@pytest.mark.campaign
def test_more_on_two_ranks(tiny_folder: Path, tmp_path: Path) -> None:
    for outcome in on_two_ranks(MORE_CHECKS, tiny_folder, tmp_path):
        assert outcome == dict.fromkeys(MORE_CHECKS, "")


def test_an_ordinary_module_needs_no_second_path() -> None:
    """World size 1: everything is whole, writable and first."""
    module = nn.Linear(3, 2)
    with gathered(module):
        assert_writable(module)
    assert fits_gathered(module, torch.device("cpu"))
    assert full_state(module).keys() == {"weight", "bias"}
    module(torch.ones(1, 3)).sum().backward()
    norm = clip_grad_norm(module.parameters(), 0.5)
    assert norm.item() == pytest.approx(8**0.5)  # two rows of three ones, and two ones
    after = torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm()
    assert after.item() == pytest.approx(0.5, rel=1e-5)


def test_a_gradient_that_is_not_finite_shows_in_the_norm() -> None:
    module = nn.Linear(3, 2)
    module(torch.full((1, 3), float("inf"))).sum().backward()
    assert not clip_grad_norm(module.parameters(), 1.0).isfinite()


def test_a_model_without_its_blocks_is_not_sharded_in_silence() -> None:
    with pytest.raises(ValueError, match=r"no block of its classes \(Conv2d\)"):
        shard(nn.Sequential(nn.Linear(2, 2)), [nn.Conv2d], mesh=None, settings=FSDP())  # type: ignore[arg-type]
