"""Running a reward server until it is told to stop."""

from __future__ import annotations

import errno
import signal
import socket
from collections.abc import Sequence

import uvicorn

from flowrl.serving.app import Dialect, Limits, Service, create_app

FOREIGN = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
GRACE_S = 10  # for the last answers to leave, when no more will be given


def bound(host: str, port: int) -> list[socket.socket]:
    """A socket at every address of `host` that this machine has; port 0 is any that is free, the same at all of them.

    Raises OSError; for a `host` that has no address at all, socket.gaierror or UnicodeError.
    """
    found: list[socket.socket] = []
    foreign: OSError | None = None
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, address in dict.fromkeys((family, address) for family, _, _, _, address in entries):
        own_port = found[0].getsockname()[1] if found else port
        try:
            found.append(socket.create_server((address[0], own_port, *address[2:]), family=family))
        except OSError as error:
            if error.errno not in FOREIGN:
                raise
            foreign = error
    if foreign and not found:
        raise foreign
    return found


def run(dialect: Dialect, limits: Limits, sockets: Sequence[socket.socket], token: str | None) -> BaseException | None:
    """Serve until SIGTERM or Ctrl-C; what has come by then is still scored and answered.

    Returns what ended it before: UnloadableError if the scorer could not be loaded.
    """

    def stop() -> None:
        server.config.timeout_graceful_shutdown = GRACE_S
        server.should_exit = True

    service = Service(dialect, limits, token, stop)
    server = uvicorn.Server(uvicorn.Config(create_app(service), access_log=False, log_level="info", lifespan="on"))
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once it has stopped, uvicorn sends it to itself again
    try:
        server.run(list(sockets))
    finally:
        signal.signal(signal.SIGTERM, before)
    return service.failure
