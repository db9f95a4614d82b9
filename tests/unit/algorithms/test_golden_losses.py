"""Losses against the numbers of the published implementations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from flowrl.algorithms.base import Transitions
from flowrl.algorithms.diffusion_nft import DiffusionNFT, NoisedSamples
from flowrl.algorithms.flow_grpo import FlowGRPO
from flowrl.algorithms.grpo_guard import GRPOGuard
from flowrl.flow.dynamics.base import Dynamics, Transition
from tests.support.golden import Golden, load, load_json


@dataclass(frozen=True)
class Given(Dynamics):
    """Dynamics whose mean is the velocity and whose log-probability is given: the golden inputs of a loss."""

    std: Tensor
    dt: Tensor
    new_log_prob: Tensor

    def transition(self, sample: Tensor, velocity: Tensor, sigmas: Tensor, step_index: int | Tensor) -> Transition:
        return Transition(mean=velocity, std=self.std, dt=self.dt)

    def log_prob(self, next_sample: Tensor, transition: Transition) -> Tensor:
        return self.new_log_prob


def transitions(
    dynamics: Given, advantages: Tensor, old_log_prob: Tensor, old: Tensor, reference: Tensor
) -> Transitions:
    rows = torch.arange(len(advantages))
    return Transitions(
        condition_rows=rows,
        group_ids=rows,
        advantages=advantages,
        sample=torch.zeros_like(old),
        next_sample=torch.zeros_like(old),
        step_index=torch.zeros_like(rows),
        old_log_prob=old_log_prob,
        old_mean=old,
        reference_velocity=reference,
        sigmas=torch.ones(2),
        dynamics=dynamics,
    )


@pytest.mark.parametrize(("prefix", "tolerance"), [("f64_", 1e-10), ("", 1e-5)])
def test_flow_grpo_loss_and_gradients(prefix: str, tolerance: float) -> None:
    """Clipped surrogate plus flow_grpo's KL, and its gradients, for three steps, through the algorithm itself."""
    golden = load("grpo_loss_kl")
    meta = golden.metadata
    algorithm = FlowGRPO(
        clip_range=meta["clip_range"], kl_coef=meta["kl_beta"], adv_clip_max=meta["adv_clip_max"], kl="flow_grpo"
    )
    dtype = torch.float64 if prefix else torch.float32
    for step in range(golden["loss"].numel()):
        log_prob = golden["new_log_probs"][:, step].to(dtype).requires_grad_()
        mean = golden["prev_sample_mean"][:, step].to(dtype).requires_grad_()
        root = golden["sqrt_neg_dt"][step].double().expand(len(mean))
        dynamics = Given(golden["std_dev_t"][step].double() * root, -root.square(), log_prob)
        reference = golden["prev_sample_mean_ref"][:, step].to(dtype)
        old_log_prob = golden["old_log_probs"][:, step].to(dtype)
        batch = transitions(dynamics, golden["advantages"].to(dtype), old_log_prob, reference, reference)
        loss = algorithm.loss(batch, lambda sample, sigma, rows, v=mean: v)
        loss.terms.mean().backward()
        found = {
            "ratio": loss.spreads["ratio"],
            "kl_loss": loss.means["kl"].mean(),
            "loss": loss.terms.mean().detach(),
            "grad_log_prob": log_prob.grad,
            "grad_prev_sample_mean": mean.grad,
        }
        for key, value in found.items():
            stored = golden[prefix + key]
            wanted = (stored[:, step] if stored.ndim > 1 else stored[step]).to(value)
            torch.testing.assert_close(value, wanted, atol=tolerance, rtol=tolerance, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize(("bias", "source"), [("batch", "flow_grpo"), ("sample", "verl_omni")])
def test_grpo_guard_loss_and_gradients(bias: str, source: str) -> None:
    """The mean bias per sample (verl-omni) and over the batch (flow_grpo), through the algorithm itself."""
    golden = load("grpo_guard")
    meta = golden.metadata
    algorithm = GRPOGuard(clip_range=meta["clip_range"], adv_clip_max=meta["adv_clip_max"], bias=bias)
    log_prob, mean = (golden[key].double().requires_grad_() for key in ("log_prob", "prev_sample_mean"))
    root = golden["sqrt_neg_dt"].double().expand(len(log_prob))
    dynamics = Given(golden["std_dev_t"].double() * root, -root.square(), log_prob)
    old = golden["old_prev_sample_mean"].double()
    batch = transitions(dynamics, golden["advantages"].double(), golden["old_log_prob"].double(), old, old)
    loss = algorithm.loss(replace(batch, reference_velocity=None), lambda sample, sigma, rows: mean)
    loss.terms.mean().backward()
    close = {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(loss.terms.mean().detach(), golden[f"f64_{source}_loss"].reshape(()), **close)
    torch.testing.assert_close(log_prob.grad, golden[f"f64_{source}_grad_log_prob"], **close)
    torch.testing.assert_close(mean.grad, golden[f"f64_{source}_grad_prev_sample_mean"], **close)
    if source == "flow_grpo":
        torch.testing.assert_close(loss.spreads["ratio"], golden["f64_flow_grpo_ratio"], atol=1e-12, rtol=0)


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
