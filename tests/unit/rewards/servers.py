"""Servers that answer as a test wants them to, on a port of this machine, and requests to them."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from flowrl.rewards import transport
from flowrl.rewards.transport import Server


@dataclass(frozen=True)
class Asked:
    """A request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """An answer. Without a status the connection is closed instead; `missing` bytes of the body are never sent."""

    status: int | None = 200
    body: bytes = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    missing: int = 0


def reply(answer: Any, status: int = 200) -> Reply:
    """`answer` as JSON."""
    return Reply(status, json.dumps(answer).encode())


GOOD = reply({"fine": 1})


@contextmanager
def serving(answer: Callable[[Asked], Reply], port: int = 0) -> Iterator[str]:
    """The URL of a server that answers so, each request in a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            given = answer(Asked(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            if given.status is None:
                self.close_connection = True
                return
            self.send_response(given.status)
            self.send_header("content-length", str(len(given.body) + given.missing))
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(given.body)
            self.close_connection = given.missing > 0

        do_GET = do_POST = respond

        def log_message(self, *arguments: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *arguments: object) -> None:
            """Clients that hang up are part of the tests."""

    server = Quiet(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def in_turn(*replies: Reply) -> tuple[Callable[[Asked], Reply], list[Asked]]:
    """Answers one after the other, the last one for ever, and the list of what was asked."""
    asked: list[Asked] = []

    def answer(request: Asked) -> Reply:
        asked.append(request)
        return replies[min(len(asked), len(replies)) - 1]

    return answer, asked


def are_about(pauses: Sequence[float], expected: Sequence[float]) -> bool:
    """Each pause is as long as expected, and up to half as long again."""
    together = zip(pauses, expected, strict=True)
    return all(least <= pause <= least * transport.JITTER for pause, least in together)


def post(url: str, max_bytes: int = 1000, **options: Any) -> dict[str, Any]:
    """The answer to one request of a client with these settings."""
    with Server(url=url, **options).connect() as connection:
        return connection.post("/score", b"body", {"x-kind": "test"}, max_bytes)


def free_port() -> int:
    """Where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
