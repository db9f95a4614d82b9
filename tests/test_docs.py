"""The documents say what the code does."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from flowrl.buffer.ledger import Ledger
from flowrl.cli.compose import choices, load_sweep
from flowrl.cli.train import command
from flowrl.config import Config, Evaluation
from flowrl.tracking.metrics import memory_metrics, reward_metrics
from tests.support.documented import undocumented

ROOT = Path(__file__).parents[1]


def schema_keys(schema: type = Config, path: str = "") -> Iterator[tuple[str, str]]:
    """Every fixed key and its default as the table writes it; components are the groups' business."""
    defaults: Any = OmegaConf.structured(schema)
    for name, hint in get_type_hints(schema).items():
        where = f"{path}{name}"
        if is_dataclass(hint) and isinstance(hint, type):
            yield from schema_keys(hint, f"{where}.")
        elif hint is not Any and not str(hint).startswith("dict"):
            yield where, "must be set" if OmegaConf.is_missing(defaults, name) else _written(defaults[name])
    if schema is Config:
        yield from schema_keys(Evaluation, "trainer.eval.")


def _written(value: Any) -> str:
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return f"`{plain if isinstance(plain, str) else json.dumps(plain)}`"


def test_the_table_of_keys_is_the_schema() -> None:
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    table = text[text.index("<!-- keys -->") : text.index("<!-- end of keys -->")]
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \|", table, re.MULTILINE)
    assert dict(rows) == dict(schema_keys())


def test_the_readme_names_every_option() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `([\w/]+)` \| (.+) \|$", text, re.MULTILINE))
    for choice in choices():
        if choice.group in table:  # variants, `ocr_line`, are named after what they vary
            listed = re.findall(r"`(\w+)`", table[choice.group])
            assert any(choice.name.startswith(name) for name in listed), f"{choice.group}/{choice.name} is missing"
    assert {"model", "algorithm", "reward", "sampler/dynamics"} <= table.keys()


def commands() -> list[list[str]]:
    """The arguments of every `python -m flowrl` in the shell blocks of README and docs."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages).replace("\\\n", " ")
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    calls = [shlex.split(line, comments=True) for line in lines]
    return [call[call.index("flowrl") + 1 :] for call in calls if call[:2] == ["python", "-m"] and "flowrl" in call]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_the_documented_commands_compose(arguments: list[str]) -> None:
    if "-m" in arguments:
        assert len(load_sweep([argument for argument in arguments if argument != "-m"])) == 3
    else:
        assert command([*arguments, "--cfg", "job"]) == 0


def test_links_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_metric_is_explained() -> None:
    rewards = {"ocr": np.array([0.0, 1.0]), "jpeg": np.array([3.0, 4.0])}
    names = reward_metrics(rewards, rewards["ocr"], np.array([0, 0]), rewards["jpeg"]).keys()
    assert undocumented(names, component=list(rewards)) == []
    balance = replace(Ledger().accounting(), submitted=1, evicted={"stale": 1})
    assert undocumented(balance.metrics(), reason=["stale"]) == []
    assert undocumented(memory_metrics(torch.device("cpu"))) == []
    assert undocumented(["eval/mine/ocr_perfect"], component=["ocr"], set=["mine"]) == []


def test_a_metric_that_is_not_explained_is_found() -> None:
    names = ["train/ratio_max", "train/ratio_median", "reward/ocr_mean", "reward/other_mean", "ratio_max"]
    assert undocumented(names, component=["ocr"]) == ["ratio_max", "reward/other_mean", "train/ratio_median"]
