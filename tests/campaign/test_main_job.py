"""The main job, whole: minutes each. Run with `pytest -m campaign`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.main_job import run

pytestmark = pytest.mark.campaign


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_illegible_words_become_legible(tmp_path: Path, seed: int) -> None:
    """Held-out exact match from at most 0.50 to at least 0.85; the score rises with it."""
    held_out = run("tiny_ocr", seed, tmp_path)["held_out"]
    (_, exact_before, score_before), (_, exact_after, score_after) = held_out[0], held_out[-1]
    assert exact_before <= 0.50 and exact_after >= 0.85
    assert score_after > score_before


@pytest.mark.parametrize(
    "overrides",
    [
        ("launcher=ray", "actor.num_ranks=2"),
        ("launcher=spawn", "trainer.layout=standalone"),
    ],
    ids=" ".join,
)
def test_more_processes_reach_the_same(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """The same words become legible, whoever draws and whoever trains."""
    held_out = run("tiny_ocr", 0, tmp_path, overrides=overrides)["held_out"]
    assert held_out[0][1] <= 0.50 and held_out[-1][1] >= 0.80


@pytest.mark.parametrize("recipe", ["tiny_ocr_guard", "tiny_ocr_nft"])
def test_other_algorithms_learn_too(tmp_path: Path, recipe: str) -> None:
    """The training reward of the last steps is well above that of the first."""
    reward = run(recipe, 0, tmp_path)["reward"]
    assert sum(reward[-5:]) / 5 > sum(reward[:3]) / 3 + 0.15
