"""`python -m flowrl.cli.encode_prompts`: the embeddings of a run's prompts, made before it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.cli.arguments import Tool
from flowrl.config import Config, ConfigError, Problem

if TYPE_CHECKING:
    import torch

    from flowrl.models.pipeline import PipelineModel
    from flowrl.prompts import Prompt

ABOUT = """\
Encodes the prompts of a run ahead, into the folder model.cache_dir: those of data.train and of all sets in
trainer.eval.sets, and their negative prompts if sampler.guidance_scale asks for them."""
EXAMPLES = """\
The arguments are those of `python -m flowrl`, for the run itself or for its model and files alone:

  python -m flowrl.cli.encode_prompts recipe=NAME model.path=FOLDER model.cache_dir=embeddings
  python -m flowrl.cli.encode_prompts model=z_image model.path=FOLDER model.cache_dir=embeddings data.train=mine.txt"""


@dataclass(frozen=True)
class OfRun(Tool):
    """A tool whose arguments are those of a training run."""

    def settings(self, arguments: Sequence[str]) -> Config:
        """The run, its components built. Raises ConfigError."""
        from flowrl.build import build_run
        from flowrl.cli.compose import load_config

        return build_run(load_config(arguments))

    def usage(self) -> str:
        """The page of `-h`."""
        return "\n".join([f"usage: python -m flowrl.cli.{self.name} key=value ...", "", self.about, "", EXAMPLES])


def encode_prompts(run: Config) -> None:
    """Fill the folder, and say what was new."""
    from rich.progress import track

    from flowrl.device import choose_device
    from flowrl.tracking.console import Terminal

    model, prompts = checked(run)
    device = choose_device(run)
    policy = model.load(device)
    assert policy.files is not None
    texts = policy.texts(prompts, run.sampler.guidance_scale)
    terminal = Terminal()
    found = policy.encode_ahead(texts)
    new = sum(track(found, "encoding", len(texts), console=terminal, transient=True, disable=not terminal.is_terminal))
    damaged = policy.files.num_damaged
    news = f"{new} of them new" + (f" ({damaged} damaged)" if damaged else "")
    terminal.out(f"{policy.files.folder}: {len(texts)} texts, {news}, encoded on {_named(device)}.", highlight=False)


def checked(run: Config) -> tuple[PipelineModel, list[Prompt]]:
    """The model, and the prompts of all files. Raises ConfigError with everything that is wrong."""
    import torch

    from flowrl.data.prompts import PromptFileError, load_prompts
    from flowrl.models.pipeline import PipelineModel

    model = run.model
    if not isinstance(model, PipelineModel):
        raise ConfigError(Problem("model", f"is a {type(model).__name__}, which keeps no embeddings in files."))
    problems = model.problems(run)
    if model.cache_dir is None:
        problems.append(Problem("model.cache_dir", "must be set: the folder to fill.", "Set model.cache_dir=FOLDER."))
    if run.device == "cuda" and torch.cuda.device_count() == 0:
        problems.append(Problem("device", "is cuda, but torch sees no CUDA device.", "Set device=cpu."))
    prompts: list[Prompt] = []
    for key, file in {"data.train": run.data.train, **_sets(run)}.items():
        try:
            prompts += load_prompts(file)
        except PromptFileError as error:
            problems.append(Problem(key, str(error)))
    if problems:
        raise ConfigError(*problems)
    return model, prompts


def _sets(run: Config) -> dict[str, str]:
    return {f"trainer.eval.sets.{name}": file for name, file in run.trainer.eval.sets.items()}


def _named(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


TOOL = OfRun("encode_prompts", ABOUT, Config, encode_prompts)

if __name__ == "__main__":
    TOOL.main()
