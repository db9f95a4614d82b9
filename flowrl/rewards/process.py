"""The main function of a reward worker's process.

This module, and what it imports, needs nothing but the standard library, so that the number of threads (one) and the
GPUs are set before any numerical library reads them. And nothing that a worker imports should import torch, which costs
200 MB and seconds of start-up.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from flowrl.distributed.launch.process import end_group, follow_parent

if TYPE_CHECKING:
    from flowrl.rewards.scoring import AnyScorer

WORKER = "flowrl-reward"  # name of the processes
GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM")


def serve(connection: Connection, prompt: bytes, scorers: Mapping[str, bytes], gpus: str, is_first: bool) -> None:
    """Say None on arriving here, None again when loaded, then answer each request, until the pipe ends.

    An answer is the scores or a RewardError.

    `scorers` are pickled one by one: one that cannot be read is an error by name. `prompt` is the pickled class of
    prompts: what it imports should not count against the time of the first request. `gpus` are all that it sees. Of a
    pool's workers, the one that `is_first` says what all of them wait for.
    """
    follow_parent()
    os.environ |= {**dict.fromkeys(THREAD_VARIABLES, "1"), GPUS_VARIABLE: gpus}
    try:
        connection.send(None)
    except OSError:  # nobody listens any more
        end_group()
    from flowrl.rewards import scoring

    if not is_first:
        scoring.waiting.setLevel(logging.ERROR)
    try:
        loaded = {name: _load(name, data) for name, data in scorers.items()}
        pickle.loads(prompt)
        connection.send(None)
        while True:
            request = connection.recv()
            try:
                connection.send(scoring.score(loaded, request))
            except scoring.RewardError as error:
                connection.send(error)
    except scoring.RewardError as error:  # of loading; without its scorers the worker is of no use
        connection.send(error)
    except (EOFError, OSError):
        end_group()


def _load(name: str, pickled: bytes) -> AnyScorer:
    from flowrl.rewards import scoring

    try:
        scorer: AnyScorer = pickle.loads(pickled)
    except scoring.FAULTS as error:
        raise scoring.failure(name, "loading", error) from error
    scoring.load(name, scorer)
    return scorer
