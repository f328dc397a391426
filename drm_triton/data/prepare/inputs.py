"""Input files: found by name, glob, directory or inside a zip file, and decompressed if Polars cannot do it."""

from __future__ import annotations

import bz2
import codecs
import collections
import csv
import fnmatch
import glob
import gzip
import hashlib
import io
import itertools
import lzma
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from drm_triton.data.prepare.failures import READ_ERRORS, read_errors
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
_NO_DATA = re.compile(r"(readme|licen[cs]e|copying|notice|changelog|citation)\b", re.IGNORECASE)
_CHUNK_BYTES = 1 << 20
_MOST_LINES = 100  # of a quoted field, where bad lines are skipped


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    Attributes
    ----------
    name : name in messages; for a member of a zip file, both names
    path : file to open
    origin : the user's file, if that is packed and `path` is an unpacked copy
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
        """The type by its first bytes: gzip, zstd, zip, bz2, xz, parquet, 7z, or plain."""
        with self.path.open("rb") as handle:
            head = handle.read(8)
        return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "plain")

    @property
    def suffix(self) -> str:
        """The suffix in lower case, without that of the compression: .csv for ratings.CSV.gz."""
        suffixes = [s.lower() for s in Path(self.name).suffixes]
        if suffixes and suffixes[-1] in (".gz", ".zst", ".zstd", ".bz2", ".xz", ".zip"):
            suffixes.pop()
        return suffixes[-1] if suffixes else ""

    def open(self) -> IO[bytes]:
        """Open the file for reading, decompressed."""
        handle: IO[bytes] = _OPENERS.get(self.kind, open)(self.path, "rb")
        return handle

    def first_bad_line(self, is_good: Callable[[str], bool]) -> str:
        """Return "line 17" for the first line that is not UTF-8 or not good, or "" if none is found."""
        try:
            with self.open() as handle:
                for number, line in enumerate(handle, start=1):
                    if not _is_good(line, is_good):
                        return f"line {number:,}"
        except READ_ERRORS:
            pass  # the caller is reporting it
        return ""


@dataclass(frozen=True)
class SkippedLines:
    """Lines of a text file that were left out.

    Attributes
    ----------
    count : number of these lines
    first : the first of them, as "line 17"
    rows_before : number of rows before it, where a row with a quoted line end is one
    blank_before : number of these rows that are blank
    """

    count: int = 0
    first: str = ""
    rows_before: int = 0
    blank_before: int = 0


