"""How far generation may run ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowrl.trainers.feed import Pace


@given(st.integers(1, 8), st.integers(0, 3), st.lists(st.sampled_from(["submit", "train", "evict"]), max_size=60))
def test_no_group_is_submitted_that_would_be_too_old_when_it_is_used(batch: int, lead: int, events: list[str]) -> None:
    """Groups that are not given up are used in the order of submission, `batch` a cycle."""
    pace = Pace(batch, lead, total_cycles=100)
    waiting: list[int] = []  # for every group that is not given up: the cycle in which it was submitted
    submitted = evicted = cycles = 0
    for event in events:
        if event == "submit" and pace.allowance(submitted, evicted, cycles):
            waiting.append(cycles)
            submitted += 1
            used_in = cycles + (len(waiting) - 1) // batch
            assert used_in - cycles <= lead
        elif event == "train" and len(waiting) >= batch:
            ages = [cycles - born for born in waiting[:batch]]
            assert max(ages) <= lead
            del waiting[:batch]
            cycles += 1
        elif event == "evict" and waiting:
            waiting.pop()
            evicted += 1
    assert pace.allowance(submitted, evicted, cycles) == max(0, (1 + lead) * batch - len(waiting))


def test_nothing_is_submitted_that_no_cycle_would_use() -> None:
    pace = Pace(4, lead=2, total_cycles=3)
    assert pace.allowance(0, 0, 0) == 12
    assert pace.allowance(12, 0, 1) == 0
    assert pace.allowance(12, 2, 2) == 2, "those that were given up are replaced"
