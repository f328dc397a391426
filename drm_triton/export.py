"""Factors for other programs, with external ids: NumPy, Parquet, or an index for fast search.

npz        factors.npz with user_factors [M, d], item_factors [N, d], user_ids [M], item_ids [N]
parquet    users.parquet and items.parquet: id, title where there is one, factors
faiss      index.faiss, a graph (HNSW) over the item factors: by inner product for score dot, by distance for l2
hnswlib    index.hnsw, the same for hnswlib; beside an index user_factors.npy, user_ids.npy and item_ids.npy

In each directory export.json says what is there and how to query it. Nothing needs pickle to be read.
"""

import errno
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.data.store import write_array
from drm_triton.errors import InputError
from drm_triton.kernels.checks import check_choice
from drm_triton.model import DRM
from drm_triton.names import Score
from drm_triton.progress import SILENT, Reporter

Format = Literal["npz", "parquet", "faiss", "hnswlib"]

MARKER = "export.json"
# The graph: links of a node, and breadth of the search that places it. With these, a model of 59K items and 64 factors
# is built in 15 s on two cores and reaches recall .96 at a breadth of 128.
LINKS, BUILD_BREADTH = 32, 100
FIRST_EF, LAST_EF = 64, 4096  # breadth ef of a query: doubled until the recall is good
GOOD_RECALL = 0.95
CUT_OFFS = (10, 50)
QUERIES = 1000  # users to measure the recall with
MOST_ID_BYTES = 4 * 2**30  # of one array of text ids, which takes the longest id for each


def export(
    model: DRM, directory: str | Path, to: Format = "npz", overwrite: bool = False, report: Reporter = SILENT
) -> dict[str, Any]:
    """Write a model's factors and ids to a directory, atomically.

    Parameters
    ----------
    model : DRM, fitted
    directory : place to make; an existing one is replaced only if `overwrite`, and only if it is an export or empty
    to : npz, parquet, faiss or hnswlib; the last two need the package of that name
    report : told of the steps

    Returns
    -------
    dict, the content of export.json: score, dimension, files, how to query them; for an index its recall against exact
    search as well, with a sample of the model's users as queries

    Raises
    ------
    InputError
        If the package for `to` is missing, or the directory cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> from drm_triton import Dataset
    >>> data = Dataset.from_frame(pl.DataFrame({"user": ["ann", "ann", "bob"], "item": ["x", "y", "x"]}))
    >>> model = DRM(factors=4, epochs=1).fit(data)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manifest = export(model, f"{folder}/factors", to="npz")
    ...     np.load(f"{folder}/factors/factors.npz")["user_ids"].tolist(), manifest["score"]
    (['ann', 'bob'], 'dot')
    """
    check_choice("export", "to", to, Format)
    kind = INDEXES.get(to)
    if kind is not None:
        _package(to)  # before anything that takes time
    U, V = (factors.cpu().numpy() for factors in (model.user_factors, model.item_factors))
    manifest: dict[str, Any] = {
        "format": "drm-triton export",
        "version": 1,
        "program": f"drm-triton {__version__}",
        "to": to,
        "score": model.config.score,
        "dimension": V.shape[1],
        "users": len(U),
        "items": len(V),
    }
    with atomic.directory(directory, overwrite, MARKER) as folder:
        if kind is not None:
            manifest |= _write_index(kind, folder, model, U, V, report)
        elif to == "npz":
            manifest |= _write_npz(folder, model, U, V)
        else:
            manifest |= _write_parquet(folder, model, U, V)
        (folder / MARKER).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return manifest


SCORES = {"dot": "user_factors @ item_factors.T", "l2": "minus the squared distance of user and item factors"}
SEEN = "Items the user already has are not left out: ask for as many more and drop them."


def _write_npz(folder: Path, model: DRM, U: NDArray, V: NDArray) -> dict[str, Any]:
    user_ids, item_ids = _id_arrays(model)
    np.savez(folder / "factors.npz", user_factors=U, item_factors=V, user_ids=user_ids, item_ids=item_ids)
    return {
        "files": {"factors.npz": "user_factors, item_factors, user_ids, item_ids; row r of factors belongs to id r"},
        "query": f"numpy.load('factors.npz'); a larger score is better: {SCORES[model.config.score]}. {SEEN}",
    }


