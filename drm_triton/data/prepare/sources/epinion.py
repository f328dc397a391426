"""Epinions and Ciao: product reviews with ratings, from two sister sites."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl

from drm_triton.data.prepare.columns import Part, Raw
from drm_triton.data.prepare.inputs import Input, Inputs, reading
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.data.prepare.tables import TABLE_FIELDS, Reading, read_tables
from drm_triton.errors import InputError


def paper_filter(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Keep what gives the paper's counts: one pass, not a k-core.

    Rows equal in user, item and rating count once, the latest of them; then items with at least 3 rows stay; then
    users with at least 5.
    """
    once = rows.group_by("user", "item", "rating").agg(pl.all().max())
    return once.filter(pl.len().over("item") >= 3).filter(pl.len().over("user") >= 5)


def read_epinion(inputs: Inputs, how: Reading) -> Raw:
    """Read the .mat or the text form, with the paper's filter."""
    raw = read(inputs, how)
    return dataclasses.replace(raw, own_filter=("the paper's filter", paper_filter))


def read(inputs: Inputs, how: Reading) -> Raw:
    """Read lines ``user item rating``, or a .mat with columns user, item, category, rating, helpfulness, time."""
    file = inputs.find(["*rating*.mat", "ratings_data.txt", "ratings_data.txt.*", "*.mat"], "ratings")
    if file.suffix == ".mat":
        return Raw([Part(file.name, _read_mat(file))], files=[file.on_disk])
    if how.columns is None and how.user is None:
        how = dataclasses.replace(how, columns=("user", "item", "rating"), separator=how.separator or " ")
    return read_tables(inputs, [file], how)


def _read_mat(file: Input) -> pl.LazyFrame:
    import scipy.io
    from scipy.io.matlab import MatReadError

    try:
        with reading(file.name):
            found = scipy.io.loadmat(file.path)
    except (MatReadError, ValueError, TypeError, NotImplementedError, KeyError) as error:
        raise InputError(f"cannot read {file.name} as a MATLAB file ({error}): fetch it again") from error
    matrices = [m for name, m in found.items() if not name.startswith("__") and getattr(m, "ndim", 0) == 2]
    matrix = next((m for m in matrices if m.shape[1] >= 4), None)
    if matrix is None or matrix.dtype.kind not in "iuf":
        raise InputError(
            f"{file.name} holds no matrix with columns user, item, category, rating, ...: give the ratings file"
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
