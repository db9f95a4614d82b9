"""A reward server's HTTP: who may ask, how much, in which protocol, and what is answered."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from flowrl.rewards.wire import CONTENT_TYPE, PATH, VERSION, WireError
from flowrl.serving import metrics
from flowrl.serving.batching import Batcher, Item, NotNowError, Place
from flowrl.serving.bodies import CLOSE, GONE, Bodies
from flowrl.serving.host import Host, LostError, ScoringError, Served

INLINE_BYTES = 100_000  # what has or makes more is read in a thread, while the server goes on with others
LOADING_S = 5  # between questions for a scorer that is being loaded
PAUSES_S = (5.0, 30.0)  # before a scorer that was lost and could not be loaded is loaded again

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is taken at once.

    Args:
        max_batch_size: samples that are scored together.
        max_wait_ms: how long a request waits for others to join it.
        queue_size: requests that may wait; further ones are answered 503.
        max_body_mb: of a request, in units of 10^6 bytes; also what its PNG files may unpack to.
        max_queue_mb: of all requests that wait or are being scored, unpacked; apart from these, of all that are on
            their way.
        timeout_s: for a body to arrive, and for one batch to be scored.
        load_timeout_s: for the scorer to start and to load.
    """

    max_batch_size: int = 32
    max_wait_ms: float = 5.0
    queue_size: int = 50
    max_body_mb: int = 128
    max_queue_mb: int = 1000
    timeout_s: float = 120.0
    load_timeout_s: float = 600.0

    @property
    def max_bytes(self) -> int:
        """Of a body."""
        return self.max_body_mb * 1_000_000

    @property
    def max_queue_bytes(self) -> int:
        """Of all requests together."""
        return self.max_queue_mb * 1_000_000


class UnloadableError(RuntimeError):
    """The scorer cannot be loaded, for good; one sentence."""


