"""The tensors of a module under the names they are published by, on the trainer's side and on an engine's.

A name is that of the plain model: peft's `base_layer` and the adapter's own name are taken out. Trainer and engine must
have the same names, shapes and scalings; `Receiver.expect` compares them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowrl.distributed.fsdp import full_tensor
from flowrl.distributed.lora import ADAPTER
from flowrl.distributed.weight_sync.errors import PublishError
from flowrl.distributed.weight_sync.manifest import Mode, Spec


class Origin(Protocol):
    """Where a published tensor comes from."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor, however it is sharded."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The trainer's own."""
        ...

    def value(self, dtype: torch.dtype) -> Tensor:
        """The whole tensor; who copies it casts it. Of a sharded one this is a collective of all trainer ranks."""
        ...


@dataclass(frozen=True)
class Whole:
    """A parameter or buffer as it is."""

    tensor: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def value(self, dtype: torch.dtype) -> Tensor:
        return _whole(self.tensor, dtype)


@dataclass(frozen=True)
class Merged:
    """W + scaling * B A, folded in float32 (LoRA, arXiv 2106.09685, equation 3)."""

    base: Tensor  # [out, in]
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scaling: float

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def value(self, dtype: torch.dtype) -> Tensor:
        base, a, b = (_whole(part, part.dtype).float() for part in (self.base, self.a, self.b))
        return torch.addmm(base, b, a, alpha=self.scaling).to(dtype)


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast before it is gathered: fewer bytes between the ranks."""
    return full_tensor(tensor.to(dtype)) if isinstance(tensor, DTensor) else tensor.detach()


def origins(module: nn.Module, mode: Mode) -> dict[str, Origin]:
    """What a trainer's module publishes in a mode. Raises PublishError if the mode does not fit the module.

    "lora": the adapter. "merged": all weights, the adapter folded in. "full": all weights of a module without adapter.
    Buffers count as weights if they are persistent.
    """
    tensors = named_tensors(module)
    adapter = {name: tensor for name, tensor in tensors.items() if is_lora(name)}
    if mode == "full" and adapter:
        raise PublishError('the trainer\'s module holds LoRA: publish it in mode "lora" or "merged", not "full".')
    if mode != "full" and not adapter:
        raise PublishError(f'the trainer\'s module holds no LoRA: publish it in mode "full", not {mode!r}.')
    if mode == "lora":
        return {name: Whole(tensor) for name, tensor in adapter.items()}
    found: dict[str, Origin] = {name: Whole(tensor) for name, tensor in tensors.items() if name not in adapter}
    if mode == "merged":
        found |= _merged(tensors, scalings(module))
    return found


def _merged(tensors: Mapping[str, Tensor], scaling: Mapping[str, float]) -> dict[str, Origin]:
    """The adapted layers' weights, by name."""
    found: dict[str, Origin] = {}
    for layer, factor in scaling.items():
        names = [f"{layer}.weight", f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"]
        for name in names:
            if name not in tensors:
                raise PublishError(f"{name} is missing: the adapter of {layer} cannot be folded into its weight.")
            if tensors[name].ndim != 2:
                raise PublishError(f"{name} is not a matrix: only adapters of linear layers can be published.")
        base, a, b = (tensors[name] for name in names)
        found[names[0]] = Merged(base, a, b, factor)
    return found


def specs(
    found: Mapping[str, Origin], wire_dtype: torch.dtype | None, rounded: Collection[str] | None = None
) -> dict[str, Spec]:
    """Shapes, and the dtypes that travel: `wire_dtype` for floating-point tensors, or their own if it is None.

    Given `rounded`, only those that it names; the others have their own.
    """

    def dtype(name: str, own: torch.dtype) -> torch.dtype:
        cast = own.is_floating_point and (rounded is None or name in rounded)
        return wire_dtype if wire_dtype is not None and cast else own

    return {name: Spec(tuple(origin.shape), dtype(name, origin.dtype)) for name, origin in found.items()}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their published names."""
    found: dict[str, Tensor] = {}
    for name, tensor in _raw_tensors(module):
        clean = clean_name(name)
        if clean in found:
            raise PublishError(f"two tensors of the module would be published as {clean}; one of them is {name}.")
        found[clean] = tensor
    return found


def _raw_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield name, buffer


def clean_name(name: str) -> str:
    """`x.base_layer.weight` is the model's `x.weight`, and `x.lora_A.default.weight` is `x.lora_A.weight`."""
    return re.sub(rf"\.(lora_[AB])\.{ADAPTER}\.", r".\1.", name.replace(".base_layer.", "."))


def is_lora(name: str) -> bool:
    """Is it a tensor of an adapter?"""
    return any(part.startswith("lora_") for part in name.split("."))


def holds_lora(module: nn.Module) -> bool:
    """Has the module an adapter?"""
    return any(is_lora(name) for name, _ in module.named_parameters())


def scalings(module: nn.Module) -> dict[str, float]:
    """alpha / rank of every adapted layer, by the layer's published name; empty without adapter."""
    if not holds_lora(module):
        return {}
    from peft.tuners.lora.layer import LoraLayer

    found: dict[str, float] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer) and ADAPTER in layer.scaling:
            if layer.use_dora.get(ADAPTER) or layer.lora_bias.get(ADAPTER):
                raise PublishError(f"{name} has a DoRA magnitude or a LoRA bias, which cannot be published.")
            found[clean_name(name)] = float(layer.scaling[ADAPTER])
    return found
