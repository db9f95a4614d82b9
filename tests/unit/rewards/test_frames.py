"""Which frames are scored, by whom, and what becomes of their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.prompts import Prompt
from flowrl.rewards.combine import Component
from flowrl.rewards.frames import AllFrames, EveryKth, Frames, UniformFrames, VideoScorer, chosen
from flowrl.rewards.jpeg import JPEGCompressibility, jpeg_kilobytes
from flowrl.rewards.ocr import OCR, VideoOCR
from flowrl.rewards.pool import RewardPool
from flowrl.rewards.recognisers import Line, RapidOCR
from flowrl.rewards.scoring import Request, RewardError, score
from flowrl.types import SampledGroup
from tests.unit.rewards.scorers import Brightness, Returns, Scores
from tests.unit.rewards.support import sampled_group
from tests.unit.rewards.test_recognisers import sign

RNG = np.random.default_rng(0)


@dataclass(frozen=True, kw_only=True)
class Lengths(Scores):
    """The number of frames that it is given of each video; 0 for a picture."""

    def score(self, images: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        return np.zeros(len(images))

    def score_videos(self, videos: np.ndarray, prompts: Sequence[Prompt]) -> np.ndarray:
        return np.full(len(prompts), float(videos.shape[1]))


def film(videos: np.ndarray) -> SampledGroup:
    """A group of these videos."""
    return replace(sampled_group(0, len(videos)), images=videos)


def scores(component: Component, group: SampledGroup) -> list[float]:
    with RewardPool({"film": component}, num_workers=0) as pool:
        return pool.submit(group).result().rewards["film"].tolist()


# ---------------------------------------------------------------------------------------------- which


@pytest.mark.parametrize(
    ("frames", "num_frames", "expected"),
    [
        (AllFrames(), 5, [0, 1, 2, 3, 4]),
        (EveryKth(k=4), 33, [0, 4, 8, 12, 16, 20, 24, 28, 32]),  # Flow-GRPO
        (EveryKth(k=4), 3, [0]),
        (UniformFrames(num=8), 33, [2, 6, 10, 14, 18, 22, 26, 30]),
        (UniformFrames(num=2), 4, [1, 3]),
        (UniformFrames(num=1), 33, [16]),
        (UniformFrames(num=8), 5, [0, 1, 2, 3, 4]),
        (UniformFrames(num=8), 1, [0]),
    ],
    ids=str,
)
def test_the_frames_of_each_policy(frames: Frames, num_frames: int, expected: list[int]) -> None:
    assert list(frames.choose(num_frames)) == expected


@given(num=st.integers(1, 40), num_frames=st.integers(1, 200))
def test_uniform_frames_are_evenly_spaced_and_as_far_from_both_ends(num: int, num_frames: int) -> None:
    found = list(UniformFrames(num=num).choose(num_frames))
    assert len(found) == min(num, num_frames)
    gaps = np.diff(found)
    assert (gaps >= 1).all() and (gaps.size == 0 or np.ptp(gaps) <= 1)
    assert found[0] >= 0 and found[-1] < num_frames
    assert abs(found[0] - (num_frames - 1 - found[-1])) <= 1


@pytest.mark.parametrize("policy", [EveryKth, UniformFrames])
def test_impossible_policies(policy: type) -> None:
    with pytest.raises(ValueError, match=r"must be at least 1, got 0"):
        policy(0)
    with pytest.raises(ValueError, match=r"frames must have choose\(num_frames\), or be null, got 8"):
        Component(scorer=Brightness(), frames=8)


def test_only_the_scored_frames_are_sent() -> None:
    videos = np.arange(2 * 33, dtype=np.uint8).reshape(2, 33, 1, 1, 1) * np.ones((4, 6, 3), np.uint8)
    sent = Component(scorer=Brightness(), frames=EveryKth(k=16)).scored_part(videos)
    assert sent[..., 0, 0, 0].tolist() == [[0, 16, 32], [33, 49, 65]]
    assert Component(scorer=Brightness()).scored_part(videos).shape == (2, 8, 4, 6, 3)
    assert Component(scorer=Lengths()).scored_part(videos) is videos
    assert chosen(videos, AllFrames()) is videos
    pictures = videos[0]
    assert Component(scorer=Brightness(), frames=EveryKth(k=16)).scored_part(pictures) is pictures


@dataclass(frozen=True)
class Fixed:
    """A policy that does not look at the length."""

    indices: tuple[int, ...]

    def choose(self, num_frames: int) -> Sequence[int]:
        return self.indices


@pytest.mark.parametrize("indices", [(), (0, 3), (-1,), (1, 0), (1, 1)])
def test_a_policy_of_ones_own_must_choose_frames_that_are_there(indices: tuple[int, ...]) -> None:
    with pytest.raises(RewardError, match=r"'film' failed on prompt 'p0': ValueError: Fixed.* must choose some of 3"):
        scores(Component(scorer=Brightness(), frames=Fixed(indices)), film(np.zeros((2, 3, 4, 6, 3), np.uint8)))


# ---------------------------------------------------------------------------------------------- by whom


@pytest.mark.parametrize("frames", [AllFrames(), EveryKth(k=3), UniformFrames(num=4), None])
def test_scores_of_frames_are_averaged(frames: Frames | None) -> None:
    """Frame f of video k is all f + 20 k."""
    shades = np.arange(11) + 20 * np.arange(2)[:, None]
    videos = np.broadcast_to(shades[..., None, None, None], (2, 11, 4, 6, 3)).astype(np.uint8)
    indices = list((frames or UniformFrames(num=8)).choose(11))
    expected = shades[:, indices].mean(axis=1) / 255
    assert scores(Component(scorer=Brightness(), frames=frames), film(videos)) == pytest.approx(expected, abs=1e-15)


def test_jpeg_of_videos() -> None:
    videos = RNG.integers(0, 256, (3, 6, 16, 24, 3), dtype=np.uint8)
    videos[1] //= 64
    component = Component(scorer=JPEGCompressibility(scale=1.0), frames=EveryKth(k=2))
    expected = [-np.mean([jpeg_kilobytes(video[frame]) for frame in (0, 2, 4)]) for video in videos]
    assert scores(component, film(videos)) == pytest.approx(expected, abs=1e-12)


def test_a_video_of_one_frame_is_worth_its_picture() -> None:
    pictures = RNG.integers(0, 256, (3, 16, 24, 3), dtype=np.uint8)
    component = Component(scorer=JPEGCompressibility())
    assert scores(component, film(pictures[:, None])) == scores(component, film(pictures))


def test_a_scorer_of_videos_gets_them_whole_unless_told_otherwise() -> None:
    videos = np.zeros((2, 33, 4, 6, 3), np.uint8)
    assert isinstance(Lengths(), VideoScorer) and not isinstance(Brightness(), VideoScorer)
    assert scores(Component(scorer=Lengths()), film(videos)) == [33.0, 33.0]
    assert scores(Component(scorer=Lengths(), frames=EveryKth(k=4)), film(videos)) == [9.0, 9.0]
    assert scores(Component(scorer=Lengths()), film(videos[:, 0])) == [0.0, 0.0]


def test_videos_in_a_process() -> None:
    with RewardPool({"film": Component(scorer=Brightness(), frames=UniformFrames(num=1))}, num_workers=1) as pool:
        videos = np.full((2, 3, 4, 6, 3), 51, np.uint8)
        assert pool.submit(film(videos)).result().rewards["film"].tolist() == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (np.array([1.0, 2.0, 3.0, np.nan]), "not finite: nan for sample b in scored frame 1"),
        (np.ones(2), "one score for each of 4 pictures, got shape [2]"),
        (np.ones(4, np.float32), "numpy array of float64, got an array of float32"),
    ],
)
def test_unusable_scores_of_frames(value: object, cause: str) -> None:
    request = Request("film", np.zeros((2, 2, 4, 6, 3), np.uint8), Prompt("p", "a film"), ("a", "b"), 1.0)
    with pytest.raises(RewardError) as caught:
        score({"film": Returns(value=value)}, request)
    assert cause in str(caught.value)


# ---------------------------------------------------------------------------------------------- OCR


@dataclass(kw_only=True)
class ReadsShades:
    """Reads the text whose index is the picture's grey value."""

    texts: Sequence[str]

    def load(self) -> None:
        pass

    def read(self, images: np.ndarray) -> list[list[Line]]:
        return [[Line(self.texts[image[0, 0, 0]], 1.0)] for image in images]


