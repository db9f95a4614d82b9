"""Every dynamics against the published code it follows: means, standard deviations, log-probabilities, gradients."""

import pytest
import torch

from flowrl.flow.dynamics import CPS, ODE, DanceSDE, Dynamics, FlowSDE, WanLinear
from flowrl.flow.schedule import StaticShift, WanUniPC
from tests.support.golden import Golden, load

STEP_FILES = [
    "flow_sde_image4d",
    "flow_sde_packed3d",
    "flow_sde_video5d",
    "flow_sde_wan_video5d",
    "dance_sde_image4d",
    "dance_sde_packed3d",
    "cps_image4d",
    "cps_packed3d",
]
GRADIENT = "grad_log_prob_new_sum_wrt_model_output_new"


def dynamics_of(name: str, golden: Golden) -> Dynamics:
    if name.startswith("flow_sde_wan"):
        return WanLinear()
    if name.startswith("flow_sde"):
        return FlowSDE(noise_level=golden.metadata["noise_level"])
    if name.startswith("dance_sde"):
        return DanceSDE(eta=golden.metadata["eta"])
    return CPS(noise_level=golden.metadata["noise_level"])


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=atol)


@pytest.mark.parametrize("name", STEP_FILES)
def test_float64(name):
    golden = load(name)
    dynamics = dynamics_of(name, golden)
    sample, velocity, next_sample, sigmas = golden.doubles("sample", "model_output", "prev_sample", "sigmas")
    transition = dynamics.transition(sample, velocity, sigmas, golden["step_index"])
    assert transition.mean.dtype == torch.float64
    close(transition.mean, golden["f64_prev_sample_mean"], 1e-10)
    close(dynamics.log_prob(next_sample, transition), golden["f64_log_prob"], 1e-10)


@pytest.mark.parametrize("name", STEP_FILES)
def test_float32(name):
    golden = load(name)
    dynamics = dynamics_of(name, golden)
    transition = dynamics.transition(golden["sample"], golden["model_output"], golden["sigmas"], golden["step_index"])
    assert transition.mean.dtype == torch.float32
    close(transition.mean, golden["prev_sample_mean"], 1e-5)
    close(transition.sample(golden["noise"]), golden["prev_sample"], 1e-5)
    close(dynamics.log_prob(golden["prev_sample"], transition), golden["log_prob"], 1e-4)


@pytest.mark.parametrize("name", STEP_FILES)
def test_standard_deviations(name):
    """flow_grpo returns std_dev_t without sqrt(-dt) for its flow-SDE and the total for CPS and Wan."""
    golden = load(name)
    dynamics = dynamics_of(name, golden)
    sample, velocity, sigmas = golden.doubles("sample", "model_output", "sigmas")
    transition = dynamics.transition(sample, velocity, sigmas, golden["step_index"])
    if isinstance(dynamics, FlowSDE):
        close(transition.diffusion, golden["f64_std_dev_t"], 1e-10)
        close((-transition.dt).sqrt(), golden["sqrt_neg_dt"], 1e-6)
    elif isinstance(dynamics, CPS):
        close(transition.std, golden["f64_std_dev_t"], 1e-10)
    elif isinstance(dynamics, WanLinear):
        close(transition.std, golden["f64_std_total"], 1e-10)
    else:
        close(transition.std, dynamics.eta * (-transition.dt).sqrt(), 1e-10)


