"""What the tools that serve rewards have in common."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from flowrl.cli.arguments import Failure, option, parse
from flowrl.config import ConfigError, Problem

if TYPE_CHECKING:
    from flowrl.serving.app import Dialect, Limits

T = TypeVar("T")
MAX_PORT = 65_535
LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass
class Listen:
    """Where a server listens, and how much it takes at once."""

    host: str = option("the address to listen at; any but this machine's own needs a token", "127.0.0.1")
    port: int = option("the port; 0: any that is free", 8000)
    token_env: str | None = option("name of the environment variable with the bearer token to ask for", None)
    max_batch_size: int = option("pictures that are scored together", 32)
    max_wait_ms: float = option("how long a request waits for others to join it", 5.0)
    queue_size: int = option("requests that may wait; further ones are answered 503", 50)
    max_body_mb: int = option("size of a request, and of what its PNG files unpack to", 128)
    max_queue_mb: int = option(
        "size of all requests that wait, and of all that are on their way; further ones are answered 503", 1000
    )
    timeout_s: float = option("for a request to arrive, and for a batch to be scored; then the scorer restarts", 120.0)
    load_timeout_s: float = option("for the scorer to be loaded", 600.0)


def parse_some(schema: type[T], arguments: Sequence[str], is_other: Callable[[str], bool]) -> tuple[T, list[str]]:
    """The settings, and the arguments of something else, those whose key `is_other`. Raises ConfigError."""
    known = {f.name for f in fields(schema)}  # type: ignore[arg-type]
    others = [a for a in arguments if (key := a.partition("=")[0].lstrip("+~")) not in known and is_other(key)]
    return parse(schema, [a for a in arguments if a not in others]), others


def listen(dialect: Dialect, settings: Listen) -> None:
    """Serve until told to stop. Raises ConfigError before anything starts, Failure if the scorer cannot be loaded."""
    _check_installed()
    from flowrl.serving.app import UnloadableError
    from flowrl.serving.run import run

    token, limits = _token(settings), _limits(settings)
    sockets = _bound(settings.host, settings.port)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"running on http://{host}:{sockets[0].getsockname()[1]} (Ctrl-C ends it)", file=sys.stderr)
    failure = run(dialect, limits, sockets, token)
    if isinstance(failure, UnloadableError):
        raise Failure(f"the scorer cannot be loaded: {failure}") from failure
    if failure is not None:
        raise failure


def _check_installed() -> None:
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise Failure(f'{", ".join(missing)} must be installed: pip install -e ".[server]".')


def _limits(settings: Listen) -> Limits:
    from flowrl.rewards.transport import WEEK_S
    from flowrl.serving.app import Limits

    values = {f.name: vars(settings)[f.name] for f in fields(Limits)}
    lowest = {"max_batch_size": 1, "max_wait_ms": 0, "queue_size": 1, "max_body_mb": 1, "max_queue_mb": 1}
    problems = [
        Problem(name, f"must be at least {low}, got {values[name]}.")
        for name, low in lowest.items()
        if not values[name] >= low
    ]
    problems += [
        Problem(name, f"must be greater than 0 and at most {WEEK_S:g}, got {values[name]}.")
        for name in ("timeout_s", "load_timeout_s")
        if not 0 < values[name] <= WEEK_S
    ]
    if problems:
        raise ConfigError(*problems)
    return Limits(**values)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Where to listen. Raises ConfigError."""
    from flowrl.serving.run import bound

    if not 0 <= port <= MAX_PORT:
        raise ConfigError(Problem("port", f"must be at least 0 and at most {MAX_PORT}, got {port}."))
    try:
        return bound(host, port)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(Problem("host", f"{host!r} has no address: {error}.")) from error
    except OSError as error:
        why = os.strerror(error.errno or 0)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            hint = "port=0 takes any that is free."
            raise ConfigError(Problem("port", f"{port} at {host} cannot be had: {why}.", hint)) from error
        raise ConfigError(Problem("host", f"{host} is no address of this machine: {why}.")) from error


def _token(settings: Listen) -> str | None:
    """The token to ask for. A server that others can reach must have one."""
    from flowrl.rewards.tokens import bearer_token
    from flowrl.rewards.transport import is_loopback

    name = settings.token_env
    if name is None:
        if not is_loopback(settings.host):
            hint = "Set token_env=NAME, or listen at 127.0.0.1 behind a proxy that asks for a password."
            raise ConfigError(Problem("host", f"{settings.host} can be reached from other machines.", hint))
        return None
    try:
        return bearer_token(name)
    except ValueError as error:
        raise ConfigError(Problem("token_env", f"{error}.")) from error
