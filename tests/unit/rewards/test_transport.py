"""Requests to a server: what is tried again, what is not, and what errors say. The servers are real, and misbehave."""

from __future__ import annotations

import gzip
import logging
import pickle
import socket
import threading
import time
import traceback
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest

from flowrl.rewards import transport
from flowrl.rewards.scoring import SelfTimed
from flowrl.rewards.transport import AnswerError, Server, UnreachableError
from tests.unit.rewards.servers import Asked, Reply, in_turn, reply, serving

GOOD = reply({"fine": 1})


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long it would have waited, each time; it does not."""
    slept: list[float] = []
    monkeypatch.setattr(transport, "sleep", slept.append)
    return slept


def are_about(pauses: Sequence[float], expected: Sequence[float]) -> bool:
    """Each pause is as long as expected, and up to half as long again."""
    together = zip(pauses, expected, strict=True)
    return all(least <= pause <= least * transport.JITTER for pause, least in together)


def post(url: str, max_bytes: int = 1000, **options: Any) -> dict[str, Any]:
    with Server(url=url, **options).connect() as connection:
        return connection.post("/score", b"body", {"x-kind": "test"}, max_bytes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ------------------------------------------------------------------------------------------ what is tried again


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504, 599])
def test_broken_servers_are_asked_again(status: int, pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(status), Reply(status), GOOD)
    with serving(answer) as url:
        assert post(url) == {"fine": 1}
    assert [(request.method, request.path, request.body) for request in asked] == [("POST", "/score", b"body")] * 3
    assert all(request.headers["x-kind"] == "test" for request in asked)
    assert are_about(pauses, [0.5, 1.0])


@pytest.mark.parametrize("status", [201, 301, 400, 401, 403, 404, 413, 422])
def test_other_answers_are_final(status: int, pauses: list[float]) -> None:
    body = b'\n  {"error": "the picture is too large"}\nand more'
    answer, asked = in_turn(Reply(status, body, {"location": "/elsewhere"}), GOOD)
    with serving(answer) as url, pytest.raises(AnswerError) as caught:
        post(url)
    assert str(caught.value) == f'POST {url}/score answered {status}: {{"error": "the picture is too large"}} and more'
    assert len(asked) == 1 and pauses == []


@pytest.mark.parametrize("retries", [0, 3])
def test_attempts_are_bounded_and_pauses_double(retries: int, pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(502, b"<html>\n<h1>Bad gateway</h1>"))
    with serving(answer) as url, pytest.raises(UnreachableError) as caught:
        post(url, retries=retries)
    assert str(caught.value) == f"POST {url}/score answered 502: Bad gateway"
    assert len(asked) == retries + 1 and are_about(pauses, [0.5, 1.0, 2.0][:retries])


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
    assert are_about(pauses, [0.5, 1.0])


def test_pauses_differ_between_clients_and_do_not_grow_for_ever(pauses: list[float]) -> None:
    with serving(in_turn(Reply(500))[0]) as url, pytest.raises(UnreachableError):
        post(url, retries=40)
    assert are_about(pauses, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[32.0] * 34])
    assert len(set(pauses)) == 40


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


def test_an_answer_that_never_ends_is_left(pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the server is not silent: a byte comes every 20 ms."""
    monkeypatch.setattr(transport, "CONNECT_S", 0.1)

    def drip(connection: socket.socket) -> None:
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            try:
                while not released.wait(0.02):
                    connection.sendall(b" ")
            except OSError:
                pass

    released = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=lambda: drip(listener.accept()[0]))
        accepting.start()
        started = time.monotonic()
        with pytest.raises(UnreachableError, match="ReadTimeout: the answer did not end in time"):
            post(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3, retries=0)
        assert time.monotonic() - started < 5
        released.set()
        accepting.join()


# ------------------------------------------------------------------------------------------ busy servers

FULL = Reply(503, b"50 requests are waiting already", {"retry-after": "7"})


def test_a_busy_server_is_waited_for_without_a_retry(pauses: list[float], caplog: pytest.LogCaptureFixture) -> None:
    soon = Reply(429, headers={"retry-after": "soon"})
    answer, asked = in_turn(*[FULL] * 9, Reply(429), Reply(429), soon, GOOD)
    with serving(answer) as url, caplog.at_level(logging.WARNING, "flowrl"):
        assert post(url, retries=0) == {"fine": 1}
    assert are_about(pauses, [*[7.0] * 9, *[32.0] * 3]) and len(asked) == 13
    assert caplog.messages == [], "nothing is wrong"


