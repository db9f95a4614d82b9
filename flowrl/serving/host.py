"""The process in which a server's scorer lives. It can be killed when it hangs, and started again when it is lost.

Nothing but the standard library and what is scored with is imported here: the process starts with this module.
"""

from __future__ import annotations

import pickle
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from flowrl.distributed.launch.child import Child, LostChild
from flowrl.distributed.launch.process import follow_parent

if TYPE_CHECKING:
    import numpy as np

NAME = "flowrl-scorer"  # of the process
FAULTS = (Exception, SystemExit)  # a scorer is anybody's code, and may wish to end the process
UNSENDABLE = (pickle.PicklingError, TypeError, AttributeError, RecursionError, MemoryError)  # from pickling


class Served(Protocol):
    """What scores. It is pickled, loaded in a process of its own, and asked for one batch at a time."""

    def load(self) -> None:
        """Read models into memory."""
        ...

    def score(self, payloads: Sequence[Any]) -> np.ndarray:
        """float64: one finite score for each sample of each payload, in order. Raises on failure."""
        ...


@runtime_checkable
class SelfTimed(Protocol):
    """A `Served` that waits for others, and gives up by itself: it has these limits instead of a server's."""

    def load_limit_s(self, load_timeout_s: float) -> float:
        """By then it is loaded, or is not going to be; what it loads besides takes `load_timeout_s`."""
        ...

    def score_limit_s(self, payloads: Sequence[Any]) -> float:
        """By then these are scored, or are not going to be."""
        ...


class ScoringError(RuntimeError):
    """The scorer raised, or its scores are of no use; one sentence. If `final`, the same samples would fail again."""

    def __init__(self, sentence: str, final: bool = False) -> None:
        super().__init__(sentence)
        self.final = final


class LostError(RuntimeError):
    """The scorer's process hung, died or could not be started; one sentence."""


@dataclass(frozen=True)
class _Raised:
    """An answer: what the scorer raised."""

    sentence: str
    final: bool


class Host:
    """One scorer in one process. Its methods block; one thread at a time loads and scores.

    Args:
        served: what scores.
        timeout_s: for one batch; then the process is killed. Unless it is `SelfTimed`, then that says when.
        load_timeout_s: to start and to load, likewise.
    """

    def __init__(self, served: Served, timeout_s: float, load_timeout_s: float) -> None:
        self._child = Child(serve, (pickle.dumps(served),), NAME)
        self._own = served if isinstance(served, SelfTimed) else None
        self._timeout_s = timeout_s
        self._load_timeout_s = self._own.load_limit_s(load_timeout_s) if self._own else load_timeout_s

    def load(self) -> None:
        """Start the process and return when the scorer is loaded.

        Raises ScoringError if it cannot be, LostError if the process is lost; then there is none.
        """
        try:
            self._child.start()
            self._answer(self._load_timeout_s)
        except ScoringError:
            self._child.kill()
            raise
        except LostChild as error:
            raise LostError(f"the scorer {error}") from error

    def score(self, payloads: Sequence[Any]) -> np.ndarray:
        """float64: the scores of all samples. Raises ScoringError, or LostError: then it must be loaded again."""
        timeout_s = self._own.score_limit_s(payloads) if self._own else self._timeout_s
        scores: np.ndarray = self._answer(timeout_s, payloads)
        return scores

    def close(self) -> None:
        """Kill the process and start no other; whoever waits for it gets LostError."""
        self._child.close()

    def _answer(self, timeout_s: float, *question: Sequence[Any]) -> Any:
        try:
            answer = self._child.ask(timeout_s, *question)
        except LostChild as error:
            raise LostError(f"the scorer {error}") from error
        except UNSENDABLE as error:  # before anything was sent
            raise ScoringError(f"it cannot be sent to the scorer: {type(error).__name__}: {error}") from error
        if isinstance(answer, _Raised):
            raise ScoringError(answer.sentence, answer.final)
        return answer


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
    from flowrl.rewards.scoring import FinalError

    traceback.print_exception(error)  # in the server's log; its clients get the sentence
    return _Raised(f"{type(error).__name__}: {error}", isinstance(error, FinalError))
