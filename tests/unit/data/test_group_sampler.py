"""The stream of groups: every prompt once an epoch, ordinals never reused, one integer of state."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data.group_sampler import GroupSampler, fixed_groups
from flowrl.prompts import Prompt


def prompts(*names: str) -> list[Prompt]:
    return [Prompt(id=name, text=name) for name in names]


def sampler(num_prompts: int = 5, batch_size: int = 2, seed: int = 0) -> GroupSampler:
    return GroupSampler(prompts(*map(str, range(num_prompts))), batch_size, num_samples=3, seed=seed)


def drawn(stream: GroupSampler, num_batches: int) -> list[str]:
    return [group.prompt.id for _ in range(num_batches) for group in stream.next_batch()]


SIZES = st.integers(1, 12)


@given(num_prompts=SIZES, batch_size=SIZES, seed=st.integers(0, 2**40), num_batches=SIZES)
def test_epochs_ordinals_and_occurrences(num_prompts: int, batch_size: int, seed: int, num_batches: int) -> None:
    stream = sampler(num_prompts, batch_size, seed)
    batches = [stream.next_batch() for _ in range(num_batches)]
    groups = [group for batch in batches for group in batch]
    assert all(len(batch) == batch_size for batch in batches)
    assert [group.ordinal for group in groups] == list(range(len(groups)))
    for start in range(0, len(groups) - num_prompts + 1, num_prompts):
        assert len({group.prompt.id for group in groups[start : start + num_prompts]}) == num_prompts
    counts = Counter(group.prompt.id for group in groups)
    assert {(g.prompt.id, g.occurrence) for g in groups} == {(p, i) for p, n in counts.items() for i in range(n)}


@given(names=st.lists(st.sampled_from("abc"), min_size=1, max_size=6), sizes=st.lists(st.integers(1, 5), max_size=8))
def test_no_two_samples_share_an_id_however_they_are_taken(names: list[str], sizes: list[int]) -> None:
    """Batches, refills of other sizes, a resume in between: prompts that stand in the file twice too."""
    streams = [GroupSampler(prompts(*names), batch_size=3, num_samples=2, seed=1) for _ in range(2)]
    groups = []
    for size in sizes:
        groups += streams[0].next_batch() + streams[0].take(size)
        streams[1].load_state_dict(streams[0].state_dict())
        streams.reverse()
    assert len({group.sample_id(k) for group in groups for k in range(2)}) == 2 * len(groups)
    whole = GroupSampler(prompts(*names), batch_size=max(len(groups), 1), num_samples=2, seed=1).next_batch()
    assert groups == whole[: len(groups)]


@given(num_prompts=SIZES, batch_size=SIZES, before=st.integers(0, 6), after=st.integers(1, 6))
def test_resumed_streams_go_on(num_prompts: int, batch_size: int, before: int, after: int) -> None:
    whole = sampler(num_prompts, batch_size)
    drawn(whole, before)
    resumed = sampler(num_prompts, batch_size)
    resumed.load_state_dict(whole.state_dict())
    assert [whole.next_batch() for _ in range(after)] == [resumed.next_batch() for _ in range(after)]


def test_a_group_is_one_prompt_k_times_and_equal_prompts_stay_two_groups() -> None:
    (one, other) = GroupSampler(prompts("a", "a"), batch_size=2, num_samples=3, seed=0).next_batch()
    assert one.prompt == other.prompt and one.ordinal != other.ordinal
    assert [[group.sample_id(k) for k in range(3)] for group in sorted((one, other), key=lambda g: g.occurrence)] == [
        [f"a:0:{k}" for k in range(3)],
        [f"a:1:{k}" for k in range(3)],
    ]


def test_a_batch_that_an_epoch_cannot_fill_runs_on_into_the_next() -> None:
    ids = drawn(sampler(num_prompts=5, batch_size=3), 5)  # three epochs exactly
    epochs = [ids[start : start + 5] for start in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == [list("01234")] * 3
    assert len(set(map(tuple, epochs))) > 1


@pytest.mark.parametrize("before", [0, 4, 5, 6, 10])
def test_resuming_at_and_around_the_end_of_an_epoch(before: int) -> None:
    whole, resumed = sampler(num_prompts=5, batch_size=1), sampler(num_prompts=5, batch_size=1)
    ids = drawn(whole, before)
    state = whole.state_dict()
    drawn(resumed, 7)  # wherever it stood
    resumed.load_state_dict(state)
    ids += drawn(resumed, 15 - before)
    assert ids == drawn(sampler(num_prompts=5, batch_size=1), 15)


def test_the_seed_orders_the_prompts_and_epochs_differ() -> None:
    assert drawn(sampler(50, 50), 1) == drawn(sampler(50, 50), 1)
    assert drawn(sampler(50, 50), 1) != drawn(sampler(50, 50, seed=1), 1)
    stream = sampler(50, 50)
    assert drawn(stream, 1) != drawn(stream, 1)


def test_the_batch_size_does_not_change_the_order() -> None:
    assert drawn(sampler(7, 3), 8) == drawn(sampler(7, 4), 6)


def test_groups_that_replace_others_are_the_next_of_the_stream() -> None:
    stream = sampler()
    assert [group.ordinal for group in stream.next_batch() + stream.take(3) + stream.next_batch()] == list(range(7))


def test_state_of_other_prompts_or_another_seed_is_refused() -> None:
    state = sampler().state_dict()
    with pytest.raises(ValueError, match=r"data\.seed"):
        sampler(seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"data\.train"):
        sampler(6).load_state_dict(state)


def test_a_stream_needs_prompts_and_sizes() -> None:
    with pytest.raises(ValueError, match="prompts"):
        sampler(num_prompts=0)
    with pytest.raises(ValueError, match="batch_size"):
        sampler(batch_size=0)


def test_fixed_groups_are_the_same_every_time() -> None:
    groups = fixed_groups(prompts("a", "b", "a"), 4)
    assert groups == fixed_groups(prompts("a", "b", "a"), 4)
    assert [(g.ordinal, g.prompt.id, g.occurrence, g.num_samples) for g in groups] == [
        (0, "a", 0, 4),
        (1, "b", 0, 4),
        (2, "a", 1, 4),
    ]
