import pytest
import torch
from torch.distributions import Normal
from torch.distributions import kl_divergence as exact_kl

from flowrl.flow.dynamics import CPS, FlowSDE, Transition
from flowrl.flow.kl import KL_FORMS, kl_divergence
from flowrl.flow.schedule import StaticShift
from tests.support.golden import load


@pytest.mark.parametrize("prefix", ["", "f64_"])
def test_the_forms_of_published_losses_and_their_gradients(prefix):
    """One column per trained step; the file's policy loss does not read the means: their gradient is the KL's."""
    golden = load("grpo_loss_kl")
    atol = 1e-10 if prefix else 1e-5
    sigmas = golden["sigmas"].double()
    for t, step in enumerate(golden["step_index"].tolist()):
        means, references = (golden[key][:, t] for key in ("prev_sample_mean", "prev_sample_mean_ref"))
        means, references = (means.double(), references.double()) if prefix else (means, references)
        means.requires_grad_()
        dt = (sigmas[step + 1] - sigmas[step]).expand(len(means))
        std = golden["std_dev_t"][t].double() * (-dt).sqrt()
        policy, reference = Transition(means, std, dt), Transition(references, std, dt)
        penalties = {form: kl_divergence(form, policy, reference, means, references) for form in KL_FORMS}
        assert all(penalty.dtype == torch.float64 and penalty.shape == (len(means),) for penalty in penalties.values())
        (golden.metadata["kl_beta"] * penalties["flow_grpo"].mean()).backward()
        expected = {
            "flow_grpo": golden[f"{prefix}kl_loss"][t],
            "gaussian": golden["f64_gaussian_kl_per_dim_with_dt"][t],
            "x": golden["flow_factory_x_based_kl"][t],
            "v": golden["flow_factory_x_based_kl"][t],
        }
        for form, value in expected.items():
            exact = prefix and form not in ("x", "v")  # those two are there in float32 only
            torch.testing.assert_close(
                penalties[form].mean().detach(), value.double(), rtol=0, atol=1e-10 if exact else 1e-5
            )
        torch.testing.assert_close(means.grad, golden[f"{prefix}grad_prev_sample_mean"][:, t], rtol=0, atol=atol)


def test_the_standard_deviations_of_the_file_are_flow_sdes():
    golden = load("grpo_loss_kl")
    steps = golden["step_index"]
    zeros = torch.zeros(len(steps), 1, dtype=torch.float64)
    transition = FlowSDE(noise_level=golden.metadata["noise_level"]).transition(zeros, zeros, golden["sigmas"], steps)
    torch.testing.assert_close(transition.diffusion, golden["std_dev_t"].double(), rtol=0, atol=1e-5)


def test_verl_omnis_distillation_is_the_flow_grpo_form():
    golden = load("opd_distill")
    student, teacher = golden["student"].requires_grad_(), golden["teacher"]
    diffusion = golden["std_dev_t"].flatten().double()
    dt = torch.full_like(diffusion, -0.25)  # any: this form does not depend on it
    policy, reference = (Transition(mean, diffusion * 0.5, dt) for mean in (student, teacher))
    loss = kl_divergence("flow_grpo", policy, reference, student, teacher).mean()
    loss.backward()
    torch.testing.assert_close(loss.detach(), golden["distill_kl_loss"][0].double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(student.grad, golden["distill_kl_grad"], rtol=0, atol=1e-6)
    student.grad = None
    kl_divergence("v", policy, reference, student, teacher).mean().backward()
    torch.testing.assert_close(student.grad, golden["distill_fm_mse_grad"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dynamics", [FlowSDE(), CPS()], ids=str)
def test_gaussian_is_the_divergence_of_the_two_distributions(dynamics):
    generator = torch.Generator().manual_seed(0)
    sample, velocity, other = (torch.randn(3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    sigmas, steps = StaticShift().sigmas(10).double(), torch.tensor([0, 4, 8])
    policy, reference = (dynamics.transition(sample, v, sigmas, steps) for v in (velocity, other))
    std = policy.std.view(-1, 1, 1)
    expected = exact_kl(Normal(policy.mean, std), Normal(reference.mean, std)).mean(dim=(1, 2))
    gaussian = kl_divergence("gaussian", policy, reference, velocity, other)
    torch.testing.assert_close(gaussian, expected)
    scripts = kl_divergence("flow_grpo", policy, reference, velocity, other)
    torch.testing.assert_close(scripts, gaussian * -policy.dt)


def test_the_papers_expression_for_flow_sde():
    """Flow-GRPO (arXiv 2505.05470): h / 2 (s (1 - sigma) / (2 sigma) + 1 / s)^2 |v - v_ref|^2."""
    sigmas, steps = StaticShift().sigmas(10).double(), torch.tensor([1, 5, 8])
    sample, velocity, other = (torch.full((3, 4), value, dtype=torch.float64) for value in (0.3, 1.0, 0.2))
    policy, reference = (FlowSDE().transition(sample, v, sigmas, steps) for v in (velocity, other))
    sigma, s, h = sigmas[steps], policy.diffusion, -policy.dt
    expected = h / 2 * (s * (1 - sigma) / (2 * sigma) + 1 / s) ** 2 * 0.8**2
    torch.testing.assert_close(kl_divergence("gaussian", policy, reference, velocity, other), expected)


def test_errors():
    mean, std, dt = torch.zeros(1, 2), torch.zeros(1).double(), torch.full((1,), -0.1).double()
    still = Transition(mean, std, dt)
    for form in ("gaussian", "flow_grpo"):
        with pytest.raises(ValueError, match=f'kl "{form}" divides by the std of the step, which is 0'):
            kl_divergence(form, still, still, mean, mean)
    assert float(kl_divergence("x", still, still, mean, mean)) == 0
    with pytest.raises(ValueError, match="kl must be one of gaussian, flow_grpo, x, v; got 'k3'"):
        kl_divergence("k3", still, still, mean, mean)