class Inputs:
    """The files that the user gave, and a temporary directory to unpack into.

    Parameters
    ----------
    raw : paths, globs, directories or zip files
    scratch : an existing directory, which the caller removes afterwards
    parameter : name of the parameter that gave `raw`, for messages
    """

    def __init__(self, raw: Sequence[str | Path], scratch: Path, parameter: str = "raw") -> None:
        self.scratch, self.parameter = scratch, parameter
        self._numbers = itertools.count()
        self.paths: list[Path] = []
        for given in raw:
            path = Path(os.path.expanduser(given))
            try:
                matches = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(str(path), recursive=True))]
                if not matches:
                    problem = "no file matches" if glob.has_magic(str(path)) else "there is no file"
                    raise InputError(f"{problem} {path}: check `{parameter}`")
                self.paths += [m for m in matches if m.is_file() or m == path]
            except OSError as error:  # for example a name that is too long, or a directory without permission to enter
                raise InputError(f"cannot read {path}: {error.strerror or error}; check `{parameter}`") from error
        if not self.paths:
            raise InputError(f"`{parameter}` {' '.join(map(str, raw))} matches only directories: give files")

    def all(self, patterns: Sequence[str] = ("*",)) -> list[InputFile]:
        """Return all given files. Of a zip file, return the members that match a pattern."""
        found: list[InputFile] = []
        for path in self.paths:
            if path.is_dir():
                raise InputError(f"{path} is a directory: give files, for example `{self.parameter}` '{path}/*.csv'")
            found += self._open(path, patterns)
        return found

    def find(self, patterns: Sequence[str], description: str) -> InputFile:
        """Return the given file, or the first file in the given directory or zip file that matches a pattern.

        Raises
        ------
        InputError
            If no file matches, or several were given.
        """
        path = self.paths[0]
        if len(self.paths) > 1:
            raise InputError(
                f"{description} must be one file, but `{self.parameter}` names {len(self.paths)}: give one of them"
            )
        with read_errors(str(path)):
            found = self._inside(path, patterns) if path.is_dir() else self._open(path, patterns, first=True)
        if not found:
            raise InputError(f"{path} contains no {' or '.join(patterns)} ({description}): check `{self.parameter}`")
        return found[0]

    def beside(self, patterns: Sequence[str]) -> InputFile | None:
        """Return a file from the directory or zip file of the data, such as the titles, or None if there is none."""
        path = self.paths[0]
        try:
            packed = zipfile.is_zipfile(path)
            if packed or path.is_dir():
                found = self._open(path, patterns, first=True) if packed else self._inside(path, patterns)
            else:
                matches = (match for pattern in patterns for match in _matching(path.parent, pattern))
                found = [InputFile(str(match), match) for match in matches]
        except InputError:
            return None
        return found[0] if found else None

    def unpack(self, file: InputFile, encoding: str = "utf-8") -> Path:
        """Write a decompressed copy in UTF-8 to the temporary directory, and return its path."""
        if file.kind == "zstd":
            raise InputError(f"{file.name} is compressed with zstd, which requires plain UTF-8 here: unpack it first")
        target = self._new_path(file.suffix)
        with read_errors(file.name), file.open() as packed:
            if encoding == "utf-8":
                with target.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
            else:
                with target.open("w", encoding="utf-8", newline="") as text:
                    shutil.copyfileobj(io.TextIOWrapper(packed, encoding, newline=""), text, _CHUNK_BYTES)
        return target

    def without_bad_lines(
        self, file: InputFile, is_good: Callable[[str], bool], quoted: bool
    ) -> tuple[InputFile, SkippedLines]:
        """Copy the good lines of a text file. Leave out those that are not UTF-8 or not good.

        Parameters
        ----------
        is_good : returns whether a line can be used
        quoted : a field in quotation marks may contain line ends. Lines up to the mark that closes it are one.
        """
        if file.kind == "zstd":
            raise InputError(f"{file.name} is compressed with zstd, so its bad rows cannot be skipped: unpack it first")
        target = self._new_path(file.suffix)
        skipped, waiting, number, rows, blank = SkippedLines(), collections.deque[bytes](), 0, 0, 0
        with read_errors(file.name), file.open() as packed, target.open("wb") as good:
            while waiting or (line := packed.readline()):
                if waiting:
                    line = waiting.popleft()
                number += 1
                taken = [line]
                while quoted and b"".join(taken).count(b'"') % 2 and len(taken) < _MOST_LINES:
                    following = waiting.popleft() if waiting else packed.readline()
                    if not following:
                        break
                    taken.append(following)
                row = b"".join(taken)
                if not (quoted and row.count(b'"') % 2) and _is_good(row, is_good):
                    good.write(row)
                    number += len(taken) - 1
                    rows, blank = rows + 1, blank + (not row.strip())
                    continue
                if not skipped.count:
                    skipped = SkippedLines(0, f"line {number:,}", rows, blank)
                skipped = replace(skipped, count=skipped.count + 1)
                waiting.extendleft(reversed(taken[1:]))  # the next line may be good
        return InputFile(file.name, target, file.on_disk), skipped

    def without_mark(self, file: InputFile) -> InputFile:
        """Return the file, or a copy without its byte order mark, which Polars does not accept in JSON."""
        if file.kind == "zstd":
            return file
        with read_errors(file.name), file.open() as handle:
            marked = handle.read(3) == codecs.BOM_UTF8
        return InputFile(file.name, self.unpack(file, "utf-8-sig"), file.on_disk) if marked else file

    def _new_path(self, suffix: str) -> Path:
        """Return an unused path in the temporary directory."""
        while True:  # several `Inputs` may share the directory
            path = self.scratch / f"{next(self._numbers)}{suffix}"
            if not path.exists():
                return path

    def _inside(self, directory: Path, patterns: Sequence[str]) -> list[InputFile]:
        """Return the first match in a directory, in its subdirectories, or else in its first zip file."""
        for pattern in patterns:
            for place in (directory, *sorted(p for p in directory.iterdir() if p.is_dir())):
                for match in _matching(place, pattern):
                    return self._open(match, ("*",))
        zips = _matching(directory, "*.zip")
        return self._open(zips[0], patterns, first=True) if zips else []

    def _open(self, path: Path, patterns: Sequence[str], first: bool = False) -> list[InputFile]:
        """Make a file readable by Polars: unpack zip files and compressions that Polars does not know.

        Of a zip file, return the members that match a pattern, or only the `first`.
        """
        file = InputFile(str(path), path)
        try:
            if path.stat().st_size == 0:
                raise InputError(f"{path} is empty: check `{self.parameter}`")
            kind = file.kind
            if printable(path) != str(path):  # Polars takes only names in UTF-8
                link = self._new_path(printable(file.suffix))
                link.symlink_to(path.absolute())
                file = InputFile(str(path), link, path)
            if kind == "zip" and file.suffix != ".npz":  # arrays are no files to read one by one
                return self._unzip(path, patterns, first)
            if kind == "7z":
                raise InputError(f"{path} is a 7z archive, which cannot be read: unpack it first (7z x {path})")
            if kind in ("bz2", "xz"):
                return [InputFile(str(path), self.unpack(file), path)]
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}") from error
        return [file]

    def _unzip(self, path: Path, patterns: Sequence[str], first: bool) -> list[InputFile]:
        """Unpack the members of a zip file that match a pattern, or only the `first`."""
        found: list[InputFile] = []
        with read_errors(str(path)), zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if not m.is_dir() and not m.filename.startswith("__MACOSX")]
            members = [m for m in members if not _NO_DATA.match(Path(m.filename).name)] or members
            chosen = [m for pattern in patterns for m in members if _fits(Path(m.filename).name, pattern)]
            for member in chosen[:1] if first else chosen:
                name = f"{path}:{member.filename}"
                place = self._new_path("")
                with read_errors(name), archive.open(member) as packed, place.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
                found.append(InputFile(name, place, path))
        if not found:
            listed = ", ".join(m.filename for m in members[:5]) or "nothing"
            raise InputError(
                f"{path} contains no {' or '.join(patterns)}; it contains {listed}: check `{self.parameter}`"
            )
        if any(f.path.stat().st_size == 0 for f in found):
            raise InputError(f"{path} contains an empty file: give files with interactions")
        return found


def sha256(paths: Iterable[Path]) -> list[dict[str, str | int]]:
    """Return name, size and SHA-256 of each file, once even if several members of a zip file were read."""
    listed: list[dict[str, str | int]] = []
    for path in dict.fromkeys(paths):
        digest = hashlib.sha256()
        with path.open("rb") as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                digest.update(chunk)
        listed.append({"file": printable(path.name), "bytes": path.stat().st_size, "sha256": digest.hexdigest()})
    return listed


def printable(name: str | Path) -> str:
    r"""Return a name as text that can be encoded. A byte that is not UTF-8 becomes an escape, such as \xff.

    Examples
    --------
    >>> printable("caf\udce9.csv")
    'caf\\xe9.csv'
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _is_good(line: bytes, is_good: Callable[[str], bool]) -> bool:
    try:
        return is_good(line.decode("utf-8"))
    except (ValueError, csv.Error, RecursionError):  # the last of JSON that is nested too deeply
        return False


def _fits(name: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(name.lower(), pattern.lower())


def _matching(directory: Path, pattern: str) -> list[Path]:
    """Return the files of a directory whose names match a pattern, ignoring case."""
    return sorted(p for p in directory.iterdir() if _fits(p.name, pattern) and p.is_file())