def test_faults_between_refusals_are_counted_by_themselves(pauses: list[float]) -> None:
    answer, _ = in_turn(Reply(429), Reply(500), FULL, Reply(None), GOOD)
    with serving(answer) as url:
        assert post(url, retries=2) == {"fine": 1}
    assert are_about(pauses, [0.5, 0.5, 7.0, 1.0])
    answer, _ = in_turn(Reply(429), Reply(500), FULL, Reply(502))
    with serving(answer) as url, pytest.raises(UnreachableError, match="answered 502"):
        post(url, retries=1)


def test_the_patience_with_a_busy_server_ends(pauses: list[float]) -> None:
    with serving(in_turn(FULL)[0]) as url, pytest.raises(UnreachableError) as caught:
        post(url, busy_timeout_s=50.0, retries=9)
    cause = "to wait for 7 s would be more than busy_timeout_s = 50 in all"
    assert str(caught.value) == f"POST {url}/score answered 503: 50 requests are waiting already; {cause}"
    assert 43 <= sum(pauses) <= 50 and all(pause >= 7 or pause == pauses[-1] for pause in pauses)


def test_what_a_refusal_takes_is_part_of_the_patience(pauses: list[float]) -> None:
    def slow(asked: Asked) -> Reply:
        time.sleep(0.2)
        return Reply(429)

    with serving(slow) as url, pytest.raises(UnreachableError, match=r"more than busy_timeout_s = 0\.6 in all"):
        post(url, busy_timeout_s=0.6)
    assert pauses == []


def test_who_asks_for_too_much_is_left(pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(503, b"restarting", {"retry-after": "3600"}), GOOD)
    with serving(answer) as url, pytest.raises(UnreachableError, match="restarting; to wait for 3600 s would be more"):
        post(url)
    assert len(asked) == 1 and pauses == []


def test_a_server_may_say_when_as_a_date(pauses: list[float]) -> None:
    date, past = (format_datetime(datetime.now(UTC) + timedelta(seconds=s), usegmt=True) for s in (9, -9))
    answer, _ = in_turn(Reply(503, headers={"retry-after": date}), Reply(503, headers={"retry-after": past}), GOOD)
    with serving(answer) as url:
        post(url)
    assert 7 < pauses[0] <= 9 * transport.JITTER and are_about(pauses[1:], [0.5])


