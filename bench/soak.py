"""The service for a long time: mixed requests at a fixed rate, and a new model every minute.

    python -m bench.soak [--minutes 30] [--rate 20] [--every 60] [--workers 2] [--save]

The requests are for users of the training data, for new users, for similar items, for items by text, for users whom
the model does not know (404) and with a bad k (422). Two models take turns at the path of the service: one is moved
away, the other moved there, and `POST /reload` asks for it. Measured are the latency, from the time at which a request
is due, and the memory of all processes of the service. The command fails if a response has another status than it
should, if a list for a user is not exactly that of one of the two models, if a reload fails, or if the memory grows by
more than 5 % from the second quarter of the time to the last (medians).
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from drm_triton import Dataset
from drm_triton.bench.record import environment, save
from drm_triton.bench.serve_hostile import running
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.models import IALS

USERS, ITEMS, INTERACTIONS, K = 3000, 4000, 60_000, 10
TOKEN = "a-token-for-the-soak"
GROWTH = 1.05
HEAD = f"Host: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"

Lists = list[dict[int, list[Any]]]  # of each model, by user


def make_models(folder: Path) -> Lists:
    """Save two models of the same data, and return what each recommends to every user."""
    users, items = generate(Shape(USERS, ITEMS, INTERACTIONS), 0)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}), ratios=(1, 0, 0))
    lists = []
    for name, factors in (("served", 16), ("other", 24)):
        model = IALS(factors=factors, epochs=2).fit(data)
        model.save(folder / name)
        frame = model.recommend(k=K).group_by("user", maintain_order=True).agg("item")
        lists.append(dict(zip(frame["user"].to_list(), frame["item"].to_list(), strict=True)))
    return lists


def draw(rng: random.Random) -> tuple[str, str, str, int, int | None]:
    """Return method, target and body of a random request, its right status, and its user if it is for one."""
    user, item = rng.randrange(USERS), rng.randrange(ITEMS)
    liked = json.dumps({"liked": rng.sample(range(ITEMS), 5), "k": K, "unknown": "popular"})
    return rng.choices(
        [
            ("GET", f"/recommendations?user={user}&k={K}", "", 200, user),
            ("POST", "/recommendations", liked, 200, None),
            ("GET", f"/items?query={item}&k=5", "", 200, None),
            ("GET", "/health", "", 200, None),
            ("GET", "/metrics", "", 200, None),
            ("GET", "/recommendations?user=nobody", "", 404, None),
            ("GET", f"/recommendations?user={user}&k=0", "", 422, None),
        ],
        [50, 20, 10, 5, 5, 5, 5],
    )[0]


async def ask(port: int, method: str, target: str, body: str = "") -> tuple[int, bytes]:
    """Send one request on a new connection; return status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    writer.write(f"{method} {target} HTTP/1.1\r\n{HEAD}{kind}Connection: close\r\n\r\n{body}".encode())
    answer = await reader.read()
    writer.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]) if head else 0, rest


class Soak:
    """The state of a run: latencies, errors, memory."""

    def __init__(self, port: int, process: int, folder: Path, lists: Lists) -> None:
        self.port, self.process, self.folder, self.lists = port, process, folder, lists
        self.times: list[float] = []
        self.errors: Counter[str] = Counter()
        self.memory: list[float] = []  # MB, in the order of time
        self.reloads = 0

    async def one(self, due: float, rng: random.Random) -> None:
        """Send a request, and check its response."""
        method, target, body, right, user = draw(rng)
        try:
            status, answer = await ask(self.port, method, target, body)
        except OSError as error:
            self.errors[type(error).__name__] += 1
            return
        self.times.append(time.monotonic() - due)
        if status != right:
            self.errors[f"status {status} instead of {right}"] += 1
        elif user is not None:
            found = [row["item"] for row in json.loads(answer)["items"]]
            if found not in [known[user] for known in self.lists]:
                self.errors["a list of neither model"] += 1

    async def reload(self) -> None:
        """Put the other model in place, and have it loaded."""
        served, other, aside = (self.folder / name for name in ("served", "other", "aside"))
        served.rename(aside)
        other.rename(served)
        aside.rename(other)
        status, answer = await ask(self.port, "POST", "/reload")
        self.reloads += status == 200
        if status != 200:
            self.errors[f"reload: {status} {answer[:100]!r}"] += 1

    def weigh(self) -> None:
        """Note the memory of all processes of the service: what is theirs alone, and their part of what is shared."""
        children = Path(f"/proc/{self.process}/task/{self.process}/children").read_text().split()
        total = 0
        for process in (str(self.process), *children):
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                total += int(line.split()[1]) if line.startswith("Pss:") else 0
        self.memory.append(total / 1024)

    async def run(self, seconds: float, rate: float, every: float) -> None:
        """Send requests at a rate, reload now and then."""
        rng, start, tasks = random.Random(0), time.monotonic(), set[asyncio.Task[None]]()
        next_reload, next_weighing = start + every, start
        for number in range(int(seconds * rate)):
            due = start + number / rate
            if (wait := due - time.monotonic()) > 0:
                await asyncio.sleep(wait)
            work = [self.one(due, rng)]
            if due >= next_reload:
                next_reload += every
                work.append(self.reload())
            for part in work:
                task = asyncio.create_task(part)
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            if due >= next_weighing:
                next_weighing += 10
                self.weigh()
        await asyncio.gather(*tasks)

    def growth(self) -> float:
        """Return the memory in the last quarter of the time, relative to the second."""
        part = max(1, len(self.memory) // 4)
        return statistics.median(self.memory[-part:]) / statistics.median(self.memory[part : 2 * part] or self.memory)


def main() -> None:
    """Run, print the result, and exit with 1 if it is not what it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=float, default=20, help="requests per second")
    parser.add_argument("--every", type=float, default=60, help="seconds between reloads")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write bench/results/soak.json and soak.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drm-soak-") as folder:
        lists = make_models(Path(folder))
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        options = ["--workers", str(args.workers), "--token-file", str(token)]
        with running(Path(folder) / "served", *options) as (port, process):
            soak = Soak(port, process, Path(folder), lists)
            asyncio.run(soak.run(60 * args.minutes, args.rate, args.every))
    p50, p99 = np.quantile(soak.times, [0.5, 0.99]) * 1e3
    row = {
        "minutes": args.minutes,
        "requests_per_second": args.rate,
        "workers": args.workers,
        "requests": len(soak.times),
        "reloads": soak.reloads,
        "errors": sum(soak.errors.values()),
        "p50_ms": round(float(p50), 1),
        "p99_ms": round(float(p99), 1),
        "memory_mb": round(statistics.median(soak.memory), 1),
        "memory_growth": round(soak.growth(), 4),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(row), *soak.errors.items(), sep="\n")
    if args.save:
        save("soak", environment(), [row])
    sys.exit(bool(soak.errors) or row["memory_growth"] > GROWTH)


if __name__ == "__main__":
    main()
