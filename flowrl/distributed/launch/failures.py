"""What goes wrong in a worker, as its caller sees it. Free of torch."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

FAULTS = (Exception, SystemExit)  # a worker answers these; its process goes on

# What a rank says when another one has left a collective.
_LOST_PEER = re.compile(
    r"connection|broken pipe|socket|gloo|nccl|TCPStore|remote process exited|by peer|timed? ?out", re.IGNORECASE
)


class WorkerError(RuntimeError):
    """An exception in a worker that cannot be raised here as itself; its message says which it was."""


class WorkerDied(RuntimeError):
    """A worker's process has ended and whatever it was doing is lost."""

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(worker, cause)
        self.worker = worker

    def __str__(self) -> str:
        worker, cause = self.args
        return f"worker {worker} {cause}"


class PlacementError(RuntimeError):
    """The workers do not fit on what there is, or cannot be started there; the message is for the user."""


class ClusterClosed(RuntimeError):
    """A worker was to be started when the places had been given up: the run is ending."""


class WorkerTraceback(Exception):
    """The cause of an error that comes from a worker: where it was raised there, which Python shows first."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)

    def __str__(self) -> str:
        worker, text = self.args
        return f"in worker {worker}:\n{text}"


@dataclass(frozen=True)
class Failure:
    """An exception on its way from a worker to whoever called."""

    worker: str
    summary: str  # type and message
    traceback: str
    pickled: bytes | None  # the exception itself, if it survives that

    @classmethod
    def of(cls, worker: str, error: BaseException) -> Failure:
        """Of an exception that has just been caught."""
        text = "".join(traceback.format_exception(error)).rstrip()
        return cls(worker, traceback.format_exception_only(error)[0].strip(), text, _pickled(error))

    def error(self) -> BaseException:
        """The exception, or a WorkerError in its place, caused by a `WorkerTraceback`."""
        error: BaseException
        try:
            error = pickle.loads(self.pickled or b"")
        except Exception:  # there is none, or its class cannot be imported here
            error = WorkerError(f"worker {self.worker} failed: {self.summary}")
        error.__cause__ = WorkerTraceback(self.worker, self.traceback)
        return error


def _pickled(error: BaseException) -> bytes | None:
    """None for what would not come out as it went in. SystemExit would end the caller: it stays where it is."""
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
        copy = pickle.loads(data)
    except Exception:  # anybody's exception: what its constructor does with its own arguments, we cannot know
        return None
    return data if type(copy) is type(error) and str(copy) == str(error) else None


def is_consequence(error: BaseException) -> bool:
    """Whether `error` only says that some other worker is gone."""
    network = isinstance(error, ConnectionError | TimeoutError) or type(error).__name__.startswith("Dist")  # of torch
    return (network or type(error) in (RuntimeError, WorkerError)) and _LOST_PEER.search(str(error)) is not None


def root(errors: Sequence[BaseException]) -> BaseException:
    """Of errors in the order of their arrival, the one that explains the others, which it names in a note."""
    chosen = next((error for error in errors if not is_consequence(error)), errors[0])
    others = [f"{type(error).__name__}: {error}".splitlines()[0] for error in errors if error is not chosen]
    if others:
        chosen.add_note("\n  ".join(["Then other workers failed, too:", *others]))
    return chosen
