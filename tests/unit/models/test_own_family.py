"""The family of docs/models.md, as somebody else would add it: from outside the package, by what is written there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from flowrl.build import build
from flowrl.cli import check_model
from flowrl.cli.compose import choices
from flowrl.config import LoRA, Sampler
from flowrl.distributed.lora import add_lora, trainable
from flowrl.flow.dynamics.ode import ODE
from flowrl.flow.solvers import Euler
from flowrl.models.pipeline import PipelineModel
from flowrl.types import Exportable, PolicyConfig
from tests.support.families import PROMPTS, start
from tests.unit.models.test_families import solved

CPU = torch.device("cpu")
PAGE = Path(__file__).parents[3] / "docs/models.md"
BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAMPLER = Sampler(num_steps=4, height=32, width=64, dynamics=ODE(), solver=Euler())


@pytest.fixture(scope="module")
def extras(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The page's blocks under the paths that their first lines name, importable."""
    root = tmp_path_factory.mktemp("outside")
    for name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(str(root))
    yield root
    patch.undo()


@pytest.fixture(scope="module")
def model(extras: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("aura_flow")
    node = {"_target_": "extras.aura_flow.AuraFlow", "max_sequence_length": 90}
    build({**node, "init": "random", "size": "tiny"}, "model").load(CPU).pipeline.save_pretrained(folder)
    return build({**node, "path": str(folder)}, "model")


def test_it_is_an_option_and_a_model(extras: Path, model: PipelineModel) -> None:
    assert ("model", "aura_flow") in {(choice.group, choice.name) for choice in choices(extras / "options")}
    assert isinstance(model, PolicyConfig) and isinstance(model, Exportable)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_it_draws_what_its_pipeline_draws(model: PipelineModel, guidance_scale: float) -> None:
    policy, sampler = model.load(CPU), replace(SAMPLER, guidance_scale=guidance_scale)
    noise = start(policy, sampler, len(PROMPTS))
    drawn = solved(policy, policy.encode(PROMPTS, guidance_scale), noise, sampler)
    expected = model.draw(model.folder(), None, PROMPTS, noise, sampler)
    assert (expected - noise).abs().mean() > 0.1
    torch.testing.assert_close(drawn, expected, atol=1e-5, rtol=0)
    assert policy.decode(drawn).shape == (3, 32, 64, 3)
    add_lora(policy.module, LoRA(rank=2, alpha=4.0), policy.lora_targets, seed=0)
    assert len(trainable(policy.module)) == 2 * (8 + 2 * 4)


def test_it_is_checked_by_the_command_that_the_page_names(extras: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_model.TOOL.command(["--config-dir", str(extras / "options"), "family=aura_flow"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 6 and all(line.startswith("ok ") for line in said)


def test_a_family_without_sizes_has_no_random_build(model: PipelineModel) -> None:
    class Bare(type(model)):  # type: ignore[misc]
        sizes: ClassVar = {}

    with pytest.raises(
        ValueError, match=r"^init must be pretrained for Bare, which has no random build \(no `sizes`\)"
    ):
        Bare(init="random")
