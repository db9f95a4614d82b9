"""Line charts as inline SVG: no script, no outside file; the page's style sheet colours them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 30  # around the plot
MAX_HOVERS = 150  # points of a line that tell their value
SMOOTHED_FROM = 30  # points from which a running mean is drawn over a line

Point = tuple[int, float]


@dataclass(frozen=True)
class Line:
    """One series. Points that are not finite are gaps."""

    name: str
    points: Sequence[Point]  # (step, value)


@dataclass(frozen=True)
class Chart:
    """Lines over the steps of a run; `limit`, if given, is a dashed horizontal line with a name."""

    title: str
    lines: Sequence[Line]
    limit: tuple[str, float] | None = None
    log: bool = False  # logarithmic values; those of 0 and less are gaps

    @property
    def has_points(self) -> bool:
        """Is there anything to draw?"""
        return any(_drawable(value, self.log) for line in self.lines for _, value in line.points)

    def svg(self) -> str:
        """The chart as an `<svg>` element; raises ValueError if there is no point to draw."""
        frame = _Frame.around(self)
        parts = [_axes(frame)]
        if self.limit is not None:
            parts.append(_limit(frame, *self.limit))
        parts += [_line(frame, line, colour) for colour, line in enumerate(self.lines)]
        title = escape(self.title, quote=True)
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">{"".join(parts)}</svg>'


@dataclass(frozen=True)
class _Frame:
    """Data to pixels, and where the ticks are."""

    steps: tuple[float, float]
    values: tuple[float, float]  # logarithms if `log`
    log: bool

    @classmethod
    def around(cls, chart: Chart) -> _Frame:
        drawn = [point for line in chart.lines for point in line.points if _drawable(point[1], chart.log)]
        if not drawn:
            raise ValueError(f"chart {chart.title!r} has no point to draw")
        values = [value for _, value in drawn] + ([chart.limit[1]] if chart.limit else [])
        scaled = [math.log10(value) if chart.log else value for value in values]
        steps = [step for step, _ in drawn]
        return cls((0, max(1, *steps)), _widened(min(scaled), max(scaled), margin=0.06), chart.log)

    def x(self, step: float) -> float:
        low, high = self.steps
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        scaled = math.log10(value) if self.log else value
        return HEIGHT - BOTTOM - (scaled - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def step_ticks(self) -> list[float]:
        return [tick for tick in _ticks(*self.steps, 6) if tick == round(tick)]

    def value_ticks(self) -> list[float]:
        low, high = self.values
        if not self.log:
            return _ticks(low, high, 5)
        decades = [10.0**exponent for exponent in range(math.ceil(low), math.floor(high) + 1)]
        return decades if len(decades) > 1 else [10.0**tick for tick in _ticks(low, high, 4)]


def _widened(low: float, high: float, margin: float) -> tuple[float, float]:
    """A range that is not empty, nor as narrow as rounding; `margin` is the share of it added on both sides."""
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, 1e-300):
        return low - margin * (high - low), high + margin * (high - low)
    pad = 0.1 * size if size > 1e-300 else 1.0
    return low - pad, high + pad


def _ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` multiples of 1, 2 or 5 times a power of ten in [low, high]."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20):
        stride = factor * power
        first, last = math.ceil(low / stride - 1e-9), math.floor(high / stride + 1e-9)
        if last - first < most:
            break
    return [index * stride for index in range(first, last + 1)]


def _axes(frame: _Frame) -> str:
    bottom = HEIGHT - BOTTOM
    parts = []
    values = frame.value_ticks()
    for value, label in zip(values, _tick_labels(values), strict=True):
        y = frame.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for step in frame.step_ticks():
        parts.append(
            f'<text class="tick" x="{frame.x(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step:.0f}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {bottom}H{WIDTH - RIGHT}"/>')
    return "".join(parts)


def _tick_labels(values: Sequence[float]) -> list[str]:
    """As few significant digits as tell the values: 0.2, 1.0005, 5e-5."""
    closest = min((b - a for a, b in pairwise(values)), default=1.0)
    for digits in range(1, 16):
        labels = [f"{value:.{digits}g}" for value in values]
        if all(abs(float(label) - value) < closest / 100 for label, value in zip(labels, values, strict=True)):
            break
    return [label.replace("e-0", "e-").replace("e+0", "e") for label in labels]


def _limit(frame: _Frame, name: str, value: float) -> str:
    y = frame.y(value)
    label = f'<text class="tick" x="{WIDTH - RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(name)}</text>'
    return (
        f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"><title>{escape(name)} {value:g}</title></path>{label}'
    )


def _line(frame: _Frame, line: Line, colour: int) -> str:
    """The path; under a running mean a faint one. Each point, or an even choice of them, tells its value on hover."""
    smooth = len(line.points) >= SMOOTHED_FROM
    parts = [_path(frame, line.points, "faint" if smooth else "line")]
    if smooth:
        parts.append(_path(frame, running_mean(line.points, len(line.points) // 15), "line"))
    stride = math.ceil(len(line.points) / MAX_HOVERS)
    for step, value in line.points[::stride]:
        if _drawable(value, frame.log):
            title = f"<title>{escape(line.name)}, step {step}: {value:.6g}</title>"
            place = f'cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3"'
            parts.append(f'<circle class="{"hover" if smooth else "dot"}" {place}>{title}</circle>')
    return f'<g class="series{colour % 6}">{"".join(parts)}</g>'


def _path(frame: _Frame, points: Sequence[Point], style: str) -> str:
    strokes = [
        "M" + "L".join(f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in piece)
        for piece in _pieces(points, frame.log)
    ]
    return f'<path class="{style}" d="{"".join(strokes)}"/>'


def _pieces(points: Sequence[Point], log: bool) -> Iterator[list[Point]]:
    """The runs of points between gaps."""
    for drawable, piece in groupby(points, key=lambda point: _drawable(point[1], log)):
        if drawable:
            yield list(piece)


def _drawable(value: float, log: bool) -> bool:
    return math.isfinite(value) and (value > 0 or not log)


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Each value becomes the mean of those at most `window` / 2 points away; gaps stay and count for nothing."""
    half = window // 2
    means = []
    for i, (step, value) in enumerate(points):
        near = [v for _, v in points[max(0, i - half) : i + half + 1] if math.isfinite(v)]
        means.append((step, sum(near) / len(near) if math.isfinite(value) else value))
    return means
