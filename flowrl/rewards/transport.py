"""Requests over HTTP: what all rewards have in common that are scored by a server.

Asking again helps against a server that is away or busy, and only then. `BusyError` is a server that is well and says
when to come back, which is waited for; `UnreachableError` is what remains of faults once the attempts are spent;
`AnswerError` is everything else, and is never tried again.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from time import sleep
from typing import Any, TypeVar

import httpx2

from flowrl.errors import ExplainedError
from flowrl.rewards.excerpt import excerpt
from flowrl.rewards.scoring import FinalError, waiting
from flowrl.rewards.tokens import bearer_token

T = TypeVar("T")
R = TypeVar("R")

BACKOFF_S = 0.5  # before the first retry; doubled for each further one
MAX_DOUBLINGS = 6  # 32 s
JITTER = 1.5  # pauses are up to so many times as long, lest all clients of a busy server come back together
CONNECT_S = 15.0
POLL_S = 1.0  # between questions whether the server is ready
KEEPALIVE_S = 2.0  # idle connections are closed before servers do so (uvicorn: 5 s), which would look like a fault
PAGE_BYTES = 64_000  # of an error page; no more of it is read
GET_BYTES = 16_000_000  # of a list of models
WEEK_S = 7 * 24 * 3600.0
TRANSIENT = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError)

log = logging.getLogger(__name__)


class UnreachableError(ExplainedError, RuntimeError):
    """A server gave no answer, or 408 or 5xx; or it was busy for too long."""


class BusyError(UnreachableError):
    """429, or 503 with Retry-After: nothing is wrong. `retry_after_s` is what it asked for, if that can be read."""

    def __init__(self, message: str, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class AnswerError(FinalError):
    """A server refused, or what it answered is of no use; asked again it would answer the same."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a server is, and how patiently it is asked.

    Args:
        url: http or https, without what differs between requests, and without a password.
        timeout_s: of one attempt, once it is connected: for the server to be silent, and to answer to the end.
        retries: further attempts after 408, 5xx, a connection that fails or breaks, or a time-out.
        busy_timeout_s: how long one request is held back for a server that is busy: 429, or 503 with Retry-After.
        concurrency: requests at a time, of each reward worker.
        start_timeout_s: how long to wait for the server to be ready, before the first step.
        token_env: the name of the environment variable that holds a bearer token; None sends none.
    """

    url: str
    timeout_s: float = 120.0
    retries: int = 2
    busy_timeout_s: float = 300.0
    concurrency: int = 8
    start_timeout_s: float = 600.0
    token_env: str | None = None

    def __post_init__(self) -> None:
        _check_url(self.url)
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"timeout_s must be greater than 0, got {self.timeout_s}")
        for name in ("timeout_s", "busy_timeout_s", "start_timeout_s"):
            value = vars(self)[name]
            if not 0 <= value <= WEEK_S:
                raise ValueError(f"{name} must be at least 0 and at most {WEEK_S:g}, got {value}")
        check_whole("retries", self.retries, 0, 1000)
        check_whole("concurrency", self.concurrency, 1, 1000)

    def connect(self) -> Connection:
        """A `Connection`; nothing is sent yet. Raises ValueError if the variable with the token holds none."""
        return Connection(self, self._token())

    @cached_property
    def connection(self) -> Connection:
        """The scorer's own, from when it is loaded."""
        return self.connect()

    @property
    def load_limit_s(self) -> float:
        """See `scoring.SelfTimed`: to be ready, and to answer one more question."""
        return self.start_timeout_s + self._request_limit_s

    def score_limit_s(self, num_samples: int) -> float:
        """See `scoring.SelfTimed`, for a request a sample."""
        return math.ceil(num_samples / self.concurrency) * self._request_limit_s

    @property
    def _request_limit_s(self) -> float:
        """What one request may take with all its attempts and pauses."""
        pauses = sum(JITTER * _backoff_s(retry) for retry in range(self.retries))
        return (1 + self.retries) * (CONNECT_S + self.timeout_s) + pauses + self.busy_timeout_s

    @property
    def is_local(self) -> bool:
        """Whether it runs on this machine, by its name."""
        return is_loopback(httpx2.URL(self.url).host)

    def _token(self) -> str | None:
        try:
            return None if self.token_env is None else bearer_token(self.token_env)
        except ValueError as error:
            raise FinalError(f"token_env: {error}") from None


