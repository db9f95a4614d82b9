"""The client of reward servers, against servers that keep the protocol and servers that do not."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from flowrl.prompts import Prompt
from flowrl.rewards import transport, wire
from flowrl.rewards.frames import VideoScorer
from flowrl.rewards.http import HTTP, VideoHTTP
from flowrl.rewards.jpeg import JPEGIncompressibility
from flowrl.rewards.scoring import SelfTimed
from flowrl.rewards.transport import AnswerError, UnreachableError
from flowrl.types import Scorer
from tests.unit.rewards.servers import Asked, Reply, reply, serving

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 16, 24, 3), dtype=np.uint8)
PROMPTS = [Prompt(f"p{n}", f"a café №{n}", f"t{n}", "blurry", {"n": n}) for n in range(7)]


class JPEGServer:
    """Scores as `JPEGIncompressibility` does, of videos their first frames; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[wire.Pictures] = []
        self.sizes: list[int] = []

    def __call__(self, asked: Asked) -> Reply:
        if asked.method == "GET":
            return Reply(200 if asked.path == "/healthz" else 404, b"ready")
        assert asked.path == "/v1/score" and asked.headers["content-type"] == "application/octet-stream"
        assert asked.headers["x-flowrl-protocol-version"] == "1"
        pictures = wire.decode(asked.body, 10**6, 100)
        self.requests.append(pictures)
        self.sizes.append(len(asked.body))
        images = pictures.images if pictures.images.ndim == 4 else pictures.images[:, 0]
        scores = JPEGIncompressibility().score(images, pictures.prompts)
        return reply({"protocol_version": "1", "scores": scores.tolist()})


@contextmanager
def loaded(answer: Any, kind: type[HTTP] = HTTP, **options: Any) -> Iterator[HTTP]:
    with serving(answer) as url:
        scorer = kind(url=url, **options)
        scorer.load()
        yield scorer


@pytest.mark.parametrize("file_format", ["safetensors", "png"])
@pytest.mark.parametrize("batch_size", [1, 3, 7, 32])
def test_gives_the_scores_of_the_server_in_order(file_format: str, batch_size: int) -> None:
    server = JPEGServer()
    with loaded(server, format=file_format, batch_size=batch_size) as scorer:
        scores = scorer.score(IMAGES, PROMPTS)
    assert scores.dtype == np.float64
    np.testing.assert_array_equal(scores, JPEGIncompressibility().score(IMAGES, PROMPTS))
    parts = sorted(server.requests, key=lambda part: part.prompts[0].metadata["n"])
    assert [len(part.images) for part in parts] == [len(IMAGES[at : at + batch_size]) for at in range(0, 7, batch_size)]
    np.testing.assert_array_equal(np.concatenate([part.images for part in parts]), IMAGES)
    assert [prompt for part in parts for prompt in part.prompts] == PROMPTS


def test_videos_go_whole_to_a_scorer_of_videos() -> None:
    assert isinstance(VideoHTTP(url="http://host"), VideoScorer) and not isinstance(
        HTTP(url="http://host"), VideoScorer
    )
    server, videos = JPEGServer(), np.stack([IMAGES, IMAGES[::-1]])
    with loaded(server, VideoHTTP, batch_size=1) as scorer:
        assert isinstance(scorer, VideoHTTP)
        scores = scorer.score_videos(videos, PROMPTS[:2])
    np.testing.assert_array_equal(scores, JPEGIncompressibility().score(videos[:, 0], PROMPTS[:2]))
    assert {part.images.shape for part in server.requests} == {(1, 7, 16, 24, 3)}


def test_png_sends_less_of_smooth_pictures() -> None:
    flat, server = np.zeros((4, 64, 64, 3), np.uint8), JPEGServer()
    for file_format in ("png", "safetensors"):
        with loaded(server, format=file_format) as scorer:
            scorer.score(flat, PROMPTS[:4])
    assert server.sizes[0] < server.sizes[1] / 10


