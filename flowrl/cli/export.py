"""`python -m flowrl.cli.export`: what a run has trained, for everybody who has diffusers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import flowrl
from flowrl.cli.arguments import Failure, Tool, new_folder, option
from flowrl.config import Config, ConfigError, Problem

if TYPE_CHECKING:
    from flowrl.cli.trained import Trained
    from flowrl.cli.verification import Differences
    from flowrl.types import Exportable

DTYPES = ("float32", "bfloat16")


@dataclass
class Export:
    """The arguments."""

    run: str = option("the run's folder, like runs/tiny_ocr")
    form: str = option("an adapter for pipe.load_lora_weights, or a whole pipeline", choices=("adapter", "merged"))
    out: str = option("the folder to make; it must not exist")
    weights: str | None = option(
        "null: those of the run's end, else the average if there is one", None, choices=("ema", "live", "final")
    )
    checkpoint: str | None = option("step_0000020, or latest; null: the run's end, or latest if it has none yet", None)
    base: str | None = option("the folder of the model before training; null: the run's model.path", None)
    dtype: str = option("what a merged transformer is stored in", "float32", choices=DTYPES)
    verify: bool = option("read it again with plain diffusers, and compare what it draws with the trainer's", True)
    tolerance: float | None = option("for that; null: 1e-5, or 0.1 if stored in bfloat16", None)
    device: str = option("where that is computed", "auto", choices=("auto", "cpu", "cuda"))


def export(settings: Export) -> None:
    """Make the folder, or raise and leave none."""
    from flowrl.cli.trained import open_run, read_trained

    folder = Path(settings.run)
    run = open_run(folder, settings.device, settings.base)
    model = _exportable(run, settings.form)
    trained = read_trained(folder, settings.checkpoint, settings.weights)
    with new_folder(settings.out) as out:
        if settings.form == "adapter":
            _write_adapter(run, trained, out)
        else:
            _write_merged(settings, run, model, trained, out)
        found = _verified(settings, run, model, trained, out) if settings.verify else None
        _write_record(settings, trained, found, out)
    print(f"{settings.out}: {settings.form} of {trained.source}, {_in_words(found)}.")


def _exportable(run: Config, form: str) -> Exportable:
    from flowrl.types import Exportable

    if form == "adapter" and run.actor.mode != "lora":
        message = "cannot be adapter: the run has trained every weight (actor.mode=full)."
        raise ConfigError(Problem("form", message, "Set form=merged."))
    if not isinstance(run.model, Exportable):
        raise ConfigError(Problem("run", f"its model, {type(run.model).__name__}, has no folder that diffusers reads."))
    return run.model


def _write_adapter(run: Config, trained: Trained, out: Path) -> None:
    from flowrl.cli.merging import check
    from flowrl.distributed.lora import peft_settings, write_adapter

    check(trained.tensors)
    layers = sorted({name.rpartition(".lora_")[0] for name in trained.tensors})
    targets = run.actor.lora.targets if run.actor.lora.targets is not None else layers
    write_adapter(out, trained.tensors, peft_settings(run.actor.lora, targets))


def _write_merged(settings: Export, run: Config, model: Exportable, trained: Trained, out: Path) -> None:
    import torch

    from flowrl.cli.merging import merge

    lora = run.actor.lora if run.actor.mode == "lora" else None
    merge(model.folder(), out, trained.tensors, lora, getattr(torch, settings.dtype))


def _verified(settings: Export, run: Config, model: Exportable, trained: Trained, out: Path) -> Differences:
    """What the comparison found. Raises Failure if the export is not what was trained, or cannot be compared."""
    import torch

    from flowrl.cli.verification import compare

    merged = settings.form == "merged"
    exact = not merged or settings.dtype == "float32"
    tolerance = (1e-5 if exact else 0.1) if settings.tolerance is None else settings.tolerance
    try:
        found = compare(run, model, trained, out if merged else model.folder(), None if merged else out)
    except torch.OutOfMemoryError as error:
        message = "the device has no room for the comparison with the trainer, in float32, so the export was not kept."
        raise Failure(f"{message} Set device=cpu, or verify=false to export without it.") from error
    if not found.to_trainer <= tolerance:
        raise Failure(
            f"the export draws latents that differ by {found.to_trainer:.2g} from the trainer's, more than "
            f"{tolerance:.2g}, so it was not kept. Set tolerance=... if the model's size or dtype explains that."
        )
    return found


def _in_words(found: Differences | None) -> str:
    if found is None:
        return "not verified"
    within, moved = f"{found.to_trainer:.1g} of the trainer's latents", f"{found.to_base:.2g} from the base's"
    return f"with plain diffusers within {within} ({moved})"


def _write_record(settings: Export, trained: Trained, found: Differences | None, out: Path) -> None:
    """`export.json`: where the files come from."""
    record = {
        "flowrl": flowrl.__version__,
        "run": settings.run,
        "weights": trained.source,
        "base": trained.base,
        "form": settings.form,
        "largest_difference": None if found is None else asdict(found),
    }
    (out / "export.json").write_text(json.dumps(record, indent=2) + "\n")


TOOL = Tool("export", "Exports trained weights for diffusers: an adapter, or a whole pipeline.", Export, export)

if __name__ == "__main__":
    TOOL.main()
