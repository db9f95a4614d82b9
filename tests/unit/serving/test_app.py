"""What a reward server answers, whatever it is sent, with a scorer that misbehaves when it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from flowrl.prompts import Prompt
from flowrl.rewards import wire
from flowrl.rewards.combine import Component
from flowrl.rewards.frames import EveryKth
from flowrl.rewards.wire import encode
from flowrl.serving.app import Limits, Service, create_app
from flowrl.serving.pictures import Pictures, PictureScorer
from tests.unit.rewards.scorers import Brightness, Obeys

IMAGES = np.random.default_rng(0).integers(0, 256, (2, 6, 5, 3), dtype=np.uint8)
PROMPTS = [Prompt("p0", "a cat"), Prompt("p1", "a dog")]
HEADERS = {
    "content-type": "application/octet-stream",
    "x-flowrl-protocol-version": "1",
    "authorization": "Bearer secret",
}
LIMITS = Limits(max_body_mb=1, timeout_s=0.5, queue_size=3, max_wait_ms=0)
GOOD = encode(IMAGES, PROMPTS)


def ordered(**orders: Any) -> bytes:
    """A picture for a scorer that obeys."""
    return encode(IMAGES[:1], [Prompt("p", "a cat", metadata=orders)])


def nested(depth: int) -> bytes:
    """A picture whose prompt has lists in lists."""
    metadata: Any = {}
    for _ in range(depth):
        metadata = {"in": metadata}
    return encode(IMAGES[:1], [Prompt("p", "a cat", metadata=metadata)])


def post(client: TestClient, body: bytes = GOOD, headers: Mapping[str, str | None] = {}) -> tuple[int, Any]:
    sent = {name: value for name, value in {**HEADERS, **headers}.items() if value is not None}
    answer = client.post("/v1/score", content=body, headers=sent)
    content = answer.json()
    assert content.pop("protocol_version") == "1"
    assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return answer.status_code, content


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(
        create_app(Service(Pictures(Component(scorer=Obeys()), max_samples=4), LIMITS, token="secret"))
    ) as client:
        while client.get("/healthz").status_code != 200:
            pass
        yield client


@pytest.mark.parametrize("file_format", ["safetensors", "png"])
def test_each_picture_gets_its_score(client: TestClient, file_format: str) -> None:
    assert post(client, encode(IMAGES, PROMPTS, file_format)) == (200, {"scores": [1.0, 1.0]})


@pytest.mark.parametrize(
    ("body", "headers", "status", "error"),
    [
        (GOOD, {"authorization": None}, 401, "the bearer token is missing or wrong"),
        (GOOD, {"authorization": "Bearer secre"}, 401, "the bearer token is missing or wrong"),
        (GOOD, {"authorization": "secret"}, 401, "the bearer token is missing or wrong"),
        (GOOD, {"x-flowrl-protocol-version": "2"}, 400, "the header x-flowrl-protocol-version must be 1, got 2"),
        (GOOD, {"x-flowrl-protocol-version": None}, 400, "the header x-flowrl-protocol-version must be 1, got None"),
        (GOOD, {"content-type": "text/html"}, 400, "the content-type must be application/octet-stream, got text/html"),
        (GOOD[:-1], {}, 400, "the body is not a whole safetensors blob"),
        (b"<html>502 Bad Gateway</html>", {}, 400, "the body is not a whole safetensors blob"),
        (b"", {}, 400, "the body is not a whole safetensors blob"),
        (encode(np.zeros((5, 1, 1, 3), np.uint8), [PROMPTS[0]] * 5), {}, 400, "one request may have 4 samples, got 5"),
        (bytes(1_000_001), {}, 413, "the request has more than 1000000 bytes (max_body_mb)"),
        (bytes(1_000_001), {"authorization": None}, 401, "the bearer token is missing or wrong"),
        (nested(150), {}, 400, "the metadata of prompt 0 is nested more than 100 deep"),
        (ordered(then="refuse"), {}, 422, "FinalError: no target"),
        (ordered(then="raise"), {}, 500, "ZeroDivisionError"),
        (ordered(then="quit"), {}, 500, "SystemExit"),
        (ordered(then="nan"), {}, 500, "ScoresError: its scores are not finite: nan for sample 0"),
        (ordered(sleep=30), {}, 500, "the scorer did not answer within 0.5 s and was stopped"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said_and_the_next_request_is_scored(
    client: TestClient, body: bytes, headers: dict[str, str | None], status: int, error: str
) -> None:
    found, content = post(client, body, headers)
    assert found == status and content["error"].startswith(error)
    assert post(client)[0] == 200


def test_other_paths_and_methods_are_refused_in_the_same_form(client: TestClient) -> None:
    assert client.get("/v1/score").status_code == 405
    assert client.get("/docs").json() == {"protocol_version": "1", "error": "Not Found"}


def test_metrics_are_for_those_with_the_token_and_count(client: TestClient) -> None:
    def value(name: str) -> float:
        text = client.get("/metrics", headers=HEADERS).text
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)

    assert client.get("/metrics").status_code == 401
    counters = ('flowrl_requests_total{status="200"}', 'flowrl_requests_total{status="500"}', "flowrl_samples_total")
    before = [value(name) for name in counters]
    post(client)
    post(client, ordered(then="raise"))
    assert [value(name) - old for name, old in zip(counters, before, strict=True)] == [1, 1, 2]
    assert value("flowrl_waiting_requests") == 0


def test_before_the_scorer_is_loaded_nobody_is_scored() -> None:
    client = TestClient(create_app(Service(Pictures(Component(scorer=Obeys())), LIMITS)))  # whose life has not begun
    assert (client.get("/healthz").status_code, client.get("/healthz").json()) == (503, {"status": "loading"})
    assert post(client) == (503, {"error": "the scorer is being loaded"})


# ---------------------------------------------------------------------------------------------- bodies


@contextmanager
def served(limits: Limits = LIMITS) -> Iterator[TestClient]:
    with TestClient(create_app(Service(Pictures(Component(scorer=Obeys())), limits))) as client:
        while client.get("/healthz").status_code != 200:
            pass
        yield client


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which pictures are unpacked, one for each."""
    found: list[str] = []
    original = wire._unpacked

    def observed(*arguments: Any) -> np.ndarray:
        found.append("loop" if in_loop() else "other")
        return original(*arguments)

    monkeypatch.setattr(wire, "_unpacked", observed)
    return found


