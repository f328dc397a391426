"""Export what a model learned and external ids: NumPy arrays, Parquet tables, or an index for fast search.

Of a model with factors:


npz        factors.npz with user_factors [M, d], item_factors [N, d], user_ids [M], item_ids [N]
parquet    users.parquet and items.parquet with columns id, title (if the data has titles) and factors
faiss      index.faiss, an HNSW graph over the item factors, by inner product for score dot and by distance for l2,
           with user_factors.npy, user_ids.npy and item_ids.npy
hnswlib    index.hnsw, the same for hnswlib

Of an item-item model, npz has weights.npz with the parts of the weights and item_ids [N], and parquet has
weights.parquet with columns item, other and weight, if the weights are sparse.

export.json in the directory describes the files and how to query them. No file needs pickle.
"""

import errno
import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from numpy.typing import NDArray

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.data.store import write_array
from drm_triton.errors import InputError
from drm_triton.kernels.checks import check_choice
from drm_triton.names import CUT_OFFS, ExportFormat, Score
from drm_triton.progress import SILENT, Reporter
from drm_triton.recommender import FactorRecommender, ItemRecommender, Recommender

Factors = NDArray[np.float32]
Labels = NDArray[np.int64]  # row numbers of items
IdArray = NDArray[np.int64] | NDArray[np.str_]

MARKER = "export.json"
# Parameters M (links of a node) and efConstruction of the HNSW graph. With these values an index of 59K items and 64
# factors is built in 15 s on two cores and reaches recall .96 with ef = 128.
LINKS, EF_CONSTRUCTION = 32, 100
FIRST_EF, LAST_EF = 64, 4096  # ef of a query starts at FIRST_EF and is doubled until the recall reaches GOOD_RECALL
GOOD_RECALL = 0.95
MAX_QUERIES = 1000  # users that measure the recall
MAX_ID_BYTES = 4 * 2**30  # of an array of text ids; NumPy stores each with the length of the longest


def export(
    model: Recommender[Any],
    directory: str | Path,
    to: ExportFormat = "npz",
    overwrite: bool = False,
    reporter: Reporter = SILENT,
) -> dict[str, Any]:
    """Write what a model learned and its ids to a directory, atomically.

    Parameters
    ----------
    model : a fitted model
    directory : directory to create. With `overwrite`, an existing directory is replaced if it is empty or an export.
    to : npz, parquet, faiss or hnswlib. The last two need the package of that name.
    overwrite : replace an existing export
    reporter : receives the progress

    Returns
    -------
    dict
        The content of export.json: files and how to query them, and the score and dimension of factors. For an index
        also its recall against exact search, measured with a sample of the model's users.

    Raises
    ------
    InputError
        If the package for `to` is missing or the directory cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> from drm_triton import DRM, Dataset
    >>> data = Dataset.from_frame(pl.DataFrame({"user": ["ann", "ann", "bob"], "item": ["x", "y", "x"]}))
    >>> model = DRM(factors=4, epochs=1).fit(data)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     manifest = export(model, f"{folder}/factors", to="npz")
    ...     np.load(f"{folder}/factors/factors.npz")["user_ids"].tolist(), manifest["score"]
    (['ann', 'bob'], 'cosine')
    """
    check_choice("export", "to", to, ExportFormat)
    index_class = INDEXES.get(to)
    if index_class is not None:
        _package(to)  # fail before the slow part
    manifest: dict[str, Any] = {
        "format": "drm-triton export",
        "version": 1,
        "program": f"drm-triton {__version__}",
        "model": model.config.model,
        "to": to,
        "users": model.interactions.n_users,
        "items": model.interactions.n_items,
    }
    if isinstance(model, ItemRecommender):
        _check_item_format(model, to)
        with atomic.directory(directory, overwrite, MARKER) as folder:
            manifest |= _write_weights(folder, model, to)
            manifest["files"] |= _write_owned(folder, model, to)
            (folder / MARKER).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", "utf-8")
        return manifest
    assert isinstance(model, FactorRecommender)
    users = np.arange(model.interactions.n_users)
    U, V = (factors.cpu().numpy() for factors in (model.dataset_queries(users), model.item_factors))
    manifest |= {"score": model.score_name, "dimension": V.shape[1]}
    with atomic.directory(directory, overwrite, MARKER) as folder:
        if index_class is not None:
            manifest |= _write_index(index_class, folder, model, U, V, reporter)
        elif to == "npz":
            manifest |= _write_npz(folder, model, U, V)
        else:
            manifest |= _write_parquet(folder, model, U, V)
        manifest["files"] |= _write_owned(folder, model, to)
        (folder / MARKER).write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return manifest


