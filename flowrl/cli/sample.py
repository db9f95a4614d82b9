"""`python -m flowrl.cli.sample`: pictures of prompts, from the base, from what a run has trained, or from an export."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.arguments import Tool, below, new_folder, option, own_names
from flowrl.config import Config, ConfigError, Evaluation, Particular, Problem, Sampler

if TYPE_CHECKING:
    from flowrl.prompts import Prompt
    from flowrl.types import Policy, SampledGroup

BASE = "base"
CHANGED = ("num_steps", "guidance_scale", "height", "width", "frames", "fps")  # of the sampler


@dataclass
class Sample:
    """The arguments. Without a run the sizes are those of flowrl's defaults."""

    out: str = option("the folder to make; it must not exist")
    prompt: str | None = option("a text to draw", None)
    prompts: str | None = option("or a file of them, .txt or .jsonl", None)
    run: str | None = option("a run's folder: its trained weights, drawn as its evaluations are", None)
    weights: str | None = option(
        "of the run; null: those of its end, else the average if there is one",
        None,
        choices=("ema", "live", "final", BASE),
    )
    checkpoint: str | None = option("step_0000020, or latest; null: the run's end, or latest if it has none yet", None)
    model: str | None = option(
        "instead of a run's weights: a diffusers folder, a Hub id, or an option of `model`", None
    )
    family: str = option("the option of the group `model` that reads it, if there is no run", "sd3")
    config_dir: str | None = option("a folder of your own options, like model/NAME.yaml", None)
    adapter: str | None = option("the folder of an exported adapter, to be put on `model`", None)
    samples_per_prompt: int = option("pictures of each", 1)
    seed: int = option("of the noise; a run's evaluations have trainer.eval.seed", Evaluation.seed)
    num_steps: int | None = option("denoising steps; null: the run's, for evaluation", None)
    guidance_scale: float | None = option("1 is without guidance; null: the run's", None)
    height: int | None = option("pixels; null: the run's", None)
    width: int | None = option("pixels; null: the run's", None)
    frames: int | None = option("of a video; null: the run's", None)
    fps: float | None = option("frames per second at which videos play; null: the run's", None)
    batch_size: int = option("pictures in one forward", 16)
    device: str = option("where they are drawn", "auto", choices=("auto", "cpu", "cuda"))


def sample(settings: Sample) -> None:
    """Make the folder: a file for each picture or video, all of them in grid.png, and samples.json."""
    from flowrl.cli.trained import open_run
    from flowrl.device import torch_settings

    check(settings)
    prompts = _prompts(settings)
    run = _of_model(settings) if settings.run is None else open_run(Path(settings.run), settings.device, settings.model)
    run = replace(run, sampler=_sampler(settings, run))
    with new_folder(settings.out) as out, torch_settings(run), own_names("sampler."):  # the kernels are a run's
        problems = run.model.problems(run) if isinstance(run.model, Particular) else []
        if problems:
            raise ConfigError(*problems)
        policy, source = _opened(settings, run)
        groups = _drawn(settings, policy, run.sampler, prompts)
        _write(out, groups, run.sampler, source, settings.seed)
    count = len(prompts) * settings.samples_per_prompt
    print(f"{settings.out}: {count} sample{'s' * (count > 1)} of {source}; all of them are in grid.png.")


def check(settings: Sample) -> None:
    """Raise ConfigError for what cannot be meant."""
    from flowrl.preflight.values import FPS

    problems = []
    if (settings.prompt is None) == (settings.prompts is None):
        problems.append(Problem("prompt", "either it or prompts must be set.", 'Write "prompt=A red cube".'))
    if settings.run is None and settings.model is None:
        problems.append(Problem("run", "either it or model must be set.", "Write run=runs/NAME or model=FOLDER."))
    for name in ("model", "adapter"):
        if vars(settings)[name] is not None and (settings.weights, settings.checkpoint) != (None, None):
            problems.append(Problem(name, "is drawn instead of a run's weights.", "Leave weights and checkpoint out."))
    least = {"samples_per_prompt": 1, "num_steps": 1, "batch_size": 1, "height": 1, "width": 1, "frames": 1}
    least |= {"guidance_scale": 0}
    problems.extend(below(settings, least))
    if settings.fps is not None and not FPS[0] <= settings.fps <= FPS[1]:
        problems.append(Problem("fps", f"must be from {FPS[0]:g} to {FPS[1]:g}, got {settings.fps}."))
    if problems:
        raise ConfigError(*problems)


