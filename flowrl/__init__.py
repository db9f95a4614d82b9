"""flowrl: post-training of flow-matching image generators with reinforcement learning.

The command `python -m flowrl recipe=NAME key=value ...` is the same, from Python, as

    import flowrl

    if __name__ == "__main__":  # reward workers import the script anew
        run_folder = flowrl.train(flowrl.load_config(["recipe=NAME", "key=value"]))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

__version__ = "0.1.0"


def load_config(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> DictConfig:
    """The configuration that `python -m flowrl OVERRIDES` would run; see `flowrl.cli.compose.load_config`."""
    from flowrl.cli import compose

    return compose.load_config(overrides, config_dir)


def train(cfg: DictConfig) -> Path:
    """Run `cfg` to its end and return the run folder; see `flowrl.cli.train.train`."""
    from flowrl.cli import train

    return train.train(cfg)
