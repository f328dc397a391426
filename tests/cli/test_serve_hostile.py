"""`serve` as a process whose files, clients and workers misbehave."""

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from tests.cli.test_serve import first_lines, received, request, start
from tests.conftest import HANG, call

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of processes")

TOKEN = "a-token-of-the-tests"
TARGET = "/recommendations?user=u1&k=9"


def make_model(path: Path, seed: int) -> list[tuple[int, float]]:
    """Save a model; return its answer to `TARGET`."""
    users, items = generate(Shape(users=80, items=60, interactions=1500), 1)
    frame = pl.DataFrame({"user": [f"u{u}" for u in users], "item": items})
    model = DRM(factors=8, epochs=1, seed=seed).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))
    model.save(path)
    rows: list[tuple[int, float]] = model.recommend(["u1"], k=9).select("item", "score").rows()
    return rows


def answer_of(port: int, target: str = TARGET) -> list[tuple[int, float]]:
    status, answer = request(port, "GET", target)
    assert status == 200, answer
    return [(row["item"], row["score"]) for row in answer["items"]]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- one process, few descriptors, impatient ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[int, float]]]:
    path = tmp_path_factory.mktemp("models") / "songs"
    return path, make_model(path, 0)


@pytest.fixture(scope="module")
def port(made: tuple[Path, Any]) -> Iterator[int]:
    service = start(made[0], "--port", 0, "--request-timeout", 1, "--drain", 2 * HANG, descriptors=256)
    port, _ = first_lines(service)
    yield port
    service.send_signal(signal.SIGTERM)
    wait_until(lambda: request(port, "GET", "/ready")[0] == 503)  # it says that it will stop, and still answers
    assert answer_of(port) == made[1]
    service.send_signal(signal.SIGINT)  # does not wait any longer
    assert service.communicate(timeout=HANG) == ("", "starting ...\n")  # nothing that clients did is in the log
    assert service.returncode == 0


def half_sent(port: int, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=HANG)
    connection.sendall(sent)
    return connection


@pytest.mark.parametrize("sent", [b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: ", b""])
def test_half_sent_headers_keep_no_one_out(port: int, made: tuple[Path, Any], sent: bytes) -> None:
    slow = [half_sent(port, sent) for _ in range(300)]
    for _ in range(5):
        assert answer_of(port) == made[1]
    for connection in slow:
        connection.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: loc",
        b"POST /recommendations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 20\r\n\r\n{",
        b"",
    ],
)
def test_a_request_that_does_not_arrive_is_given_up(port: int, sent: bytes) -> None:
    with half_sent(port, sent) as connection:
        answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert connection.recv(65536) == b""


def test_headers_without_end_are_refused(port: int) -> None:
    with half_sent(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n") as connection:
        try:
            for number in range(40):
                connection.sendall(f"X-{number}: ".encode() + b"x" * 4000 + b"\r\n")
            answer = connection.recv(65536)
        except (BrokenPipeError, ConnectionResetError):  # it did not even read them all
            return
        assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


def test_a_long_list_of_bad_ids_is_refused(port: int) -> None:
    body = b'{"liked": [1], "exclude": [' + b",".join([b"{}"] * 340_000) + b"]}"
    head = "POST /recommendations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with half_sent(port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body) as connection:
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 422 ")
    assert b"List should have at most 10000 items, not 340000" in answer


def test_another_host_is_refused(port: int) -> None:
    with half_sent(port, b"GET /health HTTP/1.1\r\nHost: rebound.example\r\n\r\n") as connection:
        assert received(connection).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_bytes(b"\0" * file.stat().st_size), lambda file: file.write_bytes(b"")]
)
def test_files_that_change_under_the_service(port: int, made: tuple[Path, Any], damage: Callable[[Path], Any]) -> None:
    path, want = made
    others = answer_of(port, "/similar?item=5"), request(port, "POST", "/recommendations", {"liked": [1, 2]})
    copy = path.with_name("copy")
    shutil.copytree(path, copy, dirs_exist_ok=True)
    for file in path.rglob("*"):
        if file.is_file():
            damage(file)
    try:
        assert answer_of(port) == want
        assert (
            answer_of(port, "/similar?item=5"),
            request(port, "POST", "/recommendations", {"liked": [1, 2]}),
        ) == others
    finally:
        shutil.copytree(copy, path, dirs_exist_ok=True)


