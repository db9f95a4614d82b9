"""The process in which a server's scorer lives. It can be killed when it hangs, and started again when it is lost.

Nothing but the standard library and what is scored with is imported here: the process starts with this module.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, Protocol

from flowrl.distributed.launch.process import epitaph, follow_parent, interrupts_blocked, kill_group

if TYPE_CHECKING:
    import numpy as np

NAME = "flowrl-scorer"  # of the process
FAULTS = (Exception, SystemExit)  # a scorer is anybody's code, and may wish to end the process

log = logging.getLogger(__name__)


class Served(Protocol):
    """What scores. It is pickled, loaded in a process of its own, and asked for one batch at a time."""

    def load(self) -> None:
        """Read models into memory."""
        ...

    def score(self, payloads: Sequence[Any]) -> np.ndarray:
        """float64: one finite score for each sample of each payload, in order. Raises on failure."""
        ...


class ScoringError(RuntimeError):
    """The scorer raised, or its scores are of no use; one sentence. The same samples would fail again."""


class LostError(RuntimeError):
    """The scorer's process hung or died, perhaps for reasons of its own; one sentence."""


@dataclass(frozen=True)
class _Raised:
    """An answer: what the scorer raised."""

    sentence: str


class Host:
    """One scorer in one process. Its methods block; one thread at a time loads and scores.

    Args:
        served: what scores.
        timeout_s: for one batch; then the process is killed.
        load_timeout_s: to start and to load.
    """

    def __init__(self, served: Served, timeout_s: float, load_timeout_s: float) -> None:
        self._pickled = pickle.dumps(served)
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._lock = threading.Lock()  # of starting and closing: no process is started after `close`
        self._closed = False
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def load(self) -> None:
        """Return when the scorer is loaded. Raises ScoringError if it cannot be, LostError if the process is lost."""
        if self._process is None:
            self._start()
            try:
                self._answer(self._load_timeout_s)
            except ScoringError:
                self._kill()
                raise

    def score(self, payloads: Sequence[Any]) -> np.ndarray:
        """float64: the scores of all samples. Raises ScoringError, or LostError after having ended the process."""
        self.load()
        assert self._connection is not None
        scores: np.ndarray = self._answer(self._timeout_s, payloads)
        return scores

    def close(self) -> None:
        """Kill the process and start no other; whoever waits for it gets LostError."""
        with self._lock:
            self._closed = True
        self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with self._lock:
            if self._closed:
                raise LostError("the server is ending")
            self._connection, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, self._pickled), name=NAME, daemon=True)
            with interrupts_blocked():
                process.start()
            self._process = process
            theirs.close()  # the process has its own; ours would hide its death

    def _answer(self, timeout_s: float, *question: Sequence[Any]) -> Any:
        """What the process says, asked or by itself. When time is up it is killed: that ends sending, too."""
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            kill_group(process)

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            for part in question:
                connection.send(part)
            answer = connection.recv()
        except (EOFError, OSError) as error:
            process.join(timeout=1)  # its own exit code, if it is about to have one
            self._kill()
            raise LostError(_lost(process, timeout_s, expired.is_set())) from error
        finally:
            timer.cancel()
        if isinstance(answer, _Raised):
            raise ScoringError(answer.sentence)
        return answer

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_group(process)
            process.join()


def _lost(process: SpawnProcess, timeout_s: float, expired: bool) -> str:
    if expired:
        return f"the scorer did not answer within {timeout_s:g} s and was stopped"
    return f"the scorer's process {epitaph(process.exitcode)}"


# ---------------------------------------------------------------------------------------------- in the process


def serve(connection: Connection, pickled: bytes) -> None:
    """Load, say so, then answer each batch, until the pipe ends."""
    follow_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a supervisor's is the server's, which first finishes its queue
    try:
        served: Served = pickle.loads(pickled)
        served.load()
    except FAULTS as error:
        connection.send(_raised(error))
        return
    connection.send(None)
    while True:
        try:
            payloads = connection.recv()
        except (EOFError, OSError):  # the server is gone
            return
        connection.send(_scored(served, payloads))


def _scored(served: Served, payloads: Sequence[Any]) -> np.ndarray | _Raised:
    try:
        return served.score(payloads)
    except FAULTS as error:
        return _raised(error)


def _raised(error: BaseException) -> _Raised:
    traceback.print_exception(error)  # in the server's log; its clients get the sentence
    return _Raised(f"{type(error).__name__}: {error}")
