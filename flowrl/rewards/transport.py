"""Requests over HTTP: what all rewards have in common that are scored by a server.

Asking again helps against a server that is away or busy, and only then. `UnreachableError` is what remains of such
faults once the attempts are spent; `AnswerError` is everything else, and is never tried again.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import sleep
from typing import Any, TypeVar

import httpx2

from flowrl.rewards.scoring import FinalError

T = TypeVar("T")
R = TypeVar("R")

BACKOFF_S = 0.5  # before the first retry; doubled for each further one
POLL_S = 1.0  # between questions whether the server is ready
KEEPALIVE_S = 2.0  # idle connections are closed before servers do so (uvicorn: 5 s), which would look like a fault
TRANSIENT = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError)

log = logging.getLogger(__name__)


class UnreachableError(RuntimeError):
    """A server gave no answer, or 408, 429 or 5xx. `retry_after_s` is how long it asked to be left alone."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AnswerError(FinalError, ValueError):
    """A server refused, or what it answered is of no use; asked again it would answer the same."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a server is, and how patiently it is asked.

    Args:
        url: http or https, without what differs between requests, and without a password.
        timeout_s: of one attempt: to connect, and for the server to be silent.
        retries: further attempts after 408, 429, 5xx, a connection that fails or breaks, or a time-out.
        concurrency: requests at a time, of each reward worker.
        start_timeout_s: how long to wait for the server to be ready, before the first step.
        token_env: the name of the environment variable that holds a bearer token; None sends none.
    """

    url: str
    timeout_s: float = 30.0
    retries: int = 2
    concurrency: int = 8
    start_timeout_s: float = 600.0
    token_env: str | None = None

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise ValueError(f"url must be like http://127.0.0.1:8000, got {self.url!r}: {error}") from error
        if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
            raise ValueError(f"url must be like http://127.0.0.1:8000, got {self.url!r}")
        if url.userinfo:
            raise ValueError("url must not hold a password; set token_env to the name of a variable with a token")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"timeout_s must be greater than 0, got {self.timeout_s}")
        for name, low in (("retries", 0), ("concurrency", 1), ("start_timeout_s", 0)):
            if not vars(self)[name] >= low:
                raise ValueError(f"{name} must be at least {low}, got {vars(self)[name]}")

    def connect(self) -> Connection:
        """A `Connection`; nothing is sent yet. Raises ValueError if the variable with the token is not set."""
        return Connection(self, self._token())

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine, by its name."""
        host = httpx2.URL(self.url).host
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def _token(self) -> str | None:
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env, "")
        if not token:
            raise ValueError(f"token_env names the environment variable {self.token_env}, which is not set")
        return token


class Connection:
    """Asks one server, from any number of threads. Lives where it was made: it cannot be pickled."""

    def __init__(self, server: Server, token: str | None) -> None:
        self._server = server
        self._client = httpx2.Client(
            base_url=server.url,
            headers={} if token is None else {"authorization": f"Bearer {token}"},
            timeout=httpx2.Timeout(server.timeout_s, pool=None),
            limits=httpx2.Limits(
                max_connections=server.concurrency,
                max_keepalive_connections=server.concurrency,
                keepalive_expiry=KEEPALIVE_S,
            ),
            trust_env=not server.is_local,  # no proxy leads back to this machine
            verify=not (server.is_local and server.url.startswith("http:")),  # else 0.1 s to read certificates
        )

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections to the server."""
        self._client.close()

    def wait(self, path: str) -> None:
        """Return as soon as GET `path` answers 200.

        Raises UnreachableError if it does not within `start_timeout_s`, AnswerError as soon as it is clear that it
        never will.
        """
        deadline = time.monotonic() + self._server.start_timeout_s
        while True:
            left = max(deadline - time.monotonic(), POLL_S)
            try:
                self._attempt("GET", path, timeout=min(self._server.timeout_s, left))
            except UnreachableError as error:
                if time.monotonic() + POLL_S > deadline:
                    limit = f"was not ready within {self._server.start_timeout_s:g} s"
                    raise UnreachableError(f"the server at {self._server.url} {limit}: {error}") from error
                sleep(POLL_S)
            else:
                return

    def get(self, path: str) -> dict[str, Any]:
        """As `post`."""
        return _json_object(self._persistent("GET", path))

    def post(self, path: str, content: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
        """The JSON object that the server answers with status 200; NaN may be in it.

        Raises UnreachableError when all attempts are spent, AnswerError for any other status or content.
        """
        return _json_object(self._persistent("POST", path, content=content, headers=headers))

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """`function` of each item, `concurrency` at a time. The first error ends it; what has not begun never does."""
        with ThreadPoolExecutor(self._server.concurrency, "flowrl-request") as threads:
            futures = [threads.submit(function, item) for item in items]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                for future in futures:
                    future.cancel()
            return [future.result() for future in futures]

    def _persistent(self, method: str, path: str, **options: Any) -> httpx2.Response:
        for retry in range(self._server.retries):
            try:
                return self._attempt(method, path, **options)
            except UnreachableError as error:
                if error.retry_after_s > self._server.timeout_s:
                    asked = f"it asked to wait for {error.retry_after_s:g} s, more than timeout_s"
                    raise UnreachableError(f"{error}; {asked}") from error
                pause = max(BACKOFF_S * 2**retry, error.retry_after_s)
                log.warning("%s; trying again in %g s", error, pause)
            sleep(pause)
        return self._attempt(method, path, **options)

    def _attempt(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """One request that is answered with 200, or the two errors."""
        try:
            response = self._client.request(method, path, **options)
        except TRANSIENT as error:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UnreachableError(f"{method} {self._url(path)}: {cause}") from error
        except httpx2.HTTPError as error:
            raise AnswerError(f"{method} {self._url(path)}: {type(error).__name__}: {error}") from error
        status = response.status_code
        if status in (408, 429) or 500 <= status < 600:
            raise UnreachableError(described(response), _retry_after_s(response))
        if status != 200:
            raise AnswerError(described(response))
        return response

    def _url(self, path: str) -> str:
        return self._server.url.rstrip("/") + path


def described(response: httpx2.Response) -> str:
    """An answer in one line, for an error: who was asked, the status, how the body begins."""
    lines = [line.strip() for line in response.text.splitlines() if line.strip()]
    body = f": {shortened(lines[0])}" if lines else " and nothing else"
    return f"{response.request.method} {response.request.url} answered {response.status_code}{body}"


def shortened(text: str, length: int = 200) -> str:
    """At most `length` characters of `text`."""
    return text if len(text) <= length else text[: length - 1] + "…"


def _json_object(response: httpx2.Response) -> dict[str, Any]:
    try:
        answer = json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise AnswerError(f"{described(response)}, which is not JSON") from error
    if not isinstance(answer, dict):
        raise AnswerError(f"{described(response)}, which is not a JSON object")
    return answer


def _retry_after_s(response: httpx2.Response) -> float:
    """Seconds, or a date (RFC 9110, 10.2.3); 0 for anything else."""
    value = response.headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
