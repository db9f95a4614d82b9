import math

import pytest
import torch
from diffusers.schedulers import UniPCMultistepScheduler
from torch import Tensor

from flowrl.flow.dynamics import ODE
from flowrl.flow.schedule import StaticShift, WanUniPC
from flowrl.flow.solvers import DPM2, Euler, Solver, UniPC
from tests.support.golden import load

SOLVERS = [Euler(), DPM2(), UniPC()]
START = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))


def swirl(sample: Tensor, sigma: Tensor) -> Tensor:
    """A velocity that is linear in nothing."""
    sigma = sigma.view(-1, 1, 1)
    return torch.sin(3 * sample) * sigma + (sample - 0.4) / (sigma + 0.25)


@pytest.mark.parametrize("grid", ["diffusers", "linspace"])
@pytest.mark.parametrize(
    ("name", "solver"), [("flow", Euler()), ("ddim", Euler()), ("dpm1", Euler()), ("dpm2", DPM2())]
)
def test_diffusion_nfts_trajectories(grid, name, solver):
    golden = load("nft_solvers_deterministic")
    expected = golden[f"{grid}_{name}_traj"]
    trajectory = {0: golden["z"]}

    def velocity(sample: Tensor, sigma: Tensor) -> Tensor:
        return (sample - golden["A"]) / (sigma.view(-1, 1, 1, 1) + 0.25)

    final = solver.solve(velocity, golden["z"], golden[f"sigmas_{grid}"], trajectory.__setitem__)
    assert list(trajectory) == list(range(expected.shape[1]))
    torch.testing.assert_close(torch.stack(list(trajectory.values()), dim=1), expected, rtol=0, atol=1e-5)
    assert torch.equal(final, trajectory[expected.shape[1] - 1])


@pytest.mark.parametrize("flow_shift", [1.0, 3.0, 5.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 10, 30])
@pytest.mark.parametrize(
    ("solver", "order", "corrector"), [(UniPC(), 2, True), (DPM2(), 2, False), (Euler(), 1, False)], ids=str
)
def test_the_family_of_diffusers_unipc(solver, order, corrector, num_steps, flow_shift):
    """The untouched scheduler that Wan's pipeline runs; without its corrector DPM-Solver++(2M), of order 1 Euler."""
    scheduler = UniPCMultistepScheduler(
        use_flow_sigmas=True,
        prediction_type="flow_prediction",
        flow_shift=flow_shift,
        solver_order=order,
        disable_corrector=[] if corrector else list(range(num_steps)),
    )
    scheduler.set_timesteps(num_steps)
    sample = START
    for i, timestep in enumerate(scheduler.timesteps):
        sample = scheduler.step(swirl(sample, scheduler.sigmas[i].expand(2)), timestep, sample).prev_sample
    final = solver.solve(swirl, START, WanUniPC(flow_shift=flow_shift).sigmas(num_steps))
    torch.testing.assert_close(final, sample, rtol=0, atol=5e-6)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("num_steps", [1, 2, 7])
def test_straight_paths_are_solved_exactly(solver, num_steps):
    """A constant x_0 means a straight path: every solver arrives there, from sigma = 1, in any number of steps."""
    start, sigmas = START.double(), StaticShift().sigmas(num_steps).double()
    final = solver.solve(lambda x, sigma: (x - 0.7) / sigma.view(-1, 1, 1), start, sigmas)
    torch.testing.assert_close(final, torch.full_like(start, 0.7), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("solver", "order"), [(Euler(), 1), (DPM2(), 2), (UniPC(), 2)], ids=str)
def test_order_of_convergence(solver, order):
    """Halving the steps divides the error by 2^order on a smooth stretch of the path.

    UniPC's corrector would gain an order, were it not for the last step, which is of first order and not corrected.
    """
    start = START.double()

    def solved(by: Solver, num_steps: int) -> Tensor:
        return by.solve(swirl, start, torch.linspace(0.9, 0.3, num_steps + 1, dtype=torch.float64))

    exact = solved(UniPC(), 3000)
    coarse, fine = ((solved(solver, n) - exact).abs().mean() for n in (80, 160))
    assert math.log2(coarse / fine) == pytest.approx(order, abs=0.35)


def test_euler_is_the_ode_dynamics_bit_for_bit():
    sigmas, sample = StaticShift().sigmas(6), START
    for i in range(6):
        sample = ODE().transition(sample, swirl(sample, sigmas[i].expand(2)), sigmas, i).mean
    assert torch.equal(Euler().solve(swirl, START, sigmas), sample)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
def test_velocities_are_asked_once_a_step_for_a_whole_batch(solver):
    asked: list[Tensor] = []

    def velocity(sample: Tensor, sigma: Tensor) -> Tensor:
        asked.append(sigma)
        return swirl(sample, sigma).bfloat16()

    sigmas = StaticShift().sigmas(5)
    final = solver.solve(velocity, START.bfloat16(), sigmas)
    assert final.dtype == torch.float32
    assert torch.equal(torch.stack(asked), sigmas[:-1, None].expand(-1, 2))
