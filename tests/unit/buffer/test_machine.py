"""Nothing is lost, doubled or split: random interleavings against a model of one dictionary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from flowrl.buffer.accounting import AccountingError
from flowrl.buffer.replay import ReplayBuffer
from tests.unit.buffer.conftest import MakeBuffer
from tests.unit.buffer.support import group, ordinals, scored

OUT = "out"
STEPS = {  # call: from which states, to which
    "begin": (("pending",), "running"),
    "put": (("pending", "running"), "finished"),
    "fail": (("pending", "running"), "failed"),
    "retry": (("failed",), "pending"),
    "release": (("taken",), "finished"),
    "trained": (("taken",), OUT),
    "evict": (("pending", "running", "finished", "failed", "taken"), OUT),
}


class Interleaving(RuleBasedStateMachine):
    """The model: `states` of all groups ever submitted, by ordinal."""

    def __init__(self, make_buffer: MakeBuffer) -> None:
        super().__init__()
        self.make_buffer = make_buffer
        self.buffer: ReplayBuffer = make_buffer()
        self.states: dict[int, str] = {}
        self.versions: dict[int, int] = {}
        self.retries: Counter[int] = Counter()
        self.trained: list[int] = []
        self.evicted: Counter[str] = Counter()
        self.restored = 0

    def having(self, *states: str) -> list[int]:
        return [ordinal for ordinal, state in self.states.items() if state in states]

    def act(self, call: str, ordinal: int, version: int) -> Callable[[], object]:
        reason = "stale" if version % 2 else "failed"
        return {
            "begin": lambda: self.buffer.begin(ordinal),
            "put": lambda: self.buffer.put(scored(ordinal, version)),
            "fail": lambda: self.buffer.fail(ordinal, reason),
            "retry": lambda: self.buffer.retry(ordinal),
            "release": lambda: self.buffer.release([ordinal]),
            "trained": lambda: self.buffer.trained([ordinal]),
            "evict": lambda: self.buffer.evict(ordinal, reason),
        }[call]

    def done(self, call: str, ordinal: int, version: int) -> None:
        self.states[ordinal] = STEPS[call][1]
        if call == "put":
            self.versions[ordinal] = version
        self.retries[ordinal] += call == "retry"
        self.trained += [ordinal] * (call == "trained")
        self.evicted["stale" if version % 2 else "failed"] += call == "evict"

    @rule(count=st.integers(0, 4), gap=st.integers(1, 2))
    def submit(self, count: int, gap: int) -> None:
        first = max(self.states, default=-1) + gap
        self.buffer.submit([group(ordinal) for ordinal in range(first, first + count)])
        self.states |= dict.fromkeys(range(first, first + count), "pending")

    @precondition(lambda self: self.having(*STEPS["evict"][0]))
    @rule(data=st.data(), version=st.integers(0, 5))
    def step(self, data: st.DataObject, version: int) -> None:
        """Of a group in flight, whatever it may do next; evictions are rare."""
        ordinal = data.draw(st.sampled_from(self.having(*STEPS["evict"][0])))
        may = [call for call, (states, _) in STEPS.items() if self.states[ordinal] in states and call != "evict"]
        call = data.draw(st.sampled_from([*may, *may, "evict"]))
        self.act(call, ordinal, version)()
        self.done(call, ordinal, version)

    @precondition(lambda self: self.states)
    @rule(data=st.data(), call=st.sampled_from(sorted(STEPS)), version=st.integers(0, 5))
    def step_or_be_refused(self, data: st.DataObject, call: str, version: int) -> None:
        """Of any group, known or not, anything: what does not fit raises and changes nothing."""
        ordinal = data.draw(st.sampled_from([*self.states, max(self.states) + 1]))
        if self.states.get(ordinal, OUT) in STEPS[call][0]:
            self.act(call, ordinal, version)()
            self.done(call, ordinal, version)
        else:
            with pytest.raises(AccountingError):
                self.act(call, ordinal, version)()

    @rule(count=st.integers(0, 3))
    def take(self, count: int) -> None:
        finished = sorted(self.having("finished"))
        if len(finished) < count:
            with pytest.raises(TimeoutError):
                self.buffer.take(count, timeout_s=0)
            return
        taken = self.buffer.take(count, timeout_s=0)
        assert ordinals(taken) == finished[:count]
        for each in taken:
            ordinal = each.sampled.group.ordinal
            assert each.sampled.sampling.policy_version == self.versions[ordinal]
            assert each.sampled.drawn.fetch()["ordinal"] == ordinal
            self.states[ordinal] = "taken"

    @precondition(lambda self: self.having("taken"))
    @rule(data=st.data(), call=st.sampled_from(["trained", "release"]))
    def many_at_once(self, data: st.DataObject, call: str) -> None:
        """All or, if one of them is not taken, none."""
        some = data.draw(st.lists(st.sampled_from(self.having("taken", "finished")), unique=True))
        act = self.buffer.trained if call == "trained" else self.buffer.release
        if any(self.states[ordinal] == "finished" for ordinal in some):
            with pytest.raises(AccountingError):
                act(some)
            return
        act(some)
        for ordinal in some:
            self.done(call, ordinal, 0)

    @rule()
    def crash_and_resume(self) -> None:
        saved = json.dumps(self.buffer.state_dict())
        self.buffer = self.make_buffer()
        self.buffer.load_state_dict(json.loads(saved))
        lost = self.having("pending", "running", "finished", "taken")
        self.states |= dict.fromkeys(lost, "pending")
        self.restored += len(lost)
        assert [each.ordinal for each in self.buffer.pending()] == sorted(lost)
        assert self.buffer.pending() == [group(ordinal) for ordinal in sorted(lost)]

    @invariant()
    def closes(self) -> None:
        balance = self.buffer.accounting()
        assert balance.submitted == len(self.states)
        assert balance.submitted == balance.trained + balance.num_evicted + balance.num_in_flight
        assert balance.trained == len(self.trained) == len(set(self.trained))
        assert Counter(balance.evicted) == self.evicted
        assert {s: n for s, n in balance.in_flight.items() if n} == Counter(self.states[o] for o in self.states) - (
            Counter({OUT: len(self.having(OUT))})
        )
        assert balance.restored == self.restored
        assert (balance.num_bytes > 0) == bool(self.having("finished", "taken"))

    @invariant()
    def knows_the_failed(self) -> None:
        failed = {ordinal: times for ordinal, (_, times) in self.buffer.failed().items()}
        assert failed == {ordinal: self.retries[ordinal] for ordinal in self.having("failed")}


def test_any_interleaving(make_buffer: MakeBuffer, request: pytest.FixtureRequest) -> None:
    num_examples = 100 if "memory" in request.node.name else 10
    run_state_machine_as_test(
        lambda: Interleaving(make_buffer),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
