"""Properties that the dynamics must have whatever the numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError
from torch import Tensor

from flowrl.flow.dynamics import CPS, DDIM, ODE, DanceSDE, FlowSDE, Transition, WanLinear
from flowrl.flow.schedule import StaticShift, WanUniPC

SHAPES = [(4, 12, 8), (4, 4, 4, 4), (4, 3, 2, 4, 4)]
STOCHASTIC = [FlowSDE(), FlowSDE(sigma_max=0.99), DanceSDE(), CPS(), CPS(log_prob_form="gaussian"), WanLinear(), DDIM()]
SIGMAS = StaticShift().sigmas(10)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dynamics", [*STOCHASTIC, ODE()], ids=str)
def test_steps_of_a_mixed_batch_are_those_of_each_sample(dynamics, shape):
    sample, velocity = randn(*shape, dtype=torch.float32), randn(*shape, seed=1, dtype=torch.float32)
    steps = torch.tensor([3, 0, 8, 3])
    together = dynamics.transition(sample, velocity, SIGMAS, steps)
    assert together.mean.shape == shape and together.std.shape == together.dt.shape == (4,)
    for row, step in enumerate(steps.tolist()):
        alone = dynamics.transition(sample[row : row + 1], velocity[row : row + 1], SIGMAS, step)
        assert torch.equal(alone.mean[0], together.mean[row])
        assert alone.std[0] == together.std[row] and alone.dt[0] == together.dt[row]


@pytest.mark.parametrize("dynamics", [d for d in STOCHASTIC if d != CPS()], ids=str)
@pytest.mark.parametrize("step", [0, 4, 8])
def test_log_prob_is_the_mean_log_density_of_the_normal_distribution(dynamics, step):
    sample, velocity, noise = randn(4, 3, 5), randn(4, 3, 5, seed=1), randn(4, 3, 5, seed=2)
    transition = dynamics.transition(sample, velocity, SIGMAS.double(), step)
    next_sample = transition.sample(noise)
    normal = torch.distributions.Normal(transition.mean, transition.std.view(-1, 1, 1))
    expected = normal.log_prob(next_sample).mean(dim=(1, 2))
    torch.testing.assert_close(dynamics.log_prob(next_sample, transition), expected, rtol=1e-12, atol=1e-12)


def test_the_two_forms_of_cps_differ_by_the_variance():
    sample, velocity, next_sample = randn(4, 3, 5), randn(4, 3, 5, seed=1), randn(4, 3, 5, seed=2)
    published, gaussian = CPS(), CPS(log_prob_form="gaussian")
    old, new = (published.transition(sample, v, SIGMAS.double(), 4) for v in (velocity, 0.9 * velocity))
    published_ratio = published.log_prob(next_sample, new) - published.log_prob(next_sample, old)
    gaussian_ratio = gaussian.log_prob(next_sample, new) - gaussian.log_prob(next_sample, old)
    torch.testing.assert_close(published_ratio, 2 * old.std.square() * gaussian_ratio)


@pytest.mark.parametrize("sigmas", [SIGMAS, WanUniPC().sigmas(10), StaticShift(shift=5.0).sigmas(4)], ids=len)
@pytest.mark.parametrize(
    "quiet", [FlowSDE(noise_level=0.0), DanceSDE(eta=0.0), CPS(noise_level=0.0), DDIM(eta=0.0)], ids=str
)
def test_without_noise_every_dynamics_is_the_euler_step(quiet, sigmas):
    num_steps = len(sigmas) - 1
    sample, velocity = randn(num_steps, 3, 5), randn(num_steps, 3, 5, seed=1)
    transition = quiet.transition(sample, velocity, sigmas.double(), torch.arange(num_steps))
    euler = ODE().transition(sample, velocity, sigmas.double(), torch.arange(num_steps))
    torch.testing.assert_close(transition.mean, euler.mean, rtol=1e-12, atol=1e-12)
    assert (transition.std == 0).all() and not quiet.stochastic and not ODE().stochastic


@given(
    st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2, unique=True),
    st.floats(0.05, 1.0),
    st.sampled_from([CPS, DDIM]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=60, deadline=None)
def test_cps_and_ddim_have_the_signal_and_noise_of_the_schedule(pair, amount, dynamics, seed):
    """x' = (1 - sigma') x_0 + sigma' (unit noise), exactly: what is kept of the noise and what is added sum to it."""
    next_sigma, sigma = sorted(pair)
    sigmas = torch.tensor([sigma, next_sigma, 0.0], dtype=torch.float64)
    x_0, eps = randn(1, 6, seed=seed), randn(1, 6, seed=seed + 1)
    transition = dynamics(amount).transition((1 - sigma) * x_0 + sigma * eps, eps - x_0, sigmas, 0)
    kept = transition.mean - (1 - next_sigma) * x_0
    noise_kept = (kept * eps).sum() / eps.square().sum()
    torch.testing.assert_close(kept, noise_kept * eps, rtol=0, atol=1e-9)
    assert float(noise_kept**2 + transition.std[0] ** 2) == pytest.approx(next_sigma**2, rel=1e-9)


