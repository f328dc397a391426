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
from drm_triton.data.attributes import attributes
from drm_triton.data.conditions import kind_of
from drm_triton.data.dataset import Dataset
from drm_triton.data.leaderboards import PublicSplit
from drm_triton.data.prepare import synthetic
from drm_triton.data.prepare.attributes import ATTRIBUTE_FIELDS, read_attributes
from drm_triton.data.prepare.build import BuildOptions, build
from drm_triton.data.prepare.download import fetch_source
from drm_triton.data.prepare.failures import read_errors
from drm_triton.data.prepare.inputs import Inputs, sha256
from drm_triton.data.prepare.parts import Parts, PartsOptions, build_parts, read_parts
from drm_triton.data.prepare.raw import FileFormat, RawInteractions, RawTable
from drm_triton.data.prepare.sources import Source, find_source
from drm_triton.errors import InputError, warn
from drm_triton.progress import SILENT, Reporter


def prepare(
    source: Source,
    raw: Sequence[str | Path] | None,
    out: str | Path,
    file_format: FileFormat | None = None,
    options: BuildOptions | PartsOptions | None = None,
    overwrite: bool = False,
    reporter: Reporter = SILENT,
    own_filter: bool = True,
    download: bool = False,
    parts: Parts | None = None,
    tables: Mapping[str, str | Path] | None = None,
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
    options : BuildOptions or, for files that are already split, PartsOptions
        The source's own filters and the paper's split by default; for parts, these parts.
    overwrite : bool
        Replace an existing data set. The old one stays until the new one is complete.
    reporter : Reporter
        Shows the steps.
    own_filter : bool
        Apply the filter that belongs to the source, if it has one (Epinion's, which gives the paper's counts).
    download : bool
        Download the source's file first, if it has a public address; `raw` must be None.
    parts : mapping from train, test and perhaps valid to a file, optional
        Files that are already split, for the sources table and lists; `raw` must be None.
    tables : mapping from items and users to a file, optional
        Tables of attributes; `Dataset.with_attributes` describes them. The encoding, the decimal mark, the dates and
        the bad rows of `file_format` are theirs too.

    Returns
    -------
    Dataset
        Opened from `out`.
    """
    place = atomic.check_directory(out, overwrite, store.MARKER)
    if parts is not None:
        if raw is not None or download:
            raise InputError("`train` and `test` are the files: leave out `raw` and `download`")
    elif raw is None:
        raw = [fetch_source(source, raw_dir(source), reporter)] if download else [find_raw(source)]
    elif download:
        raise InputError("`download` fetches the files: leave out `raw`")
    if options is None:
        is_split = parts is not None or source.public_split is not None
        options = PartsOptions() if is_split else default_options(source)
    file_format, tables = file_format or FileFormat(), tables or {}
    used = source.reads | (ATTRIBUTE_FIELDS if tables else frozenset())
    if unused := sorted(_given(file_format).keys() - used):
        raise InputError(f"source {source.name} does not use `{unused[0]}`: leave it out, or use source table")
    found = {name: read_attributes(file, name.removesuffix("s"), file_format) for name, file in tables.items()}
    data = _read(source, parts or raw or (), file_format, options, reporter, own_filter)
    if found:
        with_tables = data.with_attributes(**{name: table.frame for name, table in found.items()})
        with_tables.meta["attributes"] = {
            name: {
                "file": str(Path(tables[name]).name),
                "columns": {column: kind_of(table.frame[column].dtype) for column in attributes(table.frame)},
                "rows": len(table.frame),
                "skipped": table.skipped,
                "added": len(getattr(with_tables, name)) - len(getattr(data, name)),
            }
            for name, table in found.items()
        }
        data = with_tables
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
    raw: Sequence[str | Path] | Parts,
    file_format: FileFormat,
    options: BuildOptions | PartsOptions,
    reporter: Reporter,
    own_filter: bool = True,
) -> Dataset:
    """Read a source's files, or a file for each part, and build the data set."""
    with tempfile.TemporaryDirectory(prefix="drm-triton-") as scratch, ThreadPoolExecutor(1) as pool:
        with reporter.step("open"):
            if isinstance(raw, Mapping):
                interactions = read_parts(source, raw, Path(scratch), file_format)
            else:
                interactions = source.read(Inputs(raw, Path(scratch)), file_format)
        for name in ("weight", "event_weight"):
            if getattr(file_format, name) and interactions.weight is None:
                raise InputError(f"{interactions.name} has no column to choose as `{name}`: leave out `{name}`")
        if not own_filter:
            interactions = replace(interactions, own_filter=None)
        checksums = pool.submit(sha256, interactions.files)  # in parallel to reading: hashing releases the GIL
        data = _build(interactions, options, reporter)
        data.meta |= {"files": checksums.result(), "reading": _given(file_format)}
    if source.public_split is not None:
        _recognise(data, source.name, source.public_split)
    return data


def _given(file_format: FileFormat) -> dict[str, Any]:
    """Return the fields that are not to be recognised from the files."""
    return {name: value for name, value in asdict(file_format).items() if value is not None}


def _build(raw: RawInteractions, options: BuildOptions | PartsOptions, reporter: Reporter) -> Dataset:
    if isinstance(options, PartsOptions) and raw.is_split:
        return build_parts(raw, options, reporter)
    if isinstance(options, BuildOptions) and not raw.is_split:
        return build(raw, options, reporter)
    kind = "already split: give PartsOptions" if raw.is_split else "not split: give BuildOptions"
    raise InputError(f"{raw.name} is {kind} as `options`")


def _recognise(data: Dataset, name: str, split: PublicSplit) -> None:
    """Record which public split the data is. If the sizes differ, it is another one: warn, and record nothing."""
    here = PublicSplit(data.n_users, data.n_items, data.train.nnz + data.valid.nnz, data.test.nnz, split.results)
    if here == split:
        data.meta["public_split"] = name
        return
    warn(
        f"these files have {here.sizes}, but the public split {name} has {split.sizes}: its results do not apply",
    )


def _store(data: Dataset, source: str, out: Path, overwrite: bool, reporter: Reporter) -> Dataset:
    data.meta |= {"source": source, "program": f"drm-triton {__version__}"}
    with reporter.step("store") as step:
        data.save(out, overwrite)
        step.note(str(out))
    return Dataset.load(out)
