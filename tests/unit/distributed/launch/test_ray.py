"""What only Ray has: room that must be found, other hosts' code, and an object store."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
import ray
from ray import exceptions
from ray.exceptions import ObjectStoreFullError, RayTaskError

from flowrl.distributed import rendezvous
from flowrl.distributed.launch import fingerprint
from flowrl.distributed.launch import ray as ray_launcher
from flowrl.distributed.launch.actors import RayWorker, translated
from flowrl.distributed.launch.answers import Reply
from flowrl.distributed.launch.base import Cluster, Place
from flowrl.distributed.launch.failures import PlacementError, WorkerDied, WorkerError
from flowrl.distributed.launch.ray import Ray
from flowrl.distributed.records import pack
from flowrl.prompts import Prompt
from flowrl.rewards.remote import OnCluster
from flowrl.rewards.scoring import Request
from tests.unit.distributed.launch.conftest import Staff
from tests.unit.distributed.launch.support import SOON
from tests.unit.distributed.launch.workers import Clerk, slow_fingerprint
from tests.unit.rewards.scorers import Surroundings


def test_reward_workers_score_without_torch(ray_cluster: Cluster) -> None:
    worker = OnCluster(ray_cluster, "reward")(0, {"style": Surroundings()}, SOON)
    request = Request("style", np.zeros((2, 4, 4, 3), np.uint8), Prompt("p", "text"), ("p:0:0", "p:0:1"), SOON)
    torch_was_there, num_threads = worker.score(request)
    assert not torch_was_there and num_threads == 1
    worker.close()


def test_room_that_is_not_there_is_named(ray_cluster: Cluster) -> None:
    places = [Place("large", num_cpus=3), Place("gpu", num_gpus=1)]
    with (
        pytest.raises(PlacementError, match=r"no room for 2 workers within 0.2 s .*4 CPU \(there are 6, 2 .*1 GPU \("),
        Ray(start_timeout_s=0.2).open(places),
    ):
        pass


def test_workers_with_other_code_are_refused(
    ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "PACKAGE", tmp_path)  # here, not there
    with (
        pytest.raises(PlacementError, match=r"do not run the driver's code: flowrl \w+ instead of \w+\. .*`ray stop`"),
        Ray().open([Place("guest")]),
    ):
        pass


def test_a_host_that_does_not_answer_is_not_waited_for(ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_launcher, "own_fingerprint", slow_fingerprint)
    with (
        pytest.raises(PlacementError, match=r"node \w+ did not come up within 1 s \(launcher.start_timeout_s\)"),
        Ray(start_timeout_s=1).open([Place("guest")]),
    ):
        pass


def test_ray_that_does_not_start_is_an_error_of_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever class Ray has for it; and the signal is the program's again."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RuntimeError("Version mismatch: ray 2.0")

    for name, replacement in {"is_initialized": lambda: False, "init": refuse, "shutdown": lambda: None}.items():
        monkeypatch.setattr(ray, name, replacement)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with (
            pytest.raises(PlacementError, match=r"launcher.address=somewhere:1: Version mismatch: ray 2.0"),
            Ray(address="somewhere:1").open([Place("guest")]),
        ):
            pass
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def handler(signum: int, frame: FrameType | None) -> None:
    """The program's own."""


# ------------------------------------------------------------------------------------------ the object store


def test_what_is_fetched_is_a_view_that_outlives_its_handle(hire: Callable[[str], Staff]) -> None:
    clerk, size = hire("ray")("clerk-0"), 500_000
    (item,) = clerk.stream(Clerk.items, [7], size=size)
    first, second = item[1].fetch(), item[1].fetch()
    assert np.shares_memory(first, second) and not first.flags.writeable
    del item, second
    others = [handle for _, handle in clerk.stream(Clerk.items, [8] * 20, size=size)]  # take whatever room there is
    assert (first == 7).all()
    assert not any(np.shares_memory(first, handle.fetch()) for handle in others)


# ------------------------------------------------------------------------------------------ what Ray says