def _prompts(settings: Sample) -> list[Prompt]:
    from flowrl.data.prompts import PromptFileError, load_prompts
    from flowrl.prompts import Prompt

    if settings.prompts is None:
        return [Prompt("prompt", settings.prompt or "")]
    try:
        return list(load_prompts(settings.prompts))
    except PromptFileError as error:
        raise ConfigError(Problem("prompts", str(error))) from error


def _opened(settings: Sample, run: Config) -> tuple[Policy, str]:
    """The policy with the weights to draw with, and where the weights come from."""
    from flowrl.cli.trained import check_base, install, read_trained, settle
    from flowrl.device import choose_device
    from flowrl.distributed.lora import adapter_settings, add_lora

    policy = run.model.load(choose_device(run))
    if settings.adapter is not None:
        add_lora(policy.module, adapter_settings(Path(settings.adapter)), (), seed=0)
    plain = settings.model is not None or settings.adapter is not None or settings.weights == BASE
    if settings.run is None or plain:
        source = f"{run.model.path}{f' with {settings.adapter}' if settings.adapter else ''}"
    else:
        trained = read_trained(Path(settings.run), settings.checkpoint, settings.weights)
        check_base(policy, trained)
        install(policy, run.actor, trained)
        source = trained.source
    settle(policy)
    return policy, source


def _of_model(settings: Sample) -> Config:
    """flowrl's defaults with the model that `settings` name."""
    from flowrl.build import build
    from flowrl.cli.compose import choices, load_config
    from flowrl.flow.dynamics.ode import ODE
    from flowrl.flow.solvers import Euler
    from flowrl.types import PolicyConfig

    own = settings.config_dir
    shipped = any(choice.group == "model" and choice.name == settings.model for choice in choices(own))
    cfg = load_config([f"model={settings.model if shipped else settings.family}"], own)
    if not shipped:
        cfg.model.path = settings.model
    elif cfg.model.get("path", "") is None:
        message = f"{settings.model} is a family: it has no weights of its own."
        raise ConfigError(Problem("model", message, f"Write model=FOLDER_OR_ID family={settings.model}."))
    model = build(cfg.model, "model", PolicyConfig)
    return Config(model=model, device=settings.device, sampler=Sampler(dynamics=ODE(), solver=Euler()))


def _sampler(settings: Sample, run: Config) -> Sampler:
    changed = {name: vars(settings)[name] for name in CHANGED}
    if settings.run is not None and settings.num_steps is None:
        changed["num_steps"] = run.trainer.eval.num_steps
    return replace(run.sampler, **{name: value for name, value in changed.items() if value is not None})


def _drawn(settings: Sample, policy: Policy, sampler: Sampler, prompts: list[Prompt]) -> list[SampledGroup]:
    from flowrl.data.group_sampler import fixed_groups
    from flowrl.flow.noise import Noise
    from flowrl.rollout.native import NativeEngine

    noise = Noise.of(settings.seed, "evaluation")  # an evaluation with this seed draws the same
    engine = NativeEngine(policy, sampler, noise, settings.batch_size, deterministic=True)
    return list(engine.generate(fixed_groups(prompts, settings.samples_per_prompt), rollout_id=0))


def _write(out: Path, groups: list[SampledGroup], sampler: Sampler, source: str, seed: int) -> None:
    """`00003_1.png` is the second picture of the fourth prompt."""
    import numpy as np

    from flowrl.tracking.pictures import gallery
    from flowrl.tracking.video import file_name, save, still

    images, captions, samples = [], [], []
    for sampled in groups:
        assert sampled.images is not None
        prompt = sampled.group.prompt
        for slot, picture in enumerate(sampled.images):
            file = file_name(f"{sampled.group.ordinal:05d}_{slot}", picture)
            save(picture, out / file, sampler.fps)
            samples.append({"file": file, "prompt": prompt.text, "negative_prompt": prompt.negative, "slot": slot})
            images.append(still(picture))
            captions.append(prompt.target or prompt.text)
    gallery(np.stack(images), captions).save(out / "grid.png")
    settings = {name: vars(sampler)[name] for name in CHANGED}
    record = {"source": source, "seed": seed, **settings, "samples": samples}
    (out / "samples.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


TOOL = Tool("sample", "Draws prompts: a file of each picture or video, and a grid of them all.", Sample, sample)

if __name__ == "__main__":
    TOOL.main()
