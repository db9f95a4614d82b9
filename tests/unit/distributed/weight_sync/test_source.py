"""Which tensors a module publishes, by which names, and with which values."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from flowrl.distributed.weight_sync.errors import PublishError
from flowrl.distributed.weight_sync.manifest import Mode
from flowrl.distributed.weight_sync.source import clean_name, named_tensors, origins, scalings, specs
from tests.unit.distributed.weight_sync.workers import make_module


@pytest.mark.parametrize(("lora", "mode"), [(False, "full"), (True, "merged")])
def test_names_are_those_of_the_plain_model(lora: bool, mode: Mode) -> None:
    """All that `state_dict` of the plain model saves, and nothing else."""
    assert origins(make_module(0, lora), mode).keys() == make_module(0).state_dict().keys()


def test_merged_weights_are_those_that_peft_computes() -> None:
    module = make_module(0, lora=True)
    found = origins(module, "merged")
    layers = {clean_name(name): layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    assert len(layers) == 4
    for name, layer in layers.items():
        expected = layer.get_base_layer().weight + layer.get_delta_weight("default")  # type: ignore[operator]
        torch.testing.assert_close(found[f"{name}.weight"].value(torch.float32), expected, atol=1e-5, rtol=0)
    x = torch.randn(4, 13)
    plain = make_module(1)
    plain.load_state_dict({name: origin.value(origin.dtype) for name, origin in found.items()})
    torch.testing.assert_close(plain(x), module(x), atol=1e-4, rtol=1e-5)


def test_merging_is_done_in_float32() -> None:
    """A bfloat16 base and a small adapter: rounding comes last, once."""
    base, a, b = torch.randn(8, 5).bfloat16(), torch.randn(2, 5) * 1e-2, torch.randn(8, 2) * 1e-2
    module = nn.Sequential(nn.Linear(5, 8))
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=3, target_modules=["0"]), module, "default")
    module.bfloat16()
    layer = module[0]
    layer.get_base_layer().weight.data, layer.lora_A["default"].weight.data = base, a  # type: ignore[operator]
    layer.lora_B["default"].weight.data = b  # type: ignore[index]
    exact = base.double() + 1.5 * b.double() @ a.double()
    merged = origins(module, "merged")["0.weight"]
    torch.testing.assert_close(merged.value(torch.float32).double(), exact, atol=1e-6, rtol=0)
    assert torch.equal(merged.value(torch.bfloat16), exact.float().bfloat16())


def test_an_adapter_is_published_by_itself() -> None:
    module = make_module(0, lora=True)
    found = origins(module, "lora")
    expected = {f"{i}.{layer}.lora_{x}.weight" for i in (0, 1) for layer in ("up", "down") for x in "AB"}
    assert found.keys() == expected
    assert scalings(module) == {f"{i}.{layer}": 2.0 for i in (0, 1) for layer in ("up", "down")}


def test_wire_dtype_is_for_floating_point_only() -> None:
    found = specs(origins(make_module(0), "full"), torch.bfloat16)
    assert found["0.count"].dtype == torch.int64
    assert {spec.dtype for name, spec in found.items() if not name.endswith("count")} == {torch.bfloat16}
    assert specs(origins(make_module(0), "full"), None)["0.up.weight"].dtype == torch.float32


def test_wire_dtype_is_for_what_may_be_rounded() -> None:
    found = specs(origins(make_module(0), "full"), torch.bfloat16, rounded={"0.up.weight", "0.count"})
    assert found["0.up.weight"].dtype == torch.bfloat16 and found["0.count"].dtype == torch.int64
    assert found["0.down.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("lora", "mode", "message"),
    [(True, "full", "holds LoRA"), (False, "lora", "holds no LoRA"), (False, "merged", "holds no LoRA")],
)
def test_a_mode_that_does_not_fit_the_module_is_refused(lora: bool, mode: Mode, message: str) -> None:
    with pytest.raises(PublishError, match=message):
        origins(make_module(0, lora), mode)


def test_what_cannot_be_published_is_refused_by_name() -> None:
    convolution = nn.Sequential(nn.Conv2d(2, 2, 3))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), convolution, "default")
    with pytest.raises(PublishError, match=r"0\.weight is not a matrix"):
        origins(convolution, "merged")
    dora = nn.Sequential(nn.Linear(2, 2))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], use_dora=True), dora, "default")
    with pytest.raises(PublishError, match="0 has a DoRA"):
        scalings(dora)
    second = make_module(0, lora=True)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["up"]), second, "old")
    assert "0.up.lora_A.old.weight" in named_tensors(second)  # and a manifest refuses the name
    torn = make_module(0, lora=True)
    del torn[1].up.lora_B["default"]  # type: ignore[union-attr]
    with pytest.raises(PublishError, match=r"1\.up\.lora_B\.weight is missing"):
        origins(torn, "merged")