class Answers:
    """An actor's answers, as Ray gives them to the caller: references, the last of which may be to an error."""

    def __init__(self, *references: Any) -> None:
        self.stream = self
        self.references = references

    def options(self, **options: object) -> Answers:
        return self

    def remote(self, request: object) -> Iterator[Any]:
        return iter(self.references)


FULL = RayTaskError("stream", "Traceback\nObjectStoreFullError: no room", ObjectStoreFullError("no room"))
ITEM = (pack(1), False)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([FULL], "no room"),  # in the place of the heavy part
        ([pack("heavy"), FULL], "no room"),  # in that of the light one
        ([pack("heavy"), ITEM, FULL], "no room"),
        ([pack("heavy"), ITEM], "StopIteration"),
        ([pack("heavy")], "StopIteration"),
        ([], "StopIteration"),
    ],
)
def test_a_stream_that_breaks_off_anywhere_is_told(ray_cluster: Cluster, answers: list[Any], told: str) -> None:
    stream = RayWorker[Clerk]("clerk", Answers(*map(ray.put, answers))).stream(Clerk.items, [1])
    if len(answers) > 1 and answers[1] is ITEM:
        light, handle = next(stream)
        assert (light, handle.fetch()) == (1, "heavy")
    with pytest.raises(WorkerError, match=f"worker clerk failed: .*{told}"):
        stream.ask().result(SOON)


KILLED = "The actor died. Worker exit detail: End of file. Some common causes include: out of memory."


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (
            exceptions.RayActorError(error_msg=KILLED),
            WorkerDied,
            r"died \(out of memory\?\)\. Ray says: End of file\.$",
        ),
        (exceptions.ActorDiedError(), WorkerDied, r"died\. Ray says: The actor died unexpectedly"),
        (exceptions.ActorDiedError(FULL), PlacementError, "clerk could not be started.*no room"),
        (exceptions.OutOfMemoryError("above the threshold"), WorkerDied, "above the threshold"),
        (exceptions.RuntimeEnvSetupError("no pip"), PlacementError, "clerk could not be started.*no pip"),
        (exceptions.ActorUnschedulableError("no bundle"), PlacementError, "clerk could not be started.*no bundle"),
        (exceptions.ObjectLostError("ab", None, "stack"), WorkerError, "failed: ObjectLostError: "),
        (ObjectStoreFullError("no room"), WorkerError, "failed: ObjectStoreFullError: .*no room"),
    ],
)
def test_a_death_is_told_from_other_failures(error: Exception, kind: type[Exception], told: str) -> None:
    found = translated("clerk", error)
    assert type(found) is kind and found.__cause__ is error
    assert re.search(told, str(found)), str(found)


def test_a_call_that_fails_in_an_unknown_way_is_told() -> None:
    reply: Reply[int] = Reply()
    answer: Future[Any] = Future()
    answer.set_exception(KeyError("who knows"))
    RayWorker[Clerk]("clerk", None)._answered(reply, answer)
    with pytest.raises(WorkerError, match="worker clerk failed: KeyError: 'who knows'"):
        reply.future.result(SOON)


def test_the_address_is_that_of_rays_node(ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the host has no default route."""
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=OSError("Network is unreachable")))
    assert rendezvous.node_address() == ray.nodes()[0]["NodeManagerAddress"]


# ------------------------------------------------------------------------------------------ code


def test_the_fingerprint_is_of_contents_not_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(folder: str, text: str) -> fingerprint.Fingerprint:
        (tmp_path / folder / "part").mkdir(parents=True)
        (tmp_path / folder / "part" / "module.py").write_text(text)
        monkeypatch.setattr(fingerprint, "PACKAGE", tmp_path / folder)
        return fingerprint.own_fingerprint()

    assert of("a", "x = 1") == of("b", "x = 1")
    (difference,) = of("c", "x = 1").differences(of("d", "x = 2"))
    assert difference.startswith("flowrl ")


def test_nobody_at_the_address() -> None:
    with pytest.raises(ValueError, match="Ray Client"):
        Ray(address="ray://somewhere:10001")
