"""Build a `Dataset` from files that are already split: one file for each of train, test and perhaps valid.

The parts stay as they are. No filter removes interactions, and ids are encoded over all parts together, so a user or an
item that occurs only in test has a code too.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np
import polars as pl

from drm_triton.data.dataset import CSR, Dataset
from drm_triton.data.prepare.build import (
    POSITIVE,
    BuildOptions,
    count_events,
    distinct_ids,
    keep_rated,
    sizes_text,
    warn_missing,
    warn_skipped,
    weigh_events,
    with_removed,
    with_titles,
)
from drm_triton.data.prepare.codes import distinct, to_codes
from drm_triton.data.prepare.description import describe_rows
from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions
from drm_triton.data.prepare.read import collect
from drm_triton.data.prepare.sources.base import Source
from drm_triton.data.split import VALID, split
from drm_triton.errors import InputError
from drm_triton.names import SplitPart
from drm_triton.progress import SILENT, Reporter, counted

Parts = Mapping[SplitPart, str | Path]  # the file of each part
PARTS: tuple[SplitPart, ...] = get_args(SplitPart)


@dataclass(frozen=True)
class PartsOptions:
    """How to build a data set from parts.

    Attributes
    ----------
    valid_ratio : share of the training interactions to move to the validation part, drawn at random; 0 for none
    seed : of this draw
    """

    valid_ratio: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        ratio = self.valid_ratio
        if not isinstance(ratio, int | float | np.number) or not 0 <= ratio < 1:
            raise InputError(f"`valid_ratio` must be at least 0 and below 1, for example 0.1; got {ratio!r}")
        object.__setattr__(self, "valid_ratio", float(ratio))
        try:
            object.__setattr__(self, "seed", operator.index(self.seed))
        except TypeError:
            raise InputError(f"`seed` must be a whole number, got {self.seed!r}") from None


def read_parts(source: Source, parts: Parts, scratch: Path, file_format: FileFormat) -> RawInteractions:
    """Read the file of each part with the reader of a source, and label its tables with the part."""
    if not source.takes_parts:
        raise InputError(f"source {source.name} does not use `train` and `test`: use source table or lists")
    if not {"train", "test"} <= parts.keys():
        missing = "test" if "train" in parts else "train"
        raise InputError(f"`{missing}` is missing: files that are already split need `train` and `test`")
    named = {part: parts[part] for part in PARTS if part in parts}
    for (a, first), (b, second) in combinations(named.items(), 2):
        if os.path.realpath(os.path.expanduser(first)) == os.path.realpath(os.path.expanduser(second)):
            raise InputError(f"`{a}` and `{b}` are the same file, {first}: give a file for each part")
    read = {part: source.read(Inputs([path], scratch, part), file_format) for part, path in named.items()}
    return replace(
        read["train"],
        tables=[replace(table, part=part) for part, raw in read.items() for table in raw.tables],
        text=all(raw.text for raw in read.values()),
        files=[file for raw in read.values() for file in raw.files],
    )


def build_parts(raw: RawInteractions, options: PartsOptions, reporter: Reporter = SILENT) -> Dataset:
    """Build a data set from tables that all have a part. Its meta contains the statistics of each step."""
    with reporter.step("read") as step:
        read = collect(raw, BuildOptions())
        frame, described = read.frame, describe_rows(read)
        dropped, bad = [], read.known  # rows that filters remove, and bad rows
        warn_skipped(described.get("skipped"), len(frame))
        step.note(counted(len(frame), "row"))
        del read
    steps = [_step("read", frame)]
    if raw.file_format.event_weight is not None:
        described["events"] = count_events(frame, raw)
        frame, others = weigh_events(frame, raw.file_format.event_weight)
        dropped.append(others)
        steps.append(_step(f"events {', '.join(raw.file_format.event_weight)}", frame))
    frame, low = keep_rated(frame, raw, None)
    dropped.append(low)
    if len(low):
        steps.append(_step(POSITIVE, frame))
    rows = frame.group_by("part").len()
    for table in raw.tables:
        if table.part not in rows["part"]:
            raise InputError(f"{table.name} has no interactions: give the {table.part} part of the split")
    with reporter.step("encode") as step:
        user_ids, item_ids = (frame[role].unique().sort().alias("id") for role in ("user", "item"))
        warn_missing(user_ids, item_ids, raw)
        shape = (len(user_ids), len(item_ids))
        sizes = {"users": shape[0], "items": shape[1]}
        codes = to_codes(frame, user_ids, item_ids)
        del frame
        matrices: dict[str, CSR] = {}
        for part in PARTS:
            users, items, _, weights = distinct(codes.filter(pl.col("part") == part).drop("part"))
            matrices[part] = CSR.from_pairs(users, items, shape, weights)
        del codes
        total = sum(matrix.nnz for matrix in matrices.values())
        steps.append({"step": "one row per user and item", "interactions": total, **sizes})
        _check_disjoint(matrices, user_ids, item_ids)
        step.note(sizes_text(total, *shape))
    if options.valid_ratio:
        if matrices["valid"].nnz:
            raise InputError("the files have a validation part: leave out `valid_ratio`, or leave out `valid`")
        matrices |= _hold_out(matrices["train"], options)
    meta: dict[str, Any] = {"source": "parts", "options": {"split": "predefined", **asdict(options)}, "steps": steps}
    meta |= described
    if raw.weight:
        meta["weights"] = {"column": raw.weight}
    data = Dataset(
        matrices["train"], matrices["valid"], matrices["test"], user_ids.to_frame(), with_titles(item_ids, raw), meta
    )
    return with_removed(data, pl.concat(dropped), bad)


def _step(name: str, frame: pl.DataFrame) -> dict[str, Any]:
    """Return the statistics after a step."""
    users, items = distinct_ids(frame)
    return {"step": name, "interactions": len(frame), "users": users, "items": items}


def _check_disjoint(matrices: Mapping[str, CSR], user_ids: pl.Series, item_ids: pl.Series) -> None:
    """Refuse interactions in two parts: a model cannot be measured on what it was trained on."""
    for a, b in combinations(matrices, 2):
        shared = np.intersect1d(matrices[a].keys(), matrices[b].keys(), assume_unique=True)
        if len(shared):
            user, item = divmod(int(shared[0]), len(item_ids))
            raise InputError(
                f"{len(shared):,} of {matrices[b].nnz:,} interactions of `{b}` are in `{a}` too, for example user "
                f"{user_ids[user]!r} with item {item_ids[item]!r}: remove them from one of the files, because a model "
                "is measured only on interactions that it has not seen"
            )


def _hold_out(train: CSR, options: PartsOptions) -> dict[str, CSR]:
    """Return train and valid: a random share of the training interactions becomes the validation part."""
    users = np.repeat(np.arange(train.shape[0]), train.degrees())
    ratios = (1 - options.valid_ratio, options.valid_ratio, 0.0)
    held_out = split(users, train.indices, ratios=ratios, seed=options.seed) == VALID
    if held_out.all() or not held_out.any():
        raise InputError(
            f"`valid_ratio` {options.valid_ratio:g} of {train.nnz:,} training interactions leaves none for "
            f"{'training' if held_out.all() else 'validation'}: give another share"
        )
    return {
        part: CSR.from_pairs(
            users[mask], train.indices[mask], train.shape, None if train.weights is None else train.weights[mask]
        )
        for part, mask in (("train", ~held_out), ("valid", held_out))
    }
