"""The worked examples of CONTRIBUTING.md, written out as it says and run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import flowrl
from flowrl.build import build
from flowrl.cli.compose import choices
from flowrl.preflight import preflight

GUIDE = Path(__file__).parents[2] / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Every block of the guide under the path that its first line names, importable."""
    root = tmp_path_factory.mktemp("guide")
    for name, text in BLOCK.findall(GUIDE.read_text(encoding="utf-8")):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(root))
    yield root
    patch.undo()


def test_every_example_is_an_option(folder: Path) -> None:
    added = {(c.group, c.name) for c in choices(folder / "options")} - {(c.group, c.name) for c in choices()}
    assert added == {
        ("reward", "warmth"),
        ("sampler/dynamics", "fading_sde"),
        ("algorithm", "reinforce"),
        ("model", "dots"),
        ("recipe", "warm_dots"),
    }


def test_the_reward_scores(folder: Path) -> None:
    warmth = build({"_target_": "extras.warmth.Warmth", "scale": 2}, "reward")
    red_then_blue = np.zeros((2, 4, 4, 3), np.uint8)
    red_then_blue[0, ..., 0] = red_then_blue[1, ..., 2] = 255
    assert warmth.score(red_then_blue, []).tolist() == [2.0, -2.0]


def test_the_dynamics_is_a_gaussian_step(folder: Path) -> None:
    dynamics = build({"_target_": "extras.fading_sde.FadingSDE", "eta": 0.5}, "dynamics")
    sigmas = torch.tensor([1.0, 0.6, 0.0])
    step = dynamics.transition(torch.ones(2, 3), torch.zeros(2, 3), sigmas, 1)
    assert torch.allclose(step.std, torch.full((2,), 0.5 * 0.6 * 0.6**0.5, dtype=torch.float64))


def test_the_examples_object_for_themselves(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"algorithm\.num_updates_per_batch: must be 1"):
        preflight(load(folder, "algorithm.num_updates_per_batch=2"))
    with pytest.raises(ValueError, match=r"sampler\.dynamics: eta must be greater than 0"):
        preflight(load(folder, "sampler.dynamics.eta=0"))


def test_the_recipe_trains(folder: Path, tmp_path: Path) -> None:
    run_dir = flowrl.train(load(folder, f"runs={tmp_path}", "reward.num_workers=0", "logger=jsonl"))
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert run_dir == tmp_path / "warm_dots" and len(metrics) == 11
    assert metrics[-1]["eval/heldout/warmth_mean"] > metrics[0]["eval/heldout/warmth_mean"]
    assert (run_dir / "report.html").exists()


def load(folder: Path, *overrides: str):  # type: ignore[no-untyped-def]
    (folder / "prompts.txt").write_text('say "RED"\nsay "BLUE"\nsay "GREEN"\n')
    files = [f"data.train={folder / 'prompts.txt'}", f"trainer.eval.sets.heldout={folder / 'prompts.txt'}"]
    return flowrl.load_config(["recipe=warm_dots", *files, *overrides], folder / "options")
