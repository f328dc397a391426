"""Input files: found by name, glob, folder or inside a zip; decompressed where Polars cannot; checksummed."""

from __future__ import annotations

import bz2
import codecs
import csv
import fnmatch
import glob
import gzip
import hashlib
import io
import lzma
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from drm_triton.errors import InputError

_MAGIC: dict[bytes, str] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bz2",
    b"\xfd7zXZ": "xz",
    b"PAR1": "parquet",
    b"7z\xbc\xaf": "7z",
}
_OPENERS: dict[str, Callable[..., Any]] = {"gzip": gzip.open, "bz2": bz2.open, "xz": lzma.open}


@dataclass(frozen=True)
class Input:
    """A file to read.

    Attributes
    ----------
    name : for messages; says so when it is a member of a zip
    path : what to open
    origin : the user's file that it comes from, when that is packed and `path` is an unpacked copy
    """

    name: str
    path: Path
    origin: Path | None = None

    @property
    def on_disk(self) -> Path:
        """The user's own file."""
        return self.origin or self.path

    @property
    def kind(self) -> str:
        """What its first bytes say it is: gzip, zstd, zip, bz2, xz, parquet, 7z, or plain."""
        with self.path.open("rb") as handle:
            head = handle.read(8)
        return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "plain")

    @property
    def suffix(self) -> str:
        """The extension, in lower case, without that of the compression: .csv for ratings.CSV.gz."""
        suffixes = [s.lower() for s in Path(self.name).suffixes]
        if suffixes and suffixes[-1] in (".gz", ".zst", ".zstd", ".bz2", ".xz", ".zip"):
            suffixes.pop()
        return suffixes[-1] if suffixes else ""


