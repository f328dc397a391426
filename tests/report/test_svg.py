"""Charts as SVG: ticks, positions and markers."""

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from drm_triton.report import svg
from tests.report.conftest import Tree

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(low=finite, high=finite, whole=st.booleans())
def test_ticks_cover_the_range_with_few_round_numbers(low: float, high: float, whole: bool) -> None:
    low, high = min(low, high), max(low, high)
    marks = svg.ticks(low, high, whole=whole)
    slack = 1e-8 * (marks[-1] - marks[0])  # less than a pixel on any screen
    assert marks[0] <= low + slack
    assert high - slack <= marks[-1]
    assert 2 <= len(marks) <= 7
    assert all(a < b for a, b in itertools.pairwise(marks))


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1e4)), min_size=1, max_size=40, unique_by=lambda p: p[0]))
def test_points_are_inside_the_chart(points: list[tuple[int, float]]) -> None:
    chart = Tree(svg.lines("Loss", "epochs", [svg.Curve("<a>", 1, sorted(points))], whole=True)).root
    (path,) = chart.all("path")
    numbers = [float(n) for n in re.findall(r"[-\d.]+", path.attributes["d"] or "")]
    assert all(svg.LEFT - 0.1 <= x <= svg.WIDTH - svg.RIGHT + 0.1 for x in numbers[::2])
    assert all(svg.TOP - 0.1 <= y <= svg.HEIGHT - svg.BOTTOM + 0.1 for y in numbers[1::2])


def test_runs_differ_in_colour_or_marker() -> None:
    looks = {(svg.colour(run), svg.marker(run, 0, 0)) for run in range(1, 33)}
    assert len(looks) == 32
