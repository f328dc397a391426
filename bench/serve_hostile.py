"""Hostile clients of the service, for `bench.serve`.

Half-sent headers, many requests without reading an answer, a long list of bad ids, many unknown fields, generated
requests.
"""

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
UNREAD, PIPELINED, FIELDS = 20, 20_000, 100_000
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


def ask_beside(port: int, mode: str, connections: int, sent: bytes) -> dict[str, Any]:
    """Open connections that send as much as is taken and read nothing, and ask beside them."""
    request = b"GET /recommendations?user=1&k=10 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    opened = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(connections)]
    for connection in opened:
        connection.setblocking(False)
        connection.send(sent)
    answers = [ask(port, request) for _ in range(ASKED)]
    for connection in opened:
        connection.close()
    p50, p99 = np.quantile([seconds for _, seconds in answers], [0.5, 0.99]) * 1e3
    good = sum(status == 200 for status, _ in answers)
    found = {"mode": mode, "connections": connections, "requests": ASKED, "answered": good}
    return {**found, "p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2)}


def half_sent_headers(port: int) -> dict[str, Any]:
    """Hold connections with half-sent headers, more than the service has descriptors."""
    return ask_beside(port, "half-sent headers", HALF_SENT, HALF)


def pipelined(port: int, pid: int) -> dict[str, Any]:
    """Send many small requests on each connection before an answer is read; also return the memory that they took."""
    before = peak_mb(pid)
    row = ask_beside(port, "pipelined", UNREAD, b"GET / HTTP/1.1\r\nHost:1\r\n\r\n" * PIPELINED)
    return {**row, "added_mb": peak_mb(pid) - before}


def peak_mb(pid: int) -> int:
    """Return the largest resident memory of a process so far, in MB."""
    (kib,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kib) * 1024 // 10**6


def long_list(port: int) -> dict[str, Any]:
    """Send a body full of ids that are none."""
    return refused(port, "long list", b'{"liked": [1], "exclude": [' + b",".join([b"{}"] * BAD_IDS) + b"]}")


def many_fields(port: int) -> dict[str, Any]:
    """Send a body full of fields that do not exist."""
    return refused(port, "many fields", b"{" + b",".join(b'"%d":1' % number for number in range(FIELDS)) + b"}")


def refused(port: int, mode: str, body: bytes) -> dict[str, Any]:
    """Send a body that must be refused."""
    head = (
        "POST /recommendations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    status, seconds = ask(port, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return {"mode": mode, "requests": 1, "answered": int(status == 422), "max_ms": round(1e3 * seconds, 2)}


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
    with running(path, descriptors=DESCRIPTORS) as (port, pid):
        rows = [half_sent_headers(port), pipelined(port, pid), long_list(port), many_fields(port)]
        rows.append(generated_requests(port, examples))
    for row in rows:
        print(f"{row['mode']}: {row['answered']} of {row['requests']} answered as they should", flush=True)
    return rows
