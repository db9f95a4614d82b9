import math

import numpy as np
import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.flow.schedule import DynamicShift, Flux2Empirical, Schedule, StaticShift, WanUniPC
from tests.support.golden import load_json

GOLDEN = load_json("sigma_schedules")
QWEN_IMAGE = {"max_shift": 0.9, "max_seq_len": 8192}
NUM_STEPS = [1, 2, 3, 4, 8, 10, 25, 28, 50]


def from_name(name: str, entry: dict) -> Schedule:
    if name.startswith(("static_diffusers_customsigmas", "static_linspace")):
        return StaticShift(shift=entry["shift"], grid="linspace")
    if name.startswith("static_diffusers"):
        return StaticShift(shift=entry["shift"], grid="diffusers")
    if name.startswith("flux_dynamic"):
        return DynamicShift()
    if name.startswith("qwen_image_dynamic_noterminal"):
        return DynamicShift(**QWEN_IMAGE)
    if name.startswith("qwen_image_dynamic"):
        return DynamicShift(**QWEN_IMAGE, terminal=0.02)
    assert name.startswith("wan_unipc_flow_shift")
    return WanUniPC(flow_shift=entry["shift"])


@pytest.mark.parametrize("name", GOLDEN["schedules"])
def test_published_schedules(name):
    entry = GOLDEN["schedules"][name]
    schedule, image_seq_len = from_name(name, entry), entry.get("image_seq_len")
    sigmas = schedule.sigmas(entry["num_steps"], image_seq_len)
    assert sigmas.dtype == torch.float32
    torch.testing.assert_close(sigmas, torch.tensor(entry["sigmas"]), rtol=0, atol=2e-7)
    if isinstance(schedule, DynamicShift):
        assert schedule.mu(image_seq_len) == pytest.approx(entry["mu"], abs=1e-12)


@pytest.mark.parametrize("key", GOLDEN["flux2_klein_empirical_mu"])
def test_flux2_mu(key):
    image_seq_len, num_steps = (int(part) for part in key.removeprefix("L").split("_N"))
    mu = Flux2Empirical().mu(image_seq_len, num_steps)
    assert mu == pytest.approx(GOLDEN["flux2_klein_empirical_mu"][key], abs=1e-12)


@pytest.mark.parametrize("num_steps", NUM_STEPS)
@pytest.mark.parametrize("shift", [1.0, 1.7, 3.0, 7.3])
def test_static_schedules_are_those_of_diffusers_bit_for_bit(shift, num_steps):
    euler = FlowMatchEulerDiscreteScheduler(shift=shift)
    euler.set_timesteps(num_steps)
    assert torch.equal(StaticShift(shift=shift).sigmas(num_steps), euler.sigmas)
    euler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps))
    assert torch.equal(StaticShift(shift=shift, grid="linspace").sigmas(num_steps), euler.sigmas)
    unipc = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=shift)
    unipc.set_timesteps(num_steps)
    wan = WanUniPC(flow_shift=shift).sigmas(num_steps)
    if shift != 1.0:
        assert torch.equal(wan, unipc.sigmas)
    torch.testing.assert_close(wan, unipc.sigmas, atol=6e-8, rtol=0)  # the last bit, so that the timesteps are
    assert (wan[:-1] * 1000).long().equal(unipc.timesteps)


@pytest.mark.parametrize("num_steps", NUM_STEPS[1:])
@pytest.mark.parametrize("image_seq_len", [256, 1000, 4096, 4301])
def test_dynamic_schedules_are_those_of_diffusers_bit_for_bit(image_seq_len, num_steps):
    flux, qwen_image, flux2 = DynamicShift(), DynamicShift(**QWEN_IMAGE, terminal=0.02), Flux2Empirical()
    for schedule, mu in (
        (flux, flux.mu(image_seq_len)),
        (qwen_image, qwen_image.mu(image_seq_len)),
        (flux2, flux2.mu(image_seq_len, num_steps)),
    ):
        terminal = schedule.terminal if isinstance(schedule, DynamicShift) else None
        euler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=terminal)
        euler.set_timesteps(sigmas=np.linspace(1, 1 / num_steps, num_steps), mu=mu)
        assert torch.equal(schedule.sigmas(num_steps, image_seq_len), euler.sigmas)


@given(st.integers(2, 60), st.floats(0.2, 12), st.integers(64, 9000))
@settings(max_examples=30, deadline=None)
def test_sigmas_fall_from_pure_noise_to_zero(num_steps, shift, image_seq_len):
    schedules = [
        StaticShift(shift=shift),
        StaticShift(shift=shift, grid="linspace"),
        DynamicShift(),
        DynamicShift(**QWEN_IMAGE, terminal=0.02),
        WanUniPC(flow_shift=shift),
        Flux2Empirical(),
    ]
    for schedule in schedules:
        sigmas = schedule.sigmas(num_steps, image_seq_len)
        assert sigmas.shape == (num_steps + 1,)
        assert (sigmas.diff() < 0).all() and sigmas[-1] == 0 and abs(sigmas[0] - 1) <= 2e-6


@given(st.integers(1, 40), st.floats(1, 8))
@settings(max_examples=30, deadline=None)
def test_an_exponential_shift_by_log_s_is_the_static_shift_by_s(num_steps, shift):
    dynamic = DynamicShift(base_shift=math.log(shift), max_shift=math.log(shift))
    static = StaticShift(shift=shift, grid="linspace")
    torch.testing.assert_close(dynamic.sigmas(num_steps, 1024), static.sigmas(num_steps), rtol=0, atol=5e-7)


def test_errors():
    with pytest.raises(ValueError, match="DynamicShift depends on the picture's size: pass image_seq_len"):
        DynamicShift().sigmas(10)
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        StaticShift().sigmas(0)
    with pytest.raises(ValueError, match="terminal needs at least 2 steps"):
        DynamicShift(terminal=0.02).sigmas(1, 1024)
    with pytest.raises(ValueError, match=r"StaticShift.grid must be one of diffusers, linspace, .*; got 'karras'"):
        StaticShift(grid="karras")
    with pytest.raises(ValueError, match=r"StaticShift.shift must be a number > 0, got -1.0"):
        StaticShift(shift=-1.0)
    with pytest.raises(ValueError, match=r"DynamicShift.terminal must be None or a number between 0 and 1, got 1.5"):
        DynamicShift(terminal=1.5)
