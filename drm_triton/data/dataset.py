"""`Dataset`: interactions as three CSR matrices (train, valid, test), with the external ids of users and items."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton import atomic
from drm_triton.data import attributes, store, verify
from drm_triton.data.csr import CSR, columns_of
from drm_triton.data.frames import from_pandas
from drm_triton.data.ids import encode
from drm_triton.data.split import PAPER_RATIOS
from drm_triton.errors import InputError
from drm_triton.names import MAX_INT32, SPLIT_PARTS, DecimalMark, SplitName

__all__ = ["CSR", "Dataset"]


class Dataset:
    """Interactions split into train, valid and test, with the external ids of users and items.

    Inside, users and items have codes 0..n-1. `user_ids` and `item_ids` contain the ids of the source, by code.
    Create a data set with `load`, `from_frame`, `from_csr`, or the command ``drm-triton prepare``.

    Attributes
    ----------
    train, valid, test : CSR [n_users, n_items]
        All of them have weights, or none.
    meta : dict
        The origin of the data: source, options, statistics of each preparation step.
    path : Path or None
        The directory of a stored data set.
    """

    def __init__(
        self,
        train: CSR,
        valid: CSR,
        test: CSR,
        users: pl.DataFrame | None = None,
        items: pl.DataFrame | None = None,
        meta: dict[str, Any] | None = None,
        path: Path | None = None,
    ) -> None:
        if len({part.weights is None for part in (train, valid, test)}) > 1:
            raise InputError("Dataset: either all of `train`, `valid` and `test` have weights, or none of them")
        self.train, self.valid, self.test = train, valid, test
        self._users, self._items = users, items
        self.meta = meta or {}
        self.path = path

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name).nnz:,}" for name in SPLIT_PARTS)
        return f"Dataset(users={self.n_users:,}, items={self.n_items:,}, {sizes})"

    @property
    def n_users(self) -> int:
        """The number of users."""
        return self.train.shape[0]

    @property
    def n_items(self) -> int:
        """The number of items."""
        return self.train.shape[1]

    @property
    def n_interactions(self) -> int:
        """The number of interactions in all three parts of the split."""
        return self.train.nnz + self.valid.nnz + self.test.nnz

    @cached_property
    def owned(self) -> CSR:
        """All interactions, of every part and without weights: the items that each user has."""
        owned = self.train.unweighted()
        for part in (self.valid, self.test):
            if part.nnz:
                owned = owned.union(part.unweighted())
        return owned

    @property
    def weighted(self) -> bool:
        """Whether the interactions have weights."""
        return self.train.weights is not None

    @property
    def users(self) -> pl.DataFrame:
        """The table of users, by code: column ``id``, and attributes."""
        if self._users is None:
            self._users = _id_table(self.path, "users", self.n_users)
        return self._users

    @property
    def items(self) -> pl.DataFrame:
        """The table of items, by code: column ``id``, ``title`` if the source has titles, and attributes."""
        if self._items is None:
            self._items = _id_table(self.path, "items", self.n_items)
        return self._items

    @property
    def user_ids(self) -> pl.Series:
        """External ids of the users, by code."""
        return self.users["id"]

    @property
    def item_ids(self) -> pl.Series:
        """External ids of the items, by code."""
        return self.items["id"]

    @property
    def item_titles(self) -> pl.Series | None:
        """Titles of the items, by code, or None if the source has none."""
        return self.items["title"] if "title" in self.items.columns else None

    def with_attributes(self, items: Any = None, users: Any = None) -> Dataset:
        """Return a copy with attributes of items and users, such as categories, tags and prices.

        Parameters
        ----------
        items, users : polars or pandas DataFrame, optional
            One row for each, with a column of ids and one for each attribute; docs/attributes.md describes the types.
            Items and users that are not in the data set are added without interactions.

        Examples
        --------
        >>> data = Dataset.from_frame(pl.DataFrame({"user": ["ann"], "item": ["x"]}), ratios=(1, 0, 0))
        >>> data.with_attributes(pl.DataFrame({"item": ["y", "x"], "genre": ["rock", "jazz"]})).items.rows()
        [('x', 'jazz'), ('y', 'rock')]
        """
        all_users, all_items = _joined(self.users, users, "user"), _joined(self.items, items, "item")
        train, valid, test = (getattr(self, name).extended((len(all_users), len(all_items))) for name in SPLIT_PARTS)
        meta = {name: value for name, value in self.meta.items() if name != "checksum"}
        return Dataset(train, valid, test, all_users, all_items, meta)

    def encode_users(self, ids: Any) -> NDArray[np.int32]:
        """Return the codes of external user ids: int32 [len(ids)].

        Raises
        ------
        InputError
            If an id is unknown. The message names it.
        """
        return encode(ids, self.user_ids, "user")

    def encode_items(self, ids: Any) -> NDArray[np.int32]:
        """Return the codes of external item ids: int32 [len(ids)]. See `encode_users`."""
        return encode(ids, self.item_ids, "item", self.item_titles)

    @cached_property
    def checksum(self) -> str:
        """SHA-256 of the content: ids, interactions and weights. It does not depend on path or library versions."""
        stored: str | None = self.meta.get("checksum")
        return stored or _checksum(self)

    def verify(self) -> None:
        """Raise if the data is damaged: read all of it, check its structure, and compute its checksum again.

        Raises
        ------
        InputError
            If compiled code could not rely on the data, or if the content does not have the checksum in meta.json.
        """
        where = self.path or "Dataset"
        problem = verify.find_problem({name: getattr(self, name) for name in SPLIT_PARTS})
        for kind, ids in (("user", self.user_ids), ("item", self.item_ids)):
            if ids.null_count() or ids.n_unique() != len(ids):
                problem = f"the {kind} ids are not all different"
        if problem is None and self.meta.get("checksum") not in (None, _checksum(self)):
            problem = "its content does not have the checksum that meta.json records"
        titles = self.item_titles
        if titles is not None and self.meta.get("titles") not in (None, _text_checksum(titles)):
            problem = problem or "the titles do not have the checksum that meta.json records"
        if problem is not None:
            raise InputError(f"{where} is damaged: {problem}; prepare the data set again, or restore it from a copy")

    @classmethod
    def load(cls, path: str | Path, mapped: bool = True) -> Dataset:
        """Open a stored data set.

        The first time, everything is read and verified (see `verify`). After that it takes no time even if the arrays
        are large: while size, times and inode of the files stay the same, they are not read again.

        Parameters
        ----------
        path : directory of the data set
        mapped : map the arrays into memory. Otherwise all is read now, and files that change later change nothing
        """
        path = Path(path)
        meta = store.read_meta(path)
        n_users, n_items = meta["users"], meta["items"]
        matrices = {}
        current = verify.stamp(path)
        for name in SPLIT_PARTS:
            indptr = store.open_array(path, f"{name}.indptr", "<i8", n_users + 1, mapped)
            indices = store.open_array(path, f"{name}.indices", "<i4", meta[name], mapped)
            weights = None
            if "weights" in meta:
                weights = store.open_array(path, f"{name}.weights", "<f4", meta[name], mapped)
            matrices[name] = CSR(indptr, indices, (n_users, n_items), weights)
        data = cls(matrices["train"], matrices["valid"], matrices["test"], meta=meta, path=path)
        if not mapped:
            data._users, data._items = store.read_table(path, "users"), store.read_table(path, "items")
        for name, rows in (("users", n_users), ("items", n_items)):
            found = store.table_length(path, name) if mapped else len(getattr(data, name))
            if found != rows:
                raise InputError(f"{path / name}.parquet has {found} rows, not {rows}: prepare the data set again")
        if not verify.is_known(path, current):
            data.verify()
            verify.remember(path, current)
        return data

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the data set to a directory, atomically.

        An existing data set is replaced only with `overwrite`.
        """
        place = Path(os.path.realpath(path))
        with atomic.directory(path, overwrite, store.MARKER) as directory:
            arrays: dict[str, NDArray[Any]] = {}
            for name in SPLIT_PARTS:
                matrix: CSR = getattr(self, name)
                arrays[f"{name}.indptr"] = matrix.indptr.astype("<i8", copy=False)
                arrays[f"{name}.indices"] = matrix.indices.astype("<i4", copy=False)
                if matrix.weights is not None:
                    arrays[f"{name}.weights"] = matrix.weights.astype("<f4", copy=False)
            sizes = {"users": self.n_users, "items": self.n_items, "interactions": self.n_interactions}
            sizes |= {name: getattr(self, name).nnz for name in SPLIT_PARTS}
            others = {key: value for key, value in self.meta.items() if key not in {*sizes, "weights"}}
            titles = {} if self.item_titles is None else {"titles": _text_checksum(self.item_titles)}
            self.meta = sizes | {"checksum": self.checksum} | self._weights_meta() | others | titles
            store.write(directory, arrays, {"users": self.users, "items": self.items}, self.meta)
        self.path = place

    def _weights_meta(self) -> dict[str, Any]:
        """Return the entry `weights` of meta.json: the column they come from, if known, and their range."""
        if not self.weighted:
            return {}
        parts = [weights for name in SPLIT_PARTS if (weights := getattr(self, name).weights) is not None]
        weights = np.concatenate(parts)
        described = dict(self.meta.get("weights", {}))
        if len(weights):
            statistics = {"least": weights.min(), "most": weights.max(), "mean": weights.mean(dtype=np.float64)}
            described |= {name: float(value) for name, value in statistics.items()}
        return {"weights": described}

    @classmethod
    def of(cls, interactions: Any, weighted: bool = False) -> Dataset:
        """Return a data set as it is, or all interactions of a table or a matrix as its `train` part.

        Parameters
        ----------
        interactions : Dataset, polars or pandas frame, or scipy sparse matrix
        weighted : of a frame, use its column weight; of a matrix, its values

        Examples
        --------
        >>> Dataset.of(pl.DataFrame({"user": ["ann", "bob"], "item": ["x", "x"]}))
        Dataset(users=2, items=1, train=2, valid=0, test=0)
        """
        if isinstance(interactions, Dataset):
            return interactions
        if hasattr(interactions, "tocsr"):
            return cls.from_csr(_positive_entries(interactions), weighted=weighted)
        if isinstance(interactions, pl.LazyFrame) or hasattr(interactions, "columns"):
            try:
                return cls.from_frame(interactions, ratios=(1, 0, 0), weight="weight" if weighted else None)
            except InputError as error:
                raise InputError(
                    f"{error} (these are parameters of `Dataset.from_frame`: build the data set with it and "
                    "ratios=(1, 0, 0), and fit that)"
                ) from None
        raise InputError(
            f"interactions must be a Dataset, a polars or pandas frame, or a scipy sparse matrix, not "
            f"{type(interactions).__name__}"
        )

    @classmethod
    def from_frame(
        cls,
        frame: Any,
        user: str | None = None,
        item: str | None = None,
        rating: str | None = None,
        timestamp: str | None = None,
        min_rating: float | None = None,
        min_user: int = 1,
        min_item: int = 1,
        split: SplitName = "random",
        ratios: tuple[float, float, float] = PAPER_RATIOS,
        seed: int = 0,
        weight: str | None = None,
        event: str | None = None,
        event_weight: Mapping[str, float] | None = None,
        date_format: str | None = None,
        decimal: DecimalMark | None = None,
        skip_bad_rows: bool = False,
    ) -> Dataset:
        """Build a data set from a table with one row per interaction.

        `meta` of the result records which column was taken for what, its range, and what was ignored.

        Parameters
        ----------
        frame : polars DataFrame or LazyFrame, or pandas DataFrame
        user, item, rating, timestamp : str, optional
            Column names. By default, common names are recognised.
        min_rating : float, optional
            Keep rows with at least this rating. By default, keep all rows, except those with a rating of 0 or less,
            with a warning.
        min_user, min_item : int
            Keep users and items with at least this many interactions. Repeated until nothing changes (k-core).
        split : {"random", "per-user", "leave-last", "time", "users"}
            See `drm_triton.data.split.split`.
        ratios : (train, valid, test)
        seed : int
        weight : str, optional
            Name of the column with the weights of the interactions, for example numbers of plays. Weights of repeated
            rows of a user and an item are added. By default, interactions have no weights. See `TrainConfig`, option
            `interaction_weights`.
        event, event_weight : str and mapping, optional
            Column of event types, recognised by default, and the weight of each, such as ``{"view": 1, "buy": 5}``.
            Rows of other events are left out.
        date_format : str, optional
            How times are written as text: "day-first", "month-first" or a pattern such as "%d/%m/%Y %H:%M".
        decimal : {"point", "comma"}, optional
            The decimal mark of numbers in text. By default, it is recognised.
        skip_bad_rows : bool
            Leave out rows that cannot be used, with a warning, instead of raising an error.

        Examples
        --------
        >>> frame = pl.DataFrame({"user": ["ann", "ann", "bob"], "item": ["x", "y", "x"]})
        >>> Dataset.from_frame(frame, ratios=(1, 0, 0))
        Dataset(users=2, items=2, train=3, valid=0, test=0)
        """
        from drm_triton.data.prepare.build import BuildOptions, build
        from drm_triton.data.prepare.raw import FileFormat
        from drm_triton.data.prepare.tables import read_frame

        file_format = FileFormat(
            user,
            item,
            rating,
            timestamp,
            weight,
            event,
            decimal=decimal,
            date_format=date_format,
            event_weight=event_weight,
            skip_bad_rows=skip_bad_rows or None,
        )
        options = BuildOptions(min_rating, min_user, min_item, split, ratios, seed)
        return build(read_frame(frame, file_format), options)

    @classmethod
    def from_csr(
        cls,
        train: Any,
        valid: Any = None,
        test: Any = None,
        user_ids: Any = None,
        item_ids: Any = None,
        n_items: int | None = None,
        weighted: bool = False,
    ) -> Dataset:
        """Build a data set from matrices that are already split.

        Parameters
        ----------
        train, valid, test : scipy sparse matrix [n_users, n_items], or (indptr, indices)
            Every stored entry is an interaction; its value is ignored unless `weighted`.
        user_ids, item_ids : sequence, optional
            External ids by code; 0..n-1 by default.
        n_items : int, optional
            For (indptr, indices) only. By default the number of `item_ids`, or the largest index plus one.
        weighted : bool
            The values of scipy matrices are the weights of the interactions.

        Examples
        --------
        >>> data = Dataset.from_csr(([0, 2, 3], [1, 0, 1]), item_ids=["x", "y"])
        >>> data.train.row(0), data.item_ids.to_list()
        (array([0, 1], dtype=int32), ['x', 'y'])
        """
        given = {name: m for name, m in zip(SPLIT_PARTS, (train, valid, test), strict=True) if m is not None}
        if n_items is None:
            n_items = len(item_ids) if item_ids is not None else max(columns_of(m) for m in given.values())
        if n_items > MAX_INT32:
            raise InputError(f"from_csr: {n_items} items; there may be at most {MAX_INT32}: number those in use from 0")
        matrices = {name: CSR.from_any(matrix, n_items, name, weighted) for name, matrix in given.items()}
        shape = matrices["train"].shape
        if any(m.shape != shape for m in matrices.values()):
            raise InputError(f"from_csr: the matrices differ in shape: {[m.shape for m in matrices.values()]}")
        overlap = sum(m.to_scipy(np.int8) for m in matrices.values())
        if overlap.nnz and overlap.max() > 1:
            raise InputError(
                "from_csr: `train`, `valid` and `test` share interactions; each interaction may be in only one of them"
            )
        parts = [matrices.get(name) or CSR.empty(shape, weighted) for name in SPLIT_PARTS]
        users, items = _given_ids("user", user_ids, shape[0]), _given_ids("item", item_ids, n_items)
        return cls(parts[0], parts[1], parts[2], users, items, meta={"source": "csr"})


