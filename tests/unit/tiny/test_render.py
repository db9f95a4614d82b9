"""Rendered signs: a function of (seed, index), plain ones loud and wide ones quiet."""

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="the fonts come with the [pretrain] extra")

from flowrl.tiny.render import HEIGHT, WIDTH, Looks, render, render_parallel

WORDS = ["FLOW", "RAIN", "CAT", "WORLD", "QUIZ", "MMMMM"]
MIXTURE = Looks(plain_share=0.5)


def test_a_sign_depends_on_seed_and_index_alone() -> None:
    whole = render(WORDS, MIXTURE, seed=3)
    assert whole.shape == (len(WORDS), HEIGHT, WIDTH, 3)
    np.testing.assert_array_equal(whole[4:], render(WORDS[4:], MIXTURE, seed=3, start=4))
    assert not np.array_equal(whole, render(WORDS, MIXTURE, seed=4))


def test_the_number_of_workers_changes_nothing() -> None:
    parallel = render_parallel(WORDS, MIXTURE, seed=3, workers=2, chunk=2)
    np.testing.assert_array_equal(parallel, render(WORDS, MIXTURE, seed=3))


def test_plain_signs_have_contrast_and_wide_signs_may_not() -> None:
    words = WORDS * 10
    plain, wide = (
        np.ptp(render(words, Looks(plain_share=share), seed=0).reshape(len(words), -1, 3), axis=1).max(axis=-1)
        for share in (1.0, 0.0)
    )
    assert plain.min() > 60
    assert np.quantile(wide, 0.25) < 40


def test_long_words_shrink_to_fit() -> None:
    sign = render(["WWWWW"], Looks(plain_share=1.0), seed=0)[0].astype(int)
    border = sign[:, [0, -1]]
    assert np.abs(border - sign[0, 0]).max() == 0