PRODUCT = "user_factors @ item_factors.T"
SCORES = {"dot": PRODUCT, "cosine": PRODUCT, "l2": "minus the squared distance of user and item factors"}
SEEN = "Items that a user already has are included: search for more items and remove those that `owned` lists."


def _score_text(model: FactorRecommender[Any]) -> str:
    return f"the score, higher is better, is {SCORES[model.score_name]}."


def _write_owned(folder: Path, model: Recommender[Any], to: ExportFormat) -> dict[str, str]:
    """Write the items that each user has, so that they are not recommended."""
    data = model.interactions
    if to == "parquet":
        users = np.repeat(np.arange(data.n_users), data.owned.degrees())
        pairs = pl.DataFrame({"user": data.user_ids[users], "item": data.item_ids[data.owned.indices]})
        pairs.write_parquet(folder / "owned.parquet", compression="zstd")
        return {"owned.parquet": "user, item: the items that users have"}
    np.savez(folder / "owned.npz", indptr=data.owned.indptr, items=data.owned.indices)
    return {"owned.npz": "indptr, items: items[indptr[r] : indptr[r + 1]] are the item rows that user row r has"}


def _write_npz(folder: Path, model: FactorRecommender[Any], U: Factors, V: Factors) -> dict[str, Any]:
    user_ids, item_ids = _id_arrays(model)
    np.savez(folder / "factors.npz", user_factors=U, item_factors=V, user_ids=user_ids, item_ids=item_ids)
    return {
        "files": {
            "factors.npz": "user_factors, item_factors, user_ids, item_ids; row r of the factors belongs to id r"
        },
        "query": f"numpy.load('factors.npz'); {_score_text(model)} {SEEN}",
    }


def _write_parquet(folder: Path, model: FactorRecommender[Any], U: Factors, V: Factors) -> dict[str, Any]:
    for name, table, factors in (("users", model.interactions.users, U), ("items", model.interactions.items, V)):
        column = pl.Series("factors", factors, dtype=pl.Array(pl.Float32, factors.shape[1]))
        table.select(pl.col("^(id|title)$")).with_columns(column).write_parquet(
            folder / f"{name}.parquet", compression="zstd"
        )
    return {
        "files": {"users.parquet": "id, factors", "items.parquet": "id, title if the data has titles, factors"},
        "query": f"polars.read_parquet; {_score_text(model)} {SEEN}",
    }


def _check_item_format(model: ItemRecommender[Any], to: ExportFormat) -> None:
    if to not in ("npz", "parquet"):
        raise InputError(f"export to {to} needs factors, and {model.config.model} has weights between items; use npz")
    weights = model.weights
    if to == "parquet" and (weights.sparse is None or weights.low_rank is not None):
        raise InputError(f"export to parquet needs sparse weights, and those of {model.config.model} are not; use npz")


def _write_weights(folder: Path, model: ItemRecommender[Any], to: ExportFormat) -> dict[str, Any]:
    """Write the weights between items."""
    ids = model.interactions.item_ids
    query = "A user's scores, higher is better, are the sum of the rows of the weights at the user's items."
    if to == "npz":
        arrays = {name: tensor.cpu().numpy() for name, tensor in model.weights.tensors().items()}
        np.savez(folder / "weights.npz", **arrays, item_ids=_id_array(ids, "item"))  # type: ignore[arg-type]
        parts = (
            "weights [N, N]; or weights_values, weights_indices, weights_indptr of a SciPy csr_matrix [N, N]; plus "
            "weights_left @ weights_right.T if they are there; item_ids: row and column r belong to id r"
        )
        return {"files": {"weights.npz": parts}, "query": f"{query} {SEEN}"}
    sparse = model.weights.sparse
    assert sparse is not None
    pairs = sparse.tocoo()
    frame = pl.DataFrame({"item": ids[pairs.row], "other": ids[pairs.col], "weight": pairs.data})
    frame.write_parquet(folder / "weights.parquet", compression="zstd")
    return {
        "files": {"weights.parquet": "item, other, weight of the row of item and the column of other"},
        "query": query,
    }