class Inputs:
    """The files the user gave, and a scratch folder to unpack into.

    Parameters
    ----------
    raw : paths, globs, folders or zip files
    scratch : an existing folder, removed by the caller afterwards
    option : what the user gave them by, for messages
    """

    def __init__(self, raw: Sequence[str | Path], scratch: Path, option: str = "--raw") -> None:
        self.scratch, self.option = scratch, option
        self.paths: list[Path] = []
        for given in raw:
            path = Path(os.path.expanduser(given))
            try:
                matches = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
                if not matches:
                    what = "no file matches" if glob.has_magic(str(path)) else "there is no file"
                    raise InputError(f"{what} {path}: check {option}")
                self.paths += [m for m in matches if m.is_file() or m == path]
            except OSError as error:  # a name too long, a directory that may not be entered
                raise InputError(f"cannot read {path}: {error.strerror or error}; check {option}") from error
        if not self.paths:
            raise InputError(f"{option} {' '.join(map(str, raw))} matches folders only: give files")

    def all(self, patterns: Sequence[str] = ("*",)) -> list[Input]:
        """Return every file given; of a zip, its members that match a pattern."""
        found: list[Input] = []
        for path in self.paths:
            if path.is_dir():
                raise InputError(f"{path} is a folder: give its files, for example {self.option} '{path}/*.csv'")
            found += self._open(path, patterns)
        return found

    def find(self, patterns: Sequence[str], what: str) -> Input:
        """Return the one file that is meant: the file given, or the first in a folder or zip to match a pattern.

        Raises
        ------
        InputError
            Naming the patterns, if there is none.
        """
        path = self.paths[0]
        if len(self.paths) > 1:
            raise InputError(f"{what} is one file, but {self.option} names {len(self.paths)}: give one of them")
        with reading(str(path)):
            found = self._inside(path, patterns) if path.is_dir() else self._open(path, patterns)
        if not found:
            raise InputError(f"{path} holds no {' or '.join(patterns)} ({what}): check {self.option}")
        return found[0]

    def beside(self, patterns: Sequence[str]) -> Input | None:
        """Return a companion of the file found, such as its titles: from the same folder or zip, if it is there."""
        path = self.paths[0]
        try:
            packed = zipfile.is_zipfile(path)
            if packed or path.is_dir():
                found = self._open(path, patterns) if packed else self._inside(path, patterns)
            else:
                matches = (match for pattern in patterns for match in _matching(path.parent, pattern))
                found = [Input(str(match), match) for match in matches]
        except InputError:
            return None
        return found[0] if found else None

    def _inside(self, folder: Path, patterns: Sequence[str]) -> list[Input]:
        for pattern in patterns:
            for place in (folder, *sorted(p for p in folder.iterdir() if p.is_dir())):
                for match in _matching(place, pattern):
                    return self._open(match, ("*",))
        zips = _matching(folder, "*.zip")
        return self._open(zips[0], patterns) if zips else []

    def _open(self, path: Path, patterns: Sequence[str]) -> list[Input]:
        """Make one file readable: unpack zips, and what Polars does not decompress by itself."""
        source = Input(str(path), path)
        try:
            if path.stat().st_size == 0:
                raise InputError(f"{path} is empty: give a file with interactions")
            kind = source.kind
            if glob.has_magic(str(path)):  # Polars would take the name for a pattern
                link = self.scratch / f"{len(list(self.scratch.iterdir()))}{source.suffix}"
                link.symlink_to(path.absolute())
                source = Input(str(path), link, path)
            if kind == "zip":
                return self._unzip(path, patterns)
            if kind == "7z":
                raise InputError(f"{path} is a 7z archive, which cannot be read: unpack it first (7z x {path})")
            if kind in ("bz2", "xz"):
                return [Input(str(path), self.unpack(source), path)]
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        return [source]

    def unpack(self, source: Input, encoding: str = "utf-8") -> Path:
        """Write a decompressed copy in UTF-8 into the scratch folder."""
        if source.kind == "zstd":
            raise InputError(f"{source.name} must be plain UTF-8 to be read compressed with zstd: unpack it first")
        target = self.scratch / f"{len(list(self.scratch.iterdir()))}-{source.path.name}"
        with reading(source.name), _OPENERS.get(source.kind, open)(source.path, "rb") as packed:
            if encoding == "utf-8":
                with target.open("wb") as plain:
                    shutil.copyfileobj(packed, plain, 1 << 20)
            else:
                with target.open("w", encoding="utf-8", newline="") as text:
                    shutil.copyfileobj(io.TextIOWrapper(packed, encoding, newline=""), text, 1 << 20)
        return target

    def without_mark(self, source: Input) -> Input:
        """Return the file, or a copy if it begins with a byte order mark, which Polars does not expect in JSON."""
        if source.kind == "zstd":
            return source
        with reading(source.name), _OPENERS.get(source.kind, open)(source.path, "rb") as handle:
            marked = handle.read(3) == codecs.BOM_UTF8
        return Input(source.name, self.unpack(source, "utf-8-sig"), source.on_disk) if marked else source

    def _unzip(self, path: Path, patterns: Sequence[str]) -> list[Input]:
        found: list[Input] = []
        with reading(str(path)), zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if not m.is_dir() and not m.filename.startswith("__MACOSX")]
            members = [m for m in members if not _ABOUT.match(Path(m.filename).name)] or members
            for pattern in patterns:
                for member in members:
                    if _fits(Path(member.filename).name, pattern):
                        place = self.scratch / f"{len(list(self.scratch.iterdir()))}-{Path(member.filename).name}"
                        with archive.open(member) as packed, place.open("wb") as plain:
                            shutil.copyfileobj(packed, plain, 1 << 20)
                        found.append(Input(f"{path}:{member.filename}", place, path))
        if not found:
            seen = ", ".join(m.filename for m in members[:5]) or "nothing"
            raise InputError(f"{path} holds no {' or '.join(patterns)}; it holds {seen}: check {self.option}")
        if any(f.path.stat().st_size == 0 for f in found):
            raise InputError(f"{path} holds an empty file: give files with interactions")
        return found


