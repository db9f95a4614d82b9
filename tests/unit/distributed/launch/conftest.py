"""One cluster of each kind for all tests of the folder: Ray takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest

from flowrl.distributed.launch.base import Cluster, Launcher, Place, Remote
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.launch.spawn import Spawn
from tests.unit.distributed.launch.support import SOON, Clerks, Guests
from tests.unit.distributed.launch.workers import Clerk

LAUNCHERS: dict[str, Launcher] = {"inline": Inline(), "spawn": Spawn(num_threads=1), "ray": Ray(num_threads=1)}
PLACES = [Place("clerk-0"), Place("clerk-1"), Place("guest-0"), Place("guest-1"), Place("spare"), Place("reward-0")]
NUM_CPUS = 8  # two more than the places need


@contextmanager
def connected_to_ray() -> Iterator[None]:
    """A cluster that the program has, before flowrl comes."""
    import ray

    ray.init("local", num_cpus=NUM_CPUS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Cluster]:
    """Not flowrl's own: it stays when flowrl leaves it."""
    with connected_to_ray(), LAUNCHERS["ray"].open(PLACES) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def spawn_cluster() -> Iterator[Cluster]:
    """Processes."""
    with LAUNCHERS["spawn"].open(PLACES) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def inline_cluster() -> Iterator[Cluster]:
    """No processes."""
    with LAUNCHERS["inline"].open(PLACES) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def staff(request: pytest.FixtureRequest) -> Callable[[str], Clerks]:
    """By kind of cluster, two clerks that start from 0 and 100, for tests that leave them alive."""

    @cache
    def start(kind: str) -> Clerks:
        cluster: Cluster = request.getfixturevalue(f"{kind}_cluster")
        return [cluster.start(f"clerk-{index}", partial(Clerk, 100 * index)) for index in range(2)]

    return start


@pytest.fixture(params=["inline", "spawn", "ray"])
def clerks(request: pytest.FixtureRequest, staff: Callable[[str], Clerks]) -> Clerks:
    """Of every kind."""
    return staff(request.param)


@pytest.fixture(params=["spawn", "ray"])
def distant_clerks(request: pytest.FixtureRequest, staff: Callable[[str], Clerks]) -> Clerks:
    """In processes of their own."""
    return staff(request.param)


@pytest.fixture(params=["spawn", "ray"])
def processes(request: pytest.FixtureRequest) -> Cluster:
    """A cluster whose workers can be killed."""
    found: Cluster = request.getfixturevalue(f"{request.param}_cluster")
    return found


@pytest.fixture(scope="package")
def guests() -> Guests:
    """Of `victims`."""
    return {}


@pytest.fixture
def victims(processes: Cluster, guests: Guests) -> Clerks:
    """Two workers for tests that do not spare them: the same as before, if they still live."""
    for place in ("guest-0", "guest-1"):
        if (processes, place) not in guests or not is_alive(guests[processes, place]):
            guests[processes, place] = processes.start(place, Clerk)
            assert is_alive(guests[processes, place])
    return [guests[processes, place] for place in ("guest-0", "guest-1")]


def is_alive(remote: Remote[Clerk]) -> bool:
    """Whether it answers."""
    try:
        remote.call(Clerk.pid).result(SOON)
    except WorkerDied:
        return False
    return True
