"""Requests to a server: what is tried again, what is not, and what errors say. The servers are real, and misbehave."""

from __future__ import annotations

import gzip
import pickle
import socket
import threading
import time
import traceback
import tracemalloc
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest

from flowrl.rewards import transport
from flowrl.rewards.transport import AnswerError, Server, UnreachableError
from tests.unit.rewards.servers import GOOD, Asked, Reply, are_about, free_port, in_turn, post, reply, serving

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
