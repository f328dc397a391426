"""The published figures: spot checks, and the paper's own percentages, which follow from them."""

import pytest

from drm_triton.experiments import published
from drm_triton.experiments.entries import ENTRIES, PAPER_MODELS

# What the paper prints in brackets: the percentage by which DRM dot and DRM L2 exceed the best baseline.
GAINS = {
    "sketchfab": ((9.9, 7.4), (7.2, 6.3), (1.6, -0.3), (4.3, 3.2)),
    "epinion": ((10.7, 5.3), (7.9, 6.0), (1.0, -2.8), (4.0, 1.3)),
    "ml-20m": ((-5.9, 1.8), (-4.2, 1.9), (1.4, 2.8), (-1.0, 6.6)),
    "melon": ((-8.8, 6.4), (1.9, 13.6), (1.6, 8.3), (5.8, 15.5)),
}


def test_models_are_entries_in_the_order_of_the_paper() -> None:
    assert (*PAPER_MODELS, "drm-dot", "drm-l2") == published.MODELS
    assert {*published.MODELS} < ENTRIES.keys()


@pytest.mark.parametrize("dataset", published.SETS)
def test_table_3_gives_the_percentages_that_the_paper_prints(dataset: str) -> None:
    columns = {model: published.quality(dataset, model) for model in published.MODELS}
    for metric, printed in zip(published.METRICS, GAINS[dataset], strict=True):
        best = max(columns[model].get(metric, 0.0) for model in PAPER_MODELS)
        for model, gain in zip(("drm-dot", "drm-l2"), printed, strict=True):
            # Values have four decimals, so a quotient of .0144 and .0130 is uncertain by 1 %.
            uncertain = 100 * (0.00005 / best) * (1 + columns[model][metric] / best) + 0.11
            assert 100 * (columns[model][metric] / best - 1) == pytest.approx(gain, abs=uncertain), (metric, model)


@pytest.mark.parametrize(
    ("dataset", "model", "metric", "value"),
    [
        ("sketchfab", "slim", "ndcg@50", 0.1067),
        ("sketchfab", "sqlrank", "recall@50", 0.1422),
        ("sketchfab", "srrmf", "map_k@10", 0.0200),
        ("epinion", "bpr", "ndcg@10", 0.0238),
        ("epinion", "wmf", "map_k@10", 0.0123),
        ("ml-20m", "cdae", "ndcg@50", 0.3667),
        ("ml-20m", "drm-l2", "recall@50", 0.5014),
        ("melon", "warp", "ndcg@10", 0.1217),
        ("melon", "cml", "ndcg@50", 0.2206),
        ("sketchfab", "drm-alone-l2", "ndcg@10", 0.1234),  # Table 4
    ],
)
def test_figures_of_tables_3_and_4(dataset: str, model: str, metric: str, value: float) -> None:
    assert published.quality(dataset, model)[metric] == value


def test_what_the_paper_does_not_have() -> None:
    assert published.quality("ml-20m", "sqlrank") == published.quality("melon", "sqlrank") == {}
    assert published.quality("epinion", "drm-alone-l2") == published.quality(None, "wmf") == {}
    assert published.statistics("ml-100k") == published.statistics(None) == {}


def test_tables_1_and_5() -> None:
    assert published.statistics("ml-20m") == {
        "users": 136_000, "items": 15_500, "interactions": 9_980_000,
        "per_user": 73.0, "per_item": 643.0, "density": 0.0047,
    }  # fmt: skip
    for dataset in published.SETS:  # the printed averages are those of the printed counts, up to rounding
        found = published.statistics(dataset)
        assert found["interactions"] / found["users"] == pytest.approx(found["per_user"], rel=0.01)
        assert found["interactions"] / found["items"] == pytest.approx(found["per_item"], rel=0.01)
    assert published.CORRELATIONS["mse"] == (-0.957, -0.946, -0.943, -0.745)
    assert published.CORRELATIONS["hinge+drm"] == (-0.985, -0.984, -0.936, -0.970)
