"""PickScore: a CLIP whose tokenizer and image processor lie in another folder."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from flowrl.rewards.pickscore import PickScore
from flowrl.types import LoadError
from tests.unit.rewards.networks import PICTURES, PROMPTS, TEXTS, clip_cosines, prepared, save_clip, save_clip_processor


def test_is_the_logit_over_26(tmp_path: Path) -> None:
    path, processor = tmp_path / "weights", tmp_path / "processor"
    processor.mkdir()
    model = save_clip(path)
    save_clip_processor(processor)
    for file in ("vocab.json", "merges.txt", "preprocessor_config.json"):  # as the published repository lacks them
        (path / file).unlink()
    with pytest.raises(LoadError, match="holds no tokenizer"):
        PickScore(path=str(path), processor=None).load()
    scorer = PickScore(path=str(path), processor=str(processor), device="cpu")
    scorer.load()
    expected = math.exp(3.0) * clip_cosines(model, prepared(PICTURES), TEXTS) / 26
    np.testing.assert_allclose(scorer.score(PICTURES, PROMPTS), expected, atol=1e-5)
