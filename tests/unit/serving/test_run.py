"""A server at a port of this machine: what becomes of those who ask when they, or the scorer, are lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn

from flowrl.rewards.wire import CONTENT_TYPE, PATH, VERSION_HEADER
from flowrl.serving.app import Limits, Service, UnloadableError, create_app
from flowrl.serving.batching import Item
from flowrl.serving.host import Served
from flowrl.serving.run import bound, run
from tests.unit.serving.served import LoadsAtTimes, Obeys

HEADERS = {"content-type": CONTENT_TYPE, VERSION_HEADER: "1"}
SOON = 20.0  # seconds, for what should take one: the machine may be busy


@dataclass(frozen=True)
class Word:
    """One order."""

    item: Item

    @property
    def num_bytes(self) -> int:
        return self.item.num_bytes

    def unpacked(self) -> Item:
        return self.item


@dataclass(frozen=True)
class Words:
    """Requests are orders to a scorer. One of them this fails to read, and one cannot be sent to the scorer."""

    served: Served
    version_header: str = VERSION_HEADER
    scores_key: str = "scores"

    def read(self, body: bytes, max_bytes: int) -> Word:
        word = body.decode()
        if word == "unreadable":
            raise KeyError(word)
        return Word(Item("words", 1, len(body), threading.Lock() if word == "unpicklable" else word))


@dataclass(frozen=True)
class Live:
    """A server in a thread."""

    client: httpx2.Client
    service: Service
    thread: threading.Thread

    def post(self, word: str | bytes, **options: Any) -> tuple[int, str]:
        answer = self.client.post(PATH, content=word, **options)
        content = answer.json()
        return answer.status_code, content.get("error", "")

    def is_ready(self) -> bool:
        return self.client.get("/healthz").status_code == 200

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(name + " ")), 0.0)


@contextmanager
def live(served: Served, token: str | None = None, **limits: Any) -> Iterator[Live]:
    def stop() -> None:
        server.should_exit = True

    service = Service(Words(served), Limits(**{"max_batch_size": 1, **limits}), token, stop)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(service), port=port, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=SOON) as client:
            running = Live(client, service, thread)
            until(lambda: server.started and running.is_ready())
            yield running
    finally:
        stop()
        thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def orders(path: Path, *lines: str) -> LoadsAtTimes:
    path.write_text("\n".join(lines))
    return LoadsAtTimes(str(path))


# ------------------------------------------------------------------------------------------ clients


def test_who_has_gone_is_not_scored_and_leaves_his_place() -> None:
    with live(Obeys(), queue_size=5, timeout_s=3) as server, ThreadPoolExecutor(6) as threads:
        busy = threads.submit(server.post, "hang")
        until(lambda: server.metric("flowrl_held_bytes") > 0 and server.metric("flowrl_waiting_requests") == 0)

        def impatient(_: int) -> None:
            with pytest.raises(httpx2.ReadTimeout):
                server.post("a", timeout=httpx2.Timeout(SOON, read=0.3))

        list(threads.map(impatient, range(5)))
        until(lambda: server.metric("flowrl_waiting_requests") == 0)
        assert not busy.done()
        assert server.post("b") == (200, "")
        assert busy.result()[0] == 500
        assert server.metric("flowrl_samples_total") == 1
        assert server.metric('flowrl_requests_total{status="499"}') == 5


@pytest.mark.parametrize("word", [bytes(3_000_000), (bytes(100_000) for _ in range(30))], ids=["stated", "chunked"])
def test_a_request_that_is_too_large_is_answered_without_being_read(word: Any) -> None:
    with live(Obeys(), max_body_mb=1) as server:
        answer = server.client.post(PATH, content=word)
        assert answer.json()["error"] == "the request has more than 1000000 bytes (max_body_mb)"
        assert (answer.status_code, answer.headers["connection"]) == (413, "close")
        assert server.post("a") == (200, "")


def test_a_stated_length_is_refused_before_anything_of_it_has_come() -> None:
    with live(Obeys()) as server, begun(server, size=128_000_001, sent=0) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_of_refused_requests_only_so_much_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.serving.bodies.DRAIN_S", 1.0)
    with live(Obeys(), token="secret", max_body_mb=1) as server:
        whole = server.client.post(PATH, content=bytes(900_000))
        assert (whole.status_code, whole.headers.get("connection")) == (401, None)

        def slow() -> Iterator[bytes]:
            for _ in range(20):
                yield b"a"
                time.sleep(0.1)

        cut = server.client.post(PATH, content=slow())
        assert (cut.status_code, cut.headers.get("connection")) == (401, "close")


@contextmanager
def begun(server: Live, size: int, sent: int) -> Iterator[socket.socket]:
    """A request of which no more comes than `sent` bytes of `size`."""
    with socket.create_connection(("127.0.0.1", server.client.base_url.port)) as connection:
        lines = [f"POST {PATH} HTTP/1.1", "host: x", f"content-length: {size}"]
        lines += [f"{name}: {value}" for name, value in HEADERS.items()]
        connection.settimeout(SOON)
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + bytes(sent))
        yield connection


def test_requests_that_do_not_come_to_their_end_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.serving.bodies.QUIET_S", 1.0)
    with live(Obeys(), queue_size=2, max_queue_mb=1) as server, ExitStack() as stack:
        slow = [stack.enter_context(begun(server, size=900_000, sent=3)) for _ in range(20)]
        until(lambda: server.metric("flowrl_arriving_bytes") == 60)
        assert server.post("a") == (200, "")
        assert server.metric("flowrl_waiting_requests") == 0
        answers = [connection.recv(1000).decode() for connection in slow]
        assert all(answer.startswith("HTTP/1.1 408 ") and "nothing of it for 1 s" in answer for answer in answers)
        assert server.metric("flowrl_arriving_bytes") == 0


def test_one_that_keeps_coming_has_timeout_s_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.serving.bodies.QUIET_S", 1.0)
    with live(Obeys(), timeout_s=2.0) as server, begun(server, size=100, sent=1) as connection:
        started = time.monotonic()
        connection.settimeout(0.2)
        while True:
            connection.sendall(b"a")
            try:
                assert connection.recv(20).startswith(b"HTTP/1.1 408 ")
                break
            except TimeoutError:
                assert time.monotonic() - started < SOON
        assert time.monotonic() - started > 1.8


def test_what_has_come_of_all_that_is_on_its_way_is_bounded() -> None:
    with live(Obeys(), max_body_mb=2, max_queue_mb=1) as server:
        whole = server.client.post(PATH, content=bytes(1_500_000))
        assert whole.status_code == 200  # alone, it may have more
        with begun(server, size=1_900_000, sent=900_000):
            until(lambda: server.metric("flowrl_arriving_bytes") == 900_000)
            answer = server.client.post(PATH, content=bytes(200_000))
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"] == "too much is on its way already"
            assert server.post(bytes(50_000)) == (200, "")
        until(lambda: server.metric("flowrl_arriving_bytes") == 0)
        assert server.post(bytes(200_000)) == (200, "")


def test_a_fault_of_the_servers_own_is_answered_in_the_same_form() -> None:
    with live(Obeys()) as server:
        assert server.post("unreadable") == (500, "the server failed: KeyError")
        assert server.metric('flowrl_requests_total{status="500"}') == 1
        assert server.post("a") == (200, "")


# ------------------------------------------------------------------------------------------ the scorer


def test_whatever_a_scorer_says_can_be_sent() -> None:
    with live(Obeys()) as server:
        assert server.post("half") == (422, r"FinalError: no file caf\udce9.png")


def test_what_cannot_be_sent_to_the_scorer_is_nobody_elses_fault() -> None:
    with live(Obeys(), max_batch_size=3, max_wait_ms=1000 * SOON) as server, ThreadPoolExecutor(3) as threads:
        (status, error), *others = threads.map(server.post, ["unpicklable", "a", "b"])
        assert status == 500 and error.startswith("it cannot be sent to the scorer: TypeError: cannot pickle")
        assert others == [(200, "")] * 2
        assert server.metric("flowrl_scorer_lost_total") == 0


def test_a_request_that_comes_while_the_scorer_is_lost_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.serving.app.PAUSES_S", (SOON, SOON))
    served = orders(tmp_path / "orders", "load", "raise")
    with live(served) as server, begun(server, size=2, sent=1) as late:
        until(lambda: server.metric("flowrl_arriving_bytes") == 1)
        assert server.post("die")[0] == 503
        late.sendall(b"a")
        assert late.recv(20).startswith(b"HTTP/1.1 503 ")


def test_a_scorer_that_cannot_be_loaded_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flowrl.serving.app.PAUSES_S", (0.5, 0.5))
    served = orders(tmp_path / "orders", "load", "raise", "raise", "load")
    together = {"max_batch_size": 2, "max_wait_ms": 1000 * SOON}
    with live(served, **together) as server, ThreadPoolExecutor(2) as threads:
        why = "the scorer was lost and cannot be loaded again: MemoryError: CUDA out of memory"
        assert list(threads.map(server.post, ["die", "a"])) == [(503, why)] * 2
        assert not server.is_ready()
        answer = server.client.post(PATH, content="a")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert answer.json()["error"] == "the scorer is being loaded"
        until(server.is_ready)
        assert list(threads.map(server.post, ["a", "a"])) == [(200, "")] * 2
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [f"{why}; it is tried again"]


def test_a_scorer_that_can_never_be_loaded_again_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.serving.app.PAUSES_S", (0.1, 0.1))
    with live(orders(tmp_path / "orders", "load", *["raise"] * 3, "load")) as server:
        assert server.post("die")[0] == 503
        server.thread.join(SOON)
        assert not server.thread.is_alive()
    failure = server.service.failure
    assert isinstance(failure, UnloadableError) and str(failure) == "MemoryError: CUDA out of memory"


def test_whatever_ends_the_scoring_everybody_is_answered_and_the_server_ends() -> None:
    sockets = bound("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    answers: list[tuple[int, str]] = []

    def ask(word: str) -> None:
        answer = httpx2.post(f"http://127.0.0.1:{port}{PATH}", content=word, headers=HEADERS, timeout=SOON)
        answers.append((answer.status_code, answer.json()["error"]))

    def clients() -> None:
        until(lambda: is_ready(port))
        with ThreadPoolExecutor(5) as threads:
            list(threads.map(ask, ["nothing", "a", "b", "c", "d"]))

    thread = threading.Thread(target=clients)
    thread.start()
    together = Limits(max_batch_size=5, max_wait_ms=1000 * SOON)
    failure = run(Words(Obeys()), together, sockets, None)
    thread.join(SOON)
    assert isinstance(failure, TypeError)
    assert answers == [(503, "the server is ending")] * 5


def is_ready(port: int) -> bool:
    try:
        return httpx2.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
    except httpx2.HTTPError:
        return False
