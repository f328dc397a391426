"""MovieLens, every size: ratings of films, read from the folder, the ratings file or the zip as distributed."""

from __future__ import annotations

import dataclasses
import os

import polars as pl

from drm_triton.data.prepare.columns import Raw
from drm_triton.data.prepare.inputs import Input, Inputs
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.data.prepare.tables import TABLE_FIELDS, Reading, lines_of, read_tables, scan
from drm_triton.errors import InputError

_RATINGS = ("ratings.csv", "ratings.dat", "u.data", "ratings.csv.*", "ratings.dat.*")
_FILMS = ("movies.csv", "movies.dat", "u.item")
_POSITIONS = ("user", "item", "rating", "timestamp")


def read(inputs: Inputs, how: Reading) -> Raw:
    """Read ratings.csv (with header), ratings.dat (``::``) or u.data (tabs), and titles beside it."""
    try:
        file = inputs.find(_RATINGS, "MovieLens ratings")
    except InputError:
        if os.path.isfile(inputs.paths[0] / "train.txt"):
            folder = inputs.paths[0]
            raise InputError(
                f"{folder} holds lists of items, not MovieLens's own ratings: use `drm-triton prepare lists --leading "
                f"user --raw {folder}/train.txt --raw {folder}/test.txt`"
            ) from None
        raise
    if file.suffix != ".csv" and how.columns is None and how.user is None:
        how = dataclasses.replace(how, columns=_POSITIONS)
    films = inputs.beside(_FILMS)
    return read_tables(inputs, [file], how, titles=_titles(inputs, films) if films else None)


def _titles(inputs: Inputs, films: Input) -> pl.LazyFrame:
    """Item ids and titles; all but the CSV editions and ml-10m are in Latin-1."""
    if films.suffix == ".csv":
        return scan(inputs, films, Reading())[0].select(item="movieId", title="title")
    separator = "::" if films.suffix == ".dat" else "|"
    try:
        films.path.read_text("utf-8")
        path = films.path
    except UnicodeDecodeError:
        path = inputs.unpack(films, "latin-1")
    fields = pl.col("line").str.splitn(separator, 3)
    lines = lines_of(Input(films.name, path)).drop_nulls()
    return lines.select(item=fields.struct.field("field_0"), title=fields.struct.field("field_1"))


def _source(size: str, published: Published | None = None) -> Source:
    return Source(
        name=f"ml-{size}",
        summary=f"MovieLens {size.upper()} (ratings of 4 and more)",
        origin=f"https://grouplens.org/datasets/movielens/{size}/",
        licence="research use; no redistribution or commercial use without permission from GroupLens",
        layout="ratings.csv, ratings.dat or u.data: user, item, rating, timestamp; as folder, file or zip",
        read=read,
        reads=TABLE_FIELDS,
        wanted=f"ml-{size}.zip",
        published=published,
        min_rating=4.0,
        url=f"https://files.grouplens.org/datasets/movielens/ml-{size}.zip",
    )


MOVIELENS = (
    _source("100k"),
    _source("1m"),
    _source("10m"),
    # The paper keeps ratings of 4 and more; its fewer users and items suggest a further filter that it does not state.
    _source("20m", Published(136_000, 15_500, 9_980_000)),
    _source("25m"),
    _source("32m"),
)
