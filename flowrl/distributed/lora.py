"""Which weights are trained: all of them, or LoRA adapters (peft)."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flowrl.config import ConfigError, LoRA, Problem
from flowrl.distributed.fsdp import assert_writable, full_tensor, is_first
from flowrl.distributed.networks import NETWORKS, by_network, joined, network_of, own_name

ADAPTER = "default"
ADAPTER_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")  # diffusers' and peft's
ADAPTER_PREFIXES = ("transformer.", "base_model.model.")  # of the names in them


def train_fully(module: nn.Module, master_dtype: torch.dtype = torch.float32) -> None:
    """Every parameter trainable, with masters in `master_dtype`; before or after sharding."""
    if master_dtype != torch.float32:
        warnings.warn(
            f"actor.master_dtype={str(master_dtype).removeprefix('torch.')}: updates smaller than the rounding of a "
            "weight are lost. Set it to float32 unless memory forbids.",
            stacklevel=2,
        )
    nn.Module.to(module, master_dtype).requires_grad_(True)  # diffusers' own `to` warns of what we do on purpose
    assert_boundary(module, "full")


def add_lora(module: nn.Module, config: LoRA, default_targets: Sequence[str], seed: int) -> None:
    """Freeze `module` and add a float32 adapter to every linear layer whose name ends in one of the targets.

    Call it before sharding, with the same `seed` on every rank: then the adapter is the same everywhere.

    Raises ConfigError for a target that matches no layer, and for a warm start that does not fit exactly.
    """
    from peft import inject_adapter_in_model

    targets = list(config.targets if config.targets is not None else default_targets)
    check_targets(module, targets)
    module.requires_grad_(False)
    settings = peft_settings(config, targets)
    with torch.random.fork_rng(devices=[]):  # peft initialises from the global generator
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    for parameter in trainable(module).values():
        parameter.data = parameter.data.float()
    if config.warm_start is not None:
        load_adapter(module, Path(config.warm_start))
    assert_boundary(module, "lora")


def peft_settings(config: LoRA, targets: Sequence[str]) -> Any:
    """peft's `LoraConfig`."""
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        init_lora_weights=config.init,
        target_modules=list(targets),
        lora_dropout=0.0,
    )


def assert_boundary(module: nn.Module, mode: str) -> None:
    """Raise RuntimeError unless exactly the right parameters are trained: adapters alone, in float32, or everything."""
    trained = trainable(module)
    if mode == "full":
        wrong = [name for name, _ in module.named_parameters() if name not in trained]
        why = "is frozen, and full training freezes nothing"
    else:
        adapter = {name for name, _ in module.named_parameters() if ".lora_" in name}
        if not adapter:
            raise RuntimeError("actor.mode=lora, but the model holds no adapter.")
        wrong = sorted(adapter ^ trained.keys()) + [n for n, p in trained.items() if p.dtype != torch.float32]
        why = "is wrong: with LoRA the base is frozen, and adapters are trained in float32"
    if wrong:
        raise RuntimeError(f"actor.mode={mode}: {wrong[0]} {why} ({len(wrong)} such parameters).")


def check_targets(module: nn.Module, targets: Sequence[str]) -> None:
    """Each target must be the suffix of some linear layer's name, and there must be one."""
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    unmatched = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unmatched:
        message = f"no linear layer's name ends in {', '.join(unmatched)}."
        raise ConfigError(Problem("actor.lora.targets", message, "Set it to null for the model's own."))
    if not targets:
        hint = "Set it to null for the model's own."
        raise ConfigError(Problem("actor.lora.targets", "must name at least one layer, got none.", hint))


def load_adapter(module: nn.Module, folder: Path) -> None:
    """Copy a saved adapter's weights. Raises ConfigError unless names, shapes and alpha agree one to one."""
    files = adapter_files(folder)
    if not files:
        raise ConfigError(Problem("actor.lora.warm_start", f"{folder} holds none of {', '.join(ADAPTER_FILES)}."))
    try:
        restore(module, read_adapter(folder))
    except ValueError as error:
        message = f"{folder}: {error}"
        raise ConfigError(Problem("actor.lora.warm_start", message, "Do rank and targets agree?")) from error
    alpha = module.peft_config[ADAPTER].lora_alpha  # type: ignore[union-attr, index]
    for path in files.values():
        saved = _saved_alpha(path)
        if saved is not None and saved != alpha:
            message = f"{path.parent} was trained with alpha {saved}, not {alpha}."
            raise ConfigError(Problem("actor.lora.warm_start", message, f"Set actor.lora.alpha={saved}."))


