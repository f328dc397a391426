"""Latency and throughput of the service over a socket: top 10 of 28.8K items, d = 64.

    python -m bench.serve [--rate 500] [--connections 32] [--seconds 10] [--rounds 3]

`drm-triton serve` runs in one process and the client in another, on the same cores, with keep-alive connections. Each
request is for the top 10 of a random user, without seen items. Modes:

    rate   : a fixed number of requests per second, each sent at its due time on a free connection. The latency counts
             from the due time, so it includes the time that a request waits for a connection.
    closed : each connection sends its next request when the last response has arrived. This measures the throughput.
    likes  : like closed, for `POST /recommendations` with 10 liked items, which fits a vector for each request.

The scores of one request are 28.8K x 64 multiply-adds and read 7.4 MB.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton.bench.record import environment, save

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=500)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, help="use this model instead of training one")
    parser.add_argument("--client", nargs=2, metavar=("PORT", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        client(int(args.client[0]), args.client[1], args.connections, args.seconds, args.rate)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder) / "model"
        if not args.model:
            make_model(path)
        command = [sys.executable, "-m", "drm_triton", "serve", str(path), "--port", "0"]
        service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert service.stdout is not None
            port = service.stdout.readline().split("http://127.0.0.1:")[1].split()[0]
            rows = measure(port, args)
        finally:
            service.terminate()
            service.wait(timeout=30)
    size = {"users": USERS, "items": ITEMS, "factors": FACTORS, "k": K}
    save("serve", {"command": " ".join(["python -m bench.serve", *sys.argv[1:]]), **environment(), **size}, rows)


def measure(port: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the client in each mode, for some rounds."""
    rows = []
    modes = [("rate", args.connections), ("closed", 1), ("closed", args.connections), ("likes", args.connections)]
    for number in range(args.rounds):
        for mode, connections in modes:
            options = ["--connections", connections, "--seconds", args.seconds, "--rate", args.rate]
            command = [sys.executable, "-m", "bench.serve", "--client", port, mode, *map(str, options)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            row = {"round": number + 1, "mode": mode, "connections": connections, **json.loads(done.stdout)}
            row["load"] = environment()["load"]
            rows.append(row)
            print(
                f"{mode:>6}, {connections:>3} connections: {row['requests_per_second']:>7,.1f} requests/s, "
                f"p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms (load {row['load']})",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    main()
