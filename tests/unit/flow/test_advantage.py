import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowrl.flow.advantage import Advantages, best_and_worst, best_of_group, group_advantages
from tests.support.golden import load_json

GOLDEN = load_json("advantages")


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids_of(names: list) -> Tensor:
    return torch.tensor([sorted(set(names)).index(name) for name in names])


REWARDS, GROUPS = doubles(GOLDEN["inputs"]["rewards"]), ids_of(GOLDEN["inputs"]["prompts"])
ONE_GROUP = torch.zeros_like(GROUPS)
# repository: options; the tolerance is that of the dtype that the repository computes in
VERL_OMNI, UNIRL = {"unbiased": True}, {"unbiased": True, "eps": 1e-8}
VARIANTS = {
    "flow_grpo_group_std": (GROUPS, {"std": "group"}, 1e-12),
    "flow_grpo_global_std": (GROUPS, {"std": "batch"}, 1e-12),
    "flow_grpo_no_tracking": (ONE_GROUP, {"std": "batch"}, 1e-12),
    "verl_omni_group_std": (GROUPS, {"std": "group", **VERL_OMNI}, 1e-5),
    "verl_omni_global_std": (GROUPS, {"std": "batch", **VERL_OMNI}, 1e-5),
    "verl_omni_no_std": (GROUPS, {"std": "none"}, 1e-6),
    "unirl_group_std": (GROUPS, {"std": "group", **UNIRL}, 1e-5),
    "unirl_global_std": (GROUPS, {"std": "batch", **UNIRL}, 1e-5),
    "unirl_global_normalize": (ONE_GROUP, {"std": "batch", **UNIRL}, 1e-5),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_repositorys_advantages(name):
    groups, options, atol = VARIANTS[name]
    advantages = group_advantages(REWARDS, groups, **options)
    assert advantages.dtype == torch.float64
    torch.testing.assert_close(advantages, doubles(GOLDEN[name]), rtol=0, atol=atol)


def test_unirl_clips_afterwards():
    clipped = group_advantages(REWARDS, GROUPS, **UNIRL).clamp(-1, 1)
    torch.testing.assert_close(clipped, doubles(GOLDEN["unirl_group_std_clip1"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["dancegrpo_group", "dancegrpo_nogroup"])
def test_dancegrpo(name):
    golden = GOLDEN[name]
    rewards = doubles(golden["rewards"])
    groups = torch.arange(len(rewards)) // golden.get("num_generations", len(rewards))
    advantages = group_advantages(rewards, groups, unbiased=True, eps=1e-8)
    torch.testing.assert_close(advantages, doubles(golden["advantages"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("weighted_sum_global_std", {"combine": "raw", "std": "batch"}),
        ("weighted_sum_group_std", {"combine": "raw", "std": "group"}),
        ("gdpo", {"combine": "gdpo", "std": "group"}),
    ],
)
def test_flow_factory_with_two_rewards(name, options):
    golden = GOLDEN["flow_factory"]
    rewards = {component: doubles(golden[f"reward_{component}"]) for component in golden["weights"]}
    combine = Advantages(eps=0.0, floor=1e-6, **options)
    advantages = combine(rewards, golden["weights"], torch.tensor(golden["group_index"]))
    torch.testing.assert_close(advantages, doubles(golden[name]), rtol=0, atol=1e-10)


def test_flow_grpo_types():
    assert best_and_worst(REWARDS, GROUPS).tolist() == GOLDEN["flow_grpo_type_dpo"]
    assert best_of_group(REWARDS, GROUPS).tolist() == GOLDEN["flow_grpo_type_sft"]


def test_the_default_is_flow_grpos():
    assert torch.equal(group_advantages(REWARDS, GROUPS), group_advantages(REWARDS, GROUPS, "group", 1e-4, False, 0.0))
    values = REWARDS[GROUPS == 0].numpy()
    expected = (values - values.mean()) / (np.std(values) + 1e-4)
    np.testing.assert_allclose(group_advantages(REWARDS, GROUPS)[GROUPS == 0].numpy(), expected, rtol=1e-12)


COMBINATIONS = [(c, s) for c in ("weighted_sum", "raw") for s in ("group", "batch", "none")] + [("gdpo", "group")]


@pytest.mark.parametrize(("combine", "std"), COMBINATIONS)
@pytest.mark.parametrize("equal", [0.8, 0.1, 1 / 3, 1e-9, 1e9])
def test_a_group_of_equal_rewards_gets_exactly_nothing(equal, combine, std):
    rewards = doubles([equal] * 8 + [0.3, 0.9, 0.1, 0.2, 0.7])
    groups = torch.tensor([7] * 8 + [3] * 5)
    rewards = {"a": rewards, "b": 0.7 * rewards}
    advantages = Advantages(combine=combine, std=std)(rewards, {"a": 1.0, "b": 0.3}, groups)
    assert (advantages[:8] == 0).all() and (advantages[8:] != 0).all()


@pytest.mark.parametrize("std", ["batch", "none"])
def test_gdpo_divides_per_group(std):
    with pytest.raises(ValueError, match=r"Advantages\.std must be 'group' with combine=gdpo, got"):
        Advantages(combine="gdpo", std=std)


OPTIONS = st.fixed_dictionaries(
    {
        "std": st.sampled_from(["group", "batch", "none"]),
        "unbiased": st.booleans(),
        "eps": st.sampled_from([1e-8, 1e-4]),
        "floor": st.sampled_from([0.0, 1e-6]),
    }
)
BATCHES = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 4)), min_size=1, max_size=24)


@given(BATCHES, OPTIONS, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_neither_the_order_nor_the_names_of_groups_matter(batch, options, order):
    rewards, groups = doubles([r for r, _ in batch]), torch.tensor([g for _, g in batch])
    advantages = group_advantages(rewards, groups, **options)
    index = list(range(len(batch)))
    order.shuffle(index)
    # a permutation of the samples, and ids beyond float32's integers, which Flow-Factory's gather would mix up
    renamed = group_advantages(rewards[index], 2**40 - 7 * groups[index], **options)
    torch.testing.assert_close(renamed, advantages[index], rtol=1e-6, atol=1e-6)


@given(BATCHES, OPTIONS)
@settings(max_examples=60, deadline=None)
def test_advantages_are_finite_centred_and_zero_for_singletons(batch, options):
    rewards, groups = doubles([r for r, _ in batch]), torch.tensor([g for _, g in batch])
    advantages = group_advantages(rewards, groups, **options)
    assert advantages.isfinite().all()
    for group in groups.unique():
        members = advantages[groups == group]
        assert abs(float(members.mean())) < 1e-6
        if len(members) == 1:
            assert float(members) == 0


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(0.1, 10), st.floats(-5, 5))
@settings(max_examples=40, deadline=None)
def test_a_reward_of_another_scale_means_the_same(values, scale, offset):
    groups = torch.zeros(len(values), dtype=torch.int64)
    rewards = doubles(values)
    if rewards.std(correction=0) < 1e-3:
        return
    plain = group_advantages(rewards, groups, eps=0.0, floor=1e-9)
    moved = group_advantages(scale * rewards + offset, groups, eps=0.0, floor=1e-9)
    torch.testing.assert_close(moved, plain, rtol=1e-6, atol=1e-6)


def test_equal_rewards_are_zero_even_where_their_mean_is_not_exact():
    advantages = group_advantages(doubles([0.1] * 3), torch.zeros(3, dtype=torch.int64), eps=1e-8, unbiased=True)
    assert advantages.abs().max() < 1e-8


def test_floor_is_the_smallest_divisor():
    groups = torch.tensor([0, 0, 1, 1])
    advantages = group_advantages(doubles([1.0, 1.0 + 2e-8, 0.0, 2.0]), groups, eps=0.0, floor=1e-6)
    torch.testing.assert_close(advantages, doubles([-0.01, 0.01, -1.0, 1.0]), rtol=0, atol=1e-8)


def test_weighted_sum_counts_components_by_weight_not_by_scale():
    small, large = doubles([0.0, 1.0, 0.0, 1.0]), doubles([0.0, 0.0, 1000.0, 1000.0])
    groups, weights = torch.zeros(4, dtype=torch.int64), {"small": 2.0, "large": 1.0}
    combined = Advantages(eps=1e-9)({"small": small, "large": large}, weights, groups)
    torch.testing.assert_close(combined, doubles([-3.0, 1.0, -1.0, 3.0]), rtol=0, atol=1e-5)
    raw = Advantages(combine="raw", eps=1e-9)({"small": small, "large": large}, weights, groups)
    assert raw[2] > raw[1]


def test_one_component_is_the_same_in_every_combination():
    one, weights = {"ocr": REWARDS}, {"ocr": 1.0}
    expected = group_advantages(REWARDS, GROUPS)
    assert torch.equal(Advantages()(one, weights, GROUPS), expected)
    assert torch.equal(Advantages(combine="raw")(one, weights, GROUPS), expected)
    gdpo = Advantages(combine="gdpo")(one, weights, GROUPS)
    torch.testing.assert_close(gdpo, (expected - expected.mean()) / (expected.std(correction=0) + 1e-4))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="every reward must be finite"):
        group_advantages(doubles([0.0, value]), torch.zeros(2, dtype=torch.int64))


def test_errors():
    with pytest.raises(ValueError, match="std must be one of group, batch, none; got 'global'"):
        group_advantages(REWARDS, GROUPS, std="global")
    with pytest.raises(ValueError, match="eps and floor must not both be 0"):
        group_advantages(REWARDS, GROUPS, eps=0.0)
    with pytest.raises(ValueError, match=r"must both be \[B\]"):
        group_advantages(REWARDS[:, None], GROUPS)
    with pytest.raises(ValueError, match=r"same components: \['ocr'\], \['clip'\]"):
        Advantages()({"ocr": REWARDS}, {"clip": 1.0}, GROUPS)
    with pytest.raises(ValueError, match=r"Advantages.combine must be one of weighted_sum, raw, gdpo; got 'mean'"):
        Advantages(combine="mean")
    with pytest.raises(ValueError, match=r"Advantages.eps must be > 0 unless floor is"):
        Advantages(eps=0.0)
