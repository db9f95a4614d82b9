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
The arguments are those with which `python -m flowrl` is called for the run:

  python -m flowrl.cli.encode_prompts recipe=NAME model.path=FOLDER model.cache_dir=embeddings data.train=mine.txt"""

CONFIG_DIR = "config_dir="


@dataclass(frozen=True)
class OfRun(Tool):
    """A tool whose arguments are those of a training run."""

    def settings(self, arguments: Sequence[str]) -> Config:
        """The run, its components built. Raises ConfigError."""
        from flowrl.build import build_run
        from flowrl.cli.compose import load_config

        own = [argument for argument in arguments if argument.startswith(CONFIG_DIR)]
        overrides = [argument for argument in arguments if argument not in own]
        return build_run(load_config(overrides, own[-1].removeprefix(CONFIG_DIR) if own else None))

    def usage(self) -> str:
        """The page of `-h`."""
        return "\n".join([f"usage: python -m flowrl.cli.{self.name} key=value ...", "", self.about, "", EXAMPLES])


def encode_prompts(run: Config) -> None:
    """Fill the folder, and say what was new."""
    from rich.progress import track

    from flowrl.device import choose_device, torch_settings
    from flowrl.tracking.console import Terminal

    model, prompts = checked(run)
    device, terminal = choose_device(run), Terminal()
    quietly = not terminal.is_terminal
    with torch_settings(run):
        policy = model.load_encoders(device)
        assert policy.files is not None
        texts = policy.texts(prompts, run.sampler.guidance_scale)
        found = policy.encode_ahead(texts)
        new = sum(track(found, "encoding", len(texts), console=terminal, transient=True, disable=quietly))
    damaged = policy.files.num_damaged
    news = f"{new} of them new" + (f" ({damaged} damaged)" if damaged else "")
    terminal.out(f"{policy.files.folder}: {len(texts)} texts, {news}, encoded on {_named(device)}.", highlight=False)
    cut = sum(policy.is_cut(text) for text in texts)
    if cut:
        terminal.out(f"{cut} of them are longer than the {policy.reads()}, and are cut off there.", highlight=False)


def checked(run: Config) -> tuple[PipelineModel, list[Prompt]]:
    """The model, and the prompts of all files. Raises ConfigError with everything that is wrong."""
    from flowrl.data.prompts import load_prompts
    from flowrl.models.pipeline import PipelineModel
    from flowrl.preflight import encoding

    model = run.model
    if not isinstance(model, PipelineModel):
        raise ConfigError(Problem("model", f"is a {type(model).__name__}, which keeps no embeddings in files."))
    problems = encoding(run)
    if model.cache_dir is None:
        problems.append(Problem("model.cache_dir", "must be set: the folder to fill.", "Set model.cache_dir=FOLDER."))
    if problems:
        raise ConfigError(*problems)
    files = [run.data.train, *run.trainer.eval.sets.values()]
    return model, [prompt for file in files for prompt in load_prompts(file, run.data.target)]


def _named(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


TOOL = OfRun("encode_prompts", ABOUT, Config, encode_prompts)

if __name__ == "__main__":
    TOOL.main()
