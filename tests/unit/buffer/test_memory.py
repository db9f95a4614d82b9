"""Nothing is lost: submitted = trained + evicted + in flight, whatever happens in whatever order."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flowrl.buffer.memory import AccountingError, MemoryBuffer
from flowrl.prompts import Prompt
from flowrl.types import Group, InMemory, SampledGroup, Sampling, ScoredGroup


def group(ordinal: int) -> Group:
    return Group(ordinal, Prompt(str(ordinal), "text"), 0, 2)


def scored(ordinal: int) -> ScoredGroup:
    """The buffer looks at nothing but the group."""
    return ScoredGroup(SampledGroup(group(ordinal), None, cast("Sampling", None), InMemory(None)), {})


class Interleaving(RuleBasedStateMachine):
    """Random submits, puts, evictions and takes against a model of three sets."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = MemoryBuffer()
        self.next_ordinal = 0
        self.pending: set[int] = set()
        self.finished: set[int] = set()
        self.trained: list[int] = []
        self.evicted: list[int] = []

    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        ordinals = range(self.next_ordinal, self.next_ordinal + count)
        self.next_ordinal += count
        self.buffer.submit([group(ordinal) for ordinal in ordinals])
        self.pending |= set(ordinals)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.pending)))
        self.buffer.put(scored(ordinal))
        self.pending.remove(ordinal)
        self.finished.add(ordinal)

    @precondition(lambda self: self.pending | self.finished)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.pending | self.finished)))
        self.buffer.evict(ordinal, "failed")
        self.pending.discard(ordinal)
        self.finished.discard(ordinal)
        self.evicted.append(ordinal)

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        if len(self.finished) < count:
            with pytest.raises(AccountingError):
                self.buffer.take(count)
            return
        taken = [s.sampled.group.ordinal for s in self.buffer.take(count)]
        assert taken == sorted(self.finished)[:count]
        self.finished -= set(taken)
        self.trained += taken

    @invariant()
    def closes(self) -> None:
        balance = self.buffer.accounting()
        assert balance.submitted == self.next_ordinal
        assert balance.trained == len(self.trained) == len(set(self.trained))
        assert sum(balance.evicted.values()) == len(self.evicted)
        assert balance.in_flight == len(self.pending) + len(self.finished)
        assert balance.submitted == balance.trained + sum(balance.evicted.values()) + balance.in_flight


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_misuse_is_an_error() -> None:
    buffer = MemoryBuffer()
    buffer.submit([group(1)])
    with pytest.raises(AccountingError, match="already in flight"):
        buffer.submit([group(1)])
    with pytest.raises(AccountingError, match="never submitted"):
        buffer.put(scored(2))
    buffer.put(scored(1))
    with pytest.raises(AccountingError, match="finished already"):
        buffer.put(scored(1))
    buffer.take(1)
    with pytest.raises(AccountingError, match="not in flight"):
        buffer.evict(1, "stale")
