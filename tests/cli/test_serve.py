"""`serve` as a process behind a real socket: start, responses, errors and shutdown."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.cli.serve import _announce
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.serving.app import MAX_BODY
from tests.conftest import HANG, call, environment, run_python


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    users, items = generate(Shape(users=80, items=60, interactions=1500), 1)
    frame = pl.DataFrame({"user": [f"größe/{u} %2F&k=1" for u in users], "item": items})
    path = tmp_path_factory.mktemp("models") / "songs"
    DRM(factors=8, epochs=2).fit(Dataset.from_frame(frame, ratios=(1, 0, 0))).save(path)
    return path


def start(
    *arguments: object, descriptors: int | None = None, log: Path | None = None, **variables: str | None
) -> "subprocess.Popen[str]":
    """Start a service, on request with a limit of file descriptors, or with its stderr in a file.

    A service that writes much to stderr needs the file: it would wait for ever if nobody read from a full pipe.
    """
    command = [sys.executable, "-m", "drm_triton", "serve", *map(str, arguments)]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *command]
    with contextlib.ExitStack() as stack:
        stderr = subprocess.PIPE if log is None else stack.enter_context(log.open("w"))
        return subprocess.Popen(command, env=environment(**variables), stdout=subprocess.PIPE, stderr=stderr, text=True)


def first_lines(service: "subprocess.Popen[str]") -> tuple[int, list[str]]:
    """Return the port, and the lines that the service printed when it was ready."""
    assert service.stdout is not None
    lines = [service.stdout.readline(), service.stdout.readline()]
    assert lines[1], service.communicate()[1]
    return int(lines[0].split("http://127.0.0.1:")[1].split()[0]), lines


def check_shutdown(service: "subprocess.Popen[str]", port: int, number: int) -> None:
    """Send a signal and check that the service ends well, and that no request made it print an error."""
    idle = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)  # stays open and must not delay the shutdown
    idle.request("GET", "/health")
    assert idle.getresponse().read()
    os.kill(service.pid, number)
    assert service.communicate(timeout=HANG) == ("", "starting ...\n")
    assert service.returncode == 0
    idle.close()


@pytest.fixture(scope="module")
def port(saved: Path) -> Iterator[int]:
    service = start(saved, "--port", 0, "--max-k", 30)
    port, _ = first_lines(service)
    try:
        yield port
    finally:
        check_shutdown(service, port, signal.SIGTERM)


def request(port: int, method: str, target: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    sent = None if body is None else json.dumps(body)
    connection.request(method, target, sent, {"Content-Type": "application/json"} if sent else {})
    answer = connection.getresponse()
    result = answer.status, json.loads(answer.read())
    connection.close()
    return result


def test_responses_to_fifty_connections_equal_recommend(saved: Path, port: int) -> None:
    model = DRM.load(saved)
    users = model.interactions.user_ids.to_list()[:50]
    targets = [f"/recommendations?user={quote(user, safe='')}&k={1 + n % 30}" for n, user in enumerate(users)]
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda target: request(port, "GET", target), targets))
    for n, (user, (status, answer)) in enumerate(zip(users, answers, strict=True)):
        assert (status, answer["user"]) == (200, user)
        got = [(row["item"], row["score"]) for row in answer["items"]]
        assert got == model.recommend([user], k=1 + n % 30).select("item", "score").rows()


def test_every_operation_responds(saved: Path, port: int) -> None:
    model = DRM.load(saved)
    status, health = request(port, "GET", "/health")
    assert (status, health["model"], health["users"]) == (200, "songs", 80)
    status, answer = request(port, "POST", "/recommendations", {"liked": [1, "2"], "k": 4, "exclude": [3]})
    want = model.recommend_from([[1, 2]], k=4, without=[3])
    assert (status, [row["item"] for row in answer["items"]]) == (200, want["item"].to_list())
    status, answer = request(port, "GET", "/similar?item=5&k=3")
    assert [row["item"] for row in answer["items"]] == model.similar_items([5], k=3)["similar"].to_list()
    assert request(port, "GET", "/recommendations?user=x&k=31")[0] == 422
    assert request(port, "GET", "/recommendations?user=x")[0] == 404
    assert request(port, "DELETE", "/health")[0] == 405


def test_head_on_a_kept_connection(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG)
    connection.request("HEAD", "/health")
    head = connection.getresponse()
    assert (head.status, head.read()) == (200, b"")
    connection.request("GET", "/health")  # a body sent after the HEAD would be read as this response
    answer = connection.getresponse()
    text = answer.read()
    assert (answer.status, json.loads(text)["status"]) == (200, "ok")
    assert head.getheader("content-length") == str(len(text))
    connection.close()


def received(connection: socket.socket) -> bytes:
    answer = b""
    while not answer.endswith(b"}"):
        part = connection.recv(65536)
        assert part, answer
        answer += part
    return answer


def test_a_body_too_large_is_refused_before_it_is_read(port: int) -> None:
    head = "POST /recommendations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as connection:
        connection.sendall(f"{head}Content-Length: {MAX_BODY + 1}\r\n\r\n".encode())
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"error":"too large"' in answer
    with socket.create_connection(("127.0.0.1", port), timeout=HANG) as connection:
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for _ in range(MAX_BODY // 65536):
            connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        connection.sendall(b"1\r\n \r\n")  # one byte more than the limit, and no last chunk
        answer = received(connection)
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_example_request_and_ctrl_c(saved: Path) -> None:
    service = start(saved, "--port", 0)
    port, lines = first_lines(service)
    assert lines[0].startswith(f"serving {saved} at ")
    target = lines[1].split(f"try: curl 'http://127.0.0.1:{port}")[1].rstrip("'\n")
    status, answer = request(port, "GET", target)
    assert (status, len(answer["items"])) == (200, 10)
    check_shutdown(service, port, signal.SIGINT)


def failed_start(*arguments: object) -> tuple[int, str]:
    code, out, err = call("serve", *arguments)
    assert out == ""
    assert "Traceback" not in err
    return code, err


def test_a_port_in_use(saved: Path, port: int) -> None:
    code, error = failed_start(saved, "--port", port)
    assert (code, error.split(";")[0]) == (1, f"error: port {port} of 127.0.0.1 is in use")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--host", "203.0.113.7", "--port", 0), "error: cannot listen on 203.0.113.7, port 0: "),
        (("--host", "no such host"), "error: --host 'no such host' is not an address of this machine"),
        (("--port", 70000), "65535"),
        (("--max-k", 0), "--max-k"),
    ],
)
def test_bad_options(saved: Path, arguments: tuple[object, ...], says: str) -> None:
    code, error = failed_start(saved, *arguments)
    assert code == 2
    assert says in error


def test_without_the_extra(saved: Path) -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None; sys.argv = ['drm-triton', 'serve', sys.argv[1]]\n"
        "from drm_triton.cli import main; main()"
    )
    done = run_python("-c", code, saved)
    needed = "error: serve needs fastapi: pip install 'drm-triton[serve]'\n"
    assert (done.returncode, done.stderr) == (2, f"starting ...\n{needed}")


def test_a_warning_if_other_machines_can_connect(capsys: pytest.CaptureFixture[str]) -> None:
    for host, warned in (("127.0.0.1", False), ("0.0.0.0", True)):
        with socket.socket() as listener:
            listener.bind((host, 0))
            _announce(["a b/ü"], Path("runs/songs"), listener, has_token=False)
            url = f"http://{host}:{listener.getsockname()[1]}"
        out, err = capsys.readouterr()
        assert out.splitlines() == [
            f"serving runs/songs at {url} (Ctrl-C to stop)",
            f"try: curl '{url}/recommendations?user=a%20b%2F%C3%BC&k=10'",
        ]
        assert err.startswith("warning: listening on 0.0.0.0") if warned else err == ""


def test_the_files_for_containers_use_options_and_files_that_exist(repository: Path) -> None:
    """No container is built here, so this is what can be checked."""
    import typer

    from drm_triton.cli import app

    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {name for parameter in command.params for name in parameter.opts}
    for name in ("Dockerfile", "compose.yaml"):
        text = (repository / "deploy" / name).read_text("utf-8")
        lists = re.findall(r"^(?:CMD|ENTRYPOINT) (\[[^\]]*\])|command: (\[[^\]]*\])", text, re.MULTILINE)
        used = {word for pair in lists for word in json.loads("".join(pair)) if word.startswith("--")}
        assert used
        assert used <= options
    kept = re.findall(r"^!(.+)$", (repository / "deploy" / "Dockerfile.dockerignore").read_text("utf-8"), re.MULTILINE)
    assert all((repository / name).exists() for name in kept)
