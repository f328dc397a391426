"""Splits of interactions into train, validation and test.

Random numbers come from a 64-bit hash of (seed, user code, item code), not from a random stream. So the split does not
depend on the order of the rows, the number of threads, the machine, or the version of any library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.errors import InputError
from drm_triton.names import SplitName

SPLITS: tuple[SplitName, ...] = get_args(SplitName)
NEEDS_TIME = ("leave-last", "time")
PAPER_RATIOS = (0.7, 0.1, 0.2)
TRAIN, VALID, TEST = 0, 1, 2

_HASHED_ROWS = 1 << 18  # hashed at a time, so that the temporary arrays stay in cache


def mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the output of splitmix64 for each state `x`: a bijection of 64-bit integers that looks random.

    Examples
    --------
    >>> [hex(v) for v in mix64(np.array([0, 1], dtype=np.uint64))]
    ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    z = x + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def random_keys(seed: int, users: NDArray[np.integer], items: NDArray[np.integer] | None = None) -> NDArray[np.uint64]:
    """Return a 64-bit random number for each user, or for each (user, item) pair. Different pairs get different ones.

    Parameters
    ----------
    seed : int
        Any integer, modulo 2^64.
    users, items : array [n]
        Codes below 2^32.
    """
    key = mix64(np.array([seed % 2**64], dtype=np.uint64))
    out = np.empty(len(users), dtype=np.uint64)
    for start in range(0, len(users), _HASHED_ROWS):
        rows = slice(start, start + _HASHED_ROWS)
        pair = users[rows].astype(np.uint64) << np.uint64(32)
        if items is not None:
            pair |= items[rows].astype(np.uint64)
        out[rows] = mix64(pair ^ key)
    return out


def check_ratios(ratios: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return train/valid/test shares scaled to sum to 1, so that 70/10/20 equals .7/.1/.2."""
    numbers = [float(r) if isinstance(r, int | float | np.number) else math.nan for r in ratios]
    total = sum(numbers)
    if len(numbers) != 3 or not all(r >= 0 for r in numbers) or numbers[0] <= 0 or not math.isfinite(total):
        raise InputError(
            f"`ratios` {ratios!r} cannot be used: give three shares, train/valid/test, none negative and train above "
            "zero, for example 70/10/20"
        )
    return numbers[0] / total, numbers[1] / total, numbers[2] / total


def split_text(options: Mapping[str, Any]) -> str:
    """Return the split of a data set in one line, from the entry `options` of its meta.

    Examples
    --------
    >>> split_text({"split": "random", "ratios": (8, 1, 1), "seed": 0})
    'random 80/10/10, seed 0'
    >>> split_text({"split": "predefined", "valid_ratio": 0.1, "seed": 0})
    'predefined, 0.1 of train drawn for validation, seed 0'
    >>> split_text({"split": "leave-last", "ratios": (7, 1, 2), "seed": 0})
    'leave-last (the last two items of each user)'
    """
    if options["split"] == "leave-last":  # it uses neither ratios nor seed
        return "leave-last (the last two items of each user)"
    if "ratios" in options:
        ratios = "/".join(f"{100 * ratio / sum(options['ratios']):g}" for ratio in options["ratios"])
        return f"{options['split']} {ratios}, seed {options['seed']}"
    if not options.get("valid_ratio"):
        return str(options["split"])
    return f"{options['split']}, {options['valid_ratio']:.4g} of train drawn for validation, seed {options['seed']}"


