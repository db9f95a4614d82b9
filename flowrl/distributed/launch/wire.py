"""Packed objects through a pipe, each with a remark about it."""

from __future__ import annotations

import pickle
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from flowrl.distributed.records import Packed


class Request(Enum):
    """The remark on what is sent to a worker; on an answer it is the place of the heavy part of an item."""

    CALL = "call"
    STREAM = "stream"
    STOP = "stop"


def send(connection: Connection, packed: Packed, remark: Any = None) -> None:
    """Returns when the pipe has taken it all. Raises OSError if nobody listens."""
    connection.send_bytes(pickle.dumps((remark, packed.header, len(packed.buffers))))
    for buffer in packed.buffers:
        connection.send_bytes(buffer.data)


def receive(connection: Connection) -> tuple[Any, Packed]:
    """The next remark and object; its buffers are read-only. Raises EOFError or OSError if nothing more can come."""
    remark, header, num_buffers = pickle.loads(connection.recv_bytes())
    buffers = tuple(np.frombuffer(connection.recv_bytes(), np.uint8) for _ in range(num_buffers))
    return remark, Packed(header, buffers)
