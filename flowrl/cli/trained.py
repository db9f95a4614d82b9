"""What a run has trained: its configuration, and the weights of its checkpoints or of its end."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flowrl import config
from flowrl.build import build_run
from flowrl.cli.explain import explain
from flowrl.config import Config, ConfigError, Problem
from flowrl.distributed.checkpoint.folders import Committed, Folders, open_checkpoint
from flowrl.distributed.checkpoint.manifest import CheckpointError
from flowrl.distributed.checkpoint.tensors import read_tensors
from flowrl.distributed.lora import add_lora, read_adapter, restore, saved_name, train_fully
from flowrl.distributed.networks import NETWORKS, joined
from flowrl.types import LoadError, Policy

CHECKPOINTS, FINAL = "checkpoints", "final"
LATEST = "latest"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """Trained weights on the host, by the names that `distributed.lora.restore` takes."""

    source: str  # where they come from, for people
    tensors: Mapping[str, Tensor]
    base: str | None  # fingerprint of the model that they were trained from; None if the run has kept no checkpoint


def open_run(folder: Path, device: str, base: str | None = None) -> Config:
    """The run whose folder this is, to be computed on `device`, with the model in folder `base` if that is given.

    Keys that flowrl has got since then have their defaults. Raises ConfigError if there is no run that can be read.
    """
    file = folder / "config.yaml"
    try:
        cfg = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(file))
    except OSError as error:
        raise ConfigError(Problem("run", f"{folder} is no run's folder: {file.name}: {error.strerror}.")) from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        problems = explain(error).problems
        raise ConfigError(*(Problem(f"{file}: {p.path}", p.message, p.hint) for p in problems)) from error
    assert isinstance(cfg, DictConfig)
    if device == "cuda" and torch.cuda.device_count() == 0:
        raise ConfigError(Problem("device", "is cuda, but torch sees no CUDA device.", "Set device=cpu."))
    if base is not None:
        cfg.model.path = base
    return replace(build_run(cfg), device=device)


def read_trained(folder: Path, checkpoint: str | None, weights: str | None) -> Trained:
    """The weights of a run's folder.

    Args:
        folder: the run's.
        checkpoint: the name of one, or "latest". None: the end of a finished run, else the latest.
        weights: "live", "ema", the average; or "final", those that the run has left at its end. None: "final" at a
            finished run's end, else the average if there is one.

    Raises:
        ConfigError: there are no such weights.
        CheckpointError: the checkpoint is damaged.
    """
    if weights == FINAL and checkpoint is not None:
        message = f"cannot be {FINAL} with a checkpoint: those are the weights at the run's end."
        raise ConfigError(Problem("weights", message, "Leave one of the two out."))
    if weights == FINAL and (folder / FINAL).is_dir() and not _is_finished(folder):
        message = f"{folder / FINAL} is of an earlier end: the run has been begun again since."
        raise ConfigError(Problem("weights", message, "Leave it out to take those of the newest checkpoint."))
    if weights == FINAL or (weights is None and checkpoint is None and _is_finished(folder)):
        return Trained(str(folder / FINAL), _final(folder / FINAL), _any_base(folder))
    chosen = open_checkpoint(_committed(folder, checkpoint), verify=True)
    kept = "ema" if any(key.startswith("ema.") for key in chosen.keys) else "live"
    if weights == "ema" and kept != "ema":
        message = f"{chosen.path} keeps no average: the run had trainer.eval.use_ema=false."
        raise ConfigError(Problem("weights", message, "Set weights=live."))
    kind = weights or kept
    tensors = read_tensors(chosen.tensors, "ema." if kind == "ema" else "weights.")
    named = {saved_name(name): tensor for name, tensor in tensors.items()}
    return Trained(f"{chosen.path} ({kind})", named, _base(chosen))


def _is_finished(folder: Path) -> bool:
    """Has the run come to its end, and not been begun again since?"""
    try:
        return json.loads((folder / "run.json").read_text())["finished"] is not None and (folder / FINAL).is_dir()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _committed(folder: Path, name: str | None) -> Path:
    """The folder of the chosen checkpoint."""
    checkpoints = Folders(folder / CHECKPOINTS)
    found = {checkpoints.path(step).name: checkpoints.path(step) for step in checkpoints.steps()}
    if not found:
        hint = f"Set weights={FINAL}." if (folder / FINAL).is_dir() else ""
        raise ConfigError(Problem("run", f"{folder} holds no committed checkpoint.", hint))
    if name is None or name == LATEST:
        return list(found.values())[-1]
    if name not in found:
        raise ConfigError(Problem("checkpoint", f"{folder} has no {name!r}.", f"There are: {', '.join(found)}."))
    return found[name]


def _base(checkpoint: Committed) -> str | None:
    base: str | None = checkpoint.json("contract.json").get("base")
    return base


def _any_base(folder: Path) -> str | None:
    """All checkpoints of a run have begun from the same model; one that can be read says from which."""
    for path in Folders(folder / CHECKPOINTS).newest_first():
        try:
            return _base(open_checkpoint(path, verify=False))
        except CheckpointError as error:
            log.warning("%s", error)
    return None


def _final(folder: Path) -> dict[str, Tensor]:
    """What `Actor.save` has written: an adapter, or the whole transformer."""
    try:
        found = read_adapter(folder) or _read_networks(folder)
    except SafetensorError as error:
        raise ConfigError(Problem("weights", f"{folder} cannot be read: {error}.")) from error
    if not found:
        message = f"{folder} holds no weights: has the run come to its end?"
        raise ConfigError(Problem("weights", message, "Leave weights out to take those of a checkpoint."))
    return found


def _read_networks(folder: Path) -> dict[str, Tensor]:
    found = {network: _read_all(folder / network) for network in NETWORKS if (folder / network).is_dir()}
    return joined(found) if len(found) > 1 else found.get(NETWORKS[0], {})


def _read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def check_base(policy: Policy, trained: Trained) -> None:
    """Raise LoadError unless the policy, as it was loaded, is the model that the run has begun from."""
    if trained.base is not None and policy.fingerprint() != trained.base:
        message = "model.path: the model there is not the one that the run has trained: its content differs."
        raise LoadError(f"{message} Set base=... to where that one lies.")


def install(policy: Policy, settings: config.Actor, trained: Trained) -> None:
    """Make the loaded policy the trained one, on its device. Raises LoadError if the weights are not of this model."""
    if settings.mode == "lora":
        add_lora(policy.module, replace(settings.lora, warm_start=None), policy.lora_targets, seed=0)
    else:
        train_fully(policy.module)
    try:
        restore(policy.module, trained.tensors)
    except ValueError as error:
        raise LoadError(f"{trained.source}: {error} Is this the model that the run has trained?") from error
    settle(policy)


def settle(policy: Policy) -> None:
    """Its module on its device, to be sampled with."""
    policy.module.requires_grad_(False)
    torch.nn.Module.to(policy.module, policy.device)  # diffusers' own `to` has remarks