def _id_table(path: Path | None, name: str, rows: int) -> pl.DataFrame:
    if path is None:
        return pl.DataFrame({"id": pl.int_range(rows, eager=True)})
    return store.read_table(path, name)


def _positive_entries(matrix: Any) -> Any:
    """Return a scipy matrix without entries of 0 or less, and warn of them. Refuse entries that are not numbers."""
    matrix = matrix.tocsr()
    values = matrix.data
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise InputError(f"the matrix has {np.isnan(values).sum():,} entries that are NaN; remove them")
    bad = int((values <= 0).sum()) if values.dtype.kind in "fiu" else 0
    if not bad:
        return matrix
    warnings.warn(
        f"{bad:,} of {len(values):,} entries of the matrix are 0 or less and are left out, as they do not say that the "
        "user likes the item; `Dataset.from_csr` takes every stored entry",
        UserWarning,
        stacklevel=5,
    )
    matrix = matrix.copy()
    matrix.data[values <= 0] = 0
    matrix.eliminate_zeros()
    return matrix


def _joined(known: pl.DataFrame, given: Any, kind: str) -> pl.DataFrame:
    """Join a frame of attributes to a table of users or items, if there is one."""
    if given is None:
        return known
    frame = given if isinstance(given, pl.DataFrame) else from_pandas(given, list(given.columns))
    return attributes.join(known, attributes.checked_attributes(frame, kind, f"the {kind}s"), kind)


