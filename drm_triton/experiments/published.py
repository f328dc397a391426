"""The figures that the DRM paper prints (arXiv 2008.13141). The counts of its Table 1 are with the sources of data.

All of them are on test, means of five trainings. The published MAP@10 divides by K, so it stands under `map_k@10`, see
docs/metrics.md. Figures 2 and 3 of the paper are pictures, and no table has their values: `CLAIMS` says what the text
concludes from them.
"""

from typing import Any

SETS = ("sketchfab", "epinion", "ml-20m", "melon")
TITLES = {"sketchfab": "SketchFab", "epinion": "Epinion", "ml-20m": "ML-20M", "melon": "Melon"}
METRICS = ("map_k@10", "ndcg@10", "recall@50", "ndcg@50")

# Table 1: interactions of an average user and of an average item, and density, as printed. They are of the exact
# counts, which the paper does not print.
AVERAGES = {
    "sketchfab": {"per_user": 35.9, "per_item": 19.4, "density": 0.0012},
    "epinion": {"per_user": 29.4, "per_item": 10.6, "density": 0.00048},
    "ml-20m": {"per_user": 73.0, "per_item": 643.0, "density": 0.0047},
    "melon": {"per_user": 39.2, "per_item": 50.5, "density": 0.00048},
}

# Table 3, by metric. SQLRank was not trained on the two large sets.
MODELS = ("slim", "cdae", "bpr", "wmf", "warp", "cml", "sqlrank", "srrmf", "drm-dot", "drm-l2")
_TABLE_3: dict[str, tuple[tuple[float | None, ...], ...]] = {
    "sketchfab": (
        (0.0300, 0.0351, 0.0216, 0.0335, 0.0363, 0.0358, 0.0101, 0.0200, 0.0399, 0.0390),
        (0.1163, 0.1301, 0.0905, 0.1257, 0.1354, 0.1379, 0.0417, 0.0862, 0.1479, 0.1466),
        (0.2696, 0.2793, 0.2168, 0.2862, 0.2923, 0.3040, 0.1422, 0.1550, 0.3091, 0.3028),
        (0.1067, 0.1657, 0.1218, 0.1645, 0.1724, 0.1778, 0.0537, 0.0995, 0.1855, 0.1836),
    ),
    "epinion": (
        (0.0086, 0.0128, 0.0062, 0.0123, 0.0100, 0.0130, 0.0036, 0.0107, 0.0144, 0.0137),
        (0.0357, 0.0453, 0.0238, 0.0486, 0.0387, 0.0493, 0.0168, 0.0428, 0.0532, 0.0523),
        (0.1081, 0.1123, 0.0661, 0.1325, 0.1158, 0.1347, 0.0432, 0.1275, 0.1361, 0.1308),
        (0.0410, 0.0646, 0.0362, 0.0726, 0.0610, 0.0736, 0.0252, 0.0680, 0.0766, 0.0746),
    ),
    "ml-20m": (
        (0.1287, 0.1569, 0.0787, 0.1034, 0.1284, 0.1331, None, 0.0987, 0.1475, 0.1598),
        (0.2761, 0.3205, 0.1917, 0.2561, 0.2750, 0.2824, None, 0.2532, 0.3068, 0.3267),
        (0.4874, 0.4829, 0.3431, 0.4676, 0.4791, 0.4874, None, 0.4786, 0.4944, 0.5014),
        (0.2511, 0.3667, 0.2394, 0.3288, 0.3360, 0.3416, None, 0.3244, 0.3627, 0.3912),
    ),
    "melon": (
        (0.0838, 0.0612, 0.0400, 0.0562, 0.0474, 0.0692, None, 0.0652, 0.0764, 0.0892),
        (0.1768, 0.1041, 0.0972, 0.1303, 0.1217, 0.1659, None, 0.1324, 0.1802, 0.2010),
        (0.3415, 0.1928, 0.2159, 0.2537, 0.2577, 0.3361, None, 0.2863, 0.3471, 0.3700),
        (0.2206, 0.1335, 0.1363, 0.1716, 0.1654, 0.2206, None, 0.1842, 0.2334, 0.2550),
    ),
}

# Table 4 compares three models on SketchFab. The other two are in Table 3.
DRM_ALONE = dict(zip(METRICS, (0.0310, 0.1234, 0.2802, 0.1608), strict=True))

# Table 5: correlation of the training loss with the metrics on the training and on the validation part of ML-20M.
CORRELATED = ("train map_k@10", "train ndcg@10", "valid map_k@10", "valid ndcg@10")
CORRELATIONS = {
    "mse": (-0.957, -0.946, -0.943, -0.745),
    "hinge": (-0.983, -0.983, -0.978, -0.915),
    "mse+drm": (-0.984, -0.972, -0.976, -0.946),
    "hinge+drm": (-0.985, -0.984, -0.936, -0.970),
}

# What the text says about the pictures, in our words, and the data sets that they show.
CLAIMS: dict[str, tuple[tuple[str, ...], str]] = {
    "figure2": (
        ("sketchfab", "melon"),
        "NDCG@10 rises with rho at first, then less or not at all, on SketchFab beyond rho = 3",
    ),
    "figure3": (
        ("sketchfab", "ml-20m"),
        "DRM is better in every group of users, most clearly where users have few interactions",
    ),
}


def quality(dataset: str | None, model: str) -> dict[str, float]:
    """Return the published test metrics of a model on a data set: those of Tables 3 and 4, or nothing.

    Parameters
    ----------
    dataset : one of SETS; any other name has no published figures
    model : name of an entry, as in `drm_triton.experiments.entries`

    Examples
    --------
    >>> quality("epinion", "wmf")
    {'map_k@10': 0.0123, 'ndcg@10': 0.0486, 'recall@50': 0.1325, 'ndcg@50': 0.0726}
    >>> quality("melon", "sqlrank")
    {}
    """
    if dataset == "sketchfab" and model == "drm-alone-l2":
        return dict(DRM_ALONE)
    if dataset not in _TABLE_3 or model not in MODELS:
        return {}
    column = [row[MODELS.index(model)] for row in _TABLE_3[dataset]]
    return {metric: value for metric, value in zip(METRICS, column, strict=True) if value is not None}


def statistics(dataset: str | None) -> dict[str, Any]:
    """Return the published statistics of a data set: `users`, `items`, `interactions` and AVERAGES, or nothing.

    Examples
    --------
    >>> statistics("epinion")["users"], statistics("epinion")["per_user"]
    (21300, 29.4)
    """
    from dataclasses import asdict

    from drm_triton.data.prepare.sources import find_source

    if dataset not in AVERAGES:
        return {}
    counts = find_source(dataset).published
    assert counts is not None
    return {**asdict(counts), **AVERAGES[dataset]}
