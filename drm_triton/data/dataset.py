"""`Dataset`: interactions as three CSR matrices (train, valid, test), with the external ids of users and items."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton import atomic
from drm_triton.data import attributes, store
from drm_triton.data import verify as verification
from drm_triton.data.checksums import content_checksum, matrix_checksum, rows_checksum, text_checksum
from drm_triton.data.csr import CSR, columns_of
from drm_triton.data.dropped import elsewhere_problem, encode_dropped, removed_users
from drm_triton.data.frames import from_pandas, is_pandas
from drm_triton.data.ids import encode, given_ids
from drm_triton.data.split import PAPER_RATIOS
from drm_triton.errors import InputError, warn
from drm_triton.names import MAX_INT32, SPLIT_PARTS, DecimalMark, SplitName

__all__ = ["CSR", "Dataset"]

_CONTENT = "train.*, valid.*, test.*, users.parquet and items.parquet"  # what the checksum covers
_DROPPED = ("dropped", store.ELSEWHERE)  # entries of `meta` that describe the stored pairs


class Dataset:
    """Interactions split into train, valid and test, with the external ids of users and items.

    Inside, users and items have codes 0..n-1. `user_ids` and `item_ids` contain the ids of the source, by code.
    Create a data set with `load`, `from_frame`, `from_csr`, or the command ``drm-triton prepare``.

    Attributes
    ----------
    train, valid, test : CSR [n_users, n_items]
        All of them have weights, or none.
    dropped : CSR [n_users, n_items]
        Pairs that a filter removed, such as low ratings, without weights. A model does not learn from them, and they
        are not evaluated. But the users have these items, so they are not recommended.
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
        dropped: CSR | None = None,
    ) -> None:
        if len({part.weights is None for part in (train, valid, test)}) > 1:
            raise InputError("Dataset: either all of `train`, `valid` and `test` have weights, or none of them")
        self.train, self.valid, self.test = train, valid, test
        self.dropped = CSR.empty(train.shape) if dropped is None else dropped
        self._dropped_elsewhere: pl.DataFrame | None = None
        self._users, self._items = users, items
        self.meta = meta or {}
        self.path = path
        self.is_part = False  # whether there are more users, see `of_users`
        self.is_pandas = False  # whether it was made from a pandas frame, as the results of models then are

    def __repr__(self) -> str:
        shown = (*SPLIT_PARTS, "dropped") if self.dropped.nnz else SPLIT_PARTS
        sizes = ", ".join(f"{name}={getattr(self, name).nnz:,}" for name in shown)
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
    def liked(self) -> CSR:
        """All interactions, of every part of the split and without weights: what is known of the taste of each user."""
        return _union(self.train.unweighted(), self.valid.unweighted(), self.test.unweighted())

    @cached_property
    def owned(self) -> CSR:
        """The items that each user has: `liked` and `dropped`."""
        return _union(self.liked, self.dropped)

    @property
    def dropped_elsewhere(self) -> pl.DataFrame | None:
        """Removed pairs whose user or item is not in the data set: columns user and item, by id. None if none."""
        if self._dropped_elsewhere is None and self.path is not None and self.meta.get(store.ELSEWHERE):
            self._dropped_elsewhere = store.read_table(self.path, store.ELSEWHERE)
        return self._dropped_elsewhere

    @dropped_elsewhere.setter
    def dropped_elsewhere(self, rows: pl.DataFrame | None) -> None:
        self._dropped_elsewhere = rows

    @cached_property
    def removed_users(self) -> tuple[pl.Series, CSR]:
        """Users who are not in the data set but have items of it, by removed pairs: ids [m] and CSR [m, n_items]."""
        return removed_users(self.dropped_elsewhere, self.item_ids)

    @cached_property
    def popularity(self) -> NDArray[np.int64]:
        """Number of training interactions of each item, of all users even if this is a part: int64 [n_items]."""
        return self.train.popularity()

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
        meta = {name: value for name, value in self.meta.items() if name not in ("checksum", *_DROPPED)}
        data = Dataset(train, valid, test, all_users, all_items, meta, dropped=self.dropped.extended(train.shape))
        data.is_pandas = self.is_pandas
        return data if self.dropped_elsewhere is None else data.with_dropped(self.dropped_elsewhere)

    def with_dropped(self, rows: pl.DataFrame) -> Dataset:
        """Return a copy that knows more pairs that a filter removed: rows with columns user and item, by id."""
        if self.dropped_elsewhere is not None:
            rows = pl.concat([self.dropped_elsewhere, rows])
        added, elsewhere = encode_dropped(rows, self.user_ids, self.item_ids, self.owned)
        dropped = _union(self.dropped, added)
        meta = {name: value for name, value in self.meta.items() if name not in _DROPPED}
        data = Dataset(self.train, self.valid, self.test, self.users, self.items, meta, dropped=dropped)
        data.dropped_elsewhere = elsewhere if len(elsewhere) else None
        data.is_pandas = self.is_pandas
        return data

    def of_users(self, users: range) -> Dataset:
        """Return the part with some consecutive users and all items, as a stored one without reading other users.

        Parameters
        ----------
        users : codes of the users, ascending by 1; the part numbers them from 0

        Examples
        --------
        >>> data = Dataset.from_csr(([0, 2, 3], [0, 1, 1]), user_ids=["ann", "bob"])
        >>> part = data.of_users(range(1, 2))
        >>> part, part.user_ids.to_list(), part.popularity
        (Dataset(users=1, items=2, train=1, valid=0, test=0), ['bob'], array([1, 2]))
        """
        matrices = (*SPLIT_PARTS, "dropped")
        train, valid, test, dropped = (getattr(self, name).between(users.start, users.stop) for name in matrices)
        if self._users is None and self.path is not None:
            table = store.read_table(self.path, "users", users)
        else:
            table = self.users[users.start : users.stop]
        part = Dataset(train, valid, test, table, self.items, {"source": "part"}, dropped=dropped)
        part.popularity, part.is_part = self.popularity, True
        return part

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
        """SHA-256 of what a model learns from and is measured on: ids, interactions, weights and attributes."""
        stored: str | None = self.meta.get("checksum")
        return stored or content_checksum(self)

    def verify(self) -> None:
        """Raise if the data is damaged: read all of it, check its structure, and compute its checksum again.

        Raises
        ------
        InputError
            If compiled code could not rely on the data, or if the content does not have the checksum in meta.json.
            `load` then verifies a stored data set again the next time.
        """
        try:
            self._verify()
        except InputError:
            if self.path is not None:
                verification.forget(self.path)
            raise

    def _verify(self) -> None:
        where = self.path or "Dataset"
        problem = verification.find_problem({name: getattr(self, name) for name in (*SPLIT_PARTS, "dropped")})
        for kind, ids in (("user", self.user_ids), ("item", self.item_ids)):
            if ids.null_count() or ids.n_unique() != len(ids):
                problem = f"the {kind} ids are not all different"
        if problem is None and self.meta.get("checksum") not in (None, content_checksum(self)):
            problem = f"its content ({_CONTENT}) does not have the checksum that meta.json records"
        dropped = self.meta.get("dropped") or {}
        if problem is None and dropped.get("checksum") not in (None, matrix_checksum(self.dropped)):
            problem = "the dropped pairs (dropped.*) do not have the checksum that meta.json records"
        elsewhere, rows = self.meta.get(store.ELSEWHERE) or {}, self.dropped_elsewhere
        if problem is None and elsewhere and rows is not None:
            problem = elsewhere_problem(rows, elsewhere["pairs"], self.user_ids, self.item_ids)
            if problem is None and elsewhere.get("checksum") not in (None, rows_checksum(rows)):
                problem = f"the pairs in {store.ELSEWHERE}.parquet do not have the checksum that meta.json records"
        titles = self.item_titles
        if titles is not None and titles.dtype not in (pl.String, pl.Null):
            problem = problem or "the titles are not text"
        elif titles is not None and self.meta.get("titles") not in (None, text_checksum(titles)):
            problem = problem or "the titles in items.parquet do not have the checksum that meta.json records"
        if problem is not None:
            raise InputError(
                f"{where} is damaged: {problem}; restore it from a copy, or prepare the data set again (the data of a "
                "model: train it again)"
            )

    @classmethod
    def load(cls, path: str | Path, mapped: bool = True, verify: bool = False) -> Dataset:
        """Open a stored data set.

        The first time, everything is read and verified (see `verify`). After that it takes no time even if the arrays
        are large: while size, times and inode of the files stay the same, they are not read again.

        Parameters
        ----------
        path : directory of the data set
        mapped : map the arrays into memory. Otherwise all is read now, and files that change later change nothing
        verify : read and verify everything now, whatever was verified before; damage by a failing disk changes neither
            size nor times. Data without a recorded checksum is then refused
        """
        path = Path(path)
        meta = store.read_meta(path)
        n_users, n_items = meta["users"], meta["items"]
        shape = n_users, n_items
        current = verification.stamp(path)
        train, valid, test = (
            store.open_matrix(path, name, shape, meta[name], "weights" in meta, mapped) for name in SPLIT_PARTS
        )
        known = meta.get("dropped")
        dropped = None if known is None else store.open_matrix(path, "dropped", shape, known["pairs"], mapped=mapped)
        data = cls(train, valid, test, meta=meta, path=path, dropped=dropped)
        if not mapped:
            data._users, data._items = store.read_table(path, "users"), store.read_table(path, "items")
            data.dropped_elsewhere = data.dropped_elsewhere  # read now
        for name, rows in (("users", n_users), ("items", n_items)):
            found = store.table_length(path, name) if mapped else len(getattr(data, name))
            if found != rows:
                raise InputError(f"{path / name}.parquet has {found} rows, not {rows}: prepare the data set again")
        if verify and (missing := verification.unrecorded(meta, data.item_titles is not None)):
            raise InputError(
                f"{path} cannot be verified: meta.json records no checksum of {' and '.join(missing)}; leave out "
                "`verify`, or load and save it in Python, which records one"
            )
        if verify or not verification.is_known(path, current):
            data.verify()
            verification.remember(path, current)
        return data

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Write the data set to a directory, atomically.

        An existing data set is replaced only with `overwrite`.
        """
        place = Path(os.path.realpath(path))
        with atomic.directory(path, overwrite, store.MARKER) as directory:
            matrices = {name: getattr(self, name) for name in SPLIT_PARTS}
            tables = {"users": self.users, "items": self.items}
            dropped = {}
            if self.dropped.nnz:
                matrices["dropped"] = self.dropped
                dropped = {"dropped": {"pairs": self.dropped.nnz, "checksum": matrix_checksum(self.dropped)}}
            if (rows := self.dropped_elsewhere) is not None:
                tables[store.ELSEWHERE] = rows
                dropped[store.ELSEWHERE] = {"pairs": len(rows), "checksum": rows_checksum(rows)}
            sizes = {"users": self.n_users, "items": self.n_items, "interactions": self.n_interactions}
            sizes |= {name: getattr(self, name).nnz for name in SPLIT_PARTS}
            others = {key: value for key, value in self.meta.items() if key not in {*sizes, "weights", *_DROPPED}}
            titles = {} if self.item_titles is None else {"titles": text_checksum(self.item_titles)}
            self.meta = sizes | {"checksum": self.checksum} | dropped | self._weights_meta() | others | titles
            store.write(directory, matrices, tables, self.meta)
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
            positive, others = _positive_entries(interactions)
            data = cls.from_csr(positive, weighted=weighted)
            if others is not None:
                data.dropped = CSR.from_any(others, data.n_items).minus(data.train)
            return data
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
        data = build(read_frame(frame, file_format), options)
        weights = None if event_weight is None else dict(event_weight)
        reading = {"user": user, "item": item, "rating": rating, "event": event, "event_weight": weights}
        data.meta["reading"] = {name: value for name, value in reading.items() if value is not None}
        data.is_pandas = is_pandas(frame)
        return data

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
        users, items = given_ids("user", user_ids, shape[0]), given_ids("item", item_ids, n_items)
        return cls(parts[0], parts[1], parts[2], users, items, meta={"source": "csr"})


def _id_table(path: Path | None, name: str, rows: int) -> pl.DataFrame:
    if path is None:
        return pl.DataFrame({"id": pl.int_range(rows, eager=True)})
    return store.read_table(path, name)


def _union(*matrices: CSR) -> CSR:
    """Return the interactions of disjoint matrices, the first of which may have all of them."""
    union, *others = matrices
    for matrix in others:
        if matrix.nnz:
            union = union.union(matrix)
    return union


def _positive_entries(matrix: Any) -> tuple[Any, Any]:
    """Return a scipy matrix without entries of 0 or less, of which it warns, and a matrix of these; None if none.

    Entries that are not numbers are refused.
    """
    matrix = matrix.tocsr()
    values = matrix.data
    if values.dtype.kind == "f" and np.isnan(values).any():
        raise InputError(f"the matrix has {np.isnan(values).sum():,} entries that are NaN; remove them")
    bad = int((values <= 0).sum()) if values.dtype.kind in "fiu" else 0
    if not bad:
        return matrix, None
    warn(
        f"{bad:,} of {len(values):,} entries of the matrix are 0 or less and are left out, as they do not say that the "
        "user likes the item; they are not recommended either. `Dataset.from_csr` takes every stored entry"
    )
    positive, others = matrix.copy(), matrix.copy()
    positive.data[values <= 0] = 0
    others.data = (values <= 0).astype(np.int8)
    for part in (positive, others):
        part.eliminate_zeros()
    return positive, others


def _joined(known: pl.DataFrame, given: Any, kind: str) -> pl.DataFrame:
    """Join a frame of attributes to a table of users or items, if there is one."""
    if given is None:
        return known
    frame = given if isinstance(given, pl.DataFrame) else from_pandas(given, list(given.columns))
    return attributes.join(known, attributes.checked_attributes(frame, kind, f"the {kind}s"), kind)
