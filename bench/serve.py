"""Latency and throughput of the service over a socket, and hostile clients: top 10 of 28.8K items, d = 64.

    python -m bench.serve [--rate 2000] [--connections 32] [--seconds 10] [--rounds 3] [--examples 300]

`drm-triton serve` runs in one process and the client in another, on the same cores, with keep-alive connections. Each
request is for the top 10 of a random user, without seen items. Modes:

    rate   : a fixed number of requests per second, each sent at its due time on a free connection. The latency counts
             from the due time, so it includes the time that a request waits for a connection. The client collects no
             garbage meanwhile, because its own pauses would count.
    closed : each connection sends its next request when the last response has arrived. This measures the throughput.
    likes  : like closed, for `POST /recommendations` with 10 liked items, which fits a vector for each request.
    wrk    : like closed, with the client wrk, which is written in C and takes less of the cores, for one user.

`server` is `drm-triton`, or `bare`: a FastAPI application on the same web server that gives the same answer each time,
a constant. It bounds what any service of this kind can reach here. The servers take turns.

Afterwards `bench.serve_hostile` sends half-sent headers, many requests without reading an answer, a long list of bad
ids, many unknown fields and generated requests.

The scores of one request are 28.8K x 64 multiply-adds and read 7.4 MB.
"""

import argparse
import asyncio
import gc
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton.bench.record import environment, save
from drm_triton.bench.serve_hostile import hostile, service

USERS, ITEMS, INTERACTIONS, FACTORS, K, LIKED = 15_500, 28_800, 558_000, 64, 10, 10
WARM_UP = 1.0  # seconds, not counted


class Connection:
    """A keep-alive connection with a minimal HTTP client, so that the client costs little time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(self, request: bytes) -> bytes:
        """Send a request and return the body of the response."""
        self.writer.write(request)
        head = await self.reader.readuntil(b"\r\n\r\n")
        body = await self.reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r} {body!r}")
        return body


def user_request() -> bytes:
    """Return a request for a random user."""
    return f"GET /recommendations?user={random.randrange(USERS)}&k={K} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def likes_request() -> bytes:
    """Return a request for a new user with random liked items."""
    body = json.dumps({"liked": random.sample(range(ITEMS), LIKED), "k": K}).encode()
    head = "POST /recommendations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def closed(port: int, connections: int, seconds: float, request: Callable[[], bytes]) -> dict[str, float]:
    """Send requests without pause on every connection."""
    start = time.perf_counter() + WARM_UP
    times: list[float] = []

    async def work(connection: Connection) -> None:
        while (sent := time.perf_counter()) < start + seconds:
            await connection.send(request())
            if sent >= start:
                times.append(time.perf_counter() - sent)

    await asyncio.gather(*[work(await Connection.open(port)) for _ in range(connections)])
    return summary(times, seconds)


async def at_rate(port: int, connections: int, seconds: float, rate: float) -> dict[str, float]:
    """Send `rate` requests per second, regardless of the responses."""
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(await Connection.open(port))
    start = time.perf_counter() + 0.1
    times: list[float] = []

    async def one(due: float) -> None:
        connection = await free.get()
        await connection.send(user_request())
        free.put_nowait(connection)
        if due >= start + WARM_UP:
            times.append(time.perf_counter() - due)

    tasks = []
    for number in range(int(rate * (seconds + WARM_UP))):
        due = start + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(due)))
    await asyncio.gather(*tasks)
    return summary(times, max(seconds, time.perf_counter() - start - WARM_UP))


def summary(times: list[float], seconds: float) -> dict[str, float]:
    """Return throughput and latencies."""
    p50, p99 = np.quantile(times, [0.5, 0.99]) * 1e3
    return {
        "requests_per_second": round(len(times) / seconds, 1),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "max_ms": round(max(times) * 1e3, 2),
        "requests": len(times),
    }


def client(port: int, mode: str, connections: int, seconds: float, rate: float) -> None:
    """Run the client, in a separate process, and print the summary."""
    gc.freeze()
    gc.disable()  # a collection over the tasks of all requests holds up the client, and would count as latency
    if mode == "rate":
        result = asyncio.run(at_rate(port, connections, seconds, rate))
    else:
        result = asyncio.run(closed(port, connections, seconds, likes_request if mode == "likes" else user_request))
    print(json.dumps(result))


def make_model(path: Path) -> None:
    """Train a model of the size of SketchFab for one epoch. The values of the factors do not change the work."""
    import polars as pl

    from drm_triton import DRM, Dataset
    from drm_triton.data.prepare.synthetic import Shape, generate

    users, items = generate(Shape(USERS, ITEMS, INTERACTIONS), 0)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}), ratios=(1, 0, 0))
    assert (data.n_users, data.n_items) == (USERS, ITEMS)
    DRM(factors=FACTORS, epochs=1, eval_every=0).fit(data).save(path)


def bare(port: int) -> None:
    """Serve a constant answer with FastAPI, as the least that a service can do."""
    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    app = FastAPI()
    answer = {"user": 1, "items": [{"item": 12345 + rank, "score": 0.6459183692932129} for rank in range(K)]}

    @app.get("/recommendations")
    async def recommend(user: str, k: int = 10, exclude_seen: bool = True) -> JSONResponse:
        return JSONResponse(answer)

    uvicorn.run(app, port=port, log_level="error", access_log=False, ws="none", lifespan="off", server_header=False)


@contextmanager
def bare_service() -> Iterator[int]:
    """Run `bare` in a process, and give its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    process = subprocess.Popen([sys.executable, "-m", "bench.serve", "--bare", str(port)])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=2000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--examples", type=int, default=300, help="requests that schemathesis generates per operation")
    parser.add_argument("--model", type=Path, help="use this model instead of training one")
    parser.add_argument("--client", nargs=2, metavar=("PORT", "MODE"), help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client(int(args.client[0]), args.client[1], args.connections, args.seconds, args.rate)
        return
    if args.bare:
        bare(args.bare)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder) / "model"
        if not args.model:
            make_model(path)
        with service(path) as ours, bare_service() as constant:
            rows = measure({"drm-triton": ours, "bare": constant}, args)
        rows += hostile(path, args.examples)
    size = {"users": USERS, "items": ITEMS, "factors": FACTORS, "k": K}
    save("serve", {"command": " ".join(["python -m bench.serve", *sys.argv[1:]]), **environment(), **size}, rows)


