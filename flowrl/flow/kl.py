"""Penalties that hold the policy near a reference. Repositories say "KL" for four things; each has its own name."""

from __future__ import annotations

from torch import Tensor

from flowrl.flow.checks import require_choice
from flowrl.flow.dynamics.base import Transition, mean_square

KL_FORMS = ("gaussian", "flow_grpo", "x", "v")


def kl_divergence(
    form: str, transition: Transition, reference: Transition, velocity: Tensor, reference_velocity: Tensor
) -> Tensor:
    """The penalty per sample, averaged over the non-batch dimensions: float64 [B].

    With the means mu of the two transitions, which share one std:

    * "gaussian": (mu - mu_ref)^2 / (2 std^2), the Kullback-Leibler divergence per dimension (Flow-GRPO,
      arXiv 2505.05470; its Wan script).
    * "flow_grpo": (mu - mu_ref)^2 / (2 s^2) with s = std / sqrt(-dt), as flow_grpo's scripts for SD3, FLUX and
      Qwen-Image and verl-omni compute it: the divergence times -dt, so that steps are weighted by their length.
    * "x": (mu - mu_ref)^2, Flow-Factory's "x-based".
    * "v": (v - v_ref)^2, the form of NFT, AWM, CRD and DGPO; Flow-Factory's "v-based".

    Coefficients are not comparable between forms.

    Raises:
        ValueError: for another form, or a form that divides by a std of 0.
    """
    require_choice("kl", form, KL_FORMS)
    if form == "v":
        return mean_square(velocity, reference_velocity)
    distance = mean_square(transition.mean, reference.mean)
    if form == "x":
        return distance
    if bool((transition.std <= 0).any()):
        raise ValueError(f'kl "{form}" divides by the std of the step, which is 0 here: choose "x" or "v"')
    scale = transition.std if form == "gaussian" else transition.diffusion
    return distance / (2 * scale.square())
