"""Learning curves show every part of the loss that a run has."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from drm_triton import plots
from drm_triton.names import LOSSES


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list that collects figures, which are then not written to files."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


@pytest.mark.parametrize("parts", [("softmax",), ("psl", "drm"), ("bpr",), ("hinge", "drm"), ("mse",)])
def test_curves_of_the_losses_in_use(parts: tuple[str, ...], drawn: list[Figure]) -> None:
    losses = {name: 0.5 if name in parts else 0.0 for name in LOSSES}
    records: list[dict[str, Any]] = [
        {"epoch": epoch, "seconds": 1.0, "loss": 1.0 / epoch, **losses} for epoch in (1, 2)
    ]
    plots.learning_curves(records, Path("unused.png"))
    (figure,) = drawn
    labels = {line.get_label() for line in figure.axes[0].get_lines()}
    assert labels == {"loss", *parts}


def test_records_without_a_loss_that_a_later_version_added(drawn: list[Figure]) -> None:
    plots.learning_curves([{"epoch": 1, "seconds": 1.0, "loss": 1.0, "hinge": 1.0}], Path("unused.png"))
    assert [line.get_label() for line in drawn[0].axes[0].get_lines()] == ["loss", "hinge"]
