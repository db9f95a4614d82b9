"""`launcher=ray`: one Ray actor for each worker, on a cluster of our own or on one that is there already."""

from __future__ import annotations

import math
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.config import Config, Problem
from flowrl.distributed.launch.actors import RayCluster
from flowrl.distributed.launch.base import Cluster, Launcher, Place
from flowrl.distributed.launch.failures import PlacementError
from flowrl.distributed.launch.fingerprint import own_fingerprint
from flowrl.distributed.launch.placement import Bundle, arrange, share_of_cores, too_many_gpus


@dataclass(frozen=True)
class Ray(Launcher):
    """Actors in one placement group, on any number of hosts. Heavy results wait in Ray's object store.

    A cluster of our own has as many logical CPUs as the workers ask for, whatever the machine has, and ends with the
    driver. On an existing one the workers have to import the same flowrl, python and torch as the driver, which is
    checked first; it needs no shared disk but for checkpoints. A program that has called `ray.init` keeps its cluster.

    Args:
        address: of an existing cluster, "auto" on one of its hosts or host:port; null starts one.
        num_threads: of torch in each process; 0 is an equal share of the cores on a cluster of our own, and what Ray
            sets on any other.
        start_timeout_s: for the cluster to have room for all workers.
    """

    address: str | None = None
    num_threads: int = 0
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.start_timeout_s > 0:
            raise ValueError(f"start_timeout_s must be greater than 0, got {self.start_timeout_s}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ValueError(
                'address: Ray Client ("ray://") is not supported; run the command on a host of the cluster'
            )

    @contextmanager
    def open(self, places: Sequence[Place]) -> Iterator[Cluster]:
        """One bundle for each place, shared with those beside it; close together if that can be had."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # both are read on import
        os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # a thread that comes too late shall not start a cluster
        import ray

        bundles, seats = arrange(places)
        connected = ray.is_initialized()
        own = not connected and self.address is None
        with nullcontext() if connected else self._connected(bundles):
            group = _reserve(bundles, self.start_timeout_s)
            cluster = RayCluster(group, seats, self._environment(len(places), own))
            try:
                if not own:
                    _check_code(group, self.start_timeout_s)
                yield cluster
            finally:
                cluster.close()

    def problems(self, run: Config) -> list[Problem]:
        """More GPUs than there are, unless on somebody else's cluster, which may grow."""
        return too_many_gpus(run) if self.address is None else []

    @contextmanager
    def _connected(self, bundles: Sequence[Bundle]) -> Iterator[None]:
        import ray

        try:
            with _sigterm_kept():
                self._connect(num_cpus=math.ceil(sum(bundle["CPU"] for bundle in bundles)))
            yield
        finally:
            ray.shutdown()

    def _connect(self, num_cpus: int) -> None:
        import ray

        try:
            if self.address is None:
                ray.init(
                    "local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    logging_level="ERROR",
                    _system_config={
                        "enable_worker_prestart": False,  # in another environment than that of our workers
                        "prestart_worker_first_driver": False,
                        "process_group_cleanup_enabled": True,  # a worker goes with all that it has started
                    },
                )
            else:
                ray.init(self.address, logging_level="ERROR")
        except Exception as error:  # Ray knows no class for most of it
            where = "Ray did not start" if self.address is None else f"launcher.address={self.address}"
            raise PlacementError(f"{where}: {error}") from error

    def _environment(self, num_workers: int, own: bool) -> dict[str, str]:
        environment = {"PYTHONPATH": _python_path(), "OMP_WAIT_POLICY": "PASSIVE"}
        threads = self.num_threads or (share_of_cores(num_workers) if own else 0)
        return environment | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray takes the signal for itself, twice: in python, and in C++, which prints a stack and aborts.

    Without a handler of the program's own, Ray's python one is right: it exits in order.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before if callable(before) else signal.getsignal(signal.SIGTERM))


def _reserve(bundles: Sequence[Bundle], timeout_s: float) -> Any:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group(list(bundles), strategy="PACK")
    if group.wait(timeout_s):
        return group
    remove_placement_group(group)
    there, free = ray.cluster_resources(), ray.available_resources()
    needs = [
        f"{wanted:g} {kind} (there are {there.get(kind, 0):g}, {free.get(kind, 0):g} of them free)"
        for kind in ("CPU", "GPU")
        if (wanted := sum(bundle.get(kind, 0) for bundle in bundles))
    ]
    raise PlacementError(
        f"Ray had no room for {len(bundles)} workers within {timeout_s:g} s (launcher.start_timeout_s): they need "
        f"{' and '.join(needs)}; the largest needs {_largest(bundles)} on one host"
    )


def _largest(bundles: Sequence[Bundle]) -> str:
    kinds = {kind: max(bundle.get(kind, 0) for bundle in bundles) for bundle in bundles for kind in bundle}
    return ", ".join(f"{amount:g} {kind}" for kind, amount in kinds.items())


def _check_code(group: Any, timeout_s: float) -> None:
    """Raise PlacementError if a host of the group runs another flowrl, python or torch than this process."""
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    mine = own_fingerprint()
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": {"PYTHONPATH": _python_path()}})(
        own_fingerprint
    )
    nodes = sorted(set(placement_group_table(group)["bundles_to_node_id"].values()))
    answers = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes
    ]
    deadline = time.monotonic() + timeout_s
    for node, answer in zip(nodes, answers, strict=True):
        try:
            differences = list(mine.differences(ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))))
        except ray.exceptions.GetTimeoutError as error:
            ray.cancel(answer, force=True)
            raise PlacementError(
                f"Ray's workers on node {node[:8]} did not come up within {timeout_s:g} s (launcher.start_timeout_s)"
            ) from error
        except ray.exceptions.RayError as error:
            differences = [f"flowrl does not start there: {str(error).strip().splitlines()[-1]}"]
        if differences:
            raise PlacementError(
                f"Ray's workers on node {node[:8]} do not run the driver's code: {'; '.join(differences)}. Stop Ray "
                "there (`ray stop`), activate the driver's environment, go to the folder with this flowrl or install "
                "it, and start Ray again (`ray start`)"
            )


def _python_path() -> str:
    """Where the driver finds code, apart from the interpreter's own folders, which may lie elsewhere on other hosts."""
    folders = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths = [Path(entry).absolute() for entry in sys.path]
    return os.pathsep.join(
        str(path) for path in paths if path.is_dir() and not any(path.is_relative_to(folder) for folder in folders)
    )
