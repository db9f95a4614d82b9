"""A configuration without faults, and what preflight finds in it once it is changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from flowrl import load_config
from flowrl.config import ConfigError
from flowrl.preflight import preflight


def sound(folder: Path) -> DictConfig:
    """A configuration without faults, on two prompt files of its own."""
    for name in ("train", "heldout"):
        (folder / f"{name}.txt").write_text('say "A"\nsay "B"\n')
    files = [f"data.train={folder / 'train.txt'}", f"trainer.eval.sets.heldout={folder / 'heldout.txt'}"]
    return load_config(["data=prompts", "data.target=quoted", *files, f"runs={folder}"])


def found(base: DictConfig, **values: Any) -> dict[str, str]:
    """Problems by path, for dotted keys written with `__`."""
    cfg = copy.deepcopy(base)
    for key, value in values.items():
        OmegaConf.update(cfg, key.replace("__", "."), value, force_add=True)
    try:
        preflight(cfg)
    except ConfigError as error:
        return {problem.path: str(problem) for problem in error.problems}
    return {}
