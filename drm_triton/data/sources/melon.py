"""Melon playlists: the training file of a playlist-continuation contest, playlists as users and songs as items."""

from __future__ import annotations

import polars as pl

from drm_triton.data.files import Inputs, reading
from drm_triton.data.frames import Part, Raw
from drm_triton.data.sources.base import Published, Source
from drm_triton.data.tables import Reading
from drm_triton.errors import InputError


def read(inputs: Inputs, how: Reading) -> Raw:
    """Read train.json: playlist ``id`` and ``songs``; titles of songs are not in it."""
    file = inputs.find(["train.json", "train.json.gz", "*.json"], "Melon's playlists")
    file = inputs.without_mark(file)
    path = inputs.unpack(file) if file.kind == "gzip" else file.path
    # Numbers as they are in the file: read as integers, a song 5.5 would silently be song 5.
    wanted: dict[str, pl.DataType] = {"id": pl.Float64(), "songs": pl.List(pl.Float64())}
    with reading(file.name, encoding="convert it to UTF-8"):
        playlists = pl.read_json(path, schema=wanted)
    if playlists["songs"].null_count() == len(playlists):
        raise InputError(
            f"{file.name} has no playlists with songs: give Melon's train.json, an array of objects with id and songs"
        )
    # A playlist without songs has no interactions; one without id is found and reported like any missing user.
    rows = playlists.lazy().with_row_index("row").select("row", user="id", item="songs")
    rows = rows.filter(pl.col("item").list.len() > 0).explode("item")
    return Raw([Part(file.name, rows, unit="playlist")], files=[file.on_disk])


MELON = Source(
    name="melon",
    summary="Melon playlists (playlist = user, song = item)",
    origin="https://arena.kakao.com/melon_dataset (consent form; the contest's train.json)",
    licence="non-profit research only, naming Kakao Arena as the source",
    layout="JSON array of objects with id, songs, tags, plylst_title, like_cnt, updt_date",
    read=read,
    wanted="train.json",
    # The paper does not say which of the file's 115,000 or so playlists and songs it left out: no filter is assumed.
    published=Published(104_000, 81_200, 4_100_000),
)
