"""`report.html`: one page, self-contained, that tells what a run was and what came of it.

It is made from the run folder alone, so it can be made again at any time, also of a run that was cut short.
"""

from __future__ import annotations

import json
import statistics
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from flowrl.files import write_atomic
from flowrl.tracking.console import duration, label, number
from flowrl.tracking.curves import SMOOTHED_FROM, Chart, Line
from flowrl.tracking.loggers.jsonl import FILENAME as METRICS
from flowrl.tracking.loggers.jsonl import read_metrics
from flowrl.tracking.style import CSS
from flowrl.tracking.summary import FILENAME as SUMMARY
from flowrl.tracking.summary import Summary

SHEET = "before_after.png"

TRAINING_CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward/mean",)),
    ("Spread within a group", ("reward/group_std_mean", "reward/zero_std_ratio")),
    ("Clip fraction", ("train/clip_fraction",)),
    ("|change of log p|", ("train/log_prob_abs_diff",)),
    ("Ratio to the old policy", ("train/ratio_min", "train/ratio_mean", "train/ratio_max")),
    ("KL to the base model", ("train/kl",)),
    ("KL to the old policy, estimated", ("train/approx_kl",)),
    ("Loss", ("train/loss",)),
    ("Gradient norm", ("train/grad_norm",)),
    ("Learning rate", ("train/lr",)),
    ("Seconds per step", ("perf/step_s",)),
    ("Memory, GB", ("perf/mem_allocated_gb", "perf/mem_peak_gb")),
)


@dataclass(frozen=True, kw_only=True)
class ReportData:
    """What the page is drawn from: plain values. What a run has not written yet is None."""

    name: str
    records: Sequence[tuple[int, Mapping[str, float]]]  # (step, metrics)
    config_yaml: str
    facts: Mapping[str, Any]  # run.json: command, start, versions, commit, data fingerprints
    summary: Summary | None
    sheet_png: bytes | None

    @classmethod
    def read(cls, run_dir: Path) -> ReportData:
        """From `metrics.jsonl`, `config.yaml`, `run.json`; and `summary.json`, `before_after.png` if they are there."""
        facts = json.loads((run_dir / "run.json").read_text())
        sheet = run_dir / SHEET
        return cls(
            name=run_dir.resolve().name,
            records=read_metrics(run_dir / METRICS),
            config_yaml=(run_dir / "config.yaml").read_text(),
            facts=facts,
            summary=Summary.read(run_dir) if (run_dir / SUMMARY).exists() else None,
            sheet_png=sheet.read_bytes() if sheet.exists() else None,
        )

    def series(self, name: str) -> Line:
        """One metric over the steps that have it."""
        return Line(name, [(step, metrics[name]) for step, metrics in self.records if name in metrics])

    def names(self, prefix: str) -> list[str]:
        """The metrics that begin with `prefix`, in the order in which they first appear."""
        return list(dict.fromkeys(name for _, metrics in self.records for name in metrics if name.startswith(prefix)))


def build_report(run_dir: Path) -> Path:
    """Write `report.html` into the run folder; returns its path. Raises FileNotFoundError if that is no run folder."""
    path = run_dir / "report.html"
    write_atomic(path, render(ReportData.read(run_dir)).encode())
    return path


def render(data: ReportData) -> str:
    """The page."""
    sections = [_heading(data), _cards(data), _sheet(data), _charts(data), _timings(data), _facts(data), _details(data)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(data.name)} - flowrl</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n{''.join(sections)}</body>\n</html>\n"
    )


def _heading(data: ReportData) -> str:
    if data.summary is not None:
        told = f"{data.summary.steps} steps in {duration(data.summary.seconds)}"
    else:
        told = f"Not finished: {data.records[-1][0] if data.records else 0} steps so far"
    return f'<h1>{escape(data.name)}</h1>\n<p class="lead">{told}</p>\n'


def _cards(data: ReportData) -> str:
    if data.summary is None:
        return ""
    cards = "".join(_card(*row) for row in data.summary.rows())
    return f'<h2>Held-out prompts, before and after</h2>\n<div class="cards">{cards}</div>\n'


def _card(name: str, before: float, after: float) -> str:
    change = after - before
    trend, sign = ("better", "+") if change > 0 else ("worse", "") if change < 0 else ("", "")
    return (
        f'<div class="card"><div class="name">{escape(label(name))}</div><div class="value">{number(after)}</div>'
        f'<div class="from">{number(before)} before <span class="{trend}">{sign}{number(change)}</span></div></div>'
    )