def _given_ids(kind: str, ids: Any, rows: int) -> pl.DataFrame | None:
    if ids is None:
        return None
    try:
        series = _as_ids(pl.Series("id", ids))
    except (TypeError, pl.exceptions.PolarsError) as error:
        raise InputError(f"from_csr: `{kind}_ids` must be whole numbers or text ({error})") from error
    if len(series) != rows or series.null_count() or series.n_unique() != rows:
        raise InputError(f"from_csr: `{kind}_ids` must be {rows} different ids without nulls, got {len(series)}")
    return series.to_frame()


def _as_ids(ids: pl.Series) -> pl.Series:
    """Return ids as Int64 or String, like `prepare`. Raise if that would change an id."""
    if ids.dtype.is_integer() and ids.dtype != pl.UInt64:
        return ids.cast(pl.Int64)
    if ids.dtype.is_numeric():
        whole = ids.cast(pl.Int64, strict=False)
        if ids.dtype == pl.UInt64:
            return ids.cast(pl.String) if whole.null_count() > ids.null_count() else whole
        if not ((whole == ids) & (whole.abs() < 2**53)).all():
            raise TypeError(f"not {ids.dtype} with fractions")
        return whole
    if ids.dtype.is_nested() or ids.dtype in (pl.Binary, pl.Object):
        raise TypeError(f"not {ids.dtype}")
    return ids.cast(pl.String)


def _text_checksum(texts: pl.Series) -> str:
    """Return the SHA-256 of texts, some of which may be null."""
    return hashlib.sha256(json.dumps(texts.to_list()).encode()).hexdigest()


def _checksum(data: Dataset) -> str:
    digest = hashlib.sha256()
    for ids in (data.user_ids, data.item_ids):
        if ids.dtype == pl.String:
            digest.update(b"text")
            digest.update(ids.str.len_bytes().to_numpy().astype("<u4").tobytes())
            digest.update("".join(ids).encode())
        else:
            digest.update(b"int")
            digest.update(ids.to_numpy().astype("<i8").tobytes())
    for name in SPLIT_PARTS:
        matrix: CSR = getattr(data, name)
        digest.update(np.ascontiguousarray(matrix.indptr, dtype="<i8").data)
        digest.update(np.ascontiguousarray(matrix.indices, dtype="<i4").data)
        if matrix.weights is not None:
            digest.update(np.ascontiguousarray(matrix.weights, dtype="<f4").data)
    for table in (data.users, data.items):
        if names := attributes.attributes(table):
            digest.update(table.select(names).write_ndjson().encode())
    return digest.hexdigest()
