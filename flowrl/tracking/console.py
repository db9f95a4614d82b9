"""How numbers look in a terminal, and the last thing a run prints."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowrl.tracking.summary import Summary

BLOCKS = "▁▂▃▄▅▆▇█"


class Terminal(Console):
    """Standard output, whose reader may go away as `head` does: then it falls silent and the run goes on."""

    def on_broken_pipe(self) -> None:
        """`rich` would end the process here. What is still buffered goes nowhere."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def number(value: float) -> str:
    """Three decimals where they say something (0.812, 23.310), else three digits (1.2e-05, 1.23e+04)."""
    return f"{value:.3f}" if value == 0 or 1e-2 <= abs(value) < 1e3 else f"{value:.3g}"


def label(name: str) -> str:
    """A held-out metric's name in words: "eval/heldout/ocr_mean" is "heldout ocr mean"."""
    return name.removeprefix("eval/").replace("/", " ").replace("_", " ")


def duration(seconds: float) -> str:
    """2:05 or 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float]) -> str:
    """One block per finite value, from the lowest to the highest."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(BLOCKS) - 1
    return "".join(BLOCKS[round((value - low) / span * top) if span else 0] for value in finite)


def summary_table(summary: Summary) -> Table:
    """Held-out metrics: before, after, change."""
    table = Table(
        box=box.ROUNDED, border_style="dim", title="Held-out prompts", title_justify="left", title_style="bold"
    )
    table.add_column("")
    for heading in ("before", "after", "change"):
        table.add_column(heading, justify="right")
    for name, before, after in summary.rows():
        change = after - before
        style = "green" if change > 0 else "red" if change < 0 else "dim"
        table.add_row(
            Text(label(name)),
            number(before),
            Text(number(after), "bold"),
            Text("+" * (change > 0) + number(change), style),
        )
    return table


def print_summary(console: Console, summary: Summary, run_dir: Path) -> None:
    """The before/after table, how long it took, and where to look next."""
    console.print()
    console.print(summary_table(summary))
    console.print(f"{summary.steps} steps in {duration(summary.seconds)}", style="dim", highlight=False)
    places = Table.grid(padding=(0, 2))
    for label, path in (("report", run_dir / "report.html"), ("pictures", run_dir / "before_after.png")):
        if path.exists():
            places.add_row(Text(label, "dim"), Text(str(path), f"link {path.resolve().as_uri()}"))
    console.print(places)