def test_ancestral_ddim_draws_from_the_exact_posterior():
    """q(x' | x, x_0) of the Markov chain x = (a / a') x' + noise, whose variance follows from Bayes' rule."""
    sigma, next_sigma = 0.7, 0.4
    a, next_a = 1 - sigma, 1 - next_sigma
    forward = sigma**2 - (a / next_a * next_sigma) ** 2  # Var(x | x')
    variance = 1 / (1 / next_sigma**2 + (a / next_a) ** 2 / forward)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    sigmas = torch.tensor([sigma, next_sigma, 0.0], dtype=torch.float64)
    assert float(DDIM().transition(zero, zero, sigmas, 0).std) == pytest.approx(math.sqrt(variance))


@pytest.mark.parametrize("dynamics", [FlowSDE(), DanceSDE(), WanLinear()], ids=str)
@pytest.mark.parametrize("sigma", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("data_std", [0.3, 1.5])
def test_the_reverse_sde_keeps_the_marginals_to_first_order(dynamics, sigma, data_std):
    """For Gaussian data the exact velocity is linear: the variance after a step is off by O(dt^2), not by O(dt)."""

    def variance(sigma: float) -> float:
        return ((1 - sigma) * data_std) ** 2 + sigma**2

    def error(dt: float) -> float:
        sigmas = torch.tensor([1.0, 0.95, sigma, sigma - dt, 0.0], dtype=torch.float64)
        velocity = (sigma - (1 - sigma) * data_std**2) / variance(sigma)  # E[eps - x_0 | x = 1]
        one = torch.ones(1, 1, dtype=torch.float64)
        transition = dynamics.transition(one, velocity * one, sigmas, 2)
        return float(transition.mean**2) * variance(sigma) + float(transition.std**2) - variance(sigma - dt)

    assert error(2e-4) / error(1e-4) == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(("noise_level", "num_steps", "shift"), [(0.7, 10, 3.0), (0.45, 8, 5.0), (1.2, 20, 1.0)])
def test_the_first_step_of_the_default_rule_has_variance_noise_level_squared(noise_level, num_steps, shift):
    sigmas = StaticShift(shift=shift).sigmas(num_steps).double()
    one = torch.ones(1, 1, dtype=torch.float64)
    transition = FlowSDE(noise_level=noise_level).transition(one, 0 * one, sigmas, 0)
    assert float(transition.std) == pytest.approx(noise_level)
    assert float(transition.mean) == pytest.approx(1 - noise_level**2 / 2)
    # UniRL's rule: ten times the noise level, before the step's length
    clamped = FlowSDE(noise_level=noise_level, sigma_max=0.99).transition(one, 0 * one, sigmas, 0)
    assert float(clamped.diffusion) == pytest.approx(10 * noise_level)


def test_wan_starts_at_0_999999_which_counts_as_1():
    sigmas = WanUniPC(flow_shift=5.0).sigmas(10)
    one = torch.ones(1, 1)
    assert sigmas[0] < 1
    assert float(FlowSDE().transition(one, one, sigmas, 0).std) == pytest.approx(0.7, rel=1e-4)


@pytest.mark.parametrize("dynamics", [*STOCHASTIC, ODE()], ids=str)
def test_precision(dynamics):
    sample, velocity = randn(2, 3, 5), randn(2, 3, 5, seed=1)
    exact = dynamics.transition(sample, velocity, SIGMAS.double(), 2)
    assert exact.mean.dtype == torch.float64
    half = dynamics.transition(sample.bfloat16(), velocity.bfloat16(), SIGMAS, 2)
    rounded = dynamics.transition(sample.bfloat16().float(), velocity.bfloat16().float(), SIGMAS, 2)
    assert half.mean.dtype == torch.float32 and torch.equal(half.mean, rounded.mean)
    assert half.std.dtype == half.dt.dtype == torch.float64
    assert half.sample(torch.zeros_like(half.mean)).dtype == torch.float32
    if dynamics.stochastic:
        assert dynamics.log_prob(half.mean, half).dtype == torch.float64


@pytest.mark.parametrize("dynamics", [d for d in STOCHASTIC if d != CPS()], ids=str)
def test_log_probs_of_float32_latents_carry_no_float32_error(dynamics):
    """A step of 1e-7 in one latent moves the log-probability by what calculus says, not by rounding."""
    mean = randn(1, 64, dtype=torch.float32)
    base = dynamics.transition(mean, torch.zeros_like(mean), SIGMAS, 4)
    next_sample = base.sample(randn(1, 64, seed=1, dtype=torch.float32))
    moved = next_sample.clone()
    moved[0, 0] = torch.nextafter(moved[0, 0], torch.tensor(10.0))
    step = float(moved[0, 0]) - float(next_sample[0, 0])
    slope = -float(next_sample[0, 0] - base.mean[0, 0]) / float(base.std) ** 2 / 64
    change = float(dynamics.log_prob(moved, base) - dynamics.log_prob(next_sample, base))
    assert change == pytest.approx(slope * step, rel=1e-4)


@pytest.mark.parametrize(
    ("dynamics", "step"), [(ODE(), 3), (CPS(log_prob_form="gaussian"), 9), (FlowSDE(noise_level=0.0), 3)], ids=str
)
def test_a_step_without_noise_has_no_log_prob(dynamics, step):
    sample = randn(2, 3)
    transition = dynamics.transition(sample, sample, SIGMAS.double(), step)
    with pytest.raises(ValueError, match="no log-probability at a step without noise"):
        dynamics.log_prob(transition.mean, transition)


def test_published_cps_is_finite_at_the_last_step():
    sample = randn(2, 3).requires_grad_()
    transition = CPS().transition(sample, sample, SIGMAS.double(), 9)
    log_prob = CPS().log_prob(transition.mean.detach(), transition)
    log_prob.sum().backward()
    assert (log_prob == 0).all() and sample.grad is not None and sample.grad.isfinite().all()


def test_untrainable():
    assert FlowSDE().untrainable(range(10), 10) == CPS().untrainable(range(9), 10) == ODE().untrainable([], 10) == []
    assert "adds no noise at steps [9] of 10, so they cannot be trained" in CPS().untrainable([1, 9], 10)[0]
    assert "adds no noise at steps [1, 2] of 10" in ODE().untrainable([1, 2], 10)[0]
    assert "adds no noise at steps [1] of 10" in FlowSDE(noise_level=0.0).untrainable([1], 10)[0]
    assert FlowSDE().untrainable([10], 10) == []  # not there: what the step strategy says


@pytest.mark.parametrize("step", [-1, 10, torch.tensor([0, 10]), torch.tensor([-1, 0])])
def test_a_step_outside_the_schedule_is_refused(step):
    with pytest.raises((IndexError, RuntimeError), match=r"must be in 0..9|index out of range"):
        ODE().transition(randn(2, 3), randn(2, 3), SIGMAS, step)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FlowSDE(noise_level=-1.0), "FlowSDE.noise_level must be a number >= 0, got -1.0"),
        (lambda: FlowSDE(noise_level=math.nan), "FlowSDE.noise_level must be a number >= 0, got nan"),
        (lambda: FlowSDE(sigma_max=1.0), 'FlowSDE.sigma_max must be "next" or a number between 0 and 1, got 1.0'),
        (
            lambda: FlowSDE(sigma_max="last"),
            "FlowSDE.sigma_max must be \"next\" or a number between 0 and 1, got 'last'",
        ),
        (lambda: DanceSDE(eta=-0.1), "DanceSDE.eta must be a number >= 0, got -0.1"),
        (lambda: CPS(noise_level=1.1), "CPS.noise_level must be a number between 0 and 1, got 1.1"),
        (lambda: CPS(log_prob_form="normal"), "CPS.log_prob_form must be one of published, gaussian; got 'normal'"),
    ],
)
def test_out_of_range_is_refused_by_name(build, message):
    with pytest.raises(ValueError) as error:
        build()
    assert str(error.value) == message


@pytest.mark.parametrize("sigma_max", ["next", 0.99, 0.5])
def test_omegaconf_can_type_sigma_max(sigma_max):
    schema = OmegaConf.structured(FlowSDE)
    OmegaConf.set_readonly(schema, False)
    node = OmegaConf.merge(schema, {"noise_level": 1, "sigma_max": sigma_max})
    assert OmegaConf.to_object(node) == FlowSDE(noise_level=1.0, sigma_max=sigma_max)
    with pytest.raises(ValidationError):
        OmegaConf.merge(schema, {"sigma_max": [1]})


def test_diffusion_is_the_standard_deviation_per_root_of_time():
    transition = Transition(torch.zeros(1, 2), torch.full((1,), 0.2), torch.full((1,), -0.04))
    assert float(transition.diffusion) == pytest.approx(1.0)