READ = ["", "FLOW", "flo w", "FLO", "XYZW", "FLOWERS", "theFLOWers"]
WORTH = [0, 1, 1, 0.75, 0.25, 0.25, 0]  # 1 - d / 4 of the target FLOW, without the substring rule


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ([0, 0, 0], 0.0),
        ([1, 2, 1], 1.0),
        ([0, 1, 0], 1.0),  # frames in which nothing can be read do not count
        ([3, 4, 0], 0.5),
        ([6, 5, 3], 0.5),
        ([6, 6, 0], 0.0),
    ],
)
def test_the_published_rule_for_videos(shown: list[int], expected: float) -> None:
    """Every fourth frame is one of `shown`; between them stands the target, which nobody looks at."""
    shades = np.full(4 * len(shown), 1, np.uint8)
    shades[::4] = shown
    videos = np.broadcast_to(shades[None, :, None, None, None], (1, len(shades), 4, 6, 3))
    component = Component(scorer=VideoOCR(recogniser=ReadsShades(texts=READ)), frames=EveryKth(k=4))
    assert scores(component, film(videos)) == [expected]
    read = [WORTH[index] for index in shown if WORTH[index] > 0]
    assert expected == (sum(read) / len(read) if read else 0)


def test_a_picture_is_a_video_of_one_frame() -> None:
    pictures = np.arange(len(READ), dtype=np.uint8)[:, None, None, None] * np.ones((4, 6, 3), np.uint8)
    component = Component(scorer=VideoOCR(recogniser=ReadsShades(texts=READ)))
    assert scores(component, film(pictures)) == scores(component, film(pictures[:, None])) == WORTH


def test_ocr_reads_rendered_frames() -> None:
    """FLOW is there in the second half of the first video, and all the time in the second."""
    blank, flow = np.full((32, 80, 3), 200, np.uint8), sign(["FLOW"], 32, 80, 22)
    videos = np.stack([np.stack([blank] * 4 + [flow] * 4), np.stack([flow] * 8)])
    recogniser = RapidOCR(detect=False)
    for scorer, expected in ((OCR(recogniser=recogniser), [0.5, 1.0]), (VideoOCR(recogniser=recogniser), [1.0, 1.0])):
        assert scores(Component(scorer=scorer, frames=UniformFrames(num=4)), film(videos)) == expected