def _write_parquet(folder: Path, model: DRM, U: NDArray, V: NDArray) -> dict[str, Any]:
    for name, table, factors in (("users", model.interactions.users, U), ("items", model.interactions.items, V)):
        kept = table.select(pl.col("^(id|title)$"))
        column = pl.Series("factors", factors, dtype=pl.Array(pl.Float32, factors.shape[1]))
        kept.with_columns(column).write_parquet(folder / f"{name}.parquet", compression="zstd")
    return {
        "files": {"users.parquet": "id, factors", "items.parquet": "id, title if the data has titles, factors"},
        "query": f"polars.read_parquet; a larger score is better: {SCORES[model.config.score]}. {SEEN}",
    }


def _id_arrays(model: DRM) -> tuple[NDArray, NDArray]:
    return _id_array(model.interactions.user_ids, "user"), _id_array(model.interactions.item_ids, "item")


def _id_array(ids: pl.Series, kind: str) -> NDArray:
    """Return ids as int64 or fixed-width text, which NumPy reads without pickle."""
    if ids.dtype != pl.String:
        return ids.to_numpy().astype(np.int64)
    longest = int(ids.str.len_chars().max() or 0)  # type: ignore[arg-type]
    if 4 * longest * len(ids) > MOST_ID_BYTES or ids.str.ends_with("\0").any():
        raise InputError(
            f"export: the {kind} ids do not fit an array of text ({len(ids):,} of up to {longest:,} characters; "
            "NumPy takes room for the longest, and drops a final NUL); export to parquet instead"
        )
    return np.array(ids.to_list(), dtype=np.str_)


# -- indexes -----------------------------------------------------------------------------------------------------------


class _Index(Protocol):
    """A graph over item factors that finds neighbours approximately; `ef` is the breadth of a search."""

    file: str
    query: str  # how to ask it from Python

    def __init__(self, V: NDArray, score: Score) -> None: ...

    def search(self, queries: NDArray, k: int, ef: int) -> NDArray:
        """Row numbers of the k best items found, int64 [m, k]; -1 where there are fewer."""

    def save(self, path: Path) -> None:
        """Write it to a file."""

    def load(self, path: Path) -> None:
        """Take what a file holds in place of what was built."""


class _Faiss:
    """HNSW by Faiss."""

    file = "index.faiss"
    query = (
        "index = faiss.read_index('index.faiss'); found, labels = index.search(user_factors[rows], k): "
        "float32 rows in, the best first; item_ids[labels] are the ids, a label of -1 is none. "
    )

    def __init__(self, V: NDArray, score: Score) -> None:
        faiss = _package("faiss")
        self.query += (
            "`found` is the score. " if score == "dot" else "`found` is the squared distance: the score is -found. "
        )
        self._index = faiss.IndexHNSWFlat(
            V.shape[1], LINKS, faiss.METRIC_INNER_PRODUCT if score == "dot" else faiss.METRIC_L2
        )
        self._index.hnsw.efConstruction = BUILD_BREADTH
        self._index.add(V)

    def search(self, queries: NDArray, k: int, ef: int) -> NDArray:
        self._index.hnsw.efSearch = ef
        labels: NDArray = self._index.search(queries, k)[1]
        return labels

    def save(self, path: Path) -> None:
        path.write_bytes(_package("faiss").serialize_index(self._index).data)  # holds efSearch too

    def load(self, path: Path) -> None:
        self._index = _package("faiss").read_index(str(path))


