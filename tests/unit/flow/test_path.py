import pytest
import torch

from flowrl.flow import path

SHAPES = [(3, 12, 8), (3, 4, 4, 4), (3, 3, 2, 4, 4)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_velocity_knows_both_ends_of_its_path(shape):
    generator = torch.Generator().manual_seed(0)
    x_0, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    sigma = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    sample, velocity = path.interpolate(x_0, noise, sigma), path.velocity_target(x_0, noise)
    torch.testing.assert_close(path.predicted_x_0(sample, velocity, sigma), x_0)
    torch.testing.assert_close(path.predicted_noise(sample, velocity, sigma), noise)
    torch.testing.assert_close(path.score(sample, velocity, sigma) * path.per_sample(sigma, noise), -noise)


def test_score_of_gaussian_data():
    # x_0 ~ N(0, 1): x_sigma ~ N(0, (1 - s)^2 + s^2), and E[eps - x_0 | x] is linear in x
    sample, sigma = torch.linspace(-2, 2, 9, dtype=torch.float64)[None], 0.3
    variance = (1 - sigma) ** 2 + sigma**2
    velocity = (sigma - (1 - sigma)) / variance * sample
    torch.testing.assert_close(path.score(sample, velocity, sigma), -sample / variance)


def test_a_number_and_a_tensor_of_it_agree():
    x_0, noise = torch.zeros(2, 3), torch.ones(2, 3)
    assert torch.equal(path.interpolate(x_0, noise, 0.25), path.interpolate(x_0, noise, torch.tensor([0.25, 0.25])))


def test_dtypes():
    half = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert path.as_computed(half).dtype == torch.float32
    assert path.as_computed(half.double()).dtype == torch.float64
    per_sample = path.per_sample(torch.zeros(2, dtype=torch.float64), half.float())
    assert isinstance(per_sample, torch.Tensor) and per_sample.dtype == torch.float32 and per_sample.shape == (2, 1)
