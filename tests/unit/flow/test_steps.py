import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.flow.steps import All, Fixed, Fraction, Progressive, RandomChoice, Window
from tests.support.golden import load_json

WINDOWS = load_json("sde_windows")["windows"]


def published(prefix: str) -> list[str]:
    return [name for name in WINDOWS if name.startswith(prefix)]


def numbers(name: str, pattern: str) -> list[int]:
    match = re.search(pattern, name)
    assert match, name
    return [int(group) for group in match.groups()]


@pytest.mark.parametrize("name", published("verl_omni_progressive"))
def test_verl_omni_progressive(name):
    n, size, low, high, turn = numbers(name, r"_n(\d+)_size(\d+)_range\((\d+), (\d+)\)_ipg(\d+)")
    steps = Progressive(size=size, iters_per_group=turn, stride=size, low=low, high=high, tail="clamp", roll_back=False)
    chosen = {rollout: steps.choose(int(rollout), n) for rollout in WINDOWS[name]}
    assert chosen == {rollout: tuple(range(*window)) for rollout, window in WINDOWS[name].items()}
    assert steps.invalid(n) == []


@pytest.mark.parametrize("name", published("unirl_progressive"))
def test_unirl_progressive(name):
    n, size, overlap, turn = numbers(name, r"_n(\d+)_size(\d+)_overlap(\d+)_rollback\w+_ipw(\d+)")
    steps = Progressive(
        size=size,
        iters_per_group=turn,
        stride=size - overlap,
        high=n,
        tail="full",
        roll_back="rollbackTrue" in name,
    )
    chosen = {rollout: list(steps.choose(int(rollout), n)) for rollout in WINDOWS[name]}
    assert chosen == WINDOWS[name]


@pytest.mark.parametrize("name", published("verl_omni_random"))
def test_verl_omni_random(name):
    seed, n, size, low, high = numbers(name, r"_seed(\d+)_n(\d+)_size(\d+)_range\((\d+), (\d+)\)")
    steps = Window(size=size, low=low, high=high, seed=seed, draw="python")
    chosen = {rollout: steps.choose(int(rollout), n) for rollout in WINDOWS[name]}
    assert chosen == {rollout: tuple(range(*window)) for rollout, window in WINDOWS[name].items()}


@pytest.mark.parametrize("name", published("miles_sde_window"))
def test_miles(name):
    n, size, low, high = numbers(name, r"_n(\d+)_size(\d+)_range\((\d+), (\d+)\)")
    for seed, window in WINDOWS[name].items():
        steps = Window(size=size, low=low, high=high, seed=int(seed), draw="numpy")
        assert list(steps.choose(0, n)) == window


def test_every_published_window_is_covered():
    prefixes = ("verl_omni_progressive", "verl_omni_random", "unirl_progressive", "miles_sde_window")
    assert all(name.startswith(prefixes) for name in WINDOWS)


def test_mixgrpo():
    """25 steps: one step on every 25 rollouts, cut off at step 23, then back to the start (arXiv 2507.21802)."""
    steps = Progressive(size=4, iters_per_group=25, stride=1, high=23)
    assert steps.choose(0, 25) == steps.choose(24, 25) == (0, 1, 2, 3)
    assert steps.choose(25, 25) == (1, 2, 3, 4)
    assert steps.choose(20 * 25, 25) == (20, 21, 22)
    assert steps.choose(22 * 25, 25) == (22,)
    assert steps.choose(23 * 25, 25) == (0, 1, 2, 3)


def test_random_choice_is_numpys():
    assert RandomChoice(num_steps=3, pool=[1, 2, 3, 4, 5]).choose(0, 12) == (3, 4, 5)
    draws = {RandomChoice(num_steps=2, pool=[1, 3, 5]).choose(rollout, 8) for rollout in range(50)}
    assert draws == {(1, 3), (1, 5), (3, 5)}


