"""Publications between real processes: every transport and mode, sharded trainers, and every way to fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from flowrl.distributed.launch.base import Cluster, Place, Remote, gather
from flowrl.distributed.launch.failures import WorkerDied
from flowrl.distributed.launch.inline import Inline, LazyStream
from flowrl.distributed.launch.spawn import Spawn
from flowrl.distributed.weight_sync.errors import AbortedError, PublishError, TransferError
from flowrl.distributed.weight_sync.manifest import Mode
from flowrl.distributed.weight_sync.publisher import Publisher, Transport, collected, root_of
from tests.unit.distributed.weight_sync.workers import Engine, Trainer

MODES: tuple[Mode, ...] = ("full", "lora", "merged")
TRANSPORTS: tuple[Transport, ...] = ("broadcast", "cuda_ipc", "object_store")
PLACES = ["actor-0", "actor-1", "rollout-0", "rollout-1"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Spawn(num_threads=1).open([Place(name) for name in PLACES]) as opened:
        yield opened


@pytest.fixture(scope="module")
def trainers(cluster: Cluster) -> list[Remote[Trainer]]:
    """One process: tests put another trainer into it."""
    return [cluster.start("actor-0", partial(Trainer, "full"))]


@pytest.fixture(scope="module")
def engines(cluster: Cluster) -> list[Remote[Engine]]:
    return [cluster.start(name, Engine) for name in ("rollout-0", "rollout-1")]


class Using(Protocol):
    """A publisher with these settings, which is one and the same, as its store is."""

    def __call__(
        self, trainers: Sequence[Remote[Trainer]], transport: Transport, **settings: float
    ) -> Publisher[Trainer]: ...


@pytest.fixture(scope="module")
def using(trainers: list[Remote[Trainer]]) -> Using:
    publisher = Publisher(trainers, "broadcast", host="127.0.0.1")

    def configured(trainers: Sequence[Remote[Trainer]], transport: Transport, **settings: float) -> Publisher[Trainer]:
        vars(publisher).update({"timeout_s": 20.0, "grace_s": 30.0, "retries": 0}, **settings)
        publisher.trainers, publisher.transport = trainers, transport
        return publisher

    return configured


def become(worker: Any, make: partial[Any]) -> None:
    """Another worker in the same process."""
    worker.__dict__ = make().__dict__


def versions(engines: Sequence[Remote[Engine]]) -> list[int]:
    return gather(engines, Engine.version, [()] * len(engines))


def assert_published(trainer: Remote[Trainer], engines: Sequence[Remote[Engine]]) -> None:
    """Engines have, bit for bit, what the trainer was to publish."""
    expected = trainer.call(Trainer.values).result()
    for engine in engines:
        got = engine.call(Engine.weights).result()
        assert expected.keys() <= got.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("mode", MODES)
def test_every_transport_brings_every_mode_to_all_engines(
    trainers: list[Remote[Trainer]], engines: list[Remote[Engine]], using: Using, mode: Mode
) -> None:
    trainers[0].call(become, partial(Trainer, mode)).result()
    for number, transport in enumerate(TRANSPORTS, start=1):
        takers = engines[:1] if mode == "lora" else engines
        gather(takers, become, [(partial(Engine, mode == "lora"),)] * len(takers))
        published = using(trainers, transport).publish(number, takers)
        assert versions(takers) == [number] * len(takers)
        assert_published(trainers[0], takers)
        assert published.num_tensors == {"full": 14, "lora": 8, "merged": 14}[mode]
        assert published.metrics()["publish/failures"] == 0
        assert published.num_bytes > 4096 or mode == "lora"


@pytest.mark.parametrize("mode", MODES)
def test_one_process_needs_no_transport_but_memory(mode: Mode) -> None:
    with Inline().open([Place("actor-0"), Place("rollout-0")]) as cluster:
        trainers = [cluster.start("actor-0", partial(Trainer, mode))]
        engines = [cluster.start("rollout-0", partial(Engine, mode == "lora"))]
        Publisher(trainers, "object_store").publish(5, engines)
        assert versions(engines) == [5]
        assert_published(trainers[0], engines)


# ---------------------------------------------------------------------------------------------- failures


@pytest.fixture
def plain(trainers: list[Remote[Trainer]], engines: list[Remote[Engine]]) -> list[dict[str, Tensor]]:
    """Everything as at the start, and the engines' weights then."""
    trainers[0].call(become, partial(Trainer, "full")).result()
    gather(engines, become, [(partial(Engine),)] * 2)
    return [engine.call(Engine.weights).result() for engine in engines]


