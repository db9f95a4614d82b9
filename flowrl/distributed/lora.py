"""Which weights are trained: all of them, or LoRA adapters (peft)."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from flowrl.config import ConfigError, LoRA, Problem
from flowrl.distributed.fsdp import assert_writable, full_tensor, is_first

ADAPTER = "default"
ADAPTER_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")  # diffusers' and peft's


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
    from peft import LoraConfig, inject_adapter_in_model

    targets = list(config.targets if config.targets is not None else default_targets)
    check_targets(module, targets)
    module.requires_grad_(False)
    settings = LoraConfig(
        r=config.rank, lora_alpha=config.alpha, init_lora_weights=config.init, target_modules=targets, lora_dropout=0.0
    )
    with torch.random.fork_rng(devices=[]):  # peft initialises from the global generator
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    for parameter in trainable(module).values():
        parameter.data = parameter.data.float()
    if config.warm_start is not None:
        load_adapter(module, Path(config.warm_start))
    assert_boundary(module, "lora")


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
    path = next((folder / name for name in ADAPTER_FILES if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(Problem("actor.lora.warm_start", f"{folder} holds none of {', '.join(ADAPTER_FILES)}."))
    found = {re.sub(r"^(base_model\.model\.|transformer\.)", "", k): v for k, v in load_file(path).items()}
    expected = adapter_tensors(module)
    wrong = sorted(expected.keys() ^ found.keys())
    wrong += [name for name in expected.keys() & found.keys() if expected[name].shape != found[name].shape]
    if wrong:
        message = f"{folder}: {len(wrong)} tensors are missing, extra or misshapen, among them {wrong[0]}."
        raise ConfigError(Problem("actor.lora.warm_start", message, "Do rank and targets agree?"))
    alpha, saved = module.peft_config[ADAPTER].lora_alpha, _saved_alpha(path)  # type: ignore[union-attr, index]
    if saved is not None and saved != alpha:
        message = f"{folder} was trained with alpha {saved}, not {alpha}."
        raise ConfigError(Problem("actor.lora.warm_start", message, f"Set actor.lora.alpha={saved}."))
    with torch.no_grad():
        for name, parameter in expected.items():
            parameter.copy_(found[name])


def _saved_alpha(path: Path) -> float | None:
    """The alpha beside the weights: diffusers keeps it in the file's metadata, peft in a file of its own."""
    settings = path.with_name("adapter_config.json")
    if settings.is_file():
        return float(json.loads(settings.read_text())["lora_alpha"])
    with safe_open(path, "pt") as file:
        about = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    return float(about["transformer.lora_alpha"]) if "transformer.lora_alpha" in about else None


def save_adapter(module: nn.Module, folder: Path) -> None:
    """The adapter as `pipe.load_lora_weights(folder)` takes it; alpha goes into the metadata, else it is lost.

    All ranks of a sharded module must call it; the first one writes.
    """
    assert_writable(module)
    settings = module.peft_config[ADAPTER].to_dict()  # type: ignore[union-attr, index]
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in settings.items()}
    about = json.dumps({f"transformer.{name}": value for name, value in plain.items()}, sort_keys=True)
    tensors = {f"transformer.{name}": full_tensor(p).cpu().contiguous() for name, p in adapter_tensors(module).items()}
    if not is_first(module):
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        tensors,
        folder / ADAPTER_FILES[0],
        metadata={"format": "pt", "lora_adapter_metadata": about},
    )


def adapter_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """The adapter's parameters by the names they are saved under, without the adapter's own."""
    return {name.replace(f".{ADAPTER}.", "."): parameter for name, parameter in trainable(module).items()}


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters with gradients, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
