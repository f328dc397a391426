"""Hostile clients of the service, for `bench.serve`: half-sent headers, a long list of bad ids, generated requests."""

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

HALF_SENT, DESCRIPTORS, ASKED, BAD_IDS = 300, 256, 200, 340_000
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Half: "


@contextmanager
def running(path: Path, *options: str, descriptors: int | None = None) -> Iterator[tuple[int, int]]:
    """Run `drm-triton serve` and give its port and the id of its process."""
    command = [sys.executable, "-m", "drm_triton", "serve", str(path), "--port", "0", *options]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh", *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().split("http://127.0.0.1:")[1].split()[0]), process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


@contextmanager
def service(path: Path, *options: str, descriptors: int | None = None) -> Iterator[int]:
    """Run `drm-triton serve` and give its port."""
    with running(path, *options, descriptors=descriptors) as (port, _):
        yield port


def ask(port: int, request: bytes) -> tuple[int, float]:
    """Send one request on a new connection; return its status and its seconds."""
    start = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return int(answer.split()[1]), time.perf_counter() - start


def half_sent_headers(port: int) -> dict[str, Any]:
    """Hold connections with half-sent headers, more than the service has descriptors, and ask beside them."""
    request = b"GET /recommendations?user=1&k=10 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    slow = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(HALF_SENT)]
    for connection in slow:
        connection.sendall(HALF)
    answers = [ask(port, request) for _ in range(ASKED)]
    for connection in slow:
        connection.close()
    p50, p99 = np.quantile([seconds for _, seconds in answers], [0.5, 0.99]) * 1e3
    good = sum(status == 200 for status, _ in answers)
    found = {"mode": "half-sent headers", "connections": HALF_SENT, "requests": ASKED, "answered": good}
    return {**found, "p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2)}


def long_list(port: int) -> dict[str, Any]:
    """Send a body full of ids that are none."""
    body = b'{"liked": [1], "exclude": [' + b",".join([b"{}"] * BAD_IDS) + b"]}"
    head = (
        "POST /recommendations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    status, seconds = ask(port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return {"mode": "long list", "requests": 1, "answered": int(status == 422), "max_ms": round(1e3 * seconds, 2)}


def generated_requests(port: int, examples: int) -> dict[str, Any]:
    """Have schemathesis generate requests from the description, good and bad, and compare the responses with it."""
    program = shutil.which("schemathesis") or str(Path(sys.executable).with_name("schemathesis"))
    command = [program, "run", f"http://127.0.0.1:{port}/openapi.json", "--max-examples", str(examples), "--no-color"]
    # Rules name attributes of the items, which no description can list, so a well-formed rule may be refused.
    command += ["--exclude-checks", "positive_data_acceptance"]
    with tempfile.TemporaryDirectory() as folder:  # it leaves files behind
        done = subprocess.run([*command, "--seed", "0"], capture_output=True, text=True, cwd=folder)
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(done.stdout[-3000:] + done.stderr)
    return {"mode": "schemathesis", "requests": int(found[1]), "answered": int(found[2])}


def hostile(path: Path, examples: int) -> list[dict[str, Any]]:
    """Run all hostile clients against one service with few descriptors."""
    with service(path, descriptors=DESCRIPTORS) as port:
        rows = [half_sent_headers(port), long_list(port), generated_requests(port, examples)]
    for row in rows:
        print(f"{row['mode']}: {row['answered']} of {row['requests']} answered as they should", flush=True)
    return rows
