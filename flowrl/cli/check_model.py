"""`python -m flowrl.cli.check_model`: does a family compute what its pipeline of diffusers computes?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

from flowrl.cli.arguments import Failure, Tool, below, option, own_names
from flowrl.config import Config, ConfigError, Sampler

ABOUT = """\
Holds a model to its own pipeline, and to itself, in float32: for whoever adds a family, or has a folder that nobody has
tried yet. Prompts of different lengths are drawn from the same noise by both."""

LEAST = {"guidance_scale": 0, "height": 1, "width": 1, "frames": 1, "num_steps": 2, "tolerance": 0}  # 2 are replayed


@dataclass
class CheckModel:
    """The arguments."""

    family: str = option("the option of the group `model` that reads it")
    model: str | None = option("a diffusers folder or a Hub id; null: the family's random build", None)
    size: str = option("of the random build", "tiny")
    config_dir: str | None = option("a folder of your own options, like model/NAME.yaml", None)
    guidance_scale: float = option("where the checks are with guidance; 1: nowhere", 3.0)
    negative: str = option("a negative prompt, where the family has them", "")
    height: int = option("pixels", 64)
    width: int = option("pixels", 96)
    frames: int | None = option("of videos; null: 5", None)
    num_steps: int = option("of Euler, on the model's own schedule", 4)
    tolerance: float = option("the largest difference of any latent", 1e-4)
    device: str = option("where it is computed", "auto", choices=("auto", "cpu", "cuda"))


def check_model(settings: CheckModel) -> None:
    """Print every check as it is made. Raises Failure if one does not hold."""
    from flowrl.cli.model_checks import checks
    from flowrl.device import torch_settings

    problems = below(settings, LEAST)
    if problems:
        raise ConfigError(*problems)
    num_failed = 0
    with own_names("sampler."), _in_a_folder(_run(settings)) as run, torch_settings(run):
        for check in checks(run, settings.negative, settings.tolerance):
            num_failed += not check.holds
            print(f"{'ok  ' if check.holds else 'FAIL'}  {check.difference:<7.1e}  {check.sentence}", flush=True)
    if num_failed:
        raise Failure(f"{num_failed} of the checks failed; tolerance={settings.tolerance:g} is for latents.")


def _run(settings: CheckModel) -> Config:
    """A configuration with the model and the sampler, and nothing to train on."""
    from flowrl.build import build
    from flowrl.cli.compose import load_config
    from flowrl.flow.dynamics.flow_sde import FlowSDE
    from flowrl.flow.solvers import Euler
    from flowrl.flow.steps import Fixed
    from flowrl.models.pipeline import PipelineModel

    node = load_config([f"model={settings.family}"], settings.config_dir).model
    changes = {"path": settings.model} if settings.model else {"init": "random", "size": settings.size}
    model = build({**node, **changes}, "model", PipelineModel)
    sampler = Sampler(
        num_steps=settings.num_steps,
        height=settings.height,
        width=settings.width,
        frames=settings.frames or (5 if model.task == "t2v" else 1),
        guidance_scale=settings.guidance_scale,
        dynamics=FlowSDE(0.7),
        steps=Fixed((0, 1)),
        solver=Euler(),
    )
    run = Config(model=replace(model, dtype="float32"), device=settings.device, sampler=sampler)
    problems = model.problems(run)
    if problems:
        raise ConfigError(*problems)
    return run


@contextmanager
def _in_a_folder(run: Config) -> Iterator[Config]:
    """A random build is saved, so that plain diffusers can read it."""
    import torch

    from flowrl.models.loading import quiet

    if run.model.init == "pretrained":
        yield run
        return
    with TemporaryDirectory() as folder:
        with quiet():
            run.model.load(torch.device("cpu")).pipeline.save_pretrained(folder)
        yield replace(run, model=replace(run.model, init="pretrained", path=folder))


TOOL = Tool("check_model", ABOUT, CheckModel, check_model)

if __name__ == "__main__":
    TOOL.main()
