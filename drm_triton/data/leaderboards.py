"""Public splits: their sizes, their protocol, and the results that others have published for them.

The protocol of all of them: Recall@20 and NDCG@20 of every user with test items, over all items that are not in the
user's training part. Recall divides by the number of the user's test items, and the ideal ranking of NDCG has
min(20, that number) hits, as in `drm_triton.ranking.metrics`. The models have 64 factors where they have factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drm_triton.names import CUT_OFFS, MIN_TRAIN

K = 20  # cut-off of the published results
LEAST_TRAIN = 1  # every user with training and test items is measured

_BARS = "BARS leaderboard"
_LITERATURE = "BARS leaderboard, RecZoo or the authors' repository"
_COMPUTED = "computed in this project on the same files"


@dataclass(frozen=True)
class Result:
    """A published result.

    Attributes
    ----------
    model : name, with the variant
    recall, ndcg : Recall@20 and NDCG@20
    source : where the figures come from
    """

    model: str
    recall: float
    ndcg: float
    source: str = _LITERATURE

    @property
    def label(self) -> str:
        """The model, and whether others published the result."""
        return f"{self.model} ({'our run' if self.source == _COMPUTED else 'published'})"

    def to_dict(self) -> dict[str, str | float]:
        """Return the result under the names that `evaluate` uses."""
        return {"model": self.model, f"recall@{K}": self.recall, f"ndcg@{K}": self.ndcg, "source": self.source}


@dataclass(frozen=True)
class PublicSplit:
    """The sizes of a public split, by which it is recognised, and its leaderboard, in ascending order of recall."""

    users: int
    items: int
    train: int
    test: int
    results: tuple[Result, ...]

    @property
    def sizes(self) -> str:
        """The sizes as text."""
        return f"{self.users:,} users, {self.items:,} items, {self.train:,} + {self.test:,} interactions"

    @property
    def interactions(self) -> int:
        """The number of interactions in both parts."""
        return self.train + self.test


PUBLIC_SPLITS: dict[str, PublicSplit] = {
    "ml-1m-m1": PublicSplit(
        users=6_022,
        items=3_043,
        train=796_244,
        test=99_455,
        results=(
            Result("NGCF", 0.2513, 0.2511),
            Result("LightGCN", 0.2576, 0.2427),
            Result("EASE, lambda 1000", 0.2755, 0.2674, _COMPUTED),
            Result("EASE, lambda 500", 0.2759, 0.2660, _COMPUTED),
            Result("UltraGCN", 0.2787, 0.2642),
            Result("SimpleX", 0.2802, 0.2670),
        ),
    ),
    "amazon-cds-m1": PublicSplit(
        users=43_169,
        items=35_648,
        train=604_475,
        test=172_951,
        results=(
            Result("NGCF", 0.1258, 0.0792),
            Result("BGCF", 0.1506, 0.0948),
            Result("UltraGCN", 0.1622, 0.1043),
            Result("SimpleX", 0.1763, 0.1145),
        ),
    ),
    "gowalla": PublicSplit(
        users=29_858,
        items=40_981,
        train=810_128,
        test=217_242,
        results=(
            Result("most popular items", 0.0416, 0.0317, _COMPUTED),
            Result("ItemCF", 0.1570, 0.1214, _BARS),
            Result("MF-BPR", 0.1627, 0.1378, _BARS),
            Result("Mult-VAE", 0.1641, 0.1335),
            Result("CML", 0.1670, 0.1292, _BARS),
            Result("SLIM", 0.1699, 0.1382, _BARS),
            Result("EASE", 0.1765, 0.1467, _BARS),
            Result("LightGCN, 3 layers", 0.1824, 0.1547, "LightGCN repository"),
            Result("RP3beta", 0.1829, 0.1520, f"Anelli et al. 2023, {_COMPUTED} too"),
            Result("LightGCN", 0.1830, 0.1554, "LightGCN paper"),
            Result("GF-CF", 0.1849, 0.1518),
            Result("GF-CF, randomised SVD", 0.1862, 0.1530, _COMPUTED),
            Result("UltraGCN", 0.1862, 0.1580),
            Result("SimpleX", 0.1872, 0.1557),
            Result("BSPM-EM", 0.1920, 0.1597),
        ),
    ),
    "yelp2018": PublicSplit(
        users=31_668,
        items=38_048,
        train=1_237_259,
        test=324_147,
        results=(
            Result("MF-BPR", 0.0576, 0.0468, _BARS),
            Result("Mult-VAE", 0.0584, 0.0450),
            Result("CML", 0.0622, 0.0536, _BARS),
            Result("LightGCN, 3 layers", 0.0635, 0.0524, "LightGCN repository"),
            Result("ItemCF", 0.0639, 0.0531, _BARS),
            Result("SLIM", 0.0646, 0.0541, _BARS),
            Result("LightGCN", 0.0649, 0.0530, "LightGCN paper"),
            Result("EASE", 0.0657, 0.0552, _BARS),
            Result("UltraGCN", 0.0683, 0.0561),
            Result("GF-CF", 0.0697, 0.0571),
            Result("SimpleX", 0.0701, 0.0575),
        ),
    ),
    "amazon-book": PublicSplit(
        users=52_643,
        items=91_599,
        train=2_380_730,
        test=603_378,
        results=(
            Result("MF-BPR", 0.0338, 0.0261, _BARS),
            Result("Mult-VAE", 0.0407, 0.0315),
            Result("LightGCN", 0.0411, 0.0315, "LightGCN paper"),
            Result("CML", 0.0522, 0.0428, _BARS),
            Result("SimpleX", 0.0583, 0.0468),
            Result("UltraGCN", 0.0681, 0.0556),
            Result("EASE", 0.0710, 0.0567, _BARS),
            Result("GF-CF", 0.0710, 0.0584),
            Result("BSPM-EM", 0.0733, 0.0609),
            Result("ItemCF", 0.0736, 0.0606, _BARS),
            Result("SLIM", 0.0755, 0.0602, _BARS),
            Result("SANSA", 0.0768, 0.0637),
        ),
    ),
}


def leaderboard(meta: Mapping[str, Any]) -> list[Result]:
    """Return the published results for the data set with this `Dataset.meta`; none if it is no public split."""
    split = PUBLIC_SPLITS.get(str(meta.get("public_split")))
    return [] if split is None else list(split.results)


def protocol(meta: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the cut-offs and the least number of training items of a user with which a data set is evaluated.

    Examples
    --------
    >>> protocol({"public_split": "gowalla"}), protocol({})
    (((10, 20, 50), 1), ((10, 50), 5))
    """
    if str(meta.get("public_split")) in PUBLIC_SPLITS:
        return tuple(sorted({*CUT_OFFS, K})), LEAST_TRAIN
    return CUT_OFFS, MIN_TRAIN