def _id_arrays(model: FactorRecommender[Any]) -> tuple[IdArray, IdArray]:
    return _id_array(model.interactions.user_ids, "user"), _id_array(model.interactions.item_ids, "item")


def _id_array(ids: pl.Series, kind: str) -> IdArray:
    """Return ids as int64 or fixed-width text, which NumPy can load without pickle."""
    if ids.dtype != pl.String:
        return ids.to_numpy().astype(np.int64)
    longest = int(ids.str.len_chars().max() or 0)  # type: ignore[arg-type]
    if 4 * longest * len(ids) > MAX_ID_BYTES or ids.str.ends_with("\0").any():
        raise InputError(
            f"export: the {kind} ids do not fit in a NumPy array of text ({len(ids):,} ids of up to {longest:,} "
            "characters; each takes the space of the longest, and a final NUL is lost); export to parquet instead"
        )
    return np.array(ids.to_list(), dtype=np.str_)


# -- indexes -----------------------------------------------------------------------------------------------------------


class _Index(Protocol):
    """An approximate nearest-neighbour index over item factors. `ef` is the number of candidates a search keeps."""

    file: str
    query: str  # how to query it from Python

    def __init__(self, V: Factors, score: Score) -> None: ...

    def search(self, queries: Factors, k: int, ef: int) -> Labels:
        """Return the rows of the k best items found, int64 [m, k], padded with -1."""

    def save(self, path: Path) -> None:
        """Write the index to a file."""

    def load(self, path: Path) -> None:
        """Replace the index by the one in a file."""


class _Faiss:
    """HNSW index of Faiss."""

    file = "index.faiss"
    query = (
        "index = faiss.read_index('index.faiss'); found, labels = index.search(user_factors[rows], k): "
        "queries are float32 rows, results are sorted best first; item_ids[labels] are the ids, label -1 is no item. "
    )

    def __init__(self, V: Factors, score: Score) -> None:
        faiss = _package("faiss")
        self.query += (
            "`found` is the squared distance; the score is -found. " if score == "l2" else "`found` is the score. "
        )
        self._index = faiss.IndexHNSWFlat(
            V.shape[1], LINKS, faiss.METRIC_L2 if score == "l2" else faiss.METRIC_INNER_PRODUCT
        )
        self._index.hnsw.efConstruction = EF_CONSTRUCTION
        self._index.add(V)

    def search(self, queries: Factors, k: int, ef: int) -> Labels:
        self._index.hnsw.efSearch = ef
        labels: Labels = self._index.search(queries, k)[1]
        return labels

    def save(self, path: Path) -> None:
        path.write_bytes(_package("faiss").serialize_index(self._index).data)  # this stores efSearch too

    def load(self, path: Path) -> None:
        self._index = _package("faiss").read_index(str(path))