class Packed(Protocol):
    """A request of which no more is unpacked than it takes to know how much it is."""

    @property
    def num_bytes(self) -> int:
        """Unpacked."""
        ...

    def unpacked(self) -> Item:
        """All of it. Raises WireError."""
        ...


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

    def read(self, body: bytes, max_bytes: int) -> Packed:
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
        self._scoring = ThreadPoolExecutor(1, "scoring")  # its own: bodies that are unpacked do not keep it waiting
        self._batcher = Batcher(
            self._scored,
            max_batch_size=limits.max_batch_size,
            max_wait_ms=limits.max_wait_ms,
            queue_size=limits.queue_size,
            max_bytes=limits.max_queue_bytes,
            repeat_s=2 * limits.timeout_s,
        )
        self._bodies = Bodies(limits.max_bytes, limits.max_queue_bytes, limits.timeout_s)
        self._metrics = metrics.Metrics(
            waiting=lambda: self._batcher.num_waiting,
            held=lambda: self._batcher.num_bytes,
            arriving=lambda: self._bodies.num_bytes,
        )
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
            await asyncio.wait([task])
            self._scoring.shutdown(wait=False)
            self.failure = None if task.cancelled() else task.exception()

    async def score(self, request: Request) -> Response:
        """`POST /v1/score`."""
        started = time.perf_counter()
        try:
            body = await self._body(request)
            with self._place(len(body)) as place:
                item = await self._read(body, place)
                scores = await _unless_gone(request, self._batcher.put(item, place))
        except NotNowError as error:
            raise self._not_now(str(error)) from error
        except LostError as error:
            raise HTTPException(500, str(error)) from error
        except ScoringError as error:
            raise HTTPException(422 if error.final else 500, str(error)) from error
        except WireError as error:
            raise HTTPException(400, str(error)) from error
        self._metrics.requests.labels(200).inc()
        self._metrics.request_seconds.observe(time.perf_counter() - started)
        return JSONResponse({"protocol_version": VERSION, self._dialect.scores_key: scores.tolist()})

    async def health(self) -> Response:
        """`GET /healthz`: 200 while the scorer is loaded."""
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
        why = str(error.detail).encode(errors="backslashreplace").decode()  # it may be anybody's, with half a character
        return JSONResponse({"protocol_version": VERSION, "error": why}, error.status_code, headers=error.headers)

    async def failed(self, request: Request, error: Exception) -> Response:
        """The answer when a request has found a fault of the server's, which is in its log."""
        return await self.refused(request, HTTPException(500, f"the server failed: {type(error).__name__}", CLOSE))

    async def _body(self, request: Request) -> bytes:
        """Of a request that may be scored, or whatever there is against that, as HTTPException or NotNowError."""
        try:
            self._check(request)
        except HTTPException as error:
            if not await self._bodies.drained(request):
                error.headers = {**(error.headers or {}), **CLOSE}
            raise
        return await self._bodies.read(request)

    def _check(self, request: Request) -> None:
        """What can be said against a request before it is read. Raises HTTPException."""
        self._authorise(request)
        header, headers = self._dialect.version_header, request.headers
        if headers.get(header) != VERSION:
            raise HTTPException(400, f"the header {header} must be {VERSION}, got {headers.get(header)}")
        if headers.get("content-type") != CONTENT_TYPE:
            raise HTTPException(400, f"the content-type must be {CONTENT_TYPE}, got {headers.get('content-type')}")
        self._bodies.check_length(request)
        try:
            self._check_ready()
            self._batcher.check_open()
        except NotNowError as error:
            raise self._not_now(str(error)) from error

    def _check_ready(self) -> None:
        if not self._ready:
            raise NotNowError("the scorer is being loaded")

    @contextmanager
    def _place(self, num_bytes: int) -> Iterator[Place]:
        """In the queue, for a request that is there. Raises NotNowError."""
        self._check_ready()  # it may have been lost while the request came
        place = self._batcher.enter(num_bytes)
        try:
            yield place
        finally:
            self._batcher.leave(place)

    def _not_now(self, why: str) -> HTTPException:
        seconds = self._batcher.busy_s if self._ready else LOADING_S
        return HTTPException(503, why, {"retry-after": str(seconds)})

    def _authorise(self, request: Request) -> None:
        given = request.headers.get("authorization", "")
        if self._token is not None and not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise HTTPException(401, "the bearer token is missing or wrong", {"www-authenticate": "Bearer"})

    async def _read(self, body: bytes, place: Place) -> Item:
        """Unpacked, once there is room for that. Raises WireError or NotNowError."""
        packed = await _apart(len(body), self._dialect.read, body, self._limits.max_bytes)
        num_bytes = max(len(body), packed.num_bytes)
        self._batcher.reserve(num_bytes, place)
        return await _apart(num_bytes, packed.unpacked)

    async def _in_turn(self, do: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._scoring, do, *arguments)

    async def _work(self) -> None:
        try:
            await self._load()
            await self._batcher.run()
        finally:  # without this task nobody would ever be answered
            self._ready = False
            self._batcher.give_up(NotNowError("the server is ending"))
            self._stop()

    async def _load(self, pauses: Sequence[float] = ()) -> None:
        """Load the scorer, after as many `pauses` as it takes, while nobody waits. Raises UnloadableError at last."""
        self._ready = False
        for number, pause in enumerate((*pauses, None)):
            try:
                await self._in_turn(self._host.load)
            except (ScoringError, LostError) as error:
                if pause is None:
                    raise UnloadableError(str(error)) from error
                why = f"the scorer was lost and cannot be loaded again: {error}"
                self._batcher.give_up(NotNowError(why))
                log.log(logging.DEBUG if number else logging.ERROR, "%s; it is tried again", why)
                await asyncio.sleep(pause)
            else:
                self._ready = True
                return

    async def _scored(self, payloads: Sequence[Any]) -> np.ndarray:
        """One batch. When the scorer is lost with it, another one is there before that is raised."""
        started = time.perf_counter()
        try:
            scores = await self._in_turn(self._host.score, payloads)
        except LostError as error:
            self._metrics.lost.inc()
            log.warning("%s", error)
            await self._load(PAUSES_S)
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
    app.add_exception_handler(Exception, service.failed)
    return app


async def _apart(num_bytes: int, do: Callable[..., T], *arguments: Any) -> T:
    """What it does with so many bytes: in a thread, unless they are few."""
    return do(*arguments) if num_bytes < INLINE_BYTES else await asyncio.to_thread(do, *arguments)


async def _unless_gone(request: Request, scores: asyncio.Future[np.ndarray]) -> np.ndarray:
    """The scores, unless the client, all of whose request has come, goes away before they are there."""
    gone = asyncio.ensure_future(request.receive())  # nothing else can come
    try:
        await asyncio.wait((gone, scores), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
    if not scores.done():
        raise HTTPException(GONE, "the client has gone")
    return scores.result()