class _Hnswlib:
    """HNSW by hnswlib."""

    file = "index.hnsw"

    def __init__(self, V: NDArray, score: Score) -> None:
        self._space, self._dimension = ("ip" if score == "dot" else "l2"), V.shape[1]
        found = "1 - score" if score == "dot" else "the squared distance: the score is -found"
        self.query = (
            f"index = hnswlib.Index(space='{self._space}', dim={self._dimension}); index.load_index('index.hnsw'); "
            "index.set_ef(the ef of this file, or k if that is more); labels, found = "
            "index.knn_query(user_factors[rows], k): float32 rows in, the best first; item_ids[labels] are the ids. "
            f"`found` is {found}. "
        )
        self._index = self._empty()
        self._index.init_index(max_elements=len(V), M=LINKS, ef_construction=BUILD_BREADTH, random_seed=0)
        self._index.add_items(V)

    def search(self, queries: NDArray, k: int, ef: int) -> NDArray:
        self._index.set_ef(ef)
        try:
            return self._index.knn_query(queries, k)[0].astype(np.int64)
        except RuntimeError:  # it found fewer than k for some query, and tells nothing of the others
            return np.full((len(queries), k), -1)

    def save(self, path: Path) -> None:
        self._index.save_index(str(path))
        if path.stat().st_size != self._index.index_file_size():  # it does not say so itself
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load(self, path: Path) -> None:
        self._index = self._empty()
        self._index.load_index(str(path))

    def _empty(self) -> Any:
        return _package("hnswlib").Index(space=self._space, dim=self._dimension)


INDEXES: dict[str, type[_Index]] = {"faiss": _Faiss, "hnswlib": _Hnswlib}


def _package(name: str) -> Any:
    """The library, or an error that says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(
            f"export to {name} needs a package that is not usable here ({error}): pip install 'drm-triton[{name}]'"
        ) from error


def _write_index(
    kind: type[_Index], folder: Path, model: DRM, U: NDArray, V: NDArray, report: Reporter
) -> dict[str, Any]:
    for name, ids in zip(("user_ids", "item_ids"), _id_arrays(model), strict=True):
        write_array(folder / f"{name}.npy", ids)
    write_array(folder / "user_factors.npy", U)
    score = model.config.score
    with report.step("build the index"):
        index = kind(np.ascontiguousarray(V), score)
    with report.step("measure its recall against exact search") as step:
        sample = np.random.default_rng(0).permutation(len(U))[:QUERIES]
        judge = _Judge(model, np.ascontiguousarray(U[sample]), V)
        ef = FIRST_EF
        while min(judge.recall(index, ef).values()) < GOOD_RECALL and ef < min(len(V), LAST_EF):
            ef *= 2
        index.save(folder / index.file)
        index.load(folder / index.file)  # what is measured is what a reader gets
        recall = judge.recall(index, ef)
        step.note(", ".join(f"{name} {value:.4f}" for name, value in recall.items()))
    return {
        "files": {
            index.file: f"graph over the item factors, by {'inner product' if score == 'dot' else 'squared distance'}",
            "item_ids.npy": "id of each label",
            "user_factors.npy": "queries",
            "user_ids.npy": "id of each query",
        },
        "query": index.query + SEEN,
        "links": LINKS,
        "ef_construction": BUILD_BREADTH,
        "ef": ef,
        "queries": len(sample),
        **recall,
    }


class _Judge:
    """Share of the exact k best items that an index finds; items that tie with the k-th count as well as it does."""

    def __init__(self, model: DRM, queries: NDArray, V: NDArray) -> None:
        self.queries, self.V, self.score = queries, V, model.config.score
        self.most = min(max(CUT_OFFS), len(V))
        ops, device = model.backend()
        exact, _ = ops.top_k(
            torch.from_numpy(queries).to(device), ops.pack_items(model.item_factors, self.score), self.most
        )
        self.exact_scores = self._scores(exact.cpu().numpy())

    def recall(self, index: _Index, ef: int) -> dict[str, float]:
        found = self._scores(index.search(self.queries, self.most, ef))
        shares = {}
        for cut_off in CUT_OFFS:
            k = min(cut_off, self.most)
            worst = self.exact_scores[:, :k].min(1, keepdims=True)
            shares[f"recall@{cut_off}"] = float((found[:, :k] >= worst).mean())
        return shares

    def _scores(self, items: NDArray) -> NDArray:
        """Scores of items [m, k], summed alike for both sides of the comparison; -inf for no item."""
        Q, V = self.queries[:, None, :], self.V[items]
        scores = (Q * V).sum(-1) if self.score == "dot" else -((Q - V) ** 2).sum(-1)
        return np.where(items >= 0, scores, -np.inf)
