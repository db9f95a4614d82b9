"""What a run keeps of an evaluation fits on a page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowrl.tracking.video import storyboard
from flowrl.trainers.evaluator import Evaluated
from flowrl.trainers.journal import Shown
from flowrl.types import ScoredGroup
from tests.unit.rewards.support import scored_group


def group(ordinal: int, images: np.ndarray) -> ScoredGroup:
    scored = scored_group(ordinal, {"ocr": [0.25 * ordinal] * len(images)})
    return replace(scored, sampled=replace(scored.sampled, images=images))


@pytest.mark.parametrize("num_frames", [None, 6])
def test_the_first_picture_of_a_prompt_or_a_still_of_its_first_video(num_frames: int | None) -> None:
    shape = (2, 2, *(() if num_frames is None else (num_frames,)), 16, 24, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    shown = Shown.of(Evaluated({"heldout": [group(0, images[0]), group(1, images[1])]}, {"ocr": 0.25}))
    firsts = images[:, 0]
    assert np.array_equal(shown.images, firsts if num_frames is None else [storyboard(video) for video in firsts])
    assert (shown.labels, shown.scores) == (["FLOW"] * 2, [0.0, 0.25])
    assert shown.metrics == {"eval/heldout/ocr_mean": 0.125, "eval/heldout/ocr_perfect": 0.5}
