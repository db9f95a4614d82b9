"""Charts put points where their axes say, and leave gaps for what is not finite."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.tracking.curves import SMOOTHED_FROM, Chart, Line, running_mean

VALUES = st.floats(-1e9, 1e9, allow_nan=False)


def elements(chart: Chart, kind: str) -> list[ElementTree.Element]:
    return [item for item in ElementTree.fromstring(chart.svg()).iter() if item.tag == kind]


def ticks(chart: Chart, anchor: str) -> list[tuple[float, float]]:
    """(what the label says, where it stands) along the axis whose labels have this anchor."""
    texts = [text for text in elements(chart, "text") if text.get("text-anchor") == anchor]
    place = "y" if anchor == "end" else "x"
    return [(float(text.text or ""), float(text.get(place, ""))) for text in texts]


@settings(max_examples=200, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=60))
def test_points_lie_inside_and_agree_with_the_axis(values: list[float]) -> None:
    chart = Chart("a", [Line("a", list(enumerate(values, start=1)))])
    heights = [float(dot.get("cy", "")) for dot in elements(chart, "circle")]
    assert len(heights) == len(values) and all(12 <= y <= 200 for y in heights)
    if max(values) - min(values) > max(1e-6 * max(map(abs, values)), 1e-290):
        (low, bottom), *_, (high, top) = ticks(chart, "end")
        per_pixel = (high - low) / ((bottom - 4) - (top - 4))
        for value, y in zip(values, heights, strict=True):
            assert value == pytest.approx(low + (bottom - 4 - y) * per_pixel, abs=0.3 * per_pixel)


@settings(deadline=None)
@given(st.integers(0, 10**7))
def test_step_ticks_are_whole_distinct_and_inside(last: int) -> None:
    places = ticks(Chart("a", [Line("a", [(last, 2.0)])]), "middle")
    steps = [step for step, _ in places]
    assert (
        steps and steps == sorted(set(steps)) and all(step == int(step) and 0 <= step <= max(1, last) for step in steps)
    )


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.9998, 1.0003, [0.9998, 1.0, 1.0002]),
        (0.1, 1.6, [0.5, 1.0, 1.5]),
        (2.0, 2.0, [1.8, 1.9, 2.0, 2.1, 2.2]),
        (0.0, 0.0, [-1.0, -0.5, 0.0, 0.5, 1.0]),
    ],
)
def test_tick_labels_tell_the_values(low: float, high: float, expected: list[float]) -> None:
    assert [label for label, _ in ticks(Chart("a", [Line("r", [(0, low), (1, high)])]), "end")] == expected


def test_a_log_chart_has_decades_and_leaves_zero_out() -> None:
    chart = Chart("a", [Line("a", [(0, 1e-6), (1, 0.0), (2, 1e-3)])], ("clip range", 1e-4), log=True)
    labels = [text.text for text in elements(chart, "text") if text.get("text-anchor") == "end"]
    assert labels == ["1e-6", "1e-5", "0.0001", "0.001", "clip range"]
    assert len(elements(chart, "circle")) == 2


def test_what_is_not_finite_is_a_gap() -> None:
    chart = Chart("a", [Line("a", [(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0), (5, 2.0)])])
    (path,) = (item.get("d", "") for item in elements(chart, "path") if item.get("class") == "line")
    assert path.count("M") == 2 and path.count("L") == 2 and "nan" not in chart.svg() and "inf" not in chart.svg()
    empty = Chart("a", [Line("a", [(0, math.nan)])])
    assert not empty.has_points
    with pytest.raises(ValueError, match="chart 'a' has no point to draw"):
        empty.svg()


def test_a_long_line_is_smoothed_and_still_tells_its_values() -> None:
    points = [(step, 0.5 + 0.4 * (-1) ** step) for step in range(SMOOTHED_FROM)]
    chart = Chart("a", [Line("reward/<mean>", points)])
    styles = [item.get("class") for item in elements(chart, "path")]
    assert styles.count("faint") == styles.count("line") == 1
    titles = [item.text or "" for item in elements(chart, "title")]
    assert "reward/<mean>, step 4: 0.9" in titles
    thousands = Chart("a", [Line("a", [(step, 1.0 + step) for step in range(5000)])])
    assert len(elements(thousands, "circle")) <= 150


def test_running_mean() -> None:
    line = [(0, 0.0), (1, 3.0), (2, math.nan), (3, 6.0)]
    means = running_mean(line, 2)
    assert means[0] == (0, 1.5) and means[1] == (1, 1.5) and math.isnan(means[2][1]) and means[3] == (3, 6.0)
    assert running_mean(line[:2], 0) == line[:2]


def test_titles_are_escaped() -> None:
    assert re.search(r'aria-label="&lt;&quot;a&quot;&gt;"', Chart('<"a">', [Line("a", [(0, 1.0)])]).svg())