def in_loop() -> bool:
    try:
        return asyncio.get_running_loop().is_running()
    except RuntimeError:
        return False


def grey(side: int, **orders: Any) -> bytes:
    """A picture that is packed into very little, for a scorer that obeys."""
    return encode(np.full((1, side, side, 3), 128, np.uint8), [Prompt("p", "a cat", metadata=orders)], "png")


def test_what_there_is_no_room_for_is_not_unpacked(unpacked: list[str]) -> None:
    """Bodies of some kB, that make 750 kB each where 1 MB may be held."""
    limits = Limits(max_body_mb=1, max_queue_mb=1, timeout_s=20)
    with served(limits) as client, ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, client, grey(500, sleep=1.5))
        while not unpacked or "flowrl_held_bytes 750000.0" not in client.get("/metrics").text:
            pass
        assert post(client, grey(500)) == (503, {"error": "750000 bytes are waiting already"})
        assert len(unpacked) == 1
        assert first.result()[0] == 200


def test_only_what_is_little_is_unpacked_where_all_requests_are_served(unpacked: list[str]) -> None:
    with served() as client:
        for side in (100, 500):
            assert len(grey(side)) < 100_000 and post(client, grey(side))[0] == 200
    assert unpacked == ["loop", "other"]


def test_scoring_does_not_wait_for_threads_that_unpack() -> None:
    free = threading.Event()
    with served() as client:
        assert client.portal is not None

        async def occupy() -> None:
            loop = asyncio.get_running_loop()
            loop.set_default_executor(ThreadPoolExecutor(1))
            loop.run_in_executor(None, free.wait)

        client.portal.call(occupy)
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(post, client)
            try:
                assert answer.result(timeout=20)[0] == 200
            finally:
                free.set()


# ---------------------------------------------------------------------------------------------- pictures and videos


def test_requests_of_a_batch_are_scored_in_order() -> None:
    dialect = Pictures(Component(scorer=Brightness()))
    items = [dialect.read(encode(images, PROMPTS), 10**6).unpacked() for images in (IMAGES, IMAGES[::-1])]
    assert [(item.kind, item.num) for item in items] == [((6, 5, 3), 2)] * 2
    expected = IMAGES[[0, 1, 1, 0]].mean(axis=(1, 2, 3), dtype=np.float64) / 255
    np.testing.assert_array_equal(dialect.served.score([item.payload for item in items]), expected)


def test_of_videos_the_chosen_frames_are_scored_as_in_a_run() -> None:
    videos = np.random.default_rng(0).integers(0, 256, (2, 9, 6, 5, 3), dtype=np.uint8)
    dialect = Pictures(Component(scorer=Brightness(), frames=EveryKth(4)))
    item = dialect.read(encode(videos, PROMPTS), 10**6).unpacked()
    assert item.kind == (3, 6, 5, 3)
    expected = videos[:, ::4].mean(axis=(1, 2, 3, 4), dtype=np.float64) / 255
    np.testing.assert_allclose(PictureScorer(Brightness()).score([item.payload]), expected, rtol=1e-12)
