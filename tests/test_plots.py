"""Learning curves show every part of the loss that a run has, and intervals every model in every metric."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from drm_triton import DRM, Dataset, plots
from drm_triton.data.csr import CSR
from drm_triton.names import LOSSES
from drm_triton.training.run import best_record, read_metrics


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
    assert labels == {f"loss = {' + '.join(sorted(parts, key=LOSSES.index))}", *(parts if len(parts) > 1 else ())}


def test_records_without_a_loss_that_a_later_version_added(drawn: list[Figure]) -> None:
    plots.learning_curves([{"epoch": 1, "seconds": 1.0, "loss": 1.0, "hinge": 1.0}], Path("unused.png"))
    assert [line.get_label() for line in drawn[0].axes[0].get_lines()] == ["loss = hinge"]


@pytest.mark.parametrize("objective", ["hinge+drm", "softmax+drm"])
def test_the_parts_that_a_run_draws_add_up_to_the_loss(objective: str, drawn: list[Figure], tmp_path: Path) -> None:
    plain = Dataset.from_csr(([0, 8, 16], [*range(8), *range(4, 12)]), n_items=16)
    valid = CSR.from_pairs(np.array([0]), np.array([12]), (2, 16))
    data = Dataset(plain.train, valid, plain.test, plain.users, plain.items)
    DRM(objective=objective, lam=2.5, factors=2, epochs=3, share=2, batch_size=4).fit(data, run=tmp_path / "songs")
    (figure,) = drawn
    assert figure.get_suptitle() == f"songs: model drm, objective {objective}"
    records = read_metrics(tmp_path / "songs")
    best_epoch = best_record(records, "ndcg@10")["epoch"]
    for ax in figure.axes[:2]:  # over epochs, over seconds
        lines: list[Any] = ax.get_lines()
        loss, first, second, best = lines
        assert loss.get_label() == f"loss = {first.get_label()} + {second.get_label()}"
        assert list(loss.get_ydata()) == [record["loss"] for record in records]
        assert first.get_ydata() + second.get_ydata() == pytest.approx(loss.get_ydata())
        assert "2.5 × drm" in (first.get_label(), second.get_label())
        assert best.get_label() == f"best epoch: {best_epoch}"
        if ax is figure.axes[0]:
            assert best.get_xdata()[0] == best_epoch


def test_a_model_without_a_loss_has_one_row(drawn: list[Figure]) -> None:
    plots.learning_curves([{"epoch": 1, "seconds": 1.0, "valid/ndcg@10": 0.5}], Path("unused.png"), "ease", 1)
    plots.learning_curves([{"epoch": 1, "seconds": 1.0}], Path("unused.png"), "popularity")
    assert [len(figure.axes) for figure in drawn] == [2, 2]
    assert drawn[0].axes[0].get_xlim() == (0, pytest.approx(1.05, abs=0.1))
    assert drawn[1].axes[0].get_title() == "no loss and no validation"


def test_intervals_of_models(drawn: list[Figure]) -> None:
    rows = [
        {"model": model, "metric": metric, "mean": mean, "low": mean - 0.01, "high": mean + 0.03}
        for metric in ("ndcg@10", "map@10", "recall@10", "recall@20", "recall@50")
        for model, mean in (("$a$", 0.2), ("b_c", 0.3))
    ]
    plots.metric_intervals(rows, "Runs on $songs$", "mean over users", Path("unused.png"))
    (figure,) = drawn
    shown, hidden = figure.axes[:5], figure.axes[5:]
    assert [ax.get_title() for ax in shown] == ["ndcg@10", "map@10", "recall@10", "recall@20", "recall@50"]
    assert {ax.get_xlabel() for ax in shown} == {"mean over users"}
    assert [ax.axison for ax in hidden] == [False]
    assert [(text.get_text(), text.get_parse_math()) for text in shown[0].get_yticklabels()] == [
        ("$a$", False),
        ("b_c", False),
    ]
    low, high = sorted(shown[0].get_ylim())
    assert shown[0].get_ylim() == (high, low)  # the first model is at the top
    for ax in shown:
        bars = [container[2][0].get_segments()[0] for container in ax.containers]
        assert [bar.tolist() for bar in bars] == [
            [pytest.approx([0.19, 0]), pytest.approx([0.23, 0])],
            [pytest.approx([0.29, 1]), pytest.approx([0.33, 1])],
        ]
    assert figure.get_suptitle() == "Runs on $songs$"