def assert_untouched(engines: Sequence[Remote[Engine]], before: Sequence[dict[str, Tensor]]) -> None:
    assert versions(engines) == [0] * len(engines)
    for engine, old in zip(engines, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in engine.call(Engine.weights).result().items())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_flipped_bit_is_caught_and_named_and_repaired_by_another_attempt(
    trainers: list[Remote[Trainer]],
    engines: list[Remote[Engine]],
    plain: list[dict[str, Tensor]],
    using: Using,
    transport: Transport,
) -> None:
    engines[1].call(Engine.inject, "flip").result()
    with pytest.raises(TransferError, match=r"rollout-1 received 0\.down\.weight not as"):
        using(trainers, transport).publish(1, engines)
    assert_untouched(engines, plain)
    engines[1].call(Engine.inject, "flip").result()
    published = using(trainers, transport, retries=1).publish(2, engines)
    assert (published.num_failures, versions(engines)) == (1, [2, 2])
    assert_published(trainers[0], engines)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_fails_is_the_error_and_stops_the_others_at_once(
    trainers: list[Remote[Trainer]],
    engines: list[Remote[Engine]],
    plain: list[dict[str, Tensor]],
    using: Using,
    transport: Transport,
) -> None:
    engines[0].call(Engine.inject, "raise").result()
    began = time.monotonic()
    with pytest.raises(MemoryError, match="no room for bucket 1"):
        using(trainers, transport, timeout_s=60).publish(1, engines)
    assert time.monotonic() - began < 20
    assert_untouched(engines, plain)
    using(trainers, transport).publish(2, engines)  # all parties are free again
    assert versions(engines) == [2, 2]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_is_stuck_is_an_error_in_time(
    trainers: list[Remote[Trainer]],
    engines: list[Remote[Engine]],
    plain: list[dict[str, Tensor]],
    using: Using,
    transport: Transport,
) -> None:
    engines[0].call(Engine.inject, "hang").result()
    began = time.monotonic()
    with pytest.raises(PublishError, match=r"rollout-0 does not answer") as caught:
        using(trainers, transport, timeout_s=0.5, grace_s=0.5).publish(1, engines)
    assert time.monotonic() - began < 3
    if transport != "object_store":  # where nobody waits for the engine but the driver
        assert "weight_sync.timeout_s" in str(caught.value.__cause__)
    assert_untouched(engines, plain)  # once it has come back


