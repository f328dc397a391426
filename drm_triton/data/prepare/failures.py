"""Errors of an input file, explained in one paragraph."""

from __future__ import annotations

import csv
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import polars as pl

from drm_triton.errors import InputError

READ_ERRORS = (
    pl.exceptions.PolarsError,
    OSError,
    EOFError,
    UnicodeError,
    LookupError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    csv.Error,
    RuntimeError,  # of zipfile, about encryption and unknown compressions, and of JSON that is nested too deeply
    pl.exceptions.PanicException,  # a BaseException: a failed assertion inside Polars, for example in a damaged file
)

_SET_ENCODING = 'give its encoding, for example `encoding="latin-1"`'

_QUOTES = "its quotation marks do not match; quote fields that contain them, and double them inside"
_JSON = "it is not valid JSON, or it is cut short; download or export it again"
_TRUNCATED = "it is truncated; download or export it again"
_DAMAGED = "it is damaged; download or export it again"
_MIXED = "a value is of another kind than those above it; ids must be numbers or text, ratings numbers"

_NESTED = "its JSON is nested too deeply; give objects with numbers and text"

_MEANINGS = {  # what the message of a library may contain -> what it means for the user
    "utf-8": "it is not in UTF-8; {encoding_advice}",
    "utf8": "it is not in UTF-8; {encoding_advice}",
    "unknown encoding": "set `encoding` to one that Python knows, such as latin-1 or utf-16",
    "more fields": "a row has more fields than the first; correct it, or set the right `separator`",
    "malformed": _QUOTES,
    "could not parse": _QUOTES,
    "syntax at": _JSON,
    "eof at": _JSON,
    "end of file": _TRUNCATED,
    "end-of-stream": _TRUNCATED,
    "incomplete frame": _TRUNCATED,
    "out of specification": "it is truncated or damaged; download or export it again",
    "not a zip file": "it is truncated or damaged; download or export it again",
    "bad crc": _DAMAGED,
    "crc check failed": _DAMAGED,
    "field larger than": "a field in its first lines is longer than 128 KB; check its quotation marks and `separator`",
    "new-line character": "a line contains a single carriage return; remove it, or end lines with a newline",
    "cannot parse '": _MIXED,
    "supertype": _MIXED,
    "no space left": "there is no space to unpack it; free some, or set TMPDIR to a larger disk",
    "password required": "it is encrypted; unpack it first, with its password",
    "compression method": "its compression, such as Deflate64, is not supported; unpack it first",
    "recursion": _NESTED,
    "depthlimit": _NESTED,
    "deflate": _DAMAGED,
}


@contextmanager
def read_errors(name: str, locate: Callable[[], str] = str, encoding_advice: str = _SET_ENCODING) -> Iterator[None]:
    """Raise an InputError that explains whatever fails while `name` is read.

    Parameters
    ----------
    name : the file in messages
    locate : returns the place of the error, such as "line 17", or ""
    encoding_advice : what to do if the file is not in UTF-8
    """
    try:
        yield
    except READ_ERRORS as error:
        place = locate()
        raise InputError(
            f"cannot read {name}{', ' if place else ''}{place}: {_explain(error, encoding_advice)}"
        ) from error


def _explain(error: BaseException, encoding_advice: str) -> str:
    """Explain an error of Polars, Python or the system."""
    text = str(error).strip().split("\n", 1)[0]
    if isinstance(error, pl.exceptions.PanicException):
        return f"it is damaged, or has a form that Polars does not expect ({text}); export it again"
    if isinstance(error, UnicodeError):
        return f"it is not in the expected encoding ({text}); {encoding_advice}"
    if isinstance(error, PermissionError):
        return f"{error.strerror}; check its permissions, or give another"
    meaning = next((meaning for sign, meaning in _MEANINGS.items() if sign in str(error).lower()), None)
    if meaning is None:
        return f"{text}; check that the file is complete and has the format that its name says"
    return f"{meaning.format(encoding_advice=encoding_advice)} ({text})"
