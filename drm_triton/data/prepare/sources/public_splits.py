"""Public splits in the format of LightGCN: train.txt and test.txt, with one user per line, followed by the items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl

from drm_triton.data.leaderboards import PUBLIC_SPLITS, PublicSplit
from drm_triton.data.prepare.failures import READ_ERRORS
from drm_triton.data.prepare.inputs import InputFile, Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.sources import lists
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.errors import InputError

ADJACENCY = "s_adj_mat.npz"


def read(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    """Read train.txt and test.txt from a folder or a zip file."""
    train, test = _files(inputs, ["train.txt"])
    tables = [lists.read_file(inputs, train, _FORMAT, "train"), lists.read_file(inputs, test, _FORMAT, "test")]
    return RawInteractions(tables, text=True, files=[train.on_disk, test.on_disk])


def read_or_adjacency(inputs: Inputs, file_format: FileFormat, sizes: PublicSplit) -> RawInteractions:
    """Read train.txt, or s_adj_mat.npz if there is no train.txt, and test.txt."""
    train, test = _files(inputs, ["train.txt", ADJACENCY])
    if train.suffix != ".npz":
        return read(inputs, file_format)
    held_out = lists.read_file(inputs, test, _FORMAT, "test")
    # Numbers, as in the matrix: of text ids, only those of one file would be.
    numbers = held_out.frame.with_columns(pl.col("user", "item").cast(pl.Int64, strict=False))
    tables = [
        RawTable(train.name, read_adjacency(train, sizes.users, sizes.items), part="train"),
        replace(held_out, frame=numbers),
    ]
    return RawInteractions(tables, files=[train.on_disk, test.on_disk])


def _files(inputs: Inputs, training: Sequence[str]) -> tuple[InputFile, InputFile]:
    """Return the files of the training and the test part."""
    if len(inputs.paths) == 1:
        train, test = inputs.find(training, "the training part"), inputs.find(["test.txt"], "the test part")
        if train.name != test.name:  # equal if one file was given
            return train, test
    raise InputError(f"give the folder that contains {' or '.join(training)} and test.txt as `raw`, not files")


def read_adjacency(file: InputFile, n_users: int, n_items: int) -> pl.LazyFrame:
    """Return the interactions in the adjacency matrix of users and items.

    The matrix has a row and a column for each user and then for each item. Its top right block [n_users, n_items] is
    the matrix of interactions, perhaps normalised, and its bottom left block the transpose of this.
    """
    import scipy.sparse

    problem = f"{file.name} is not the adjacency matrix of {n_users:,} users and {n_items:,} items"
    advice = "download it again, or give train.txt"
    try:
        matrix = scipy.sparse.load_npz(file.path)  # refuses pickled arrays
        if hasattr(matrix, "check_format"):  # the compressed formats; others are checked when they are made
            matrix.check_format(full_check=True)
        matrix = matrix.tocoo()
        finite = bool(np.isfinite(matrix.data).all())
    except (*READ_ERRORS, ValueError, AttributeError, TypeError) as error:
        raise InputError(f"{problem}: it cannot be read as a SciPy sparse matrix ({error}); {advice}") from error
    size = n_users + n_items
    if matrix.shape != (size, size):
        raise InputError(f"{problem}: its shape is {matrix.shape}, not {(size, size)}; {advice}")
    if not finite:
        raise InputError(f"{problem}: it has values that are not finite; {advice}")
    stored = matrix.data != 0
    rows, columns = matrix.row[stored].astype(np.int64), matrix.col[stored].astype(np.int64)
    inside = ((rows < n_users) == (columns < n_users)) & (rows != columns)  # a normalised matrix may have a diagonal
    upper, lower = (rows < n_users) & (columns >= n_users), (rows >= n_users) & (columns < n_users)
    keys = rows[upper] * size + columns[upper], columns[lower] * size + rows[lower]
    if inside.any() or not np.array_equal(np.sort(keys[0]), np.sort(keys[1])):
        raise InputError(f"{problem}: it joins users with users, items with items, or is not symmetric; {advice}")
    return pl.LazyFrame({"user": rows[upper], "item": columns[upper] - n_users})


_FORMAT = FileFormat(leading="user")
_LICENCES = {
    "ml-1m-m1": "GroupLens: research use; no redistribution or commercial use without permission",
    "amazon-cds-m1": "none stated; reviews of Amazon collected by J. McAuley",
    "gowalla": "none stated; check-ins of Gowalla from SNAP",
    "yelp2018": "Yelp's licence of its open data set: academic use",
    "amazon-book": "none stated; reviews of Amazon collected by J. McAuley",
}
_SUMMARIES = {
    "ml-1m-m1": "MovieLens 1M, the split MovieLens1M_m1 of BARS",
    "amazon-cds-m1": "Amazon CDs, the split AmazonCDs_m1 of BARS",
    "gowalla": "Gowalla check-ins, the split of NGCF and LightGCN",
    "yelp2018": "Yelp reviews of 2018, the split of NGCF and LightGCN",
    "amazon-book": "Amazon books, the split of NGCF and LightGCN",
}


def source_of(name: str, split: PublicSplit) -> Source:
    """Return the source of a public split with these sizes."""
    adjacency = name == "gowalla"
    wanted = f"train.txt (or {ADJACENCY}) and test.txt" if adjacency else "train.txt and test.txt"
    repository = "xue-pai/UltraGCN" if name.endswith("-m1") else "gusye1234/LightGCN-PyTorch"
    return Source(
        name=name,
        summary=_SUMMARIES[name],
        origin=f"https://github.com/{repository} (folder data)",
        licence=_LICENCES[name],
        layout=f"{wanted}; a line of a text file is a user and the user's items",
        read=partial(read_or_adjacency, sizes=split) if adjacency else read,
        wanted=wanted,
        published=Published(split.users, split.items, split.interactions),
        public_split=split,
    )


SOURCES = tuple(source_of(name, split) for name, split in PUBLIC_SPLITS.items())
