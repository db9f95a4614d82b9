"""A diffusers folder with trained weights in it: everything else is the base's, linked or copied.

It works on files, one after the other, so that memory holds no more than the trained weights and one file of the base.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flowrl.cli.arguments import Failure
from flowrl.config import LoRA
from flowrl.distributed.networks import NETWORKS, by_network
from flowrl.distributed.weight_sync.source import Merged, is_lora

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
OTHER_WEIGHTS = (".bin", ".ckpt", ".msgpack", ".h5", ".onnx", ".pb", ".pkl", ".pt", ".pth")  # some of them pickles
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "module")
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES)


def merge(base: Path, out: Path, tensors: Mapping[str, Tensor], lora: LoRA | None, dtype: torch.dtype) -> None:
    """Fill `out` with the pipeline of `base` and the trained weights.

    Args:
        base: a diffusers folder with safetensors.
        out: an empty folder.
        tensors: an adapter to be folded in, or weights that take the place of the base's.
        lora: the adapter's settings; None if it is none.
        dtype: what the transformer is stored in. The folding is done in float32.

    Raises:
        Failure: the base is no such folder, or the weights do not fit it.
    """
    check(tensors)
    parts = {network or NETWORKS[0]: own for network, own in by_network(tensors).items()}
    _carry_over(base, out, tuple(parts))
    for network, own in parts.items():
        _merge_network(base / network, out / network, own, lora, dtype)


def _merge_network(
    source: Path, target: Path, tensors: Mapping[str, Tensor], lora: LoRA | None, dtype: torch.dtype
) -> None:
    pending = dict(tensors)
    target.mkdir()
    _link(source / "config.json", target / "config.json")
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for file in _weight_files(source):
        stored = {name: _trained(name, value, pending, lora).contiguous() for name, value in _read(file)}
        stored = {name: value.to(dtype) if value.is_floating_point() else value for name, value in stored.items()}
        check(stored)
        _refuse_adapters(stored)
        save_file(stored, target / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file.name)
        num_bytes += sum(value.nbytes for value in stored.values())
    if pending:
        message = f"{len(pending)} trained tensors have no place in {source}, among them {min(pending)}."
        raise Failure(f"{message} Is this the model that the run has trained?")
    if (source / INDEX).is_file():
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def check(tensors: Mapping[str, Tensor]) -> None:
    """Raise Failure for values that are not finite, and for names that only a wrapper gives."""
    for name, value in tensors.items():
        leaked = [part for part in name.split(".") if part in WRAPPERS]
        if leaked:
            raise Failure(f"{name} is no name of the model's: {leaked[0]} belongs to what was wrapped around it.")
        if not bool(value.isfinite().all()):
            raise Failure(f"{name} holds values that are not finite: these weights draw nothing.")


def _refuse_adapters(names: Iterable[str]) -> None:
    left = next((name for name in names if is_lora(name)), None)
    if left is not None:
        raise Failure(f"the base holds an adapter itself, {left}: the base must be the plain model.")


def _trained(name: str, base: Tensor, pending: dict[str, Tensor], lora: LoRA | None) -> Tensor:
    """The trained value of a base's tensor, taken out of what is `pending`; of one that was not trained, its own."""
    layer = name.removesuffix(".weight")
    if lora is None:
        value = pending.pop(name, base)
    elif f"{layer}.lora_A.weight" in pending:
        a, b = (pending.pop(f"{layer}.lora_{half}.weight", None) for half in "AB")
        if a is None or b is None or a.shape[0] != lora.rank or b.shape[1] != lora.rank:
            raise Failure(f"{layer}: the adapter's two halves are not of rank {lora.rank}.")
        value = Merged(base, a, b, lora.alpha / lora.rank).value(torch.float32)
    else:
        value = base
    if value.shape != base.shape:
        raise Failure(f"{name} has the shape {list(value.shape)}, but {list(base.shape)} in the base.")
    return value


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise Failure(f"{file} of the base cannot be read: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a diffusers model, of the plain variant."""
    indexed = (folder / INDEX).is_file()
    names = sorted(set(_json(folder / INDEX)["weight_map"].values())) if indexed else [WEIGHTS]
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise Failure(f"{folder} holds no {name}: the base must be a diffusers folder with safetensors.")
    return [folder / name for name in names]


# ---------------------------------------------------------------------------------------------- the rest of the folder


def _carry_over(base: Path, out: Path, trained: tuple[str, ...]) -> None:
    """Every part of the pipeline but the trained ones, the list of them, and the licence."""
    listed = _json(base / "model_index.json")
    parts = [name for name, kind in listed.items() if isinstance(kind, list) and any(kind) and name not in trained]
    files = [base / "model_index.json", *base.glob("LICENSE*")]
    for name in parts:
        if Path(name).name != name or not (base / name).is_dir():
            raise Failure(f"{base} lacks its part {name}.")
        files += [file for file in (base / name).rglob("*") if file.is_file() and file.suffix not in OTHER_WEIGHTS]
    for file in files:
        _link(file, out / file.relative_to(base))


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where that cannot be: on another disk, of another owner."""
    target.parent.mkdir(parents=True, exist_ok=True)
    real = source.resolve()  # the Hub's cache is made of symbolic links
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(real, target)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Failure(f"{file} cannot be read: the base must be a diffusers folder ({error}).") from error