def test_what_does_not_fit_is_refused_before_any_transfer(
    trainers: list[Remote[Trainer]],
    engines: list[Remote[Engine]],
    plain: list[dict[str, Tensor]],
    using: Using,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainers[0].call(become, partial(Trainer, "merged")).result()
    trainers[0].call(Trainer.inject, "raise").result()  # a transfer would fail
    engines[0].call(become, partial(Engine, True)).result()
    with pytest.raises(PublishError, match="holds LoRA"):
        using(trainers, "broadcast", retries=1).publish(1, engines)
    assert "published again" not in caplog.text  # trying again would be pointless
    assert_untouched(engines[1:], plain[1:])


def test_nothing_of_an_attempt_stays_in_the_store(
    trainers: list[Remote[Trainer]], engines: list[Remote[Engine]], plain: list[dict[str, Tensor]], using: Using
) -> None:
    publisher = using(trainers, "broadcast")
    store, _ = publisher._store()
    publisher.publish(1, engines)
    using(trainers, "cuda_ipc").publish(2, engines)
    engines[0].call(Engine.inject, "raise").result()
    with pytest.raises(MemoryError):
        using(trainers, "broadcast").publish(3, engines)
    assert not [key for key in store.list_keys() if key.startswith("publication")]


def test_an_engine_that_dies_is_named_and_can_be_replaced(
    cluster: Cluster,
    trainers: list[Remote[Trainer]],
    engines: list[Remote[Engine]],
    plain: list[dict[str, Tensor]],
    using: Using,
) -> None:
    assert_death_is_named(trainers, engines, plain, using, "broadcast")
    engines[1] = cluster.start("rollout-1", Engine)
    using(trainers, "broadcast").publish(2, engines)
    assert versions(engines) == [2, 2]
    assert_published(trainers[0], engines)


def assert_death_is_named(
    trainers: list[Remote[Trainer]],
    engines: list[Remote[Engine]],
    before: list[dict[str, Tensor]],
    using: Using,
    transport: Transport,
) -> None:
    """Of the second engine, while the first keeps what it has."""
    engines[1].call(Engine.inject, "die").result()
    began = time.monotonic()
    with pytest.raises(WorkerDied, match=r"rollout-1 .*SIGKILL"):
        using(trainers, transport, timeout_s=60).publish(1, engines)
    assert time.monotonic() - began < 20
    assert_untouched(engines[:1], before[:1])


# ---------------------------------------------------------------------------------------------- several ranks


@pytest.fixture(scope="module")
def ranks(cluster: Cluster, trainers: list[Remote[Trainer]]) -> list[Remote[Trainer]]:
    """Two of them; who joins them parts them, too."""
    return [trainers[0], cluster.start("actor-1", partial(Trainer, "full", 1))]


@contextmanager
def sharded(ranks: Sequence[Remote[Trainer]]) -> Iterator[None]:
    """One module over both ranks, inside."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    gather(ranks, become, [(partial(Trainer, "full", rank),) for rank in (0, 1)])
    gather(ranks, Trainer.join, [(store.port, rank, 2) for rank in (0, 1)])
    gather(ranks, Trainer.shard, [()] * 2)
    yield
    wait([rank.call(Trainer.part) for rank in ranks])  # also if one of them is dead


def test_sharded_trainers(ranks: list[Remote[Trainer]], engines: list[Remote[Engine]], using: Using) -> None:
    """Two FSDP ranks: buckets are gathered by both, whoever sends, and a failure leaves neither of them hanging."""
    expected = Trainer("full").values()
    gather(engines, become, [(partial(Engine),)] * 2)
    with sharded(ranks):
        for version, transport in enumerate(TRANSPORTS, start=1):
            engines[0].call(Engine.inject, "raise").result()
            with pytest.raises(MemoryError):
                using(ranks, transport).publish(9, engines)
            using(ranks, transport).publish(version, engines)
            assert versions(engines) == [version, version]
            for engine in engines:
                got = engine.call(Engine.weights).result()
                assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize("transport", ["broadcast", "object_store"])
def test_a_rank_that_fails_is_the_error_although_another_waits_for_it(
    ranks: list[Remote[Trainer]],
    engines: list[Remote[Engine]],
    plain: list[dict[str, Tensor]],
    using: Using,
    transport: Transport,
) -> None:
    """As rank 0 does in a collective that rank 1 has left, until the ranks' own time is up."""
    gather(ranks, become, [(partial(Trainer, "full", rank),) for rank in (0, 1)])
    gather(ranks, Trainer.inject, [("hang",), ("raise",)])
    began = time.monotonic()
    with pytest.raises(MemoryError, match="no room for bucket 1") as caught:
        using(ranks, transport, grace_s=0.5).publish(1, engines)
    assert time.monotonic() - began < 2
    assert any(note.startswith("Then actor-0") for note in caught.value.__notes__)
    assert_untouched(engines, plain)
    ranks[0].call(Trainer.inject, "").result()
    assert time.monotonic() - began < 8  # rank 0 has given up, too, once it could


@pytest.mark.parametrize("transport", ["broadcast", "object_store"])
def test_a_rank_that_dies_is_named_and_no_engine_has_changed(
    cluster: Cluster,
    ranks: list[Remote[Trainer]],
    engines: list[Remote[Engine]],
    plain: list[dict[str, Tensor]],
    using: Using,
    transport: Transport,
) -> None:
    if transport == "object_store":
        ranks[1] = cluster.start("actor-1", partial(Trainer, "full", 1))
    with sharded(ranks):
        ranks[1].call(Trainer.inject, "die").result()
        began = time.monotonic()
        with pytest.raises(WorkerDied, match=r"actor-1 .*SIGKILL"):
            using(ranks, transport, timeout_s=60).publish(1, engines)
        assert time.monotonic() - began < 10
    assert_untouched(engines, plain)


def test_an_engine_that_dies_is_named_by_signals_alone(
    trainers: list[Remote[Trainer]], engines: list[Remote[Engine]], plain: list[dict[str, Tensor]], using: Using
) -> None:
    assert_death_is_named(trainers, engines, plain, using, "cuda_ipc")


# ---------------------------------------------------------------------------------------------- in this process


def test_the_root_of_several_errors() -> None:
    died, real = WorkerDied("actor-1", "was killed"), KeyError("weight")
    lost = RuntimeError("[gloo] Connection closed by peer")
    late, told = TransferError("bucket 2 was not taken"), AbortedError("given up")
    errors: list[BaseException] = [told, late, lost, real, died]
    while errors:
        assert root_of(errors) is errors.pop()
    assert root_of([]) is None


def test_a_long_stream_is_one_answer() -> None:
    """More items than Python's stack has room for calls."""
    assert [light for light, _ in collected(LazyStream((i, None) for i in range(3000))).result()] == list(range(3000))

    def failing() -> Iterator[tuple[int, None]]:
        yield 0, None
        raise KeyError("bucket 1")

    with pytest.raises(KeyError, match="bucket 1"):
        collected(LazyStream(failing())).result()