@pytest.mark.parametrize("name", [name for name in STEP_FILES if "wan" not in name])
@pytest.mark.parametrize("prefix", ["", "f64_"])
def test_an_updated_policy_and_its_gradient(name, prefix):
    golden = load(name)
    dynamics = dynamics_of(name, golden)
    inputs = golden.doubles("sample", "model_output_new", "prev_sample", "sigmas")
    sample, velocity, next_sample, sigmas = inputs if prefix else [x.float() for x in inputs]
    velocity.requires_grad_()
    transition = dynamics.transition(sample, velocity, sigmas, golden["step_index"])
    log_prob = dynamics.log_prob(next_sample, transition)
    log_prob.sum().backward()
    if f"{prefix}log_prob_new" in golden.tensors:
        close(log_prob.detach(), golden[f"{prefix}log_prob_new"], 1e-10 if prefix else 1e-4)
    if f"{prefix}{GRADIENT}" in golden.tensors:
        expected = golden[f"{prefix}{GRADIENT}"]
        relative = 1e-10 if prefix else 1e-5  # of the largest gradient in the batch
        close(velocity.grad, expected, relative * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize(
    "name", [name for name in STEP_FILES if name.startswith(("flow_sde", "dance")) and "wan" not in name]
)
def test_dropping_the_constants_is_a_constant_away(name):
    """verl-omni's and DiffusionNFT's log-probabilities differ from ours by -log std - log(2 pi) / 2 alone."""
    golden = load(name)
    dynamics = dynamics_of(name, golden)
    transition = dynamics.transition(golden["sample"], golden["model_output"], golden["sigmas"], golden["step_index"])
    log_prob = dynamics.log_prob(golden["prev_sample"], transition)
    constants = torch.distributions.Normal(0.0, transition.std).log_prob(torch.zeros_like(transition.std))
    close(log_prob - constants, golden["log_prob_no_normalizer"], 1e-4)


@pytest.mark.parametrize("prefix", ["", "f64_"])
def test_ode_is_the_euler_step_of_diffusers(prefix):
    golden = load("ode_step")
    inputs = golden.doubles("sample", "model_output", "sigmas")
    sample, velocity, sigmas = inputs if prefix else [x.float() for x in inputs]
    mean = ODE().transition(sample, velocity, sigmas, golden["step_index"]).mean
    close(mean, golden[f"{prefix}next_sample"], 1e-10 if prefix else 1e-6)
    if not prefix:
        close(mean, golden["next_sample_diffusers"], 1e-6)


@pytest.mark.parametrize(("sigma_max", "prefix"), [("next", "sigmas1"), (0.99, "sigma099")])
def test_both_rules_for_the_first_step(sigma_max, prefix):
    golden = load("flow_sde_sigma1_variants")
    dynamics = FlowSDE(noise_level=golden.metadata["noise_level"], sigma_max=sigma_max)
    transition = dynamics.transition(golden["sample"], golden["model_output"], golden["sigmas"], 0)
    close(transition.mean, golden[f"{prefix}_mean"], 1e-5)
    close(dynamics.log_prob(golden["prev_sample"], transition), golden[f"{prefix}_log_prob"], 1e-4)
    if prefix == "sigmas1":
        close(transition.diffusion, golden["sigmas1_std_dev_t"], 1e-5)
    else:
        close(transition.std, golden["sigma099_std_total"], 1e-5)


def test_storing_latents_in_bfloat16_moves_the_ratio():
    golden = load("flow_sde_bf16_roundtrip")
    dynamics = FlowSDE(noise_level=golden.metadata["noise_level"])
    sample, velocity = golden["sample_bf16_as_f32"], golden["model_output"]
    transition = dynamics.transition(sample, velocity, golden["sigmas"], golden["step_index"])
    next_sample = transition.sample(golden["noise"])
    close(transition.mean, golden["prev_sample_mean"], 1e-5)
    close(next_sample, golden["flow_grpo_prev_sample"], 1e-5)
    sampled = dynamics.log_prob(next_sample, transition)
    close(sampled, golden["flow_grpo_log_prob"], 1e-4)
    stored = golden["flow_grpo_prev_sample"].bfloat16()
    assert torch.equal(stored.float(), golden["flow_factory_next_latents"].float())
    replayed = dynamics.log_prob(stored, transition)
    close(replayed, golden["flow_grpo_log_prob_replayed_from_bf16_storage"], 1e-4)
    close(replayed, golden["flow_factory_log_prob"], 1e-4)
    assert ((sampled - replayed).exp() - 1).abs().max() > 1e-3
    # a sample that is exactly bfloat16 is computed on as its float32 self
    half = dynamics.transition(sample.bfloat16(), velocity, golden["sigmas"], golden["step_index"])
    assert torch.equal(half.mean, transition.mean)


@pytest.mark.parametrize("name", ["window_trajectory_sde", "window_trajectory_cps"])
def test_a_whole_trajectory_with_a_window(name):
    """ODE steps outside the window, stochastic steps inside, with an analytic velocity (Flow-GRPO-Fast)."""
    golden = load(name)
    noise_level, (start, end) = golden.metadata["noise_level"], golden.metadata["sde_window"]
    inside = FlowSDE(noise_level=noise_level) if name.endswith("sde") else CPS(noise_level=noise_level)
    sigmas, sample = golden["sigmas"], golden["trajectory"][:, 0]
    for i in range(len(sigmas) - 1):
        velocity = (sample - golden["A"]) / (sigmas[i] + 0.25)
        if start <= i < end:
            transition = inside.transition(sample, velocity, sigmas, i)
            sample = transition.sample(golden["window_noise"][:, i - start])
            close(inside.log_prob(sample, transition), golden["window_log_probs"][:, i - start], 1e-4)
        else:
            sample = ODE().transition(sample, velocity, sigmas, i).mean
        close(sample, golden["trajectory"][:, i + 1], 1e-5)


@pytest.mark.parametrize("name", ["flow_sde_image4d", "cps_packed3d", "ode_step", "window_trajectory_sde"])
def test_the_files_were_made_on_the_diffusers_grid(name):
    golden = load(name)
    sigmas = StaticShift(shift=golden.metadata["shift"]).sigmas(len(golden["sigmas"]) - 1)
    close(sigmas, golden["sigmas"], 2e-7)


def test_the_other_grids():
    dance, wan = load("dance_sde_image4d"), load("flow_sde_wan_video5d")
    linspace = StaticShift(shift=dance.metadata["shift"], grid="linspace").sigmas(dance.metadata["num_steps"])
    close(linspace, dance["sigmas"], 2e-7)
    unipc = WanUniPC(flow_shift=wan.metadata["flow_shift"]).sigmas(wan.metadata["num_steps"])
    close(unipc, wan["sigmas"], 2e-7)
