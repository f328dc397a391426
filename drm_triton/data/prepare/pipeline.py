"""Prepare a data set from a source: find, download or generate the raw data, build the data set, store it."""

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
from drm_triton.data.prepare import synthetic
from drm_triton.data.prepare.build import BuildOptions, build
from drm_triton.data.prepare.download import fetch_source
from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import Inputs, sha256
from drm_triton.data.prepare.raw import FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.sources import Source, find_source
from drm_triton.errors import InputError
from drm_triton.progress import SILENT, Reporter


def prepare(
    source: Source,
    raw: Sequence[str | Path] | None,
    out: str | Path,
    file_format: FileFormat | None = None,
    options: BuildOptions | None = None,
    overwrite: bool = False,
    reporter: Reporter = SILENT,
    own_filter: bool = True,
    download: bool = False,
) -> Dataset:
    """Prepare the files of a source into the directory `out`.

    Parameters
    ----------
    source : Source
        From `drm_triton.data.prepare.sources.find_source`.
    raw : paths, globs, directories or zip files
        None for the source's directory under data/raw.
    out : directory to write
    file_format : FileFormat, optional
        How to read the files, as far as the source allows a choice.
    options : BuildOptions, optional
        The source's own filters and the paper's split by default.
    overwrite : bool
        Replace an existing data set. The old one stays until the new one is complete.
    reporter : Reporter
        Shows the steps.
    own_filter : bool
        Apply the filter that belongs to the source, if it has one (Epinion's, which gives the paper's counts).
    download : bool
        Download the source's file first, if it has a public address; `raw` must be None.

    Returns
    -------
    Dataset
        Opened from `out`.
    """
    place = atomic.check_directory(out, overwrite, store.MARKER)
    if raw is None:
        raw = [fetch_source(source, raw_dir(source), reporter)] if download else [find_raw(source)]
    elif download:
        raise InputError("`download` fetches the files: leave out `raw`")
    data = _read(source, raw, file_format or FileFormat(), options or default_options(source), reporter, own_filter)
    return _store(data, source.name, place, overwrite, reporter)


def prepare_synthetic(
    shape: synthetic.Shape,
    out: str | Path,
    options: BuildOptions | None = None,
    overwrite: bool = False,
    reporter: Reporter = SILENT,
    source: str = "synthetic",
) -> Dataset:
    """Generate interactions with planted structure and prepare them into the directory `out`.

    `source` is recorded: the name of the source that the data stands in for, if it does.
    """
    place = atomic.check_directory(out, overwrite, store.MARKER)
    options = options or BuildOptions()
    with reporter.step("generate"):
        users, items = synthetic.generate(shape, options.seed)
    raw = RawInteractions([RawTable("the generated data", pl.LazyFrame({"user": users, "item": items}))])
    data = build(raw, options, reporter)
    data.meta["synthetic"] = asdict(shape)
    return _store(data, source, place, overwrite, reporter)


def prepare_synthetic_melon(
    shape: synthetic.Shape,
    out: str | Path,
    options: BuildOptions | None = None,
    overwrite: bool = False,
    reporter: Reporter = SILENT,
) -> Dataset:
    """Generate files in Melon's format and prepare them into the directory `out`.

    The files are written to data/raw/melon-synthetic, where `prepare` does not look for Melon's own.
    """
    place = atomic.check_directory(out, overwrite, store.MARKER)
    source = find_source("melon")
    options = options or default_options(source)
    path = data_dir() / "raw" / "melon-synthetic" / "train.json"
    with reporter.step("generate") as step:
        synthetic.write_melon(path, shape, options.seed)
        synthetic.write_song_meta(path.with_name("song_meta.json"), shape, options.seed)
        step.note(str(path))
    data = _read(source, [path], FileFormat(), options, reporter)
    data.meta["synthetic"] = asdict(shape)
    return _store(data, source.name, place, overwrite, reporter)


def raw_dir(source: Source) -> Path:
    """Return the default directory of a source's files."""
    return data_dir() / "raw" / source.name


def find_raw(source: Source) -> Path:
    """Return the directory of a source's files. If it is missing or empty, raise an error that says how to get them."""
    directory = raw_dir(source)
    if os.path.isdir(directory):
        with read_errors(str(directory)):
            if any(directory.iterdir()):
                return directory
    if source.wanted is None:
        raise InputError(f"source {source.name} needs `raw`: the file or files to read")
    ways = [f"get it from {source.origin}", f"put {source.wanted} into {directory}/ or give it as `raw`"]
    if source.url:
        ways.append("or use `download` to fetch it")
    if source.name == "melon":
        ways.append("or try everything on generated data of the same format with `synthetic`, for example `scale=0.02`")
    raise InputError(f"there is no {source.name} data yet: {'; '.join(ways)}")


def default_options(source: Source) -> BuildOptions:
    """Return the source's own filters with the paper's split."""
    return BuildOptions(min_rating=source.min_rating, min_user=source.min_user, min_item=source.min_item)


def _read(
    source: Source,
    raw: Sequence[str | Path],
    file_format: FileFormat,
    options: BuildOptions,
    reporter: Reporter,
    own_filter: bool = True,
) -> Dataset:
    """Read a source's files and build the data set."""
    given: Mapping[str, Any] = {name: value for name, value in asdict(file_format).items() if value is not None}
    if unused := sorted(given.keys() - source.reads):
        raise InputError(f"source {source.name} does not use `{unused[0]}`: leave it out, or use source table")
    with tempfile.TemporaryDirectory(prefix="drm-triton-") as scratch, ThreadPoolExecutor(1) as pool:
        with reporter.step("open"):
            interactions = source.read(Inputs(raw, Path(scratch)), file_format)
        if file_format.weight and interactions.weight is None:
            raise InputError(f"{interactions.name} has no column to choose as `weight`: leave out `weight`")
        if not own_filter:
            interactions = replace(interactions, own_filter=None)
        checksums = pool.submit(sha256, interactions.files)  # in parallel to reading: hashing releases the GIL
        data = build(interactions, options, reporter)
        data.meta |= {"files": checksums.result(), "reading": given}
    return data


def _store(data: Dataset, source: str, out: Path, overwrite: bool, reporter: Reporter) -> Dataset:
    data.meta |= {"source": source, "program": f"drm-triton {__version__}"}
    with reporter.step("store") as step:
        data.save(out, overwrite)
        step.note(str(out))
    return Dataset.load(out)