def adapter_files(folder: Path) -> dict[str, Path]:
    """The file of the adapter in `folder`, under ""; or that of each network's, by the network's name. May be empty."""
    files = {
        network: file
        for network in ("", *NETWORKS)
        for file in [folder / network / name for name in reversed(ADAPTER_FILES)]
        if file.is_file()
    }
    return {"": files[""]} if "" in files else files


@torch.no_grad()
def restore(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy saved values into the trainable parameters, by the names they are saved under.

    Persistent buffers may be among them. Raises ValueError unless names and shapes agree one to one.
    """
    parameters = adapter_tensors(module)
    known: dict[str, Tensor] = {**parameters, **dict(module.named_buffers())}
    wrong = sorted((parameters.keys() - values.keys()) | (values.keys() - known.keys()))
    wrong += [name for name in known.keys() & values.keys() if known[name].shape != values[name].shape]
    if wrong:
        raise ValueError(f"{len(wrong)} tensors are missing, extra or misshapen, among them {wrong[0]}.")
    for name, value in values.items():
        known[name].copy_(value)


def _saved_alpha(path: Path) -> float | None:
    """The alpha beside the weights: diffusers keeps it in the file's metadata, peft in a file of its own."""
    settings = path.with_name("adapter_config.json")
    if settings.is_file():
        return float(json.loads(settings.read_text())["lora_alpha"])
    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    return float(about["transformer.lora_alpha"]) if "transformer.lora_alpha" in about else None


def save_adapter(module: nn.Module, folder: Path) -> None:
    """The module's adapter; see `write_adapter`. All ranks of a sharded module must call it; the first one writes."""
    assert_writable(module)
    tensors = {name: full_tensor(parameter).cpu() for name, parameter in adapter_tensors(module).items()}
    if is_first(module):
        write_adapter(folder, tensors, module.peft_config[ADAPTER])  # type: ignore[index]


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], settings: Any) -> None:
    """An adapter as `pipe.load_lora_weights(folder)` takes it, and as peft does; of several networks, a folder each.

    diffusers' file has alpha in its metadata, else it would be lost; peft's has `adapter_config.json` beside it.

    Args:
        folder: made if it is not there.
        tensors: by the names that `adapter_tensors` gives.
        settings: peft's `LoraConfig`.
    """
    for network, own in by_network(tensors).items():
        layers = {own_name(layer) for layer in settings.target_modules if network_of(layer) in ("", network)}
        _write_one(folder / network, own, replace(settings, target_modules=layers))


def _write_one(folder: Path, tensors: Mapping[str, Tensor], settings: Any) -> None:
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.to_dict().items()}
    about = json.dumps({f"transformer.{name}": value for name, value in plain.items()}, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    settings.save_pretrained(folder)
    for file, prefix in zip(ADAPTER_FILES, ADAPTER_PREFIXES, strict=True):
        named = {prefix + name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, folder / file, metadata={"format": "pt", "lora_adapter_metadata": about})


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """The tensors of the adapter in `folder`, by the names that `adapter_tensors` gives."""
    prefixes = "|".join(map(re.escape, ADAPTER_PREFIXES))
    return joined(
        {
            network: {re.sub(rf"^({prefixes})", "", name): tensor for name, tensor in load_file(path).items()}
            for network, path in adapter_files(folder).items()
        }
    )


def adapter_settings(folder: Path) -> LoRA:
    """What the adapter in a folder that `write_adapter` has filled begins from. Raises ConfigError for another folder.

    Its own weights are the warm start.
    """
    try:
        first = next(iter(adapter_files(folder).values()), folder / ADAPTER_FILES[0])
        plain = json.loads(first.with_name("adapter_config.json").read_text())
        rank, alpha, targets = int(plain["r"]), float(plain["lora_alpha"]), sorted(plain["target_modules"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{folder} holds no adapter_config.json that says its rank, alpha and layers."
        raise ConfigError(Problem("adapter", message)) from error
    return LoRA(rank=rank, alpha=alpha, targets=targets, warm_start=str(folder))


def saved_name(name: str) -> str:
    """A trained tensor's name without the adapter's own."""
    return name.replace(f".{ADAPTER}.", ".")


def adapter_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by the names they are saved under, without the adapter's own."""
    return {saved_name(name): parameter for name, parameter in trainable(module).items()}


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters with gradients, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
