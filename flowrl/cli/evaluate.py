"""`python -m flowrl.cli.evaluate`: held-out rewards of the base and of what a run has trained, compared."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flowrl.cli.arguments import Failure, Tool, option
from flowrl.config import Config, ConfigError, Problem

if TYPE_CHECKING:
    from flowrl.cli.comparing import Compared
    from flowrl.cli.statistics import Interval


@dataclass
class Evaluate:
    """The arguments."""

    run: str = option("the run's folder, like runs/tiny_ocr")
    weights: str | None = option(
        "null: those of the run's end, else the average if there is one", None, choices=("ema", "live", "final")
    )
    checkpoint: str | None = option("step_0000020, or latest; null: the run's end, or latest if it has none yet", None)
    sets: str | None = option("names of the run's held-out sets: a,b; null: all of them", None)
    samples_per_prompt: int | None = option("pictures of each prompt; null: the run's number", None)
    seed: int | None = option("of the noise; null: the run's trainer.eval.seed", None)
    base: str | None = option("the folder of the model before training; null: the run's model.path", None)
    out: str | None = option("the JSON file to write; null: evaluation.json in the run's folder", None)
    device: str = option("where pictures are drawn", "auto", choices=("auto", "cpu", "cuda"))


def evaluate(settings: Evaluate) -> None:
    """Draw, score, compare, print the table and write the JSON."""
    from flowrl.cli.comparing import compared, scored
    from flowrl.cli.trained import open_run, read_trained

    folder = Path(settings.run)
    run = _adjusted(open_run(folder, settings.device, settings.base), settings)
    trained = read_trained(folder, settings.checkpoint, settings.weights)
    before, after = scored(run, trained)
    found = compared(before, after)
    _print(found, trained.source)
    _write(Path(settings.out) if settings.out else folder / "evaluation.json", run, trained.source, found)


def _adjusted(run: Config, settings: Evaluate) -> Config:
    """The run with what the arguments change of its evaluation."""
    evaluation = run.trainer.eval
    chosen = list(evaluation.sets) if settings.sets is None else settings.sets.split(",")
    unknown = [name for name in chosen if name not in evaluation.sets]
    if unknown or not chosen:
        names = ", ".join(evaluation.sets) or "none"
        raise ConfigError(Problem("sets", f"the run has no held-out set {', '.join(unknown)}.", f"There are: {names}."))
    samples = evaluation.samples_per_prompt if settings.samples_per_prompt is None else settings.samples_per_prompt
    if samples < 1:
        raise ConfigError(Problem("samples_per_prompt", f"must be at least 1, got {samples}."))
    evaluation = replace(
        evaluation,
        sets={name: evaluation.sets[name] for name in chosen},
        samples_per_prompt=samples,
        seed=evaluation.seed if settings.seed is None else settings.seed,
    )
    return replace(run, trainer=replace(run.trainer, eval=evaluation))


def _print(found: Compared, source: str) -> None:
    """Each mean above its interval; a difference that is surely one is coloured."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from flowrl.cli.statistics import CONFIDENCE, METHOD
    from flowrl.tracking.console import Terminal, number

    def cell(interval: Interval, style: str = "") -> Text:
        limits = f"\n{number(interval.low)} to {number(interval.high)}"
        return Text.assemble((number(interval.mean), style or "bold"), (limits, "dim"))

    table = Table(box=box.ROUNDED, border_style="dim", show_lines=True)
    table.add_column("")
    for heading in ("base", "trained", "difference"):
        table.add_column(heading, justify="right")
    for name, measures in found.items():
        for measure, comparison in measures.items():
            label = Text.assemble(f"{name} {measure}", (f"\n{comparison.num_prompts} prompts", "dim"))
            change = comparison.difference
            style = "bold green" if change.low > 0 else "bold red" if change.high < 0 else "bold"
            table.add_row(label, cell(comparison.base), cell(comparison.trained), cell(change, style))
    terminal = Terminal()
    terminal.print(table)
    terminal.print(f"trained: {source}", highlight=False, soft_wrap=True)
    terminal.print(f"{CONFIDENCE:.0%} intervals: {METHOD}", style="dim", highlight=False, soft_wrap=True)


def _write(file: Path, run: Config, source: str, found: Compared) -> None:
    """Replace the JSON file."""
    from flowrl.cli.statistics import CONFIDENCE, METHOD
    from flowrl.files import write_atomic

    record = {
        "trained": source,
        "seed": run.trainer.eval.seed,
        "samples_per_prompt": run.trainer.eval.samples_per_prompt,
        "confidence": CONFIDENCE,
        "method": METHOD,
        "sets": {name: {m: asdict(c) for m, c in measures.items()} for name, measures in found.items()},
    }
    try:
        write_atomic(file, (json.dumps(record, indent=2) + "\n").encode())
    except OSError as error:
        raise Failure(f"{file} cannot be written: {error.strerror}.") from error


TOOL = Tool(
    "evaluate", "Compares held-out rewards of the base and of trained weights, prompt by prompt.", Evaluate, evaluate
)

if __name__ == "__main__":
    TOOL.main()