# -- workers and reloads -----------------------------------------------------------------------------------------------


def workers_of(pid: int) -> list[int]:
    """Return the workers of a service, without multiprocessing's own helper."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_workers_reload_and_survive(tmp_path: Path) -> None:
    """One service with two workers: reloads drop no request and mix no models, and a killed worker is replaced."""
    path = tmp_path / "songs"
    answers = [make_model(path, 0), make_model(tmp_path / "new", 1)]
    assert answers[0] != answers[1]
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN + "\n")
    service = start(path, "--port", 0, "--workers", 2, "--token-file", token_file, "--log", "all", log=tmp_path / "log")
    port, lines = first_lines(service)
    assert TOKEN not in "".join(lines)
    got: list[Any] = []
    stop = threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            got.append(authorized(port, "GET", TARGET))

    clients = [threading.Thread(target=hammer) for _ in range(4)]
    for client in clients:
        client.start()
    try:
        assert len(workers_of(service.pid)) == 2
        path.rename(tmp_path / "old")
        (tmp_path / "new").rename(path)
        status, _ = authorized(port, "POST", "/reload")
        assert status == 200
        wait_until(lambda: reloads(port, "ok") == 2)  # both workers
        after = len(got) + len(clients)
        wait_until(lambda: len(got) > after + 50)
        (path / "model.safetensors").rename(tmp_path / "kept")
        service.send_signal(signal.SIGHUP)
        wait_until(lambda: reloads(port, "error") == 2)
        wait_until(lambda: len(got) > after + 100)
    finally:
        stop.set()
        for client in clients:
            client.join()
    assert {status for status, _ in got} == {200}
    lists = [[(row["item"], row["score"]) for row in answer["items"]] for _, answer in got]
    assert all(rows in answers for rows in lists)
    assert lists[0] == answers[0]
    assert all(rows == answers[1] for rows in lists[after:])

    (tmp_path / "kept").rename(path / "model.safetensors")
    victim, other = workers_of(service.pid)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(set(workers_of(service.pid)) - {victim}) == 2)
    for _ in range(20):
        assert authorized(port, "GET", TARGET)[0] == 200
    service.send_signal(signal.SIGTERM)
    assert service.communicate(timeout=HANG)[0] == ""
    assert service.returncode == 0
    err = (tmp_path / "log").read_text()
    assert "Traceback" not in err
    assert "reload failed, the old model stays" in err
    assert "worker 0 ended with code -9" in err or "worker 1 ended with code -9" in err
    assert " GET /recommendations 200 " in err
    assert "u1" not in err
    assert TOKEN not in err
    assert not Path(f"/proc/{other}").exists()


def authorized(port: int, method: str, target: str) -> tuple[int, Any]:
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
    )
    with half_sent(port, head.encode()) as connection:
        answer = b""
        while part := connection.recv(65536):
            answer += part
    header, _, body = answer.partition(b"\r\n\r\n")
    return int(header.split()[1]), body.decode() if target == "/metrics" else json.loads(body)


def reloads(port: int, result: str) -> int:
    _, text = authorized(port, "GET", "/metrics")
    (line,) = (line for line in text.splitlines() if line.startswith(f'drm_triton_reloads_total{{result="{result}"}}'))
    return int(line.split()[-1])


@pytest.mark.parametrize("token", ["short", "a token with spaces in it", "ein-langes-Schlüsselwort"])
def test_a_bad_token_is_refused_without_showing_it(tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text(token, "utf-8")
    code, _, error = call("serve", tmp_path, "--token-file", path)
    assert code == 2
    assert "a token has at least 16 printable ASCII characters" in error
    assert token not in error
    monkeypatch.setenv("DRM_TRITON_TOKEN", token)
    code, _, error = call("serve", tmp_path)
    assert (code, "DRM_TRITON_TOKEN" in error, token in error) == (2, True, False)


def test_a_token_file_that_cannot_be_read(tmp_path: Path) -> None:
    code, _, error = call("serve", tmp_path, "--token-file", tmp_path / "absent")
    assert code == 2
    assert "cannot read the token" in error