class _Hnswlib:
    """HNSW index of hnswlib."""

    file = "index.hnsw"

    def __init__(self, V: Factors, score: Score) -> None:
        self._space, self._dimension = ("l2" if score == "l2" else "ip"), V.shape[1]
        found = "the squared distance; the score is -found" if score == "l2" else "1 - score"
        self.query = (
            f"index = hnswlib.Index(space='{self._space}', dim={self._dimension}); index.load_index('index.hnsw'); "
            "index.set_ef(max(ef, k)) with the ef in this file; "
            "labels, found = index.knn_query(user_factors[rows], k): queries are float32 rows, results are sorted best "
            "first; item_ids[labels] are the ids. "
            f"`found` is {found}. "
        )
        self._index = self._empty()
        self._index.init_index(max_elements=len(V), M=LINKS, ef_construction=EF_CONSTRUCTION, random_seed=0)
        self._index.add_items(V)

    def search(self, queries: Factors, k: int, ef: int) -> Labels:
        self._index.set_ef(ef)
        try:
            labels: Labels = self._index.knn_query(queries, k)[0].astype(np.int64)
            return labels
        except RuntimeError:  # it found fewer than k items for some query, and returns no results for the others
            return np.full((len(queries), k), -1)

    def save(self, path: Path) -> None:
        self._index.save_index(str(path))
        if path.stat().st_size != self._index.index_file_size():  # hnswlib does not report a full disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def load(self, path: Path) -> None:
        self._index = self._empty()
        self._index.load_index(str(path))

    def _empty(self) -> Any:
        return _package("hnswlib").Index(space=self._space, dim=self._dimension)


INDEXES: dict[str, type[_Index]] = {"faiss": _Faiss, "hnswlib": _Hnswlib}


def _package(name: str) -> Any:
    """Import a package, or raise an error that says how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InputError(
            f"export to {name} needs a package that cannot be imported ({error}); pip install 'drm-triton[{name}]'"
        ) from error


def _write_index(
    index_class: type[_Index], folder: Path, model: FactorRecommender[Any], U: Factors, V: Factors, reporter: Reporter
) -> dict[str, Any]:
    for name, ids in zip(("user_ids", "item_ids"), _id_arrays(model), strict=True):
        write_array(folder / f"{name}.npy", ids)
    write_array(folder / "user_factors.npy", U)
    score = model.score_name
    with reporter.step("build the index"):
        index = index_class(np.ascontiguousarray(V), score)
    with reporter.step("measure its recall against exact search") as step:
        sample = np.random.default_rng(0).permutation(len(U))[:MAX_QUERIES]
        recall_at = _Recall(model, np.ascontiguousarray(U[sample]), V)
        ef = FIRST_EF
        while min(recall_at(index, ef).values()) < GOOD_RECALL and ef < min(len(V), LAST_EF):
            ef *= 2
        index.save(folder / index.file)
        index.load(folder / index.file)  # measure what a reader of the file gets
        recall = recall_at(index, ef)
        step.note(", ".join(f"{name} {value:.4f}" for name, value in recall.items()))
    return {
        "files": {
            index.file: f"graph over the item factors, by {'squared distance' if score == 'l2' else 'inner product'}",
            "item_ids.npy": "item id of each label",
            "user_factors.npy": "factors of the users, the queries",
            "user_ids.npy": "user id of each query",
        },
        "query": index.query + SEEN,
        "links": LINKS,
        "ef_construction": EF_CONSTRUCTION,
        "ef": ef,
        "queries": len(sample),
        **recall,
    }


class _Recall:
    """Fraction of the exact top k that an index finds. Items with the score of the k-th item count as found."""

    def __init__(self, model: FactorRecommender[Any], queries: Factors, V: Factors) -> None:
        self.queries, self.V, self.score = queries, V, model.score_name
        self.k = min(max(CUT_OFFS), len(V))
        backend, device = model.backend()
        items = backend.pack_items(model.item_factors, self.score)
        exact, _ = backend.top_k(torch.from_numpy(queries).to(device), items, self.k)
        self.exact_scores = self._scores(exact.cpu().numpy())

    def __call__(self, index: _Index, ef: int) -> dict[str, float]:
        found = self._scores(index.search(self.queries, self.k, ef))
        recall = {}
        for cut_off in CUT_OFFS:
            k = min(cut_off, self.k)
            worst = self.exact_scores[:, :k].min(1, keepdims=True)
            recall[f"recall@{cut_off}"] = float((found[:, :k] >= worst).mean())
        return recall

    def _scores(self, items: Labels) -> Factors:
        """Return scores of items [m, k], -inf for no item. Both sides of the comparison sum in the same order."""
        Q, V = self.queries[:, None, :], self.V[items]
        scores = -((Q - V) ** 2).sum(-1) if self.score == "l2" else (Q * V).sum(-1)
        return np.where(items >= 0, scores, -np.inf)
