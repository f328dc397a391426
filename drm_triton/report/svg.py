"""Line and bar charts as SVG text, coloured by the style sheet: class r1 is the first run, r0 the baseline.

Labels are escaped here. A run has the same colour in every chart and table.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drm_triton.report.markup import escape

WIDTH, HEIGHT = 320, 200  # of a line chart, in px of its view box
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 10, 38
COLOURS, SHAPES = 8, 4
MAX_MARKERS = 25  # a curve with this many points or more marks only the best one

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The line of one run. A ring marks the point `best`."""

    label: str
    run: int  # number of the run, from 1
    points: Sequence[Point]
    best: Point | None = None


@dataclass(frozen=True)
class Bars:
    """One value for each group, of a run or of the baseline (run 0)."""

    label: str
    run: int
    values: Sequence[float]


def colour(run: int) -> str:
    """Return the CSS class of a run. With more than COLOURS runs the colours repeat with other markers."""
    return f"r{(run - 1) % COLOURS + 1}" if run else "r0"


def marker(run: int, x: float, y: float, size: float = 3.2) -> str:
    """Draw a circle, square, triangle or diamond. Runs differ in shape as well as in colour."""
    shape = ((run - 1) + (run - 1) // COLOURS) % SHAPES
    if shape == 0:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>'
    if shape == 1:
        corners = [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)]
    elif shape == 2:
        corners = [(0, -1.2), (1.15, 0.8), (-1.15, 0.8)]
    else:
        corners = [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)]
    return '<polygon points="{}"/>'.format(" ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in corners))


def swatch(run: int) -> str:
    """Draw the marker of a run for use in text."""
    mark = marker(run, 7, 7, 4.5) if run else '<rect x="2" y="3" width="10" height="8" rx="2"/>'
    return f'<svg class="swatch {colour(run)}" viewBox="0 0 14 14" aria-hidden="true">{mark}</svg>'


def run_label(run: int, name: str) -> str:
    """Build the label of a run: its marker and its name."""
    return f'{swatch(run)}<bdi class="name">{escape(name)}</bdi>'


def ticks(low: float, high: float, n: int = 4, whole: bool = False) -> list[float]:
    """Return about n round numbers that cover [low, high].

    Examples
    --------
    >>> ticks(0.11, 0.19)
    [0.1, 0.12, 0.14, 0.16, 0.18, 0.2]
    >>> ticks(1, 5, whole=True)
    [1.0, 2.0, 3.0, 4.0, 5.0]
    """
    span = max(high - low, 1e-6 * max(abs(low), abs(high)))
    if span < 1e-300:  # zero, or so small that the step would underflow
        span = 1.0
    unit = 10.0 ** math.floor(math.log10(span / n))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m * n >= span * 0.99)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Format the number at a tick."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def lines(title: str, x_label: str, curves: Sequence[Curve], whole: bool = False) -> str:
    """Draw a line chart. With `whole` the ticks of the x axis are integers."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks = ticks(min(xs) if whole else 0.0, max(xs), 5, whole)
    y_ticks = ticks(min(ys), max(ys))
    x_range = (min(xs), max(xs)) if whole and min(xs) < max(xs) else (x_ticks[0], x_ticks[-1])

    def place(x: float, y: float) -> Point:
        across = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    elements = []
    for y in y_ticks:
        _, at = place(x_range[0], y)
        elements.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        elements.append(f'<text class="tick y" x="{LEFT - 6}" y="{at + 4:.1f}">{number(y)}</text>')
    for x in x_ticks:
        if x_range[0] <= x <= x_range[1]:
            at, _ = place(x, y_ticks[0])
            elements.append(f'<text class="tick x" x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}">{number(x)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    elements.append(f'<text class="tick x" x="{middle:.1f}" y="{HEIGHT - 4}">{escape(x_label)}</text>')
    for curve in curves:
        elements.append(f'<g class="{colour(curve.run)}">' + _curve(curve, place, x_label) + "</g>")
    ends = "; ".join(
        f"{curve.label} from {curve.points[0][1]:.4g} to {curve.points[-1][1]:.4g}" for curve in curves if curve.points
    )
    label = escape(f"{title} over {x_label}: {ends}")
    return (
        f'<svg class="lines" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(elements)}</svg>'
    )


def _curve(curve: Curve, place: Callable[[float, float], Point], x_label: str) -> str:
    path = "M" + "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in curve.points)
    marked = (
        curve.points if len(curve.points) < MAX_MARKERS else [point for point in curve.points if point == curve.best]
    )
    elements = [f'<path d="{path}"/>']
    for x, y in marked:
        tooltip = escape(f"{curve.label}: {y:.4g} at {x:.4g} {x_label}" + (" (best)" if (x, y) == curve.best else ""))
        ring = '<circle class="ring" cx="{:.1f}" cy="{:.1f}" r="6.5"/>'.format(*place(x, y))
        elements.append(
            f"<g><title>{tooltip}</title>{ring if (x, y) == curve.best else ''}{marker(curve.run, *place(x, y))}</g>"
        )
    return "".join(elements)


def bars(title: str, groups: Sequence[str], series: Sequence[Bars]) -> str:
    """Draw horizontal bars in groups. Lengths are percentages, so the text has the same size at any width."""
    top = max((value for one in series for value in one.values), default=0.0) or 1.0
    row, gap, heading = 18, 14, 22
    elements, y = [], 0
    for g, group in enumerate(groups):
        elements.append(f'<text class="group" x="0" y="{y + 14}">{escape(group)}</text>')
        y += heading
        for one in series:
            percent = 86 * one.values[g] / top  # the rest is for the number
            elements.append(
                f'<g class="{colour(one.run)}"><title>{escape(one.label)}: {one.values[g]:.4f}</title>'
                f'<rect x="0" y="{y}" width="{percent:.2f}%" height="{row - 4}" rx="2"/></g>'
                f'<text class="value" x="{percent:.2f}%" dx="6" y="{y + 11}">{one.values[g]:.3f}</text>'
            )
            y += row
        y += gap
    description = "; ".join(
        f"{group}: " + ", ".join(f"{one.label} {one.values[g]:.3f}" for one in series) for g, group in enumerate(groups)
    )
    return (
        f'<svg class="bars" width="100%" height="{max(y - gap, 1)}" role="img" '
        f'aria-label="{escape(f"{title}. {description}")}">{"".join(elements)}</svg>'
    )
