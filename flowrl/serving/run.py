"""Running a reward server until it is told to stop."""

from __future__ import annotations

import ipaddress
import signal

import uvicorn

from flowrl.serving.app import Dialect, Limits, Service, create_app


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run(dialect: Dialect, limits: Limits, host: str, port: int, token: str | None) -> BaseException | None:
    """Serve until SIGTERM or Ctrl-C; what has been admitted by then is still scored and answered.

    Returns what ended it before: ScoringError or LostError if the scorer could not be loaded. Exits with 1 if the port
    cannot be had.
    """

    def stop() -> None:
        server.should_exit = True

    service = Service(dialect, limits, token, stop)
    server = uvicorn.Server(
        uvicorn.Config(create_app(service), host=host, port=port, access_log=False, log_level="info", lifespan="on")
    )
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once it has stopped, uvicorn sends it to itself again
    try:
        server.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    return service.failure
