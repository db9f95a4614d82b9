"""The page is complete, self-contained and rebuilt from the run folder alone."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from flowrl.tracking.console import duration, number, print_summary, sparkline
from flowrl.tracking.report import ReportData, build_report, render
from flowrl.tracking.summary import Summary
from tests.unit.tracking.conftest import CONFIG, FACTS, STEPS

VOID = {"meta", "img", "path", "circle", "br"}


class Page(HTMLParser):
    """Texts by tag, addresses, and whether every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


def test_the_page_holds_everything_and_points_nowhere(run_dir: Path) -> None:
    html = build_report(run_dir).read_text()
    page = Page(html)
    assert "script" not in page.tags and "link" not in page.tags and "http" not in html and "url(" not in html
    (picture,) = page.addresses
    png = base64.b64decode(picture.removeprefix("data:image/png;base64,"))
    assert Image.open(io.BytesIO(png)).size == Image.open(run_dir / "before_after.png").size
    assert page.texts["h1"] == ["tiny_ocr"]
    charts = page.texts["h3"]
    for title in (
        "Evaluation: heldout",
        "Reward",
        "Clip fraction",
        "|change of log p|",
        "Gradient norm",
        "Seconds per step",
    ):
        assert title in charts
    assert page.texts["pre"] == [CONFIG]
    assert FACTS["command"] in page.texts["code"]
    for fact in ("python 3.11.7, torch 2.13.0", "train.txt 77aa, heldout.txt 55bb", FACTS["commit"], "-"):
        assert fact in page.texts["td"]


def test_the_page_tells_the_numbers_of_the_run(run_dir: Path) -> None:
    html = build_report(run_dir).read_text()
    (before, after), *_ = re.findall(r'class="value">([\d.]+)</div><div class="from">([\d.]+) before', html)
    summary = Summary.read(run_dir)
    assert (float(after), float(before)) == pytest.approx(
        (summary.before["eval/heldout/ocr_mean"], summary.after["eval/heldout/ocr_mean"]), abs=5e-4
    )
    last = ReportData.read(run_dir).series("reward/mean").points[-1]
    assert f"<title>reward/mean, step {STEPS}: {last[1]:.6g}</title>" in html
    assert "<title>clip range 0.001</title>" in html


def test_the_page_is_the_same_when_built_again(run_dir: Path) -> None:
    assert build_report(run_dir).read_bytes() == build_report(run_dir).read_bytes()


def test_a_run_cut_short_has_a_page_too(run_dir: Path) -> None:
    for name in ("summary.json", "before_after.png"):
        (run_dir / name).unlink()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:8]) + lines[8][:30])
    page = Page(build_report(run_dir).read_text())
    assert page.texts["p"][0] == "Not finished: 7 steps so far"
    assert "Reward" in page.texts["h3"] and "img" not in page.tags
    (run_dir / "metrics.jsonl").write_text("")
    assert "h3" not in Page(build_report(run_dir).read_text()).tags


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        build_report(tmp_path)


def test_metrics_that_are_not_finite_do_not_break_the_page() -> None:
    records = [(0, {"train/loss": float("nan"), "train/kl": float("inf")}), (1, {"train/loss": 1.0})]
    data = ReportData(name="<run>", records=records, config_yaml="", facts={}, summary=None, sheet_png=None)
    page = Page(render(data))
    assert page.texts["h3"] == ["Loss"] and page.texts["h1"] == ["<run>"]


def test_evaluations_of_another_scale_have_a_chart_of_their_own() -> None:
    metrics = {"eval/a/ocr_mean": 0.5, "eval/a/ocr_perfect": 0.0, "eval/a/pickscore_mean": 22.0, "eval/b/ocr_mean": 0.1}
    data = ReportData(name="r", records=[(0, metrics)], config_yaml="", facts={}, summary=None, sheet_png=None)
    assert Page(render(data)).texts["h3"] == ["Evaluation: a", "Evaluation: a pickscore mean", "Evaluation: b"]


def test_summary_round_trip(tmp_path: Path) -> None:
    summary = Summary(before={"a": 0.1}, after={"a": 0.3}, steps=4, seconds=9.5)
    summary.write(tmp_path)
    assert Summary.read(tmp_path) == summary
    assert json.loads((tmp_path / "summary.json").read_text())["after"] == {"a": 0.3}
    with pytest.raises(ValueError, match="they must agree"):
        Summary(before={"a": 0.1}, after={}, steps=1, seconds=1.0)


def test_the_last_words_of_a_run(run_dir: Path) -> None:
    build_report(run_dir)
    console = Console(file=io.StringIO(), width=200, color_system=None)
    print_summary(console, Summary.read(run_dir), run_dir)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    row = next(line for line in text.splitlines() if "heldout ocr mean" in line)
    assert [word for word in row.split() if word[-1].isdigit()] == ["0.550", "0.916", "+0.366"]
    assert f"{STEPS} steps in 7:41" in text
    assert str(run_dir / "report.html") in text and str(run_dir / "before_after.png") in text


def test_numbers_read_well() -> None:
    assert [number(v) for v in (0, 0.12345, 23.31, 1e-3, -1.2e-5, 12345.0)] == [
        "0.000", "0.123", "23.310", "0.001", "-1.2e-05", "1.23e+04",
    ]  # fmt: skip
    assert [duration(s) for s in (0, 59.6, 125, 3725)] == ["0:00", "1:00", "2:05", "1:02:05"]
    assert (sparkline([0, 7, float("nan"), 3.5]), sparkline([2, 2]), sparkline([])) == ("▁█▅", "▁▁", "")
