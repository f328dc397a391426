"""Downloads from a local server."""

import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from drm_triton.data.prepare.download import fetch, fetch_source, published_md5
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.sources import find_source
from drm_triton.errors import DrmError, InputError
from tests.data.conftest import titles

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `files`; may break off after `limit` bytes, ignore ranges, or change its tag."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/file.bin": CONTENT, "/file.bin.md5": f"MD5 (file.bin) = {MD5}\n".encode()}
        self.limit: int | None = None
        self.ranges = True
        self.tag = '"one"'
        self.requested: list[str | None] = []

    def url(self, path: str = "/file.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        content = server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = 0
        requested = self.headers.get("Range")
        server.requested.append(requested)
        if requested and server.ranges and self.headers.get("If-Range") == server.tag:
            start = int(requested.removeprefix("bytes=").removesuffix("-"))
        if start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", server.tag)
        self.end_headers()
        end = None if server.limit is None else start + server.limit
        self.wfile.write(content[start:end])

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_whole(server: Server, tmp_path: Path) -> None:
    path = fetch(server.url(), tmp_path / "new" / "file.bin", published_md5(server.url() + ".md5"))
    assert path.read_bytes() == CONTENT
    assert [f.name for f in path.parent.iterdir()] == ["file.bin"]


def test_a_broken_download_resumes(server: Server, tmp_path: Path) -> None:
    server.limit = 100_000
    for _ in range(2):
        with pytest.raises(DrmError, match="again"):
            fetch(server.url(), tmp_path / "file.bin", MD5)
        assert not (tmp_path / "file.bin").exists()
    server.limit = None
    assert fetch(server.url(), tmp_path / "file.bin", MD5).read_bytes() == CONTENT
    assert server.requested == [None, "bytes=100000-", "bytes=200000-"]


@pytest.mark.parametrize("change", [{"ranges": False}, {"tag": '"two"'}])
def test_starts_again_if_it_must(server: Server, tmp_path: Path, change: dict[str, Any]) -> None:
    server.limit = 100_000
    with pytest.raises(DrmError):
        fetch(server.url(), tmp_path / "file.bin", MD5)
    server.limit = None
    vars(server).update(change)
    assert fetch(server.url(), tmp_path / "file.bin", MD5).read_bytes() == CONTENT


@pytest.mark.parametrize(("arrived", "requests"), [(CONTENT, 1), (CONTENT + b"more", 2)])
def test_all_had_arrived_but_for_its_name(server: Server, tmp_path: Path, arrived: bytes, requests: int) -> None:
    (tmp_path / "file.bin.part").write_bytes(arrived)
    (tmp_path / "file.bin.part.tag").write_text(server.tag)
    assert fetch(server.url(), tmp_path / "file.bin", MD5).read_bytes() == CONTENT
    assert [f.name for f in tmp_path.iterdir()] == ["file.bin"]
    assert len(server.requested) == requests  # a file that is too long is downloaded again


def test_all_had_arrived_but_damaged(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(bytes(len(CONTENT)))
    (tmp_path / "file.bin.part.tag").write_text(server.tag)
    with pytest.raises(DrmError, match="MD5"):
        fetch(server.url(), tmp_path / "file.bin", MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DrmError, match="MD5"):
        fetch(server.url(), tmp_path / "file.bin", "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_missing_file_and_server(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DrmError, match="404"):
        fetch(server.url("/nothing"), tmp_path / "a")
    assert published_md5(server.url("/nothing.md5")) is None
    server_gone = "http://127.0.0.1:1/file"
    with pytest.raises(DrmError, match="connection"):
        fetch(server_gone, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_source_from_download_to_data_set(server: Server, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("ml-20m/ratings.csv", "userId,movieId,rating,timestamp\n1,2,5.0,9\n1,3,1.0,9\n")
        archive.writestr("ml-20m/movies.csv", "movieId,title,genres\n2,Heat,x\n")
    server.files["/ml-20m.zip"] = packed.getvalue()
    source = replace(find_source("ml-20m"), url=server.url("/ml-20m.zip"))
    path = fetch_source(source, tmp_path / "raw")
    data = prepare(source, [path], tmp_path / "out")
    assert titles(data) == ["Heat"]
    assert data.meta["files"][0]["sha256"] == hashlib.sha256(packed.getvalue()).hexdigest()
    requests = len(server.requested)
    assert fetch_source(source, tmp_path / "raw") == path  # there already
    assert len(server.requested) == requests


def test_a_source_without_address(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no public address"):
        fetch_source(find_source("melon"), tmp_path)
