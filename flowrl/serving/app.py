"""A reward server's HTTP: who may ask, how much, in which protocol, and what is answered."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect

from flowrl.rewards.wire import CONTENT_TYPE, PATH, VERSION, WireError
from flowrl.serving import metrics
from flowrl.serving.batching import Batcher, Item, QueueFullError
from flowrl.serving.host import Host, LostError, ScoringError, Served

INLINE_BYTES = 100_000  # a larger body is decoded in a thread, while the server goes on with others
RETRY_AFTER = {"retry-after": "1"}
GONE = 499  # the client, before its request had ended: nobody reads this answer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is taken at once.

    Args:
        max_batch_size: samples that are scored together.
        max_wait_ms: how long a request waits for others to join it.
        queue_size: requests that may wait; further ones are answered 503.
        max_body_mb: of a request, in units of 10^6 bytes; also what its PNG files may unpack to.
        timeout_s: for a body to arrive, and for one batch to be scored.
        load_timeout_s: for the scorer to start and to load.
    """

    max_batch_size: int = 32
    max_wait_ms: float = 5.0
    queue_size: int = 50
    max_body_mb: int = 128
    timeout_s: float = 120.0
    load_timeout_s: float = 600.0

    @property
    def max_bytes(self) -> int:
        """Of a body."""
        return self.max_body_mb * 1_000_000


class Dialect(Protocol):
    """A protocol's own part: what its requests hold, and what scores them."""

    @property
    def version_header(self) -> str:
        """The request's header that names the protocol's version."""
        ...

    @property
    def scores_key(self) -> str:
        """What the answer calls its scores."""
        ...

    @property
    def served(self) -> Served:
        """What scores the payloads of the items."""
        ...

    def read(self, body: bytes, max_bytes: int) -> Item:
        """A request's body, which may not unpack to more than `max_bytes`. Raises WireError."""
        ...


class Service:
    """Scores requests of one dialect.

    Args:
        dialect: of the requests.
        limits: how much is taken at once.
        token: whoever asks must bring it, if there is one.
        stop: called when nothing more can be scored, whatever the reason; after the server's end, it is in `failure`.
    """

    def __init__(
        self, dialect: Dialect, limits: Limits, token: str | None = None, stop: Callable[[], None] = lambda: None
    ) -> None:
        self._dialect = dialect
        self._limits = limits
        self._token = token
        self._stop = stop
        self._ready = False
        self._host = Host(dialect.served, limits.timeout_s, limits.load_timeout_s)
        self._batcher = Batcher(self._scored, limits.max_batch_size, limits.max_wait_ms, limits.queue_size)
        self._metrics = metrics.Metrics(lambda: self._batcher.num_waiting)
        self.failure: BaseException | None = None

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load in the background and score until the server ends."""
        task = asyncio.create_task(self._work())
        try:
            yield
        finally:
            task.cancel()
            self._host.close()
            self._batcher.close()
            await asyncio.wait([task])
            self.failure = None if task.cancelled() else task.exception()

    async def score(self, request: Request) -> Response:
        """`POST /v1/score`."""
        started = time.perf_counter()
        try:
            place = self._admitted(request)
        except HTTPException:
            await _discard(request, self._limits.timeout_s)
            raise
        try:
            item = await self._read(request)
            scores = await self._batcher.score(item, place)
        except LostError as error:
            raise HTTPException(503, str(error), RETRY_AFTER) from error
        except ScoringError as error:
            raise HTTPException(422, str(error)) from error
        except WireError as error:
            raise HTTPException(400, str(error)) from error
        finally:
            self._batcher.leave(place)
        self._metrics.requests.labels(200).inc()
        self._metrics.request_seconds.observe(time.perf_counter() - started)
        return JSONResponse({"protocol_version": VERSION, self._dialect.scores_key: scores.tolist()})

    async def health(self) -> Response:
        """`GET /healthz`: 200 once the scorer is loaded."""
        return JSONResponse({"status": "ready" if self._ready else "loading"}, 200 if self._ready else 503)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        self._authorise(request)
        return Response(self._metrics.text(), media_type=metrics.CONTENT_TYPE)

    async def refused(self, request: Request, error: Exception) -> Response:
        """The answer of an HTTPException."""
        assert isinstance(error, AnyHTTPException)
        if request.url.path == PATH:
            self._metrics.requests.labels(error.status_code).inc()
        return JSONResponse(
            {"protocol_version": VERSION, "error": error.detail}, error.status_code, headers=error.headers
        )

    def _admitted(self, request: Request) -> object:
        """A place in the queue, or whatever can be said against a request before it is read, as HTTPException."""
        self._authorise(request)
        header, headers = self._dialect.version_header, request.headers
        if headers.get(header) != VERSION:
            raise HTTPException(400, f"the header {header} must be {VERSION}, got {headers.get(header)}")
        if headers.get("content-type") != CONTENT_TYPE:
            raise HTTPException(400, f"the content-type must be {CONTENT_TYPE}, got {headers.get('content-type')}")
        if not self._ready:
            raise HTTPException(503, "the scorer is being loaded", RETRY_AFTER)
        try:
            return self._batcher.enter()
        except QueueFullError as error:
            raise HTTPException(503, str(error), RETRY_AFTER) from error

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._token is not None and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise HTTPException(401, "the bearer token is missing or wrong", {"www-authenticate": "Bearer"})

    async def _read(self, request: Request) -> Item:
        max_bytes = self._limits.max_bytes
        body = await _body(request, max_bytes, self._limits.timeout_s)
        if len(body) < INLINE_BYTES:
            return self._dialect.read(body, max_bytes)
        return await asyncio.to_thread(self._dialect.read, body, max_bytes)

    async def _work(self) -> None:
        try:
            await asyncio.to_thread(self._host.load)
            self._ready = True
            await self._batcher.run()
        finally:
            self._stop()  # without this task nobody would ever be answered

    def _scored(self, payloads: Sequence[Any]) -> np.ndarray:
        """One batch; runs in the batcher's thread."""
        started = time.perf_counter()
        try:
            scores = self._host.score(payloads)
        except LostError as error:
            self._metrics.lost.inc()
            log.warning("%s", error)
            raise
        self._metrics.samples.inc(len(scores))
        self._metrics.score_seconds.observe(time.perf_counter() - started)
        self._metrics.batch_requests.observe(len(payloads))
        return scores


def create_app(service: Service) -> FastAPI:
    """The three paths of a server."""
    app = FastAPI(lifespan=service.lifespan, openapi_url=None)
    # As Starlette's: FastAPI's own kind of route would cost each request as much as all the rest here.
    app.add_route(PATH, service.score, methods=["POST"])
    app.add_api_route("/healthz", service.health)
    app.add_api_route("/metrics", service.metrics)
    app.add_exception_handler(AnyHTTPException, service.refused)
    return app


async def _body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """The whole body. One that is too large is refused when all of it has come, though none of it is kept."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size <= max_bytes:
                    parts.append(part)
                else:
                    parts.clear()
    except TimeoutError as error:
        raise HTTPException(408, f"the request did not arrive within {seconds:g} s") from error
    except ClientDisconnect as error:
        raise HTTPException(GONE, "the client has gone") from error
    if size > max_bytes:
        raise HTTPException(413, f"the request has {size} bytes, and {max_bytes} are allowed (max_body_mb)")
    return b"".join(parts)


async def _discard(request: Request, seconds: float) -> None:
    """Let a client finish its request: one that is still writing would read no answer, but a broken connection."""
    with suppress(HTTPException):
        await _body(request, 0, seconds)
