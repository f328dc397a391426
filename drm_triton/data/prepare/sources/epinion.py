"""Epinions and Ciao: product reviews with ratings, from two sister sites."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl

from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import InputFile, Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.data.prepare.tables import TABLE_FIELDS, read_tables
from drm_triton.errors import InputError


def paper_filter(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Keep the rows that give the paper's counts: one pass, not a k-core.

    Of rows with equal user, item and rating, keep the latest. Then keep items with at least 3 rows, then users with at
    least 5 rows.
    """
    distinct = rows.group_by("user", "item", "rating").agg(pl.all().max())
    return distinct.filter(pl.len().over("item") >= 3).filter(pl.len().over("user") >= 5)


def read_epinion(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    """Read Epinion's ratings and add the paper's filter."""
    raw = read(inputs, file_format)
    return dataclasses.replace(raw, own_filter=("the paper's filter", paper_filter))


def read(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    """Read lines ``user item rating``, or a .mat file with columns user, item, category, rating, helpfulness, time."""
    file = inputs.find(["*rating*.mat", "ratings_data.txt", "ratings_data.txt.*", "*.mat"], "ratings")
    if file.suffix == ".mat":
        return RawInteractions([RawTable(file.name, _read_mat(file))], files=[file.on_disk])
    if file_format.columns is None and file_format.user is None:
        separator = file_format.separator or " "
        file_format = dataclasses.replace(file_format, columns=("user", "item", "rating"), separator=separator)
    return read_tables(inputs, [file], file_format)


def _read_mat(file: InputFile) -> pl.LazyFrame:
    import scipy.io
    from scipy.io.matlab import MatReadError

    try:
        with read_errors(file.name):
            found = scipy.io.loadmat(file.path)
    except (MatReadError, ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise InputError(f"cannot read {file.name} as a MATLAB file ({error}): download it again") from error
    matrices = [m for name, m in found.items() if not name.startswith("__") and getattr(m, "ndim", 0) == 2]
    matrix = next((m for m in matrices if m.shape[1] >= 4), None)
    if matrix is None or matrix.dtype.kind not in "iuf":
        raise InputError(
            f"{file.name} contains no matrix with columns user, item, category, rating, ...: give the ratings file"
        )
    columns = {"user": 0, "item": 1, "rating": 3} | ({"timestamp": 5} if matrix.shape[1] > 5 else {})
    return pl.LazyFrame({name: np.ascontiguousarray(matrix[:, k]) for name, k in columns.items()})


_LAYOUT = ".mat with a matrix of user, item, category, rating, helpfulness, time; or text lines `user item rating`"

EPINION = Source(
    name="epinion",
    summary="Epinions product reviews",
    origin="J. Tang's trust data sets (rating_with_timestamp.mat), or http://www.trustlet.org (ratings_data.txt)",
    licence="none stated; cite mTrust (WSDM 2012) and eTrust (KDD 2012)",
    layout=_LAYOUT,
    read=read_epinion,
    reads=TABLE_FIELDS,
    wanted="ratings_data.txt or epinions_rating_with_timestamp.mat",
    published=Published(21_300, 59_200, 631_000),
)

CIAO = Source(
    name="ciao",
    summary="Ciao product reviews",
    origin="J. Tang's trust data sets (rating_with_timestamp.mat)",
    licence="none stated; cite mTrust (WSDM 2012) and eTrust (KDD 2012)",
    layout=_LAYOUT,
    read=read,
    reads=TABLE_FIELDS,
    wanted="ciao_rating_with_timestamp.mat",
)