def test_many_clients_get_through_a_narrow_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five clients with two connections each, and room for two requests: all of them come through, without retries."""
    monkeypatch.setattr(transport, "BACKOFF_S", 0.01)
    room = threading.Semaphore(2)

    def narrow(asked: Asked) -> Reply:
        if not room.acquire(blocking=False):
            return Reply(503, b"full", {"retry-after": "0"})
        time.sleep(0.01)
        room.release()
        return GOOD

    def work(url: str) -> None:
        with Server(url=url, retries=0, concurrency=2).connect() as connection:
            finished.append(connection.map(lambda n: connection.post("/", b"", {}, 1000), range(10)))

    finished: list[list[dict[str, Any]]] = []
    with serving(narrow) as url:
        clients = [threading.Thread(target=work, args=(url,)) for _ in range(5)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(20)
    assert finished == [[{"fine": 1}] * 10] * 5


# ------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("retries", [0, 2, 20])
@pytest.mark.parametrize("busy_timeout_s", [0.0, 100.0])
def test_a_request_ends_within_its_limit(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch, retries: int, busy_timeout_s: float
) -> None:
    """With a server that is busy, and breaks, at the worst moments, and a clock that runs by what is waited for."""
    server = Server(url="http://127.0.0.1:1", retries=retries, busy_timeout_s=busy_timeout_s, timeout_s=40.0)
    now = [0.0]
    replies = iter([Reply(429), Reply(500)] * 100)

    def attempt(*_: object, **__: object) -> bytes:
        now[0] += transport.CONNECT_S + server.timeout_s
        if next(replies).status == 429 and busy_timeout_s:
            raise transport.BusyError("busy", None)
        raise UnreachableError("broken")

    monkeypatch.setattr(transport.Connection, "_attempt", attempt)
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(transport, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with server.connect() as connection, pytest.raises(UnreachableError):
        connection.post("/", b"", {}, 1000)
    assert 0 < now[0] <= server.score_limit_s(1)


def test_the_limit_counts_waves_of_requests() -> None:
    server = Server(url="http://host", concurrency=8, retries=1, timeout_s=10.0, busy_timeout_s=20.0)
    one = 2 * (transport.CONNECT_S + 10) + 0.5 * transport.JITTER + 20
    assert [server.score_limit_s(num) for num in (1, 8, 9, 24)] == [one, one, 2 * one, 3 * one]
    assert server.load_limit_s == server.start_timeout_s + one
    assert isinstance(server, SelfTimed)


# ------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"<!DOCTYPE html>\n<p>Sign in", "answered 200: Sign in, which is not JSON"),
        (b"\x1b[31mno\x1b[0m", "answered 200: \ufffd[31mno\ufffd[0m, which is not JSON"),
        (b"", "answered 200 and nothing else, which is not JSON"),
        (b'{"scores": [1', 'answered 200: {"scores": [1, which is not JSON'),
        (b'{"a": "\xff"}', 'answered 200: {"a": "\ufffd"}, which is not JSON'),
        (b"[" * 100_000, "which is not JSON"),
        (b"[1.0]", r"answered 200: [1.0], which is not a JSON object"),
    ],
    ids=["HTML", "colours", "empty", "cut", "Latin-1", "deep", "list"],
)
def test_an_answer_is_a_json_object(body: bytes, cause: str, pauses: list[float]) -> None:
    answer, asked = in_turn(Reply(200, body))
    with serving(answer) as url, pytest.raises(AnswerError) as caught:
        post(url, max_bytes=10**6)
    assert cause in str(caught.value) and len(str(caught.value)) < 350
    assert len(asked) == 1


def test_what_is_encoded_is_not_unpacked(pauses: list[float]) -> None:
    bomb = Reply(200, gzip.compress(b"0" * 10**8), {"content-encoding": "gzip"})
    answer, asked = in_turn(bomb)
    with (
        serving(answer) as url,
        pytest.raises(AnswerError, match=f"POST {url}/score answered 200: encoded as gzip, un"),
    ):
        post(url, max_bytes=10**6)
    assert len(asked) == 1 and asked[0].headers["accept-encoding"] == "identity"
    with serving(in_turn(replace(bomb, status=502), GOOD)[0]) as url:
        assert post(url) == {"fine": 1}


@pytest.mark.parametrize(("status", "max_bytes"), [(200, 5000), (404, transport.PAGE_BYTES)])
def test_no_more_is_read_than_was_asked_for(status: int, max_bytes: int) -> None:
    """From a server that would go on for ever."""

    def flood(connection: socket.socket) -> None:
        with connection:
            connection.sendall(f"HTTP/1.1 {status} Any\r\ncontent-length: {10**12}\r\n\r\n[1".encode())
            try:
                while True:
                    connection.sendall(b"1" * 100_000)
            except OSError:
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=lambda: flood(listener.accept()[0]))
        accepting.start()
        tracemalloc.start()
        with pytest.raises(AnswerError, match=f"answered {status}: \\[1111") as caught:
            post(f"http://127.0.0.1:{listener.getsockname()[1]}", max_bytes)
        assert tracemalloc.get_traced_memory()[1] < 3e6
        tracemalloc.stop()
        accepting.join()
    assert ("more than 5000 bytes" in str(caught.value)) == (status == 200) and len(str(caught.value)) < 350


def test_an_answer_of_just_the_size_is_taken() -> None:
    with serving(in_turn(reply({"a": "b"}))[0]) as url:
        assert post(url, max_bytes=10) == {"a": "b"}
        with pytest.raises(AnswerError, match="more than 9 bytes"):
            post(url, max_bytes=9)


# ------------------------------------------------------------------------------------------ tokens, proxies


def test_the_token_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")
    answer, asked = in_turn(GOOD, Reply(401, b"wrong token 's3cret'"))
    with serving(answer) as url:
        server = Server(url=url, token_env="JUDGE_TOKEN")
        post(url, token_env="JUDGE_TOKEN")
        with pytest.raises(AnswerError, match=r"answered 401: wrong token '\(the token\)'") as caught:
            post(url, token_env="JUDGE_TOKEN")
        post_without = in_turn(GOOD)
    assert [request.headers["authorization"] for request in asked] == ["Bearer s3cret"] * 2
    everything = "".join(traceback.format_exception(caught.value))
    assert "s3cret" not in f"{everything} {server!r} {pickle.dumps(server)!r}"
    with serving(post_without[0]) as url:
        post(url)
    assert "authorization" not in post_without[1][0].headers


def test_nothing_that_the_library_says_shows_the_token(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret")

    for error in (httpx2.LocalProtocolError, httpx2.ReadError):
        said = error("Illegal header value b'Bearer s3cret'")
        monkeypatch.setattr(httpx2.Client, "stream", Mock(side_effect=said))
        with pytest.raises((AnswerError, UnreachableError), match=r"Bearer \(the token\)") as caught:
            post("http://localhost:1", token_env="JUDGE_TOKEN", retries=1)
        assert "s3cret" not in "".join(traceback.format_exception(caught.value))


def test_a_missing_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    with pytest.raises(ValueError, match="token_env: the environment variable JUDGE_TOKEN is not set"):
        Server(url="http://localhost:1", token_env="JUDGE_TOKEN").connect()


@pytest.mark.parametrize("token", ["s3cret\n", "s3 cret", "s3cr\u00e9t", "s3cret\x01", "s3cret\t", "s3cret\x7f"])
def test_what_no_header_can_hold_is_refused_by_its_variables_name(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", token)
    with pytest.raises(ValueError, match="token_env: the environment variable JUDGE_TOKEN may hold") as caught:
        Server(url="http://localhost:1", token_env="JUDGE_TOKEN").connect()
    assert "s3" not in "".join(traceback.format_exception(caught.value))


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


def test_waits_to_the_end_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is asked for the last time when time is up, not a pause before."""
    now = [0.0]
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(transport, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    answer, asked = in_turn(Reply(503, b"loading"))
    with serving(answer) as url, Server(url=url, start_timeout_s=2.5).connect() as connection:
        with pytest.raises(UnreachableError, match=r"was not ready within 2\.5 s"):
            connection.wait("/healthz")
        told = f"waits for {url} (at most 2.5 s, start_timeout_s): GET {url}/healthz answered 503: loading"
    assert now == [2.5] and len(asked) == 4
    assert caplog.messages == [told]


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
        echoes = connection.map(lambda n: connection.post("/", str(n).encode(), {}, 1000)["echo"], range(12))
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
        ({"url": "http://a..b"}, "url must be like http"),
        ({"url": f"http://{'a' * 64}.org"}, "url must be like http"),
        ({"url": "http://host:99999"}, "the port of url must be at least 1 and at most 65535"),
        ({"url": "http://host:0"}, "the port of url must be at least 1"),
        ({"timeout_s": 1e10}, "timeout_s must be at least 0 and at most 604800"),
        ({"retries": -1}, "retries must be a whole number, at least 0 and at most 1000, got -1"),
        ({"retries": 1.5}, r"retries must be a whole number, .* got 1\.5"),
        ({"concurrency": 0}, "concurrency must be a whole number, at least 1"),
        ({"concurrency": 2.0}, "concurrency must be a whole number"),
        ({"start_timeout_s": -1.0}, "start_timeout_s must be at least 0"),
        ({"start_timeout_s": float("inf")}, "start_timeout_s must be at least 0 and at most 604800, got inf"),
        ({"busy_timeout_s": float("nan")}, "busy_timeout_s must be at least 0"),
        ({"retries": 10**9}, "retries must be a whole number, at least 0 and at most 1000"),
    ],
)
def test_impossible_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Server(**({"url": "http://host"} | options))


@pytest.mark.parametrize("host", ["b\u00fccher.example", "[::1]", "10.0.0.1", "host.", "my_judge"])
def test_hosts_of_all_kinds(host: str) -> None:
    Server(url=f"https://{host}:65535/v1")