def measure(ports: dict[str, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the client in each mode against each server, for some rounds."""
    rows = []
    modes = [("rate", args.connections), ("closed", 1), ("closed", args.connections), ("wrk", args.connections)]
    runs = [(mode, n, server) for mode, n in modes for server in ports if mode != "wrk" or shutil.which("wrk")]
    runs.append(("likes", args.connections, "drm-triton"))
    for number in range(args.rounds):
        for mode, connections, server in runs:
            found = send_load(ports[server], mode, connections, args)
            row = {"round": number + 1, "server": server, "mode": mode, "connections": connections, **found}
            row["load"] = environment()["load"]
            rows.append(row)
            print(
                f"{server:>10} {mode:>6}, {connections:>3} connections: {row['requests_per_second']:>7,.1f} per s, "
                f"p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms (load {row['load']})",
                flush=True,
            )
    return rows


def send_load(port: int, mode: str, connections: int, args: argparse.Namespace) -> dict[str, float]:
    """Run one client in a process of its own and return its summary."""
    if mode == "wrk":
        target = f"http://127.0.0.1:{port}/recommendations?user=77&k={K}"
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(args.seconds))}s", "--latency", target]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        if "Non-2xx" in text or "Socket errors" in text:
            raise RuntimeError(text)
        scale = {"us": 1e-3, "ms": 1.0, "s": 1e3}
        latency = {
            share: float(value) * scale[unit] for share, value, unit in re.findall(r"(\d+)% +([\d.]+)(us|ms|s)", text)
        }
        rate = float(re.findall(r"Requests/sec: +([\d.]+)", text)[0])
        total = int(re.findall(r"(\d+) requests in", text)[0])
        quantiles = {"p50_ms": round(latency["50"], 2), "p99_ms": round(latency["99"], 2)}
        return {"requests_per_second": round(rate, 1), **quantiles, "requests": total}
    options = ["--connections", connections, "--seconds", args.seconds, "--rate", args.rate]
    command = [sys.executable, "-m", "bench.serve", "--client", str(port), mode, *map(str, options)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
