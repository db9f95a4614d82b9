"""Requests to a server: what is tried again, what is not, and what errors say. The servers are real, and misbehave."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from flowrl.rewards import transport
from flowrl.rewards.transport import AnswerError, Server, UnreachableError
from tests.unit.rewards.servers import Asked, Reply, in_turn, reply, serving

GOOD = reply({"fine": 1})


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it would have waited, each time; it does not."""
    slept: list[float] = []
    monkeypatch.setattr(transport, "sleep", slept.append)
    return slept


def post(url: str, **options: Any) -> dict[str, Any]:
    with Server(url=url, **options).connect() as connection:
        return connection.post("/score", b"body", {"x-kind": "test"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------ what is tried again


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 599])
def test_busy_and_broken_servers_are_asked_again(status: int, pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(status), Reply(status), GOOD)
    with serving(answer) as url:
        assert post(url) == {"fine": 1}
    assert [(request.method, request.path, request.body) for request in asked] == [("POST", "/score", b"body")] * 3
    assert all(request.headers["x-kind"] == "test" for request in asked)
    assert pauses == [0.5, 1.0]


@pytest.mark.parametrize("status", [201, 301, 400, 401, 403, 404, 413, 422])
def test_other_answers_are_final(status: int, pauses: list[float]) -> None:
    body = b'\n  {"error": "the picture is too large"}\nand more'
    answer, asked = in_turn(Reply(status, body, {"location": "/elsewhere"}), GOOD)
    with serving(answer) as url, pytest.raises(AnswerError) as caught:
        post(url)
    assert str(caught.value) == f'POST {url}/score answered {status}: {{"error": "the picture is too large"}}'
    assert len(asked) == 1 and pauses == []


@pytest.mark.parametrize("retries", [0, 3])
def test_attempts_are_bounded_and_pauses_double(retries: int, pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(502, b"<html>\n<h1>Bad gateway</h1>"))
    with serving(answer) as url, pytest.raises(UnreachableError) as caught:
        post(url, retries=retries)
    assert str(caught.value) == f"POST {url}/score answered 502: <html>"
    assert len(asked) == retries + 1 and pauses == [0.5, 1.0, 2.0][:retries]


@pytest.mark.parametrize("fault", [Reply(None), Reply(200, b'{"fine"', missing=4)], ids=["no answer", "half an answer"])
def test_broken_connections_are_tried_again(fault: Reply, pauses: list[float]) -> None:
    answer, asked = in_turn(fault, GOOD)
    with serving(answer) as url:
        assert post(url) == {"fine": 1}
        assert len(asked) == 2
        asked.clear()
        with pytest.raises(UnreachableError, match=f"POST {url}/score: RemoteProtocolError: .+"):
            post(url, retries=0)


def test_nobody_listens(pauses: list[float]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UnreachableError, match=f"POST {url}/score: ConnectError: .*refused"):
        post(url)
    assert pauses == [0.5, 1.0]


def test_a_server_that_hangs_is_left(pauses: list[float]) -> None:
    released = threading.Event()

    def hang(request: Asked) -> Reply:
        released.wait(10)
        return GOOD

    with serving(hang) as url:
        started = time.monotonic()
        with pytest.raises(UnreachableError, match=f"POST {url}/score: ReadTimeout"):
            post(url, timeout_s=0.1, retries=1)
        assert 0.2 <= time.monotonic() - started < 5
        released.set()


# ------------------------------------------------------------------------------------------ Retry-After


def test_the_server_says_when(pauses: list[float]) -> None:
    answer, _ = in_turn(Reply(503, headers={"retry-after": "7"}), Reply(429, headers={"retry-after": "soon"}), GOOD)
    with serving(answer) as url:
        post(url)
    assert pauses == [7.0, 1.0]


def test_it_may_say_so_as_a_date(pauses: list[float]) -> None:
    date, past = (format_datetime(datetime.now(UTC) + timedelta(seconds=s), usegmt=True) for s in (9, -9))
    answer, _ = in_turn(Reply(503, headers={"retry-after": date}), Reply(503, headers={"retry-after": past}), GOOD)
    with serving(answer) as url:
        post(url)
    assert 7 < pauses[0] <= 9 and pauses[1] == 1.0


def test_who_asks_for_too_much_is_left(pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(503, b"restarting", {"retry-after": "3600"}), GOOD)
    with serving(answer) as url, pytest.raises(UnreachableError, match="restarting; it asked to wait for 3600 s, more"):
        post(url)
    assert len(asked) == 1 and pauses == []


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"<!DOCTYPE html>\n<p>Sign in", "answered 200: <!DOCTYPE html>, which is not JSON"),
        (b"", "answered 200 and nothing else, which is not JSON"),
        (b'{"scores": [1', 'answered 200: {"scores": [1, which is not JSON'),
        (b'{"a": "\xff"}', 'answered 200: {"a": "\ufffd"}, which is not JSON'),
        (b"[" * 100_000, "which is not JSON"),
        (b"[1.0]", r"answered 200: [1.0], which is not a JSON object"),
    ],
    ids=["HTML", "empty", "cut", "Latin-1", "deep", "list"],
)
def test_an_answer_is_a_json_object(body: bytes, cause: str, pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(200, body))
    with serving(answer) as url, pytest.raises(AnswerError) as caught:
        post(url)
    assert cause in str(caught.value) and len(str(caught.value)) < 350
    assert len(asked) == 1