@pytest.mark.parametrize(
    ("steps", "num_steps", "expected"),
    [
        (Fraction(low=0.0, high=0.5, num_steps=3), 12, (0, 2, 4)),
        (Fraction(low=0.0, high=1.0, num_steps=4), 10, (0, 2, 5, 7)),
        (Fraction(low=0.7, high=1.0, num_steps=3), 10, (7, 8, 9)),
        (Fraction(low=0.29, high=0.3, num_steps=1), 100, (29,)),
        (Fixed(steps=[5, 1, 3, 1]), 10, (1, 3, 5)),
        (All(), 4, (0, 1, 2)),
        (All(include_last=True), 4, (0, 1, 2, 3)),
        (Window(size=3), 4, (0, 1, 2)),
    ],
    ids=str,
)
def test_fixed_choices(steps, num_steps, expected):
    assert steps.choose(0, num_steps) == steps.choose(7, num_steps) == expected
    assert steps.invalid(num_steps) == []


@pytest.mark.parametrize("draw", ["python", "numpy"])
def test_windows_start_everywhere_and_nowhere_else(draw):
    steps = Window(size=3, low=1, high=7, draw=draw)
    starts = [steps.choose(rollout, 10)[0] for rollout in range(2000)]
    assert sorted(set(starts)) == [1, 2, 3, 4]
    assert all(400 < starts.count(start) < 600 for start in range(1, 5))


STRATEGIES = st.one_of(
    st.builds(All, include_last=st.booleans()),
    st.builds(
        Window,
        size=st.integers(1, 6),
        low=st.integers(0, 6),
        high=st.none() | st.integers(0, 14),
        seed=st.integers(0, 99),
        draw=st.sampled_from(["python", "numpy"]),
    ),
    st.builds(
        Progressive,
        size=st.integers(1, 6),
        iters_per_group=st.integers(1, 5),
        stride=st.integers(1, 6),
        low=st.integers(0, 6),
        high=st.none() | st.integers(0, 14),
        tail=st.sampled_from(["full", "clamp", "truncate"]),
        roll_back=st.booleans(),
    ),
    st.builds(RandomChoice, num_steps=st.integers(0, 6), pool=st.lists(st.integers(-1, 14), max_size=6)),
    st.builds(Fixed, steps=st.lists(st.integers(-1, 14), max_size=6)),
    st.builds(Fraction, low=st.floats(0, 0.5), high=st.floats(0.51, 1), num_steps=st.integers(1, 12)),
)


@given(STRATEGIES, st.integers(0, 1000), st.integers(1, 12))
@settings(max_examples=400, deadline=None)
def test_without_problems_there_is_always_a_choice(steps, rollout_id, num_steps):
    if steps.invalid(num_steps):
        return
    random.seed(0)
    chosen = steps.choose(rollout_id, num_steps)
    random.seed(1)
    assert chosen == steps.choose(rollout_id, num_steps)
    assert chosen and list(chosen) == sorted(set(chosen))
    assert chosen[0] >= 0 and chosen[-1] < num_steps


@pytest.mark.parametrize(
    ("steps", "num_steps", "message"),
    [
        (All(), 1, "is empty"),
        (Fixed(steps=[]), 10, "is empty"),
        (Fixed(steps=[3, 10]), 10, r"names \[10\], but the steps are 0..9"),
        (Window(size=5), 5, "needs 5 steps from 0 on, but there are 4 below 4"),
        (Window(size=2, high=11), 10, "reaches step 10, but the last of 10 steps is 9"),
        (Progressive(size=4, low=8), 10, "needs 4 steps from 8 on, but there are 1 below 9"),
        (RandomChoice(num_steps=4, pool=[1, 2, 3]), 10, "must draw between 1 and 3 steps"),
        (RandomChoice(num_steps=1, pool=[]), 10, "is empty"),
        (RandomChoice(num_steps=1, pool=[2, 2]), 10, "names a step of its pool twice"),
        (Fraction(low=0.0, high=0.5, num_steps=7), 12, "asks for 7 steps, but that part of 12 steps has 6"),
    ],
    ids=str,
)
def test_invalid(steps, num_steps, message):
    assert any(re.search(message, reason) for reason in steps.invalid(num_steps))


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Window(size=0), "Window.size"),
        (lambda: Window(draw="torch"), "Window.draw"),
        (lambda: Progressive(stride=0), "Progressive.stride"),
        (lambda: Progressive(tail="wrap"), "Progressive.tail"),
        (lambda: Fraction(low=0.5, high=0.5), "Fraction.high"),
        (lambda: Fraction(low=-0.1), "Fraction.low"),
    ],
)
def test_out_of_range_is_refused_by_name(build, field):
    with pytest.raises(ValueError, match=field):
        build()
