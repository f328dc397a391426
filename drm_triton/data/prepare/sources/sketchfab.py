"""SketchFab likes: which users liked which 3-D models, crawled and anonymised by the rec-a-sketch project."""

from __future__ import annotations

import csv

import polars as pl

from drm_triton.data.prepare.columns import find_columns
from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import Inputs
from drm_triton.data.prepare.raw import FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.errors import InputError


def read(inputs: Inputs, file_format: FileFormat) -> RawInteractions:
    r"""Read model_likes_anon.psv: ``modelname|mid|uid``, quoted where needed, with ``\`` escaping a separator.

    Polars does not support escape characters, so Python's csv module reads the file, which has some 600,000 rows.
    """
    file = inputs.find(["model_likes_anon.psv", "*.psv", "*.psv.gz"], "SketchFab's likes")
    encoding = file_format.encoding
    path = inputs.unpack(file, encoding or "utf-8") if file.kind == "gzip" or encoding else file.path
    users: list[str | None] = []
    items: list[str | None] = []
    names: list[str] = []
    with read_errors(file.name), path.open(encoding="utf-8-sig", newline="") as handle:
        rows = csv.reader(handle, delimiter="|", quoting=csv.QUOTE_MINIMAL, escapechar="\\")
        header = next(rows, [])
        given = {"user": file_format.user or "uid", "item": file_format.item or "mid"}
        found = find_columns(header, given, file.name)
        user, item = header.index(found["user"]), header.index(found["item"])
        title = header.index("modelname") if "modelname" in header else None
        for number, row in enumerate(rows, start=1):
            if not row:
                continue
            if len(row) != len(header):
                raise InputError(
                    f"row {number:,} of {file.name} (not counting the header) has {len(row)} fields, but the header "
                    f"has {len(header)}: correct the row, or download the file again if it is cut short"
                )
            users.append(row[user] or None)
            items.append(row[item] or None)
            names.append(row[title] if title is not None else "")
    strings = {"user": pl.String, "item": pl.String}
    frame = pl.LazyFrame({"user": users, "item": items}, schema=strings)
    titles = pl.LazyFrame({"item": items, "title": names}, schema={"item": pl.String, "title": pl.String})
    return RawInteractions(
        [RawTable(file.name, frame)],
        text=True,
        titles=titles if title is not None else None,
        files=[file.on_disk],
    )


SKETCHFAB = Source(
    name="sketchfab",
    summary="SketchFab likes of 3-D models",
    origin="https://github.com/EthanRosenthal/rec-a-sketch (data/model_likes_anon.psv, packed there: unpack it)",
    licence="none stated; crawled from sketchfab.com",
    layout="pipe-separated with header modelname|mid|uid, quoting minimal, escape character backslash",
    read=read,
    reads=frozenset({"user", "item", "encoding"}),
    wanted="model_likes_anon.psv",
    # The paper mentions no filter, so there is none.
    published=Published(15_500, 28_800, 558_000),
)