def split(
    users: NDArray[np.integer],
    items: NDArray[np.integer],
    time: NDArray[np.integer | np.floating] | None = None,
    method: SplitName = "random",
    ratios: tuple[float, float, float] = PAPER_RATIOS,
    seed: int = 0,
) -> NDArray[np.uint8]:
    """Label each interaction 0 (train), 1 (validation) or 2 (test).

    ``random``
        The ratios hold exactly over all interactions (the paper's protocol).
    ``per-user``
        The ratios hold within each user, rounded. Each user keeps at least one training interaction.
    ``leave-last``
        The last interaction of a user is test and the one before it validation. A user with two interactions has no
        validation interaction, and a user with one has only a training interaction.
    ``time``
        The oldest interactions are train, the newest test.
    ``users``
        Whole users are held out. Users of validation and test have no training interaction.

    Interactions at the same time are ordered by item code, then user code.

    Parameters
    ----------
    users, items : array [n]
        Codes of the interactions, sorted by user, then item, without repeated pairs.
    time : array [n], optional
        Times, which ``leave-last`` and ``time`` need.

    Returns
    -------
    labels : uint8 [n]
    """
    n = len(users)
    _, valid, test = check_ratios(ratios)
    if method in NEEDS_TIME and time is None:
        raise InputError(f"split {method} needs the time of each interaction, which the data does not have")
    if method == "random":
        return _cut(random_keys(seed, users, items), valid, test)
    if method == "users":
        labels = _cut(random_keys(seed, np.arange(int(users.max(initial=-1)) + 1)), valid, test)
        return np.take(labels, users)
    if method == "time":
        rank = np.empty(n, dtype=np.int64)
        rank[_order(time, items, users)] = np.arange(n)
        return _cut(rank, valid, test)
    if method not in SPLITS:
        raise InputError(f"unknown `split` {method!r}: choose one of {', '.join(SPLITS)}")

    # The two splits within users: order the interactions of each user, then label them by distance from the end.
    order = _order(users, random_keys(seed, users, items)) if method == "per-user" else _order(users, time, items)
    counts = np.bincount(users)
    to_end = np.cumsum(counts)[users] - np.arange(n)  # n_u, ..., 1 within each user, because users are sorted
    if method == "leave-last":
        n_test = np.minimum(counts - 1, 1)
        n_valid = np.clip(counts - 2, 0, 1)
    else:
        n_test = np.minimum(np.floor(counts * test + 0.5).astype(np.int64), np.maximum(counts - 1, 0))
        n_valid = np.minimum(np.floor(counts * valid + 0.5).astype(np.int64), np.maximum(counts - 1 - n_test, 0))
    labels = np.empty(n, dtype=np.uint8)
    held = n_test + n_valid
    labels[order] = np.where(to_end <= n_test[users], TEST, np.where(to_end <= held[users], VALID, TRAIN))
    return labels


def _order(*keys: NDArray[Any] | None) -> NDArray[np.integer]:
    """Return row numbers sorted by the first key, then the second, ... Unlike np.lexsort it uses all threads."""
    frame = pl.DataFrame({str(k): key for k, key in enumerate(keys)})
    return frame.select(pl.arg_sort_by(frame.columns)).to_series().to_numpy()


def _cut(keys: NDArray[Any], valid: float, test: float) -> NDArray[np.uint8]:
    """Label distinct keys by rank: the largest round(n·test) are test, the round(n·valid) below them validation."""
    ranks = [rank for rank in held_out_ranks(len(keys), valid, test) if rank < len(keys)]
    ranked = np.partition(keys, ranks) if ranks else keys
    return labels_above(keys, [ranked[rank] for rank in ranks])


def held_out_ranks(n: int, valid: float, test: float) -> tuple[int, int]:
    """Return the ranks, from 0, of the first validation and the first test interaction among n; n if there is none."""
    n_test = round(n * test)
    n_valid = min(round(n * valid), n - n_test)
    return n - n_test - n_valid, n - n_test


def labels_above(keys: NDArray[Any], least: Sequence[Any]) -> NDArray[np.uint8]:
    """Label keys by the least keys of validation and of test, which are left out from the end where there are none."""
    labels = np.zeros(len(keys), dtype=np.uint8)
    for bound, label in zip(least, (VALID, TEST), strict=False):
        labels[keys >= bound] = label
    return labels
