"""How long servers are waited for that are busy, or not there yet. The servers are real, and misbehave."""

from __future__ import annotations

import logging
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import pytest

from flowrl.rewards import transport
from flowrl.rewards.scoring import SelfTimed
from flowrl.rewards.transport import AnswerError, Server, UnreachableError
from tests.unit.rewards.servers import GOOD, Asked, Reply, are_about, free_port, in_turn, post, serving

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
