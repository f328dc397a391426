"""MovieLens in all sizes: ratings of films, read from the distributed directory, ratings file or zip file."""

from __future__ import annotations

import dataclasses
import os

import polars as pl

from drm_triton.data.prepare.inputs import InputFile, Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.data.prepare.tables import TABLE_FIELDS, read_tables, scan
from drm_triton.data.prepare.text import lines_of
from drm_triton.errors import InputError

_RATINGS = ("ratings.csv", "ratings.dat", "u.data", "ratings.csv.*", "ratings.dat.*")
_FILMS = ("movies.csv", "movies.dat", "u.item")
_POSITIONS = ("user", "item", "rating", "timestamp")


def read(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    """Read ratings.csv (with header), ratings.dat (``::``) or u.data (tabs), and the titles beside it."""
    try:
        file = inputs.find(_RATINGS, "MovieLens ratings")
    except InputError:
        if os.path.isfile(inputs.paths[0] / "train.txt"):
            directory = inputs.paths[0]
            raise InputError(
                f"{directory} contains lists of items, not MovieLens's own ratings: use source lists with "
                f"`train` {directory}/train.txt and `test` {directory}/test.txt"
            ) from None
        raise
    if file.suffix != ".csv" and file_format.columns is None and file_format.user is None:
        file_format = dataclasses.replace(file_format, columns=_POSITIONS)
    films = inputs.beside(_FILMS)
    return read_tables(inputs, [file], file_format, titles=_titles(inputs, films) if films else None)


def _titles(inputs: Inputs, films: InputFile) -> pl.LazyFrame:
    """Return item ids and titles. All editions but the CSV ones and ml-10m are in Latin-1."""
    if films.suffix == ".csv":
        return scan(inputs, films, FileFormat()).frame.select(item="movieId", title="title")
    separator = "::" if films.suffix == ".dat" else "|"
    try:
        films.path.read_text("utf-8")
        path = films.path
    except UnicodeDecodeError:
        path = inputs.unpack(films, "latin-1")
    fields = pl.col("line").str.splitn(separator, 3)
    lines = lines_of(InputFile(films.name, path)).drop_nulls()
    return lines.select(item=fields.struct.field("field_0"), title=fields.struct.field("field_1"))


def _source(size: str, published: Published | None = None) -> Source:
    return Source(
        name=f"ml-{size}",
        summary=f"MovieLens {size.upper()} (ratings of 4 and more)",
        origin=f"https://grouplens.org/datasets/movielens/{size}/",
        licence="research use; no redistribution or commercial use without permission from GroupLens",
        layout="ratings.csv, ratings.dat or u.data: user, item, rating, timestamp; as directory, file or zip file",
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
    # The paper keeps ratings of 4 and more. It has fewer users and items, which suggests a filter it does not mention.
    _source("20m", Published(136_000, 15_500, 9_980_000)),
    _source("25m"),
    _source("32m"),
)