def _check_url(text: str) -> None:
    """Raises ValueError for what can never be the URL of a server."""
    try:
        url = httpx2.URL(text)
        url.raw_host.decode("ascii").encode("idna")  # as it is looked up
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise ValueError(f"url must be like http://127.0.0.1:8000, got {text!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ValueError(f"url must be like http://127.0.0.1:8000, got {text!r}")
    if url.userinfo:
        raise ValueError("url must not hold a password; set token_env to the name of a variable with a token")
    if url.port is not None and not 1 <= url.port <= 65535:
        raise ValueError(f"the port of url must be at least 1 and at most 65535, got {text!r}")


def check_whole(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Raises ValueError unless `value` is a whole number from `low` to `high`."""
    if not isinstance(value, int) or not low <= value <= high:
        limits = f"at least {low}" + (f" and at most {high}" if high < math.inf else "")
        raise ValueError(f"{name} must be a whole number, {limits}, got {value!r}")


def is_loopback(host: str) -> bool:
    """Whether the name or address `host` is this machine's alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Connection:
    """Asks one server, from any number of threads. Lives where it was made: it cannot be pickled.

    Nothing that it raises or logs holds the token, whoever said it.
    """

    def __init__(self, server: Server, token: str | None) -> None:
        self._server = server
        self._token = token
        self._client = httpx2.Client(
            base_url=server.url,
            # Unpacked, an answer could be a thousand times as large as what came.
            headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {}),
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
        never will. That it has to be waited for is told at once.
        """
        limit_s, url = self._server.start_timeout_s, self._server.url
        deadline, is_told = time.monotonic() + limit_s, False
        while True:
            left = max(deadline - time.monotonic(), POLL_S)
            try:
                self._attempt("GET", path, GET_BYTES, min(self._server.timeout_s, left))
            except UnreachableError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    message = f"the server at {url} was not ready within {limit_s:g} s: {error}"
                    raise UnreachableError(message) from error
                if not is_told:
                    waiting.warning("waits for %s (at most %g s, start_timeout_s): %s", url, limit_s, error)
                is_told = True
                sleep(min(left, POLL_S))
            else:
                return

    def get(self, path: str) -> dict[str, Any]:
        """As `post`."""
        return self._object("GET", path, GET_BYTES)

    def post(self, path: str, content: bytes, headers: Mapping[str, str], max_bytes: int) -> dict[str, Any]:
        """The JSON object that the server answers with status 200; NaN may be in it.

        Raises UnreachableError when all attempts are spent, or the patience with a busy server is; AnswerError for any
        other status or content, and for more than `max_bytes` of it.
        """
        return self._object("POST", path, max_bytes, content=content, headers=headers)

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

    def _object(self, method: str, path: str, max_bytes: int, **options: Any) -> dict[str, Any]:
        body = self._persistent(method, path, max_bytes, **options)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise AnswerError(f"{self._answered(method, path, 200, body)}, which is not JSON") from None
        if not isinstance(answer, dict):
            raise AnswerError(f"{self._answered(method, path, 200, body)}, which is not a JSON object")
        return answer

    def _persistent(self, method: str, path: str, max_bytes: int, **options: Any) -> bytes:
        """What is answered at last. Faults count as retries; what a busy server takes, pauses and all, as time."""
        server = self._server
        faults, refusals, patience = 0, 0, server.busy_timeout_s
        while True:
            began = time.monotonic()
            try:
                return self._attempt(method, path, max_bytes, server.timeout_s, **options)
            except BusyError as error:
                least = _backoff_s(refusals) if error.retry_after_s is None else max(error.retry_after_s, BACKOFF_S)
                patience -= time.monotonic() - began
                if least > patience:
                    limit = f"would be more than busy_timeout_s = {server.busy_timeout_s:g} in all"
                    raise UnreachableError(f"{error}; to wait for {least:g} s {limit}") from error
                pause = min(_jittered(least), patience)
                patience -= pause
                refusals += 1
                log.info("%s; asking again in %.1f s", error, pause)
            except UnreachableError as error:
                if faults == server.retries:
                    raise
                pause = _jittered(_backoff_s(faults))
                faults += 1
                log.warning("%s; trying again in %.1f s", error, pause)
            sleep(pause)

    def _attempt(self, method: str, path: str, max_bytes: int, timeout_s: float, **options: Any) -> bytes:
        """The body of one request that is answered with 200, or one of the three errors."""
        connect_s = min(CONNECT_S, timeout_s)
        timeout = httpx2.Timeout(timeout_s, connect=connect_s, pool=None)
        deadline = time.monotonic() + connect_s + timeout_s
        try:
            with self._client.stream(method, path, timeout=timeout, **options) as response:
                status, headers = response.status_code, response.headers
                body, is_whole = _read(response, max_bytes if status == 200 else PAGE_BYTES, deadline)
        except TRANSIENT as error:
            raise UnreachableError(f"{method} {self._url(path)}: {self._retold(error)}") from None
        except httpx2.HTTPError as error:
            raise AnswerError(f"{method} {self._url(path)}: {self._retold(error)}") from None
        encoding, retry_after = headers.get("content-encoding", "identity"), headers.get("retry-after")
        is_plain = encoding == "identity"
        if status == 200 and is_plain and is_whole:
            return body
        said = self._answered(method, path, status, body if is_plain else f"encoded as {encoding}, unasked".encode())
        if status == 429 or (status == 503 and retry_after is not None):
            raise BusyError(said, _seconds(retry_after or ""))
        if status == 408 or 500 <= status < 600:
            raise UnreachableError(said)
        if status == 200 and is_plain:
            raise AnswerError(f"{said}, and so on: more than {max_bytes} bytes")
        raise AnswerError(said)

    def _url(self, path: str) -> str:
        return self._server.url.rstrip("/") + path

    def _answered(self, method: str, path: str, status: int, body: bytes) -> str:
        """An answer in one line, for an error: who was asked, the status, how the body begins."""
        text = excerpt(self._without_token(body[:PAGE_BYTES].decode("utf-8", errors="replace")))
        return f"{method} {self._url(path)} answered {status}" + (f": {text}" if text else " and nothing else")

    def _retold(self, error: Exception) -> str:
        text = self._without_token(str(error))
        return f"{type(error).__name__}: {text}" if text else type(error).__name__

    def _without_token(self, text: str) -> str:
        return text.replace(self._token, "(the token)") if self._token else text


def _read(response: httpx2.Response, max_bytes: int, deadline: float) -> tuple[bytes, bool]:
    """At most `max_bytes` of the body, as they come, and whether that is all of it."""
    body = bytearray()
    for part in response.iter_raw():
        body += part
        if len(body) > max_bytes:
            return bytes(body[:max_bytes]), False
        if time.monotonic() > deadline:
            raise httpx2.ReadTimeout("the answer did not end in time")
    return bytes(body), True


def _backoff_s(number: int) -> float:
    return BACKOFF_S * 2.0 ** min(number, MAX_DOUBLINGS)


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(1.0, JITTER)


def _seconds(retry_after: str) -> float | None:
    """Seconds, or a date (RFC 9110, 10.2.3); None for anything else."""
    value = retry_after.strip()
    if value.isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except (OverflowError, ValueError):
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
