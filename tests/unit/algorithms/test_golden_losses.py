"""Losses against the numbers of the published implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flowrl.algorithms.base import clipped_surrogate
from flowrl.algorithms.diffusion_nft import DiffusionNFT, NoisedSamples
from flowrl.algorithms.grpo_guard import regulated_log_ratio
from flowrl.flow.dynamics.base import Transition
from flowrl.flow.kl import kl_divergence
from tests.support.golden import Golden, load, load_json


@pytest.mark.parametrize(("prefix", "tolerance"), [("f64_", 1e-10), ("", 1e-5)])
def test_flow_grpo_loss_and_gradients(prefix: str, tolerance: float) -> None:
    """Clipped surrogate plus flow_grpo's KL, and its gradients, for three steps."""
    golden = load("grpo_loss_kl")
    clip, beta, bound = (golden.metadata[key] for key in ("clip_range", "kl_beta", "adv_clip_max"))
    dtype = torch.float64 if prefix else torch.float32
    for step in range(golden["loss"].numel()):
        log_prob = golden["new_log_probs"][:, step].to(dtype).requires_grad_()
        mean = golden["prev_sample_mean"][:, step].to(dtype).requires_grad_()
        advantages = golden["advantages"].to(dtype).clamp(-bound, bound)
        ratio = (log_prob - golden["old_log_probs"][:, step].to(dtype)).exp()
        policy = clipped_surrogate(ratio, advantages, clip, clip).mean()
        root = golden["sqrt_neg_dt"][step].double().expand(len(mean))
        std = golden["std_dev_t"][step].double() * root
        transition = Transition(mean=mean, std=std, dt=-root.square())
        reference = replace(transition, mean=golden["prev_sample_mean_ref"][:, step].to(dtype))
        kl = kl_divergence("flow_grpo", transition, reference, mean, mean).mean()
        loss = policy + beta * kl
        loss.backward()
        expected = {
            "ratio": ratio.detach(),
            "policy_loss": policy.detach(),
            "kl_loss": kl.detach(),
            "loss": loss.detach(),
            "grad_log_prob": log_prob.grad,
            "grad_prev_sample_mean": mean.grad,
        }
        for key, value in expected.items():
            per_sample = golden[prefix + key].ndim > 1
            wanted = golden[prefix + key][:, step] if per_sample else golden[prefix + key][step]
            torch.testing.assert_close(
                value, wanted.to(value), atol=tolerance, rtol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize(("bias", "source"), [("batch", "flow_grpo"), ("sample", "verl_omni")])
def test_grpo_guard_loss_and_gradients(bias: str, source: str) -> None:
    """The mean bias per sample (verl-omni) and over the batch (flow_grpo)."""
    golden = load("grpo_guard")
    clip, bound = golden.metadata["clip_range"], golden.metadata["adv_clip_max"]
    log_prob, mean = (golden[key].double().requires_grad_() for key in ("log_prob", "prev_sample_mean"))
    root = golden["sqrt_neg_dt"].double()
    std = (golden["std_dev_t"].double() * root).expand(len(log_prob))
    old_mean = golden["old_prev_sample_mean"].double()
    change = log_prob - golden["old_log_prob"].double()
    ratio = regulated_log_ratio(change, mean, old_mean, std, bias).exp()
    advantages = golden["advantages"].double().clamp(-bound, bound)
    loss = (clipped_surrogate(ratio, advantages, clip, clip) / root.square()).mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), golden[f"f64_{source}_loss"].reshape(()), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(log_prob.grad, golden[f"f64_{source}_grad_log_prob"], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(mean.grad, golden[f"f64_{source}_grad_prev_sample_mean"], atol=1e-10, rtol=1e-10)
    if source == "flow_grpo":
        torch.testing.assert_close(ratio.detach(), golden["f64_flow_grpo_ratio"], atol=1e-12, rtol=0)


def nft_batch(golden: Golden, dtype: torch.dtype) -> NoisedSamples:
    """One training row per sample."""
    rows = torch.arange(len(golden["advantages"]))
    return NoisedSamples(
        condition_rows=rows,
        group_ids=rows,
        advantages=golden["advantages"].double(),
        clean=golden["x0"].to(dtype),
        noised=golden["xt"].to(dtype),
        time=golden["t"].to(dtype),
        old_velocity=golden["old_prediction"].to(dtype),
        reference_velocity=golden["ref_forward_prediction"].to(dtype),
    )


@pytest.mark.parametrize("name", ["nft_loss_beta0", "nft_loss_beta1"])
@pytest.mark.parametrize(("prefix", "tolerance"), [("f64_", 1e-10), ("", 1e-5)])
def test_nft_loss_and_gradient(name: str, prefix: str, tolerance: float) -> None:
    """The whole loss of a row, through the algorithm itself."""
    golden = load(name)
    meta = golden.metadata
    algorithm = DiffusionNFT(beta=meta["beta"], kl_coef=meta["kl_coef"], adv_clip_max=meta["adv_clip_max"])
    dtype = torch.float64 if prefix else torch.float32
    v = golden["forward_prediction"].to(dtype).requires_grad_()

    def velocity(sample: Tensor, sigma: Tensor, condition_rows: Tensor) -> Tensor:
        return v

    loss = algorithm.loss(nft_batch(golden, dtype), velocity)
    loss.terms.mean().backward()
    wanted = golden[f"{prefix}total_loss"].reshape(())
    torch.testing.assert_close(loss.terms.mean().detach(), wanted.double(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        v.grad, golden[f"{prefix}grad_forward_prediction"].to(dtype), atol=tolerance, rtol=tolerance
    )
    kl = golden[f"{prefix}kl_div_loss"].reshape(()).double()
    torch.testing.assert_close(loss.means["kl"].mean(), kl, atol=tolerance, rtol=tolerance)


def test_nft_advantage_modes() -> None:
    """r and the policy loss in the five modes, on the tensors of nft_loss_beta0."""
    golden, modes = load("nft_loss_beta0"), load_json("nft_adv_modes")
    modes = modes.get("modes", modes)
    batch = nft_batch(golden, torch.float64)

    def velocity(sample: Tensor, sigma: Tensor, condition_rows: Tensor) -> Tensor:
        return golden["forward_prediction"].double()

    checked = 0
    for mode, expected in modes.items():
        if not isinstance(expected, dict) or "r" not in expected:
            continue
        algorithm = DiffusionNFT(
            beta=golden.metadata["beta"], adv_mode=mode, adv_clip_max=golden.metadata["adv_clip_max"], kl_coef=0.0
        )
        r = algorithm.optimality(batch.advantages)
        torch.testing.assert_close(r, torch.tensor(expected["r"], dtype=torch.float64), atol=1e-6, rtol=0)
        policy = algorithm.loss(batch, velocity).means["policy_loss"].mean()
        wanted = torch.tensor(expected["policy_loss"], dtype=torch.float64).reshape(())
        torch.testing.assert_close(policy, wanted, atol=1e-5, rtol=1e-5)
        checked += 1
    assert checked == 5
