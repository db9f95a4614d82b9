import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.flow.noise import Noise

KEYS = st.lists(st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=4)), max_size=4).map(tuple)


@given(st.lists(KEYS, min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_a_row_depends_on_its_key_alone(keys, order):
    noise = Noise.of(3, "rollout")
    shuffled = list(keys)
    order.shuffle(shuffled)
    together = noise.normal((2, 5), shuffled)
    for key, row in zip(shuffled, together, strict=True):
        assert torch.equal(noise.normal((2, 5), [key])[0], row)


@given(KEYS, KEYS)
@settings(max_examples=50, deadline=None)
def test_different_keys_draw_different_noise(a, b):
    rows = Noise.of(0).normal((4,), [a, b])
    assert torch.equal(rows[0], rows[1]) == (a == b)


@pytest.mark.parametrize(
    ("a", "b"), [(("ab", "c"), ("a", "bc")), ((1,), ("1",)), ((12, 3), (1, 23)), ((), ("",)), ((-1,), ("-1",))]
)
def test_keys_that_look_alike_do_not_collide(a, b):
    assert not torch.equal(*Noise.of(7).normal((4,), [a, b]))
    assert Noise.of(7).generator(*a).initial_seed() != Noise.of(7).generator(*b).initial_seed()


def test_children_are_longer_keys():
    noise = Noise.of(1, "train")
    direct = noise.normal((3,), [("epsilon", 4)])
    assert torch.equal(direct, noise.child("epsilon").normal((3,), [(4,)]))
    assert torch.equal(direct, Noise.of(1).child("train", "epsilon", 4).normal((3,), [()]))
    assert not torch.equal(direct, Noise.of(2, "train").normal((3,), [("epsilon", 4)]))


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = [Noise.of(5).normal((4,), [(1,)]), Noise.of(5).uniform((4,), [(1,)]), Noise.of(5).permutation(9, "x")]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    second = [Noise.of(5).normal((4,), [(1,)]), Noise.of(5).uniform((4,), [(1,)]), Noise.of(5).permutation(9, "x")]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_are_independent_standard_normals():
    rows = Noise.of(0, "statistics").normal((1000,), [(i,) for i in range(400)])
    assert rows.dtype == torch.float32 and rows.shape == (400, 1000)
    assert abs(rows.mean()) < 5 / math.sqrt(rows.numel())
    assert abs(rows.var() - 1) < 5 * math.sqrt(2 / rows.numel())
    correlation = torch.corrcoef(rows) - torch.eye(400)
    assert correlation.abs().max() < 6 / math.sqrt(1000)


def test_uniform_and_permutation():
    draws = Noise.of(0).uniform((500,), [(i,) for i in range(20)])
    assert draws.min() >= 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.02
    order = Noise.of(0).permutation(10, "time", 3)
    assert order.dtype == torch.int64 and sorted(order.tolist()) == list(range(10))
    assert not torch.equal(order, Noise.of(0).permutation(10, "time", 4))


def test_no_rows_and_scalar_rows():
    assert Noise.of(0).normal((3, 2), []).shape == (0, 3, 2)
    assert Noise.of(0).normal((), [(1,), (2,)]).shape == (2,)


def test_the_stream_does_not_change():
    # resumed runs and shared seeds depend on it
    row = Noise.of(0, "rollout").normal((3,), [(1, 2, 3)])[0]
    torch.testing.assert_close(
        row, torch.tensor([0.5637533068656921, -0.3626433312892914, -0.4140284061431885]), rtol=0, atol=0
    )