def test_a_broken_encoding_is_no_reason_to_ask_again(pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(200, b"plain", {"content-encoding": "gzip"}))
    with serving(answer) as url, pytest.raises(AnswerError, match="DecodingError"):
        post(url)
    assert len(asked) == 1


# ------------------------------------------------------------------------------------------ tokens, proxies


def test_the_token_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    answer, asked = in_turn(GOOD, Reply(401, b"wrong token"))
    with serving(answer) as url:
        server = Server(url=url, token_env="JUDGE_TOKEN")
        post(url, token_env="JUDGE_TOKEN")
        with pytest.raises(AnswerError, match="answered 401: wrong token") as caught:
            post(url, token_env="JUDGE_TOKEN")
        post_without = in_turn(GOOD)
    assert [request.headers["authorization"] for request in asked] == ["Bearer s3cret"] * 2
    assert "s3cret" not in f"{caught.value} {server!r} {pickle.dumps(server)!r}"
    with serving(post_without[0]) as url:
        post(url)
    assert "authorization" not in post_without[1][0].headers


def test_a_missing_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="the environment variable JUDGE_TOKEN, which is not set"):
        Server(url="http://localhost:1", token_env="JUDGE_TOKEN").connect()


def test_proxies_do_not_come_between_this_machine_and_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving(in_turn(GOOD)[0]) as url:
        assert post(url) == {"fine": 1}
        assert post(url.replace("127.0.0.1", "localhost")) == {"fine": 1}
    with pytest.raises(UnreachableError, match="ConnectError"):  # that proxy, which is not there
        post("http://judge.example", retries=0)


# ------------------------------------------------------------------------------------------ waiting for the server


def test_waits_until_the_server_is_ready(pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(503, b"loading"), Reply(503, b"loading"), Reply(200, b"not JSON"))
    with serving(answer) as url, Server(url=url).connect() as connection:
        connection.wait("/healthz")
    assert [(request.method, request.path) for request in asked] == [("GET", "/healthz")] * 3
    assert pauses == [transport.POLL_S] * 2


def test_waits_for_a_server_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "POLL_S", 0.02)
    port = free_port()
    with Server(url=f"http://127.0.0.1:{port}").connect() as connection:
        waiting = threading.Thread(target=connection.wait, args=("/healthz",))
        waiting.start()
        time.sleep(0.1)
        assert waiting.is_alive()
        with serving(in_turn(GOOD)[0], port):
            waiting.join(5)
        assert not waiting.is_alive()


def test_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "POLL_S", 0.02)
    with serving(in_turn(Reply(503, b"loading"))[0]) as url, Server(url=url, start_timeout_s=0.5).connect() as server:
        started = time.monotonic()
        with pytest.raises(UnreachableError, match=f"server at {url} was not ready within 0.5 s: GET .* 503: loading"):
            server.wait("/healthz")
        assert time.monotonic() - started < 20


def test_does_not_wait_for_what_will_never_be(pauses: list[float]) -> None:
    answer, _ = in_turn(Reply(404, b"no such page"))
    with (
        serving(answer) as url,
        Server(url=url).connect() as connection,
        pytest.raises(AnswerError, match=f"GET {url}/healthz answered 404: no such page"),
    ):
        connection.wait("/healthz")
    assert pauses == []


# ------------------------------------------------------------------------------------------ concurrency


def test_requests_run_side_by_side_up_to_the_limit() -> None:
    together, running, most = threading.Barrier(3, timeout=5), [0], [0]
    lock = threading.Lock()

    def meet(request: Asked) -> Reply:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait()  # passes only if three are asked at the same time
        with lock:
            running[0] -= 1
        return reply({"echo": int(request.body)})

    with serving(meet) as url, Server(url=url, concurrency=3).connect() as connection:
        echoes = connection.map(lambda n: connection.post("/", str(n).encode(), {})["echo"], range(12))
    assert echoes == list(range(12)) and most == [3]


def test_the_first_error_ends_a_map() -> None:
    begun: list[int] = []

    def count(number: int) -> int:
        begun.append(number)
        if number == 1:
            raise AnswerError("one")
        time.sleep(0.02)
        return number

    with Server(url="http://localhost:1", concurrency=2).connect() as connection:
        with pytest.raises(AnswerError, match="one"):
            connection.map(count, range(50))
        assert connection.map(count, range(0)) == []
    assert len(begun) < 6


# ------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:8000"}, "url must be like http"),
        ({"url": "ftp://host"}, "url must be like http"),
        ({"url": "http://"}, "url must be like http"),
        ({"url": "http://host:port"}, "url must be like http"),
        ({"url": "http://host?key=s3cret"}, "url must be like http"),
        ({"url": "http://me:s3cret@host"}, "url must not hold a password; set token_env"),
        ({"timeout_s": 0.0}, "timeout_s must be greater than 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be greater than 0"),
        ({"retries": -1}, "retries must be at least 0"),
        ({"concurrency": 0}, "concurrency must be at least 1"),
        ({"start_timeout_s": -1.0}, "start_timeout_s must be at least 0"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server(**({"url": "http://host"} | options))
