"""Melon playlists, from the training file of a playlist-continuation contest. Playlists are users, songs are items."""

from __future__ import annotations

import polars as pl

from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import InputFile, Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.errors import InputError


def read(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    """Read ``id`` and ``songs`` of the playlists in train.json, and the titles from song_meta.json beside it."""
    file = inputs.find(["train.json", "train.json.gz", "*.json"], "Melon's playlists")
    file = inputs.without_mark(file)
    path = inputs.unpack(file) if file.kind == "gzip" else file.path
    # As floats, because reading as integers would silently turn song 5.5 into song 5.
    wanted: dict[str, pl.DataType] = {"id": pl.Float64(), "songs": pl.List(pl.Float64())}
    with read_errors(file.name, encoding_advice="convert it to UTF-8"):
        playlists = pl.read_json(path, schema=wanted)
    if playlists["songs"].null_count() == len(playlists):
        raise InputError(
            f"{file.name} has no playlists with songs: give Melon's train.json, an array of objects with id and songs"
        )
    # A playlist without songs has no interactions. One without an id is reported later, like any missing user.
    rows = playlists.lazy().with_row_index("row").select("row", user="id", item="songs")
    rows = rows.filter(pl.col("item").list.len() > 0).explode("item")
    songs = inputs.beside(["song_meta.json"])
    titles = _titles(inputs.without_mark(songs)) if songs else None
    return RawInteractions([RawTable(file.name, rows, unit="playlist")], titles=titles, files=[file.on_disk])


def _titles(songs: InputFile) -> pl.LazyFrame:
    """Return song ids and titles, each with its artists."""
    wanted: dict[str, pl.DataType] = {
        "id": pl.Int64(),
        "song_name": pl.String(),
        "artist_name_basket": pl.List(pl.String()),
    }
    with read_errors(songs.name, encoding_advice="convert it to UTF-8"):
        meta = pl.read_json(songs.path, schema=wanted)
    artists = pl.col("artist_name_basket").list.join(", ")
    title = pl.concat_str("song_name", artists.replace("", None), separator=" – ", ignore_nulls=True)
    return meta.lazy().select(item="id", title=title)


MELON = Source(
    name="melon",
    summary="Melon playlists (playlist = user, song = item)",
    origin="https://arena.kakao.com/melon_dataset (consent form; the contest's train.json)",
    licence="non-profit research only, naming Kakao Arena as the source",
    layout="JSON array of objects with id, songs, tags, plylst_title, like_cnt, updt_date; titles from song_meta.json",
    read=read,
    wanted="train.json (and song_meta.json for titles)",
    # The file has some 115,000 playlists. The paper does not say which ones it left out, so there is no filter.
    published=Published(104_000, 81_200, 4_100_000),
)
