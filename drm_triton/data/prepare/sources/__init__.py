"""The sources of data that `drm-triton prepare` knows: one file each, and the registry `SOURCES`."""

from __future__ import annotations

import difflib

from drm_triton.data.prepare.sources import (
    epinion,
    lists,
    melon,
    movielens,
    public_splits,
    sketchfab,
    synthetic,
    table,
)
from drm_triton.data.prepare.sources.base import Published, Source
from drm_triton.errors import InputError

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        melon.MELON,
        sketchfab.SKETCHFAB,
        epinion.EPINION,
        epinion.CIAO,
        *movielens.MOVIELENS,
        *public_splits.SOURCES,
        table.TABLE,
        lists.LISTS,
        synthetic.SYNTHETIC,
    )
}

__all__ = ["SOURCES", "Published", "Source", "find_source"]


def find_source(name: str) -> Source:
    """Return the source of that name. If there is none, raise an error that lists the sources."""
    if name in SOURCES:
        return SOURCES[name]
    near = difflib.get_close_matches(name, SOURCES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(f"unknown source {name!r}: {hint}choose one of {', '.join(SOURCES)}")