def scores_of(answer: Reply, **options: Any) -> np.ndarray:
    """Of two pictures, from a server that answers so."""
    with loaded(lambda asked: Reply() if asked.method == "GET" else answer, **options) as scorer:
        return scorer.score(IMAGES[:2], PROMPTS[:2])


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        ({"protocol_version": "1", "scores": [1.0]}, "scores must be a list of 2, got [1.0]"),
        ({"protocol_version": "1", "scores": [1.0, 2.0, 3.0]}, "scores must be a list of 2"),
        ({"protocol_version": "1", "scores": [1.0, float("nan")]}, "scores[1] must be a finite number, got nan"),
        ({"protocol_version": "1", "scores": [1.0, float("inf")]}, "scores[1] must be a finite number"),
        ({"protocol_version": "1", "scores": [1.0, None]}, "scores[1] must be a finite number"),
        ({"protocol_version": "1", "scores": ["1", 1.0]}, "scores[0] must be a finite number"),
        ({"protocol_version": "2", "scores": [1.0, 2.0]}, '"protocol_version" must be "1", got \'2\''),
        ({"scores": [1.0, 2.0]}, '"protocol_version" must be "1", got None'),
        ({"protocol_version": "1"}, "scores must be a list of 2"),
    ],
)
def test_bad_scores_are_errors_that_name_the_server(answer: dict[str, Any], cause: str) -> None:
    with pytest.raises(AnswerError) as caught:
        scores_of(reply(answer))
    assert cause in str(caught.value) and "/v1/score answered, but" in str(caught.value)


def test_an_error_page_is_an_error() -> None:
    with pytest.raises(AnswerError, match=r"/v1/score answered 200: Welcome, which is not JSON"):
        scores_of(Reply(200, b"<html>Welcome</html>"))


def test_the_servers_own_words_are_in_the_error() -> None:
    sentence = json.dumps({"protocol_version": "1", "error": "prompt 'p1' has no target"}).encode()
    with pytest.raises(AnswerError, match=r"answered 422: .*prompt 'p1' has no target"):
        scores_of(Reply(422, sentence))


def test_a_server_that_dies_in_a_batch_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BACKOFF_S", 0.01)
    with pytest.raises(UnreachableError, match=r"/v1/score: RemoteProtocolError"):
        scores_of(Reply(None))


def test_a_server_that_comes_back_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "BACKOFF_S", 0.01)
    server, failed, lock = JPEGServer(), set[bytes](), threading.Lock()

    def every_request_fails_once(asked: Asked) -> Reply:
        with lock:
            first = asked.method == "POST" and asked.body not in failed
            failed.add(asked.body)
        return Reply(503, b"full", {"retry-after": "0"}) if first else server(asked)

    with loaded(every_request_fails_once, batch_size=2, concurrency=4) as scorer:
        scores = scorer.score(IMAGES, PROMPTS)
    np.testing.assert_array_equal(scores, JPEGIncompressibility().score(IMAGES, PROMPTS))
    assert len(server.requests) == 4


def test_prompts_that_json_cannot_hold_are_refused_before_they_are_sent() -> None:
    server = JPEGServer()
    with loaded(server) as scorer, pytest.raises(ValueError, match="prompts cannot be written as JSON"):
        scorer.score(IMAGES[:1], [Prompt("p", "x", metadata={"when": {1, 2}})])
    assert server.requests == []


def test_load_waits_for_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "POLL_S", 0.01)
    left = [3]

    def loading(asked: Asked) -> Reply:
        assert asked.path == "/healthz"
        left[0] -= 1
        return Reply(503 if left[0] else 200)

    with loaded(loading):
        assert left == [0]


def test_an_answer_is_no_larger_than_its_scores() -> None:
    """So many digits as nobody needs."""
    scores = {"protocol_version": "1", "scores": [1.0, 2.0], "more": "1" * 100_000}
    with pytest.raises(AnswerError, match=r"/v1/score answered 200: .* more than 64128 bytes"):
        scores_of(reply(scores))


def test_its_limits_count_requests() -> None:
    one = HTTP(url="http://host", batch_size=1, concurrency=1).score_limit_s(1)
    scorer = HTTP(url="http://host", batch_size=10, concurrency=2)
    assert [scorer.score_limit_s(num) for num in (1, 10, 20, 21, 41)] == [one, one, one, 2 * one, 3 * one]
    assert isinstance(scorer, SelfTimed)


def test_is_a_scorer_that_can_be_pickled() -> None:
    scorer = HTTP(url="http://host:1", format="png")
    assert isinstance(scorer, Scorer) and pickle.loads(pickle.dumps(scorer)) == scorer


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (HTTP, {"format": "jpeg"}, "format must be safetensors or png, got 'jpeg'"),
        (HTTP, {"batch_size": 0}, "batch_size must be a whole number, at least 1, got 0"),
        (HTTP, {"batch_size": 2.5}, "batch_size must be a whole number"),
        (HTTP, {"retries": -1}, "retries must be a whole number"),
        (VideoHTTP, {"format": "png"}, "format must be safetensors for videos"),
    ],
)
def test_impossible_settings(kind: type[HTTP], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(url="http://host", **options)
