"""Preparation from a named source: find or make the raw data, run the pipeline, store the result."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.data import data_dir, store
from drm_triton.data.dataset import Dataset
from drm_triton.data.prepare import build as pipeline
from drm_triton.data.prepare import synthetic as generator
from drm_triton.data.prepare.build import Options
from drm_triton.data.prepare.columns import Part, Raw
from drm_triton.data.prepare.inputs import Inputs, sha256
from drm_triton.data.prepare.inputs import reading as reading_files
from drm_triton.data.prepare.sources import Source
from drm_triton.data.prepare.tables import Reading
from drm_triton.errors import InputError
from drm_triton.progress import SILENT, Reporter


def raw_dir(source: Source) -> Path:
    """Return where a source's own files are looked for by default."""
    return data_dir() / "raw" / source.name


def find_raw(source: Source) -> list[Path]:
    """Return a source's raw folder if there is anything in it, or say how to get the data."""
    folder = raw_dir(source)
    if os.path.isdir(folder):
        with reading_files(str(folder)):
            if any(folder.iterdir()):
                return [folder]
    if source.wanted is None:
        raise InputError(f"source {source.name} needs --raw: the file or files to read")
    ways = [f"get it from {source.origin}", f"put {source.wanted} into {folder}/ or name it with --raw"]
    if source.url:
        ways.append("or let --download fetch it")
    if source.name == "melon":
        ways.append("or try everything on generated data of the same format and shape: --synthetic [--scale 0.02]")
    raise InputError(f"there is no {source.name} data yet: {'; '.join(ways)}")


def prepare(
    source: Source,
    raw: Sequence[str | Path],
    out: str | Path,
    reading: Reading = Reading(),  # noqa: B008  frozen, so one instance can serve every call
    options: Options | None = None,
    overwrite: bool = False,
    report: Reporter = SILENT,
    own_filter: bool = True,
    remarks: Mapping[str, Any] | None = None,
) -> Dataset:
    """Prepare a source's files into the directory `out`.

    Parameters
    ----------
    source : Source
        From `drm_triton.data.prepare.sources.find_source`.
    raw : paths, globs, folders or zip files
    out : directory to write
    options : Options, optional
        The source's own defaults when not given.
    overwrite : bool
        Replace an existing data set; the old one stays until the new one is complete.
    own_filter : bool
        Apply the filter particular to the source, if it has one (Epinion's, which gives the paper's counts).
    remarks : mapping, optional
        Recorded in the data set's meta as it is.

    Returns
    -------
    Dataset
        Opened from `out`.
    """
    out = atomic.check_directory(out, overwrite, store.MARKER)
    given = {k: v for k, v in asdict(reading).items() if v is not None}
    if unheeded := sorted(given.keys() - source.reads):
        raise InputError(f"source {source.name} does not use --{unheeded[0]}: leave it out, or use source table")
    options = options or default_options(source)
    with tempfile.TemporaryDirectory(prefix="drm-triton-") as scratch, ThreadPoolExecutor(1) as pool:
        with report.step("open"):
            interactions = source.read(Inputs(raw, Path(scratch)), reading)
        if not own_filter:
            interactions = replace(interactions, own_filter=None)
        sums = pool.submit(sha256, interactions.files)  # beside the reading: hashing leaves Python's lock alone
        data = pipeline.build(interactions, options, report)
        data.meta |= {"files": sums.result(), "reading": given}
        data.meta |= remarks or {}
    return _store(data, source.name, out, overwrite, report)


def prepare_synthetic(
    shape: generator.Shape,
    out: str | Path,
    options: Options | None = None,
    overwrite: bool = False,
    report: Reporter = SILENT,
) -> Dataset:
    """Generate interactions with planted structure and prepare them into the directory `out`."""
    out = atomic.check_directory(out, overwrite, store.MARKER)
    options = options or Options()
    with report.step("generate"):
        users, items = generator.generate(shape, options.seed)
    raw = Raw([Part("the generated data", pl.LazyFrame({"user": users, "item": items}))])
    data = pipeline.build(raw, options, report)
    data.meta["synthetic"] = asdict(shape)
    return _store(data, "synthetic", out, overwrite, report)


def write_synthetic_melon(shape: generator.Shape, seed: int = 0, report: Reporter = SILENT) -> Path:
    """Write a generated train.json, with song_meta.json beside it, where no real one is looked for; return its path."""
    path = data_dir() / "raw" / "melon-synthetic" / "train.json"
    with report.step("generate") as step:
        generator.write_melon(path, shape, seed)
        generator.write_song_meta(path.with_name("song_meta.json"), shape, seed)
        step.note(str(path))
    return path


def default_options(source: Source) -> Options:
    """Return the source's own filters with the paper's split."""
    return Options(min_rating=source.min_rating, min_user=source.min_user, min_item=source.min_item)


def _store(data: Dataset, source: str, out: Path, overwrite: bool, report: Reporter) -> Dataset:
    data.meta |= {"source": source, "program": f"drm-triton {__version__}"}
    with report.step("store") as step:
        data.save(out, overwrite)
        step.note(str(out))
    return Dataset.load(out)
