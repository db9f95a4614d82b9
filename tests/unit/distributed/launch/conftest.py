"""One cluster of each kind for all tests of the folder: Ray takes seconds to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from flowrl.distributed.launch.base import Cluster, Launcher, Place, Remote
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.inline import Inline
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.launch.spawn import Spawn
from tests.unit.distributed.launch.support import SOON, Clerks
from tests.unit.distributed.launch.workers import Clerk

LAUNCHERS: dict[str, Launcher] = {"inline": Inline(), "spawn": Spawn(num_threads=1), "ray": Ray(num_threads=1)}
PLACES = [Place("clerk-0"), Place("clerk-1"), Place("spare"), Place("reward-0")]
NUM_CPUS = 6  # two more than the places need


@contextmanager
def connected_to_ray() -> Iterator[None]:
    """A cluster that the program has, before flowrl comes."""
    import ray

    ray.init(
        "local",
        num_cpus=NUM_CPUS,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        _system_config={"prestart_worker_first_driver": False},
    )
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


Staff = Callable[[str], Remote[Clerk]]  # by place


@pytest.fixture(scope="package")
def hire(request: pytest.FixtureRequest) -> Callable[[str], Staff]:
    """By kind of cluster, the clerk of a place: the same as before if it still lives, else another. Tests may kill."""
    hired: dict[tuple[str, str], Remote[Clerk]] = {}

    def clerk(kind: str, place: str) -> Remote[Clerk]:
        if (kind, place) not in hired or not is_alive(hired[kind, place]):
            hired[kind, place] = request.getfixturevalue(f"{kind}_cluster").start(place, Clerk)
        return hired[kind, place]

    return lambda kind: partial(clerk, kind)


@pytest.fixture(params=["inline", "spawn", "ray"])
def staff(request: pytest.FixtureRequest, hire: Callable[[str], Staff]) -> Staff:
    """Of every kind."""
    return hire(request.param)


@pytest.fixture
def clerks(staff: Staff) -> Clerks:
    """Two, of every kind."""
    return [staff("clerk-0"), staff("clerk-1")]


@pytest.fixture(params=["spawn", "ray"])
def distant_staff(request: pytest.FixtureRequest, hire: Callable[[str], Staff]) -> Staff:
    """In processes of their own."""
    return hire(request.param)


@pytest.fixture
def distant_clerks(distant_staff: Staff) -> Clerks:
    """Two, in processes of their own."""
    return [distant_staff("clerk-0"), distant_staff("clerk-1")]


def is_alive(remote: Remote[Clerk]) -> bool:
    """Whether it answers."""
    try:
        remote.call(Clerk.pid).result(SOON)
    except WorkerDied:
        return False
    return True
