"""Downloads that can be interrupted at any point. They are resumed, checked, and renamed only when complete."""

from __future__ import annotations

import hashlib
import re
import urllib.error
import urllib.request
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from drm_triton import atomic
from drm_triton._version import __version__
from drm_triton.data.prepare.sources.base import Source
from drm_triton.errors import DrmError, InputError
from drm_triton.progress import SILENT, Reporter, Step

TIMEOUT = 30.0  # seconds without a byte
_CHUNK_BYTES = 1 << 18


def fetch_source(source: Source, directory: Path, reporter: Reporter = SILENT) -> Path:
    """Download a source's file into a directory, unless it exists, and return its path."""
    if source.url is None:
        raise InputError(f"source {source.name} has no public address: get the data from {source.origin}")
    target = directory / source.url.rsplit("/", 1)[-1]
    if target.exists():
        reporter.line(f"{target} exists already")
        return target
    return fetch(source.url, target, published_md5(source.url + ".md5"), reporter)


def published_md5(url: str) -> str | None:
    """Return the MD5 sum published at `url`, or None if there is none."""
    try:
        with _open(url) as response:
            text = response.read(1000).decode("ascii", "replace")
    except (OSError, HTTPException):
        return None
    found = re.search(r"\b[0-9a-fA-F]{32}\b", text)
    return found.group().lower() if found else None


def fetch(url: str, target: Path, md5: str | None = None, reporter: Reporter = SILENT) -> Path:
    """Download `url` to `target`.

    A partial download is kept as ``target.part``. Another call continues from there if the server still has the same
    file, according to its ETag or date, which is stored beside it. The file is renamed to `target` only when it is
    complete and its checksum equals `md5`.

    Raises
    ------
    DrmError
        If the server cannot be reached, ends the connection early, or sends a file with another checksum.
    """
    part, tag = target.with_name(target.name + ".part"), target.with_name(target.name + ".part.tag")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with reporter.step(f"download {url}", unit="bytes") as step:
            total = _transfer(url, part, tag, step)
            if total is not None and part.stat().st_size != total:
                raise DrmError(
                    f"the download of {url} ended after {part.stat().st_size:,} of {total:,} bytes: try again to "
                    "continue from there"
                )
            step.note(f"{part.stat().st_size:,} bytes")
    except urllib.error.HTTPError as error:
        raise DrmError(
            f"cannot download {url}: the server answers {error.code} {error.reason}; get the file yourself"
        ) from error
    except (OSError, HTTPException) as error:
        raise DrmError(
            f"the download of {url} failed ({error}): check the connection and try again; the partial download is "
            f"kept in {part}"
        ) from error
    if md5 is None:
        reporter.line(f"no checksum is published for {url}; its SHA-256 is recorded in the data set")
    elif (found := _md5(part)) != md5:
        part.unlink()
        tag.unlink(missing_ok=True)
        raise DrmError(
            f"the download of {url} is damaged: its MD5 sum is {found}, not the published {md5}; download it again"
        )
    atomic.move_file(part, target)
    tag.unlink(missing_ok=True)
    return target


def _transfer(url: str, part: Path, tag: Path, step: Step) -> int | None:
    """Append the missing bytes to `part`, or write it anew. Return the size of the whole file, if known."""
    have = part.stat().st_size if part.exists() and tag.exists() else 0
    try:
        response = _open(url, have, tag.read_text() if have else "")
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        if error.headers.get("Content-Range") == f"bytes */{have}":  # only the rename is missing
            return have
        have, response = 0, _open(url)
    with response:
        resumed = response.status == HTTPStatus.PARTIAL_CONTENT
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        tag.write_text(response.headers.get("ETag") or response.headers.get("Last-Modified") or "")
        step.total = have + int(length) if length else None
        step.advance(have)
        with part.open("ab" if resumed else "wb") as handle:
            while chunk := response.read(_CHUNK_BYTES):
                handle.write(chunk)
                step.advance(len(chunk))
    return step.total


def _open(url: str, start: int = 0, tag: str = "") -> HTTPResponse:
    headers = {"User-Agent": f"drm-triton/{__version__}", "Accept-Encoding": "identity"}
    if start and tag:
        headers |= {"Range": f"bytes={start}-", "If-Range": tag}  # the server sends a changed file from the start
    response: HTTPResponse = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    return response


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
