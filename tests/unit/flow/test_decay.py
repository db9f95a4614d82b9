import pytest

from flowrl.flow.decay import CRD_DECAYS, NFT_DECAYS, Decay, FlowGRPODecay, LinearRamp
from tests.support.golden import load_json

SCHEDULES = load_json("ema_decay_schedules")["schedules"]


def from_name(name: str) -> Decay:
    last = name.rsplit("_", 1)[-1]
    if name.startswith("flow_grpo_EMAModuleWrapper"):
        return FlowGRPODecay(max_decay=float(last.removeprefix("decay")))
    if name.startswith("diffusion_nft_return_decay_type"):
        return NFT_DECAYS[int(last.removeprefix("type"))]
    if name.startswith("flow_factory_power"):
        decay, warmup = name.removeprefix("flow_factory_power_decay").split("_warm")
        return FlowGRPODecay(max_decay=float(decay), warmup=int(warmup))
    if name.startswith("flow_factory_piecewise_linear"):
        flat, rate, cap = name.split("_")[-3:]
        return LinearRamp(flat=int(flat), rate=float(rate), cap=float(cap))
    assert name.startswith("flow_factory_crd_compute_decay")
    if "-" not in last:
        return CRD_DECAYS[int(last)]
    flat, start, rate, cap = last.split("-")
    return LinearRamp(flat=int(flat), start=float(start), rate=float(rate), cap=float(cap))


@pytest.mark.parametrize("name", SCHEDULES)
def test_published_schedules(name):
    decay = from_name(name)
    assert {step: decay.at(int(step)) for step in SCHEDULES[name]} == pytest.approx(SCHEDULES[name], abs=1e-12)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: LinearRamp(cap=1.5), "cap"),
        (lambda: LinearRamp(start=0.9, cap=0.5), "start"),
        (lambda: LinearRamp(rate=-0.1, cap=0.5), "rate"),
        (lambda: FlowGRPODecay(max_decay=1.01), "max_decay"),
        (lambda: FlowGRPODecay(warmup=0), "warmup"),
    ],
)
def test_out_of_range_is_refused_by_name(build, field):
    with pytest.raises(ValueError, match=field):
        build()
