"""What `python -m flowrl --help` prints."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from flowrl.cli.compose import Choice, choices

_HEAD = """\
flowrl: post-training of flow-matching image generators with reinforcement learning.

usage: python -m flowrl [recipe=NAME] [group=OPTION ...] [key=value ...] [flags]

Without arguments it trains the small model that it ships with, on this machine, with the recipe tiny_ocr.
Pictures, metrics and report.html go to runs/<name>; name is the recipe unless you set it.

flags:
  -m, --multirun      one run for each combination of comma lists: -m algorithm.clip_range=1e-4,1e-3
  --cfg job           print the configuration that would run, and stop
  --config-dir DIR    a folder of your own with recipe/NAME.yaml, model/NAME.yaml, ... beside flowrl's
  -h, --help          this page
"""

_TAIL = """\
examples:
  python -m flowrl
  python -m flowrl name=slower actor.optimizer.lr=5e-5 seed=1
  python -m flowrl data=prompts data.train=mine.txt trainer.eval.sets.heldout=kept.txt data.target=quoted
  python -m flowrl sampler/dynamics=cps sampler.dynamics.noise_level=0.6
  python -m flowrl -m seed=0,1,2
"""


def help_text(config_dir: Path | None = None) -> str:
    """The page: what flowrl is, its flags, every recipe and group with its options, examples."""
    options = choices(config_dir)
    recipes = [choice for choice in options if choice.group == "recipe"]
    groups = [choice for choice in options if choice.group != "recipe"]
    return "\n".join([_HEAD, _section("recipes (recipe=NAME):", recipes), *_groups(groups), _TAIL])


def _groups(options: Iterable[Choice]) -> list[str]:
    by_group = groupby(options, key=lambda choice: choice.group)
    return ["groups (group=OPTION; every key of an option can be set: group.key=value):\n"] + [
        _section(f"  {group}", list(members), indent=4) for group, members in by_group
    ]


def _section(title: str, options: list[Choice], indent: int = 2) -> str:
    width = max((len(option.name) for option in options), default=0)
    lines = [f"{' ' * indent}{option.name:<{width}}  {option.description}".rstrip() for option in options]
    return "\n".join([title, *lines, ""])
