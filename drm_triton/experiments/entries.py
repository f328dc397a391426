"""What can be compared: models with their fixed options, and the search spaces of the paper.

The space `ours` of an entry is that of `tune`. The space `paper` is Table 2 of the paper. Options that the paper does
not state have one value there, ours, or are searched as well; the comments say which.

Importing this module imports no torch: the command line reads the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any, Literal

from drm_triton.base_config import Config
from drm_triton.errors import InputError
from drm_triton.models.configs import CONFIGS, config_class

SpaceName = Literal["paper", "ours"]
Space = dict[str, Sequence[Any]]


@dataclass(frozen=True)
class Entry:
    """A model with options that are the same in every trial.

    Attributes
    ----------
    name : its name in tables and in `--models`
    model : name of the model
    fixed : options that are not searched
    paper : the paper's search space; empty if the paper has none
    paper_fixed : further fixed options in that space
    """

    name: str
    model: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    paper: Space = field(default_factory=dict)
    paper_fixed: Mapping[str, Any] = field(default_factory=dict)

    def with_fixed(self, options: Mapping[str, Any]) -> Entry:
        """Return the entry with further fixed options, those that its model has."""
        mine = {name: value for name, value in options.items() if name in config_class(self.model).fields()}
        open_in_paper = {name: value for name, value in self.paper_fixed.items() if name not in mine}
        return replace(self, fixed={**self.fixed, **mine}, paper_fixed=open_in_paper)

    def base(self, space: SpaceName, metric: str) -> Config:
        """Return the configuration whose searched options the trials replace."""
        fixed = {**self.fixed, **(self.paper_fixed if space == "paper" else {})}
        return config_class(self.model).from_mapping({**fixed, "monitor": metric})

    def space(self, space: SpaceName) -> Space:
        """Return the searched options and their values."""
        if space == "paper" and not self.paper:
            raise InputError(f"`space` paper: the paper does not have {self.name}; use ours, or leave it out")
        found = self.paper if space == "paper" else self.base("ours", "recall@50").search_space()
        return {name: values for name, values in found.items() if name not in self.fixed}

    def settings(self, space: SpaceName, metric: str, trials: int | None) -> list[Config]:
        """Return the configurations of the trials: random points of the space, or all of it if `trials` is None."""
        from drm_triton.training.tune import draws, replaced

        base, options = self.base(space, metric), self.space(space)
        if not options:
            return [base]
        if trials is None:
            return list(self._grid(space, base, options))
        drawn = draws(options, base)
        if space == "paper" and any(base.to_dict().get(name) not in values for name, values in options.items()):
            next(drawn)  # the defaults, which are not a point of the paper's grid
        return [replaced(base, **self._complete(space, point)) for point in islice(drawn, trials)]

    def _grid(self, space: SpaceName, base: Config, options: Space) -> Iterator[Config]:
        """Yield the configurations of all points of the space, without those that are rejected."""
        from drm_triton.training.tune import replaced

        for values in product(*options.values()):
            point = dict(zip(options, values, strict=True))
            with suppress(InputError):
                yield replaced(base, **self._complete(space, point))

    def _complete(self, space: SpaceName, point: dict[str, Any]) -> dict[str, Any]:
        """Add options that depend on others: the paper has 15 negatives for each positive of DRM."""
        return {**point, "eta": 15 * point["rho"]} if space == "paper" and self.model == "drm" else point


FACTORS = (16, 32, 64, 128)
RATES = (1e-4, 1e-3, 5e-3, 0.01, 0.03, 0.05, 0.1)
RIDGES = (1e-4, 1e-3, 3e-3, 0.01, 0.03)
CONFIDENCES = (1.0, 3.0, 5.0, 10.0, 20.0)
DRM_SPACE: Space = {
    "factors": FACTORS,
    "lr": RATES,
    "tau": (0.1, 0.3, 0.5, 1.0, 3.0, 10.0),
    "rho": (1, 2, 3, 4, 5),
    "lambda": (0.1, 0.5, 1.0, 2.0, 3.0, 5.0),
}
COVARIANCES = (0.1, 0.5, 1.0, 3.0, 5.0, 10.0)
# The paper trains with a constant rate and one list per step. Larger batches, which we keep, are not in its space, but
# needed to train on millions of interactions in minutes.
PAPER_RATE = {"schedule": "constant", "cov_form": "printed"}
DRM_SPACES: dict[str, Space] = {"dot": DRM_SPACE, "l2": {**DRM_SPACE, "cov": COVARIANCES}}
# What Table 2 leaves open: the negatives of the library that the paper used for BPR, the printed form of CML's
# covariance, and the settings of the authors' program for SQL-Rank.
PAPER_FIXED: dict[str, dict[str, Any]] = {
    "bpr": {"negative_sampling": "popularity"},
    "cml": {"cov_form": "printed"},
    "sqlrank": {"ratio": 3, "regularization": 4.0, "lr_decay": 0.9, "epochs": 121},
}


def _paper_spaces() -> dict[str, Space]:
    """Return the spaces of Table 2, by model."""
    return {
        "slim": {"l1": (0.1, 0.5, 1.0, 3.0, 5.0, 10.0, 20.0), "l2": (0.1, 0.5, 1.0, 3.0, 5.0, 10.0, 20.0)},
        "cdae": {"factors": FACTORS, "lr": RATES, "regularization": RIDGES, "corruption": (0.2, 0.5, 0.8)},
        "bpr": {"factors": FACTORS, "lr": RATES, "regularization": RIDGES},
        "wmf": {"factors": FACTORS, "regularization": RIDGES, "confidence": CONFIDENCES},
        "warp": {"factors": FACTORS, "lr": RATES, "max_sampled": (10, 20, 30, 40, 50)},
        "cml": {"factors": FACTORS, "lr": RATES, "eta": (10, 20, 30, 40, 50), "cov": COVARIANCES},
        "sqlrank": {"factors": FACTORS, "lr": RATES},
        "srrmf": {"factors": FACTORS, "regularization": RIDGES, "confidence": CONFIDENCES},
    }


PAPER_MODELS = tuple(_paper_spaces())  # in the order of the paper's Table 3
ENTRIES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        *(Entry(name, name, {}, _paper_spaces().get(name, {}), PAPER_FIXED.get(name, {})) for name in CONFIGS),
        *(
            Entry(f"drm-{score}", "drm", {"objective": "hinge+drm", "score": score}, space, PAPER_RATE)
            for score, space in DRM_SPACES.items()
        ),
        *(
            # Without another part of the loss, lambda only scales it.
            Entry(
                f"drm-alone-{score}",
                "drm",
                {"objective": "drm", "score": score, "lambda": 1.0},
                {name: values for name, values in space.items() if name != "lambda"},
                PAPER_RATE,
            )
            for score, space in DRM_SPACES.items()
        ),
        Entry("softmax@k", "drm", {"objective": "softmax@k"}),
        Entry("psl", "drm", {"objective": "psl"}),
    )
}


def entries(names: Sequence[str]) -> list[Entry]:
    """Return the entries with these names."""
    if len(set(names)) < len(names):
        raise InputError(f"`models` names a model twice: {', '.join(names)}")
    unknown = [name for name in names if name not in ENTRIES]
    if unknown or not names:
        raise InputError(f"`models` must be some of {', '.join(ENTRIES)}; got {', '.join(unknown) or 'none'}")
    return [ENTRIES[name] for name in names]
