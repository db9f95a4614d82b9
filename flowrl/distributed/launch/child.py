"""A process that is asked one question at a time. It can be killed at any moment, from either side.

Nothing but the standard library: what such a process runs may have to come before all else.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from flowrl.distributed.launch.process import epitaph, interrupts_blocked, kill_group

TIMED_OUT = "did not answer within {:g} s and was stopped"


class LostChild(RuntimeError):
    """A process is gone; how, as a sentence of which it is the subject. `exitcode`, if it ended by itself."""

    def __init__(self, how: str, exitcode: int | None = None) -> None:
        super().__init__(how)
        self.exitcode = exitcode


class Child:
    """A spawned process, started when it is told to and again after it was lost.

    Its main function calls `follow_parent` first of all: then whatever it has started is killed with it, and when the
    process that asks is gone, however it went, it goes too.

    Args:
        main: what it runs, with its end of a pipe as the first argument.
        arguments: the others.
        name: of the process.
    """

    def __init__(self, main: Callable[..., None], arguments: tuple[Any, ...], name: str) -> None:
        self._main = main
        self._arguments = arguments
        self._name = name
        self._lock = threading.Lock()  # of starting and closing: no process is started after `close`
        self._closed = False
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Spawn the process, unless it is there or closed; does not wait for it. Raises LostChild if it cannot be."""
        with self._lock:
            if self._process is not None or self._closed:
                return
            try:
                self._process, self._connection = self._spawned()
            except OSError as error:
                raise LostChild(f"cannot be started: {error}") from error

    def ask(self, timeout_s: float, *question: object) -> Any:
        """The answer to a question, or what the process says by itself. Raises LostChild, and then it is gone.

        When time is up it is killed: that ends sending, too. What cannot be pickled is an error, pickle's own, before
        anything of it is sent.
        """
        process, connection = self._process, self._connection
        if process is None or connection is None:
            raise LostChild("is closed")
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            kill_group(process)

        timer = threading.Timer(timeout_s, expire)
        timer.start()
        try:
            for part in question:
                connection.send(part)
            return connection.recv()
        except (EOFError, OSError) as error:
            process.join(timeout=1)  # its own exit code, if it is about to have one
            self.kill()
            if expired.is_set():
                raise LostChild(TIMED_OUT.format(timeout_s)) from error
            raise LostChild(epitaph(process.exitcode), process.exitcode) from error
        finally:
            timer.cancel()

    def _spawned(self) -> tuple[SpawnProcess, Connection]:
        """A process and our end of its pipe."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._main, args=(theirs, *self._arguments), name=self._name, daemon=True)
        with theirs:  # the process has its own; ours would hide its death
            try:
                with interrupts_blocked():
                    process.start()
            except OSError:
                ours.close()
                raise
        return process, ours

    def kill(self) -> None:
        """Kill the process and wait until it is gone; `start` begins another one."""
        process, self._process = self._process, None
        if process is not None:
            kill_group(process)
            process.join()

    def close(self) -> None:
        """Kill the process and start no other; whoever waits for its answer gets LostChild."""
        with self._lock:
            self._closed = True
        self.kill()
