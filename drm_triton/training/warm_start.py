"""The start of an update: a model that is trained on from an old one, on data with new interactions, users and items.

Rows of the factor tables are matched by external id. Users and items that the old model was fit on keep their factors
and their Adagrad sums. New users are folded in to the old items, then new items to the users: an item is fitted to
rank its users above others, as a user is to rank their items. At last come users who have new items only.

An update takes the last epochs of the schedule: a model of 20 epochs continues at epoch 18. Its learning rate falls
from `lr` to 0 over them. Rows that were trained for long have large Adagrad sums and move little, new rows move fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.base_config import Config
from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.data.ids import lookup
from drm_triton.errors import InputError, warn
from drm_triton.kernels.protocol import Backend
from drm_triton.ranking.fold_in import fold_in
from drm_triton.training.state import Progress, State

SHARE = 0.15  # of the epochs that an update takes, see bench/update.py
FIXED = ("factors", "score")  # options that an update cannot change
FOLDED_IN = 1.0  # Adagrad's sums of a row that was folded in, as of a spectral one: it is good already


@dataclass(frozen=True)
class WarmStart:
    """Where an update begins.

    Attributes
    ----------
    state : before the first epoch; None for a model that is trained anew, because it is not a table of factors
    origin : the old model and what was taken over, as env.json has it
    """

    state: Progress | None
    origin: dict[str, Any]


@dataclass(frozen=True)
class Known:
    """The rows of an old model that are the users and items of a new data set, by code; -1 for new ones."""

    users: NDArray[np.int64]
    items: NDArray[np.int64]

    @classmethod
    def of(cls, old: Dataset, new: Dataset) -> Known:
        """Match users and items by their ids. Those without interactions in the part `train` of `old` are new."""
        users, items = lookup(new.user_ids, old.user_ids), lookup(new.item_ids, old.item_ids)
        return cls(_trained(users, old.train.degrees()), _trained(items, old.train.popularity()))

    def described(self) -> dict[str, dict[str, int]]:
        """Return the numbers of known and new users and items."""
        tables = (("users", self.users), ("items", self.items))
        return {name: {"known": int((rows >= 0).sum()), "new": int((rows < 0).sum())} for name, rows in tables}


def _trained(rows: NDArray[np.int32], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    trained = (rows >= 0) & (counts[np.maximum(rows, 0)] > 0) if len(counts) else np.zeros(len(rows), bool)
    return np.where(trained, rows, -1).astype(np.int64)


def check_related(old: Dataset, new: Dataset) -> None:
    """Raise if the data sets have no user and no item in common. Their ids may be written in different ways."""
    tables = (("user", old.user_ids, new.user_ids), ("item", old.item_ids, new.item_ids))
    if all((lookup(ids, before) < 0).all() for _, before, ids in tables):
        examples = " and ".join(f"{kind} ids such as {ids[0]!r}, not {before[0]!r}" for kind, before, ids in tables)
        raise InputError(
            f"the model knows no user and no item of the new data, which has {examples}; give ids of the same form, or "
            "train a new model"
        )


def warn_of_leaks(old: Dataset, new: Dataset, known: Known, fit_parts: tuple[str, ...]) -> None:
    """Warn if the old model was fit on interactions that the new data set holds out."""
    trained = old.train.keys()
    for name in [name for name in ("valid", "test") if name not in fit_parts]:
        part: CSR = getattr(new, name)
        users, items = known.users[np.repeat(np.arange(part.shape[0]), part.degrees())], known.items[part.indices]
        keys = (users * old.n_items + items)[(users >= 0) & (items >= 0)]
        seen = int(np.isin(keys, trained).sum())
        if seen:
            warn(
                f"the old model has learned from {seen:,} of the {part.nnz:,} interactions in the part {name}, so "
                f"metrics on {name} will be too good; hold out newer interactions only, with "
                "`drm-triton prepare ... --split time` or Dataset.from_frame(..., split='time')"
            )


def update_epochs(config: Config, epochs: int | None) -> int:
    """Return the number of epochs of an update, by default a share of those of the training.

    Examples
    --------
    >>> update_epochs(TrainConfig(), None), update_epochs(TrainConfig(epochs=4), None)
    (3, 1)
    """
    if epochs is None:
        return min(max(1, round(SHARE * config.epochs)), config.last_epoch)
    if not 1 <= epochs <= config.last_epoch:
        raise InputError(
            f"`epochs` of an update must be from 1 to {config.last_epoch}, the epochs of the training, got {epochs}"
        )
    return epochs


def carry(table: Tensor, old: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Write the known rows of an old table into a new one, in place; return the new one."""
    known = np.flatnonzero(rows >= 0)
    table[torch.from_numpy(known).to(table.device)] = old[torch.from_numpy(rows[known]).to(old.device)].to(table.device)
    return table


def unknown_rows(rows: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the codes of the new users, or items, that have interactions."""
    return np.flatnonzero((rows < 0) & (counts > 0))


def in_old_codes(rows: CSR, known: NDArray[np.int64], n_old: int) -> CSR:
    """Return the interactions with items that the old model knows, under its codes: CSR [B, n_old]."""
    items, users = known[rows.indices], np.repeat(np.arange(rows.shape[0]), rows.degrees())
    keys = users[items >= 0] * n_old + items[items >= 0]
    keys.sort()
    return CSR.from_keys(keys, (rows.shape[0], n_old))


def users_of(items: NDArray[np.int64], fit: CSR) -> CSR:
    """Return the users of some items: CSR [len(items), M]."""
    users = np.repeat(np.arange(fit.shape[0]), fit.degrees())
    order = np.argsort(fit.indices, kind="stable")
    by_item = CSR.from_pairs(fit.indices[order], users[order], (fit.shape[1], fit.shape[0]))
    return by_item.take(items)


def list_state(
    old: dict[str, Tensor], known: Known, fit: CSR, config: TrainConfig, backend: Backend, device: torch.device
) -> State:
    """Return the state of DRM, or of a model that is trained like it, before the first epoch of an update.

    Parameters
    ----------
    old : user_factors and item_factors of the old model; user_state and item_state if they are known
    fit : the interactions to train on
    """
    old = {name: tensor.to(device) for name, tensor in old.items()}
    old_V, (M, N), d = old["item_factors"], fit.shape, config.factors
    U, V = (
        carry(old_V.new_zeros(n, d), old[f"{name}_factors"], rows)
        for name, n, rows in (("user", M, known.users), ("item", N, known.items))
    )
    users, items = unknown_rows(known.users, fit.degrees()), unknown_rows(known.items, fit.popularity())
    histories = in_old_codes(fit.take(users), known.items, len(old_V))
    U[torch.from_numpy(users).to(device)] = fold_in(old_V, histories, config, backend)
    V[torch.from_numpy(items).to(device)] = fold_in(U, users_of(items, fit), config, backend)
    rest = users[histories.degrees() == 0]  # they have new items only
    U[torch.from_numpy(rest).to(device)] = fold_in(V, fit.take(rest), config, backend)
    if config.precision == "bfloat16":
        U, V = U.bfloat16().float(), V.bfloat16().float()
    sums = [torch.full_like(table, FOLDED_IN) for table in (U, V)]
    for table, name, rows in zip(sums, ("user_state", "item_state"), (known.users, known.items), strict=True):
        if name in old:
            carry(table, old[name], rows)
    return State(U, V, *sums)