def _sheet(data: ReportData) -> str:
    if data.sheet_png is None:
        return ""
    source = b64encode(data.sheet_png).decode()
    caption = (
        "The same prompts and the same starting noise, before and after training; the score is at the lower right."
    )
    return (
        f'<h2>Pictures</h2>\n<figure class="sheet"><img alt="{caption}" src="data:image/png;base64,{source}">'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


# ---------------------------------------------------------------------------------------------- curves


def _charts(data: ReportData) -> str:
    charts = [chart for chart in (*_held_out(data), *_training(data)) if chart.has_points]
    if not charts:
        return ""
    note = f"Point at a curve to read it. Of {SMOOTHED_FROM} points and more, the strong line is a running mean."
    figures = "".join(_figure(chart) for chart in charts)
    return f'<h2>Curves</h2>\n<p class="note">{note}</p>\n<div class="charts">{figures}</div>\n'


def _held_out(data: ReportData) -> Iterator[Chart]:
    """Metrics between 0 and 1 share a chart per prompt set; any other scale has one of its own."""
    together: dict[str, list[Line]] = {}
    for name in data.names("eval/"):
        line = data.series(name)
        shared = all(0 <= value <= 1 for _, value in line.points)
        together.setdefault(label(name.rpartition("/")[0] if shared else name), []).append(line)
    for title, lines in together.items():
        yield Chart(f"Evaluation: {title}", lines)


def _training(data: ReportData) -> Iterator[Chart]:
    clip = OmegaConf.select(OmegaConf.create(data.config_yaml), "algorithm.clip_range")
    limit = ("clip range", float(clip)) if isinstance(clip, int | float) and clip > 0 else None
    for title, names in TRAINING_CHARTS:
        lines = [line for line in map(data.series, names) if line.points]
        # ranges are 1e-6 to 1e-3, and what they clip is as small
        beside_clip = names == ("train/log_prob_abs_diff",)
        yield Chart(title, lines, limit if beside_clip else None, log=beside_clip)


def _figure(chart: Chart) -> str:
    keys = [
        f'<span><i class="key series{index % 6}"></i>{escape(line.name)}</span>'
        for index, line in enumerate(chart.lines)
    ]
    return f"<figure><h3>{escape(chart.title)}</h3>{chart.svg()}<figcaption>{''.join(keys)}</figcaption></figure>"


# ---------------------------------------------------------------------------------------------- tables


def _timings(data: ReportData) -> str:
    """Seconds per phase: total over the run and median of the steps that have it."""
    phases = {
        name: [value for _, value in data.series(name).points] for name in data.names("perf/") if name.endswith("_s")
    }
    phases = {name: values for name, values in phases.items() if not name.endswith("_per_s")}
    longest = max((sum(values) for values in phases.values()), default=0.0)
    if not longest:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name.removeprefix('perf/').removesuffix('_s'))}</td>"
        f'<td class="bars"><span class="bar" style="width:{100 * sum(values) / longest:.1f}%"></span></td>'
        f'<td class="n">{duration(sum(values))}</td><td class="n">{statistics.median(values):.2f} s</td></tr>'
        for name, values in sorted(phases.items(), key=lambda item: -sum(item[1]))
    )
    head = '<tr><th>phase</th><th></th><th class="n">total</th><th class="n">median</th></tr>'
    note = '<p class="note">Phases may contain others; step is a whole step.</p>'
    return f"<h2>Time</h2>\n<table>{head}{rows}</table>\n{note}\n"


def _facts(data: ReportData) -> str:
    rows = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{_fact(name, value)}</td></tr>"
        for name, value in data.facts.items()
    )
    return f'<h2>Run</h2>\n<table class="facts">{rows}</table>\n'


def _fact(name: str, value: Any) -> str:
    """A mapping as "name value, ..."; what is None is unknown, or not so yet."""
    if isinstance(value, Mapping):
        return escape(", ".join(f"{key} {item}" for key, item in value.items() if item is not None))
    text = "-" if value is None else escape(str(value))
    return f"<code>{text}</code>" if name == "command" else text


def _details(data: ReportData) -> str:
    rows = []
    for name in sorted(data.names("")):
        values = [value for _, value in data.series(name).points]
        cells = "".join(f'<td class="n">{v:.6g}</td>' for v in (values[0], values[-1], min(values), max(values)))
        rows.append(f"<tr><td>{escape(name)}</td>{cells}</tr>")
    head = (
        "<tr><th>metric</th>"
        + "".join(f'<th class="n">{h}</th>' for h in ("first", "last", "lowest", "highest"))
        + "</tr>"
    )
    return (
        f"<details><summary>All metrics</summary><table>{head}{''.join(rows)}</table></details>\n"
        f"<details><summary>Configuration</summary><pre>{escape(data.config_yaml)}</pre></details>\n"
    )
