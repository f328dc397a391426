"""SketchFab likes: users who liked 3-D models, crawled and anonymised by the rec-a-sketch project."""

from __future__ import annotations

import csv

import polars as pl

from drm_triton.data.prepare.columns import Part, Raw, find_columns
from drm_triton.data.prepare.inputs import Inputs, reading
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.data.prepare.tables import Reading
from drm_triton.errors import InputError


def read(inputs: Inputs, how: Reading) -> Raw:
    r"""Read model_likes_anon.psv: ``modelname|mid|uid``, quoted where needed, with ``\`` escaping a separator.

    Polars has no escape character, so Python's own reader takes this one; the file has some 600,000 rows.
    """
    file = inputs.find(["model_likes_anon.psv", "*.psv", "*.psv.gz"], "SketchFab's likes")
    path = inputs.unpack(file, how.encoding or "utf-8") if file.kind == "gzip" or how.encoding else file.path
    users: list[str | None] = []
    items: list[str | None] = []
    names: list[str] = []
    with reading(file.name), path.open(encoding="utf-8-sig", newline="") as handle:
        rows = csv.reader(handle, delimiter="|", quoting=csv.QUOTE_MINIMAL, escapechar="\\")
        header = next(rows, [])
        found = find_columns(header, {"user": how.user or "uid", "item": how.item or "mid"}, file.name)
        user, item = header.index(found["user"]), header.index(found["item"])
        title = header.index("modelname") if "modelname" in header else None
        for number, row in enumerate(rows, start=1):
            if not row:
                continue
            if len(row) != len(header):
                raise InputError(
                    f"row {number:,} of {file.name} (the header not counted) has {len(row)} fields and the header "
                    f"{len(header)}: correct the row, or fetch the file again if it is cut short"
                )
            users.append(row[user] or None)
            items.append(row[item] or None)
            names.append(row[title] if title is not None else "")
    strings = {"user": pl.String, "item": pl.String}
    frame = pl.LazyFrame({"user": users, "item": items}, schema=strings)
    titles = pl.LazyFrame({"item": items, "title": names}, schema={"item": pl.String, "title": pl.String})
    return Raw([Part(file.name, frame)], text=True, titles=titles if title is not None else None, files=[file.on_disk])


SKETCHFAB = Source(
    name="sketchfab",
    summary="SketchFab likes of 3-D models",
    origin="https://github.com/EthanRosenthal/rec-a-sketch (data/model_likes_anon.psv, packed there: unpack it)",
    licence="none stated; crawled from sketchfab.com",
    layout="pipe-separated with header modelname|mid|uid, quoting minimal, escape character backslash",
    read=read,
    reads=frozenset({"user", "item", "encoding"}),
    wanted="model_likes_anon.psv",
    # The paper names no filter, so none is assumed.
    published=Published(15_500, 28_800, 558_000),
)
