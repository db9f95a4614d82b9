"""Models of published architecture with random weights: `model.init=random`. Nothing is downloaded, nothing is read.

A pipeline is described by the classes and the config.json values of its parts (`Published`; one file per family in
`flowrl.models.published`) and put together by `assemble`. Parameters are first made without storage and then drawn on
the device in their final dtype, one at a time, so that 20 B of them never exist as float32 on the host.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.flow.noise import Noise
from flowrl.models.byte_tokenizers import TOKENIZERS

EMBEDDING_STD = 0.02
"""Of the rows of an embedding: small beside what the layers add, as in trained language models."""


T5_QUERIES = "SelfAttention.q.weight"
"""T5 does not divide its attention's logits by sqrt(d_kv): its queries are that much smaller instead."""


@dataclass(frozen=True)
class Part:
    """A class of diffusers or transformers, as a dotted name, and what its folder's config.json says."""

    cls: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Published:
    """A pipeline's contents, by the names of its constructor's arguments."""

    parts: Mapping[str, Part]  # the neural networks
    scheduler: Part
    tokenizers: Mapping[str, str]  # to one of "clip", "t5", "qwen"
    options: Mapping[str, Any] = field(default_factory=dict)  # such as boundary_ratio or is_distilled


def assemble(
    published: Published,
    pipeline_cls: Any,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    float32_parts: Collection[str] = (),
    only: Collection[str] | None = None,
) -> Any:
    """An ordinary diffusers pipeline, which can be saved and loaded like any other.

    Args:
        published: its architecture.
        pipeline_cls: the diffusers class.
        dtype: of the weights, see `build`.
        device: where they are drawn, one part at a time: there must be room for the largest. Each part is on the CPU
            afterwards, for whoever uses it to place.
        seed: of the weights; no two parts are equal.
        float32_parts: names of parts that are float32 whatever `dtype` is.
        only: names of the parts that have weights; of others there are the shapes. None: all have.
    """
    modules = {}
    for name, part in published.parts.items():
        own_dtype = torch.float32 if name in float32_parts else dtype
        if only is not None and name not in only:
            modules[name] = skeleton(resolve_name(part.cls), part.config).to(own_dtype)
            continue
        module = build(resolve_name(part.cls), part.config, dtype=own_dtype, device=device, seed=seed, name=name)
        modules[name] = module.to("cpu")  # before the next one is drawn
    tokenizers = {name: TOKENIZERS[kind]() for name, kind in published.tokenizers.items()}
    scheduler = resolve_name(published.scheduler.cls)(**published.scheduler.config)
    return pipeline_cls(**modules, **tokenizers, scheduler=scheduler, **published.options)


def build(
    cls: Any, config: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device, seed: int, name: str = ""
) -> nn.Module:
    """A frozen module in evaluation mode with random weights that keep activations of order 1.

    A tensor's values depend on `seed`, `name`, its own name and shape, and the kind of device, not on other tensors;
    those in bfloat16 are those in float32, rounded.

    Args:
        cls: a model class of diffusers or transformers.
        config: what config.json says, as keyword arguments.
        dtype: of parameters and saved buffers, as `from_pretrained` has it: what the class wants in float32 stays so.
        device: where the weights are drawn, and stay.
        seed: of the weights.
        name: of this module among others of the same seed.
    """
    module = skeleton(cls, config)
    source = Noise.of(seed, "untrained", name)
    in_float32 = _float32_names(module)
    drawn: dict[nn.Parameter, nn.Parameter] = {}  # by what it replaces: tied parameters stay tied
    for prefix, owner in module.named_modules():
        for own_name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter not in drawn:
                path = f"{prefix}.{own_name}" if prefix else own_name
                values = _draw(owner, own_name, parameter.shape, _generator(source, path, device))
                if path.endswith(T5_QUERIES):
                    values /= math.sqrt(config["d_kv"])
                kept = not in_float32.isdisjoint(path.split("."))
                drawn[parameter] = nn.Parameter(values.to(torch.float32 if kept else dtype), requires_grad=False)
            owner.register_parameter(own_name, drawn[parameter])
        if isinstance(owner, nn.BatchNorm2d):
            _draw_statistics(owner, _generator(source, prefix, device))
        _cast_saved_buffers(owner, dtype)
    return module.to(device).eval()


def skeleton(cls: Any, config: Mapping[str, Any]) -> nn.Module:
    """The module with parameters on the meta device, and everything else as its constructor computes it."""
    from accelerate import init_empty_weights
    from transformers import PreTrainedModel

    with init_empty_weights(include_buffers=False):  # tables of positions are buffers, or plain attributes
        if not issubclass(cls, PreTrainedModel):
            module: nn.Module = cls(**config)
            return module
        model = cls(cls.config_class(**config))
    model.tie_weights()  # the context has separated what the constructor tied
    return model  # type: ignore[no-any-return]


def _float32_names(module: nn.Module) -> set[str]:
    """Components of the names of parameters that diffusers keeps in float32 whatever the dtype."""
    from diffusers import ModelMixin

    return set(module._keep_in_fp32_modules or ()) if isinstance(module, ModelMixin) else set()


def _generator(source: Noise, path: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(source.generator(path).initial_seed())


def _draw(owner: nn.Module, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Float32 values of one parameter, on the generator's device."""
    device = generator.device
    if name == "bias":
        return torch.zeros(shape, device=device)
    if shape.numel() == shape[0]:  # the scale of a norm, [D] or [D, 1, 1, 1]
        return torch.ones(shape, device=device)
    # Linear and convolutional weights: unit variance in, unit variance out; also those that libraries begin at zero.
    std = EMBEDDING_STD if isinstance(owner, nn.Embedding) else math.sqrt(shape[0] / shape.numel())
    return torch.empty(shape, device=device).normal_(0, std, generator=generator)


def _draw_statistics(owner: nn.BatchNorm2d, generator: torch.Generator) -> None:
    """Means around 0 and variances around 1, neither of them exactly: normalisation must be seen to be done."""
    assert owner.running_mean is not None and owner.running_var is not None
    shape, device = owner.running_mean.shape, generator.device
    owner.running_mean = torch.empty(shape, device=device).normal_(0, 0.3, generator=generator)
    owner.running_var = torch.empty(shape, device=device).normal_(0, 0.3, generator=generator).exp()


def _cast_saved_buffers(owner: nn.Module, dtype: torch.dtype) -> None:
    for name, buffer in list(owner.named_buffers(recurse=False)):
        if name not in owner._non_persistent_buffers_set and buffer.is_floating_point():
            setattr(owner, name, buffer.to(dtype))
