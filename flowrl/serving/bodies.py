"""Requests' bodies on their way: how much of them is taken at once, and for how long they are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from flowrl.serving.batching import NotNowError

GONE = 499  # the client, before it had its answer: nobody reads this one
QUIET_S = 10.0  # without a byte
DRAIN_S = 10.0  # for a body that nobody wants
CLOSE = {"connection": "close"}


class CutOffError(HTTPException):
    """A body that is not read to its end: what follows on this connection could not be told from it."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(status, why, CLOSE)


class Bodies:
    """Reads any number of bodies at the same time. What has come of them is bounded, not what they say is to come:
    whoever is slow keeps nobody out.

    Args:
        max_bytes: of one body.
        max_together: of what has come of all that are on their way; one that is alone may have more.
        timeout_s: for one body.
    """

    def __init__(self, max_bytes: int, max_together: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_together = max_together
        self._timeout_s = timeout_s
        self.num_bytes = 0  # of all that are on their way

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises CutOffError, or, when all of it has come, NotNowError if others had taken the room."""
        body = bytearray()
        is_crowded = False

        def take(part: bytes) -> None:
            nonlocal is_crowded
            others = self.num_bytes - len(body)
            is_crowded = is_crowded or (others > 0 and self.num_bytes + len(part) > self._max_together)
            if is_crowded:
                self.num_bytes = others
                body.clear()
            else:
                self.num_bytes += len(part)
                body.extend(part)

        try:
            await self._receive(request, self._timeout_s, take)
        finally:
            self.num_bytes -= len(body)
        if is_crowded:
            raise NotNowError("too much is on its way already")
        return bytes(body)

    async def drained(self, request: Request) -> bool:
        """Whether all of a body came that nobody wants. A client that is still writing might not come to read its
        answer; if its request is too large or too slow, that is its own affair."""
        try:
            await self._receive(request, DRAIN_S, lambda part: None)
        except CutOffError:
            return False
        return True

    def check_length(self, request: Request) -> None:
        """Raises CutOffError for a body that is too large, as it says of itself."""
        if int(request.headers.get("content-length", 0)) > self._max_bytes:
            raise self._too_large()

    async def _receive(self, request: Request, seconds: float, take: Callable[[bytes], None]) -> None:
        self.check_length(request)
        size = 0
        now = asyncio.get_running_loop().time
        end = now() + seconds
        try:
            async with asyncio.timeout_at(min(end, now() + QUIET_S)) as patience:
                async for part in request.stream():
                    size += len(part)
                    if size > self._max_bytes:
                        raise self._too_large()
                    take(part)
                    patience.reschedule(min(end, now() + QUIET_S))
        except TimeoutError as error:
            why = f"the request did not arrive within {seconds:g} s, or nothing of it for {QUIET_S:g} s"
            raise CutOffError(408, why) from error
        except ClientDisconnect as error:
            raise CutOffError(GONE, "the client has gone") from error

    def _too_large(self) -> CutOffError:
        return CutOffError(413, f"the request has more than {self._max_bytes} bytes (max_body_mb)")
