"""Schedulers of folders: what flowrl has is read, and the rest is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

from flowrl.flow.noise import Noise
from flowrl.flow.schedule import WanUniPC
from flowrl.flow.solvers import Euler, UniPC
from flowrl.models.policy import PipelinePolicy
from flowrl.rollout.native import NativeEngine
from flowrl.types import LoadError
from tests.support.families import FAMILIES, folder, random_policy, saved

CPU = torch.device("cpu")
EULER = [name for name in FAMILIES if not name.startswith("wan")]


def with_scheduler(name: str, kind: str | None = None, **changes: Any) -> PipelinePolicy:
    """The family's policy with another scheduler: of another class, or with other settings."""
    policy, own = copy.copy(random_policy(name)), random_policy(name).pipeline.scheduler
    cls = type(own) if kind is None else getattr(diffusers, kind)
    policy.pipeline = SimpleNamespace(scheduler=cls.from_config(own.config, **changes))
    return policy


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "kind", ["FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler", "DDIMScheduler", "DPMSolverMultistepScheduler"]
)
def test_another_class_is_refused_by_name(name: str, kind: str) -> None:
    with pytest.raises(
        LoadError, match=rf"^model\.path=[^\n]*: scheduler: [^\n]*a {kind}, not .*set sampler\.schedule"
    ):
        with_scheduler(name, kind).schedule()


@pytest.mark.parametrize("name", EULER)
@pytest.mark.parametrize(
    "changes",
    [{"stochastic_sampling": True}, {"num_train_timesteps": 500}, {"use_karras_sigmas": True}, {"invert_sigmas": True}],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_without_an_equal_are_refused_by_name(name: str, changes: dict[str, Any]) -> None:
    ((setting, value),) = changes.items()
    with pytest.raises(LoadError, match=rf"has {setting}={value}, which flowrl does not do: set sampler\.schedule"):
        with_scheduler(name, **changes).schedule()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("value", [None, "a", 0])
def test_odd_values_are_one_sentence(name: str, value: object, tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder(name), tmp_path / "model"))
    file = path / "scheduler" / "scheduler_config.json"
    settings = json.loads(file.read_text())
    shift = "flow_shift" if name.startswith("wan") else "shift"
    dynamic = {"base_shift": None, "max_shift": value} if settings.get("use_dynamic_shifting") else {}
    file.write_text(json.dumps(settings | {shift: value} | dynamic))
    with pytest.raises(LoadError, match=r"^model\.path=[^\n]*: scheduler: [^\n]+$"):
        replace(saved(name), path=str(path)).load(CPU).schedule()


@pytest.mark.parametrize(
    "changes",
    [
        {"solver_order": 3},
        {"solver_order": 1},
        {"solver_type": "bh1"},
        {"predict_x0": False},
        {"lower_order_final": False},
        {"disable_corrector": [0, 1]},
        {"thresholding": True},
    ],
    ids=str,
)
def test_unipc_with_other_steps_than_flowrls_is_refused_when_it_is_asked_for(changes: dict[str, Any]) -> None:
    """Where its steps are taken, on the folder's own sigmas; Euler's method has no such settings."""
    policy = with_scheduler("wan", **changes)
    whole = random_policy("wan").pipeline
    policy.pipeline = SimpleNamespace(**whole.components | {"scheduler": policy.pipeline.scheduler}, **FACTORS)
    ((setting, value),) = changes.items()
    sampler = FAMILIES["wan"].sampler(solver=UniPC())

    def opened(policy: PipelinePolicy = policy, deterministic: bool = True, **more: Any) -> NativeEngine:
        return NativeEngine(policy, replace(sampler, **more), Noise.of(0), 1, deterministic=deterministic)

    with pytest.raises(LoadError, match=r"scheduler: .*set sampler/solver=euler") as refusal:
        opened()
    assert f"{setting}={value!r}" in str(refusal.value)
    assert opened(solver=Euler()).sigmas.equal(opened(deterministic=False).sigmas)
    opened(schedule=WanUniPC())
    opened(policy=random_policy("wan"))


FACTORS = {"vae_scale_factor_spatial": 8, "vae_scale_factor_temporal": 4}  # of the tiny model