_ABOUT = re.compile(r"(readme|licen[cs]e|copying|notice|changelog|citation)\b", re.IGNORECASE)  # not data


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name.lower(), pattern.lower())


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder whose names fit a pattern, in whatever case."""
    return sorted(p for p in folder.iterdir() if _fits(p.name, pattern) and p.is_file())


_ENCODING = "give its encoding, for example --encoding latin-1"


@contextmanager
def reading(name: str, locate: Callable[[], str] = str, encoding: str = _ENCODING) -> Iterator[None]:
    """Turn whatever goes wrong while `name` is read into one paragraph for the user.

    `locate` may find the place; `encoding` is the advice if it is not in UTF-8.
    """
    try:
        yield
    except _FAILURES as error:
        place = locate()
        raise InputError(f"cannot read {name}{', ' if place else ''}{place}: {_explain(error, encoding)}") from error


_FAILURES = (
    pl.exceptions.PolarsError,
    OSError,
    EOFError,
    UnicodeError,
    LookupError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    csv.Error,
)

_MEANINGS = {  # what the message of a library may contain -> what it means for the user
    "utf-8": "it is not in UTF-8; {encoding}",
    "utf8": "it is not in UTF-8; {encoding}",
    "unknown encoding": "give an --encoding that Python knows, such as latin-1 or utf-16",
    "more fields": "a row has more fields than the first; correct it, or give the right --separator",
    "malformed": "its quotation marks do not pair up; quote fields that contain them, and double them inside",
    "could not parse": "its quotation marks do not pair up; quote fields that contain them, and double them inside",
    "syntax at": "it is not valid JSON, or is cut short; fetch or export it again",
    "eof at": "it is not valid JSON, or is cut short; fetch or export it again",
    "end of file": "it is truncated; fetch or export it again",
    "end-of-stream": "it is truncated; fetch or export it again",
    "incomplete frame": "it is truncated; fetch or export it again",
    "out of specification": "it is truncated or damaged; fetch or export it again",
    "not a zip file": "it is truncated or damaged; fetch or export it again",
    "bad crc": "it is damaged; fetch or export it again",
    "crc check failed": "it is damaged; fetch or export it again",
    "field larger than": "a field of its first lines is longer than 128 KB; check its quotation marks and --separator",
    "new-line character": "a carriage return stands alone in a line; remove it, or end lines with a newline",
    "cannot parse '": "a value is of another kind than those above it; make ids numbers or text, ratings numbers",
    "supertype": "a value is of another kind than those above it; make ids numbers or text, ratings numbers",
    "no space left": "there is no room to unpack it; free some space, or set TMPDIR to a larger disk",
    "deflate": "it is damaged; fetch or export it again",
}


def _explain(error: BaseException, encoding: str) -> str:
    """Say in a sentence what an error of Polars, Python or the system means for an input file."""
    text = str(error).strip().split("\n", 1)[0]
    if isinstance(error, UnicodeError):
        return f"it is not in the expected encoding ({text}); {encoding}"
    if isinstance(error, PermissionError):
        return f"{error.strerror}; check its permissions, or give another"
    meaning = next((m for sign, m in _MEANINGS.items() if sign in str(error).lower()), None)
    if meaning is None:
        return f"{text}; check that the file is complete and of the kind its name says"
    return f"{meaning.format(encoding=encoding)} ({text})"


def first_bad_line(source: Input, good: Callable[[str], bool]) -> str:
    """Return "line 17" for the first line that is not UTF-8 or not `good`; "" if there is none or it cannot be told."""
    try:
        with _OPENERS.get(source.kind, open)(source.path, "rb") as handle:
            for number, line in enumerate(handle, start=1):
                try:
                    fine = good(line.decode("utf-8"))
                except ValueError:
                    fine = False
                if not fine:
                    return f"line {number:,}"
    except _FAILURES:
        pass  # it is being reported already
    return ""


def sha256(paths: Iterable[Path]) -> list[dict[str, str | int]]:
    """Return name, size and SHA-256 of each file."""
    listed: list[dict[str, str | int]] = []
    for path in paths:
        digest = hashlib.sha256()
        with path.open("rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
        listed.append({"file": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()})
    return listed
