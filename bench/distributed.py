"""Steps of several processes: bytes against the plan, time against one process, memory; and over a slow network.

    python -m bench.distributed [--scale 0.25] [--rounds 3] [--steps 20] [--network | --estimate]

One process with all cores, and worlds of 1, 2 and 4 ranks that share the cores, take the same steps in turns, each in
new processes. Time is the median of a step, then of the rounds. The time of the processor is that of all ranks, which
other work on the machine changes less. The plan counts what a rank sends in a step of lists:

    f = (W - 1) / W      of the rows that are needed belong to another rank
    items = lists rho + groups eta, users = lists      rows that the lists of a rank need, at most
    bytes = f (4 (1 + d) (items + users) + (16 + 4 d) items + 4 (1 + d) users)

that is ids and rows of items and users, then terms of items (row, source, coefficient, total, and a vector) and
gradients of users. Rows that several lists need are counted once for each, so that the plan is an upper bound. Over the
whole catalogue, a rank sends 4 f d bytes for each row of the pool or catalogue that it fetches, and one or two sums of
as many gradients.

--network takes the same steps on two hosts: network namespaces of this machine (root and iproute2 are needed), with a
link of 1 Gbit/s between them. --estimate prints the table of estimates for GPUs in docs/scaling.md. Results:
results/distributed.json and .md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drm_triton.bench.record import RESULTS, Row, environment

SETTINGS: list[dict[str, Any]] = [
    {"objective": "hinge+drm", "batch_size": 2048},
    {"objective": "hinge+drm", "batch_size": 16384},
    {"objective": "hinge+drm", "batch_size": 65536},
    {"objective": "softmax", "batch_size": 256, "pool": 8192},
    {"objective": "softmax", "batch_size": 2048, "pool": 8192},
]
WORLDS = (0, 1, 2, 4)  # 0: one process without torch.distributed
HOSTS, RATE = ("drm-host-0", "drm-host-1"), "1gbit"
ADDRESSES = ("10.99.77.1", "10.99.77.2")


def planned(options: dict[str, Any], world: int, d: int = 64, eta: int = 45, share: int = 32, rho: int = 1) -> float:
    """Return the bytes that a rank sends in a step of lists, at most."""
    lists: float = options["batch_size"] / world
    items, users = lists * rho + lists / share * eta, lists
    away = (world - 1) / world
    return away * (4 * (1 + d) * (items + users) + (16 + 4 * d) * items + 4 * (1 + d) * users)


GPU_LIST = 2.7e-9  # seconds of a list on an H100, estimated: results/gpu_counts.md
LATENCY = {"NVLink": 25e-6, "InfiniBand": 40e-6}  # seconds of an exchange without bytes, assumed
BANDWIDTH = {"NVLink": 450e9, "InfiniBand": 50e9}  # bytes per second and direction: H100 SXM, and 400 Gbit/s
EXCHANGES = 5  # of a step: sizes and ids, rows, sizes and terms with the losses


def estimated(lists: int, link: str, world: int = 8, d: int = 64, n: int = 46) -> dict[str, float]:
    """Return the parts of the estimated time of a step on GPUs, in seconds. Not measured.

    On a GPU, terms are sent one by one, and the vector of a list once to each rank that needs it.
    """
    own, away = lists / world, (world - 1) / world
    items, users = own * (1 + 45 / 32), own
    rows = 4 * (1 + d) * (items + users)
    terms = own * (16 * n + 4 * d * min(world, n)) + 4 * (1 + d) * users
    return {
        "kernels": own * GPU_LIST,
        "bytes": away * (rows + terms) / BANDWIDTH[link],
        "exchanges": EXCHANGES * LATENCY[link],
        "MB": away * (rows + terms) / 1e6,
    }


def estimates() -> str:
    """Return the table of estimates."""
    lines = [
        "| 8 GPUs on | lists in a step | kernels, µs | bytes on the link | exchanges | million lists a second |",
        "|---|---|---|---|---|---|",
    ]
    for link in BANDWIDTH:
        for lists in (16384, 65536, 262144):
            parts = estimated(lists, link)
            total = parts["kernels"] + parts["bytes"] + parts["exchanges"]
            times = " | ".join(f"{1e6 * parts[name]:,.0f}" for name in ("kernels", "bytes", "exchanges"))
            lines.append(f"| {link} | {lists:,} | {times} | {lists / total / 1e6:,.0f} |")
    return "\n".join(lines) + "\n"


def work(path: str, options: dict[str, Any], steps: int) -> None:
    """Take some steps in this process, alone or as a rank; rank 0 prints the result."""
    import torch

    from drm_triton import Dataset
    from drm_triton.cli.together import launched
    from drm_triton.config import TrainConfig
    from drm_triton.distributed.engine import Distributed
    from drm_triton.distributed.rows import Division
    from drm_triton.distributed.start import initial_shard
    from drm_triton.distributed.world import World
    from drm_triton.kernels import use_backend
    from drm_triton.training.engine import Engine, SingleProcess
    from drm_triton.training.loop import initial_state
    from drm_triton.training.preflight import warm_up
    from drm_triton.training.step import learning_rate

    config = TrainConfig(init="normal", **options)
    backend, device = use_backend("cpu")
    warm_up(config, backend, device)
    data = Dataset.load(path)
    world = World.joined() if launched() else World()
    world.use(device)
    before = resident()
    engine: Engine
    if launched():
        users, items = Division(data.n_users, world.size), Division(data.n_items, world.size)
        state = initial_shard(world, config, data.train, users, items)
        tables = resident() - before
        engine = Distributed(world, state, users, items, config, data, data.train, backend)
    else:
        state = initial_state(config, data.train, device)
        tables = resident() - before
        engine = SingleProcess(state, config, data, data.train, backend)
    times, sent, processor = [], 0, 0.0
    for number in range(steps + 3):
        if number == 3:
            sent, processor = world.sent, time.process_time()
        world.any(False)  # start together
        began = time.perf_counter()
        engine.step(min(state.position + config.batch_in_force, engine.n_lists), learning_rate(state, config, 10**9))
        times.append(time.perf_counter() - began)
        if state.position == engine.n_lists:
            state.start_epoch()
    row = {
        "seconds": statistics.median(times[3:]),
        "processor": (time.process_time() - processor) / steps,
        "sent": (world.sent - sent) / steps - 8 * (world.size - 1),  # without the signal to start
        "tables": tables,
        "checksum": sum(int(table.view(torch.int32).long().sum()) for table in (state.U, state.V)),
    }
    rows = world.gather_objects(row)
    if world.first:
        sums = {name: sum(one[name] for one in rows) for name in ("checksum", "processor")}
        print(json.dumps({**rows[0], **sums, **{name: max(one[name] for one in rows) for name in ("sent", "tables")}}))
    world.leave()


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    text = Path("/proc/self/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def launch(arguments: list[str], world: int, hosts: int = 1) -> Row:
    """Run `work` in new processes; return what it prints."""
    worker = ["-m", "drm_triton.bench.distributed", "--work", *arguments]
    if world == 0:
        commands = [[sys.executable, *worker]]
    elif hosts == 1:
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        commands = [[sys.executable, *run, *worker]]
    else:
        text = f"-m torch.distributed.run --nnodes {hosts} --nproc-per-node {world // hosts} --master-port 29677"
        commands = [
            ["ip", "netns", "exec", host, sys.executable, *text.split(), "--node-rank", str(number), "--master-addr",
             ADDRESSES[0], *worker]
            for number, host in enumerate(HOSTS[:hosts])
        ]  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // max(1, world)))
    environment = os.environ | {"OMP_NUM_THREADS": threads, "NUMBA_NUM_THREADS": threads}
    if hosts > 1:
        environment["GLOO_SOCKET_IFNAME"] = "veth"
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate() for process in running]
    for process, (_, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"{' '.join(process.args)} failed:\n{errors[-3000:]}")  # type: ignore[arg-type]
    found: Row = json.loads(outputs[0][0].strip().splitlines()[-1])
    return found


@contextmanager
def two_hosts() -> Iterator[None]:
    """Make two network namespaces with a link of RATE between them, and remove them afterwards."""

    def run(command: str, check: bool = True) -> None:
        subprocess.run(command.split(), check=check, capture_output=not check)

    for host in HOSTS:
        run(f"ip netns del {host}", check=False)
    try:
        for host in HOSTS:
            run(f"ip netns add {host}")
        run(f"ip link add veth netns {HOSTS[0]} type veth peer name veth netns {HOSTS[1]}")
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            run(f"ip -n {host} addr add {address}/24 dev veth")
            for device in ("lo", "veth"):
                run(f"ip -n {host} link set {device} up")
            run(f"ip netns exec {host} tc qdisc add dev veth root tbf rate {RATE} burst 256kb latency 50ms")
        yield
    finally:
        for host in HOSTS:
            run(f"ip netns del {host}", check=False)


def label(options: dict[str, Any]) -> str:
    """Return a setting as text."""
    return f"{options['objective']}, {options['batch_size']:,} lists"


def measure(path: Path, rounds: int, steps: int) -> list[Row]:
    """Take steps in worlds of all sizes, in turns."""
    found: dict[tuple[int, int], list[Row]] = {}
    for _ in range(rounds):
        for number, options in enumerate(SETTINGS):
            for world in WORLDS:
                row = launch([str(path), json.dumps(options), str(steps)], world)
                found.setdefault((number, world), []).append(row)
                print(label(options), "world", world, row, flush=True)
    rows = []
    for (number, world), several in found.items():
        options = SETTINGS[number]
        alone = statistics.median(row["seconds"] for row in found[number, 0])
        seconds = statistics.median(row["seconds"] for row in several)
        rows.append(
            {
                "setting": label(options),
                "ranks": world,
                "seconds": seconds,
                "rate": alone / seconds,
                "processor": statistics.median(row["processor"] for row in several),
                "sent": several[0]["sent"],
                "planned": planned(options, world) if world and options["objective"] != "softmax" else None,
                "tables": statistics.median(row["tables"] for row in several),
                "checksum": several[0]["checksum"],
            }
        )
    return rows


def measure_network(path: Path, steps: int) -> list[Row]:
    """Take steps on two hosts over a slow link, and on one host."""
    rows = []
    with two_hosts():
        for options in SETTINGS[1:3]:
            arguments = [str(path), json.dumps(options), str(steps)]
            near, far = launch(arguments, 2), launch(arguments, 2, hosts=2)
            line = 8 * far["sent"] / 1e9  # each direction of the link carries what one rank sends
            rows.append(
                {
                    "setting": label(options),
                    "one host": near["seconds"],
                    "two hosts": far["seconds"],
                    "of the bytes": line,
                    "same bits": near["checksum"] == far["checksum"],
                }
            )
            print(rows[-1], flush=True)
    return rows


def report(stored: dict[str, Any]) -> str:
    """Return the tables."""
    header = stored["environment"]
    lines = [
        "# Steps of several processes",
        "",
        f"{header['processor']}, {len(os.sched_getaffinity(0))} cores, {header['date'][:10]}, load {header['load']}. "
        f"Data: {stored['data']}. `python -m bench.distributed`.",
        "",
        "| setting | ranks | ms a step | rate (one process: 1) | processor ms, all ranks | MB sent by a rank | "
        "planned, at most | MB of tables |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in stored["rows"]:
        planned_mb = "" if row["planned"] is None else f"{row['planned'] / 1e6:.2f}"
        lines.append(
            f"| {row['setting']} | {row['ranks'] or 'one process'} | {1e3 * row['seconds']:.1f} | {row['rate']:.2f} | "
            f"{1e3 * row['processor']:.0f} | {max(0, row['sent']) / 1e6:.2f} | {planned_mb} | "
            f"{row['tables'] / 1e6:.0f} |"
        )
    if stored.get("network"):
        lines += [
            "",
            f"Two ranks on one host, and on two hosts with a link of {RATE} (`--network`):",
            "",
            "| setting | one host, ms | two hosts, ms | ms that the bytes take on the link | same bits |",
            "|---|---|---|---|---|",
        ]
        for row in stored["network"]:
            times = " | ".join(f"{1e3 * row[name]:.0f}" for name in ("one host", "two hosts", "of the bytes"))
            lines.append(f"| {row['setting']} | {times} | {'yes' if row['same bits'] else 'NO'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", default="0.25", help="size of the generated data, relative to Melon")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--network", action="store_true", help="only the two hosts; keeps the other results")
    parser.add_argument("--estimate", action="store_true", help="print estimates for GPUs, and measure nothing")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        path, options, steps = arguments.work
        work(path, json.loads(options), int(steps))
        return
    if arguments.estimate:
        print(estimates())
        return
    folder = Path("data") / f"melon-{arguments.scale}"
    if not folder.exists():
        command = f"prepare melon --synthetic --scale {arguments.scale} --out {folder} -q"
        subprocess.run([sys.executable, "-m", "drm_triton", *command.split()], check=True)
    file = RESULTS / "distributed.json"
    stored = json.loads(file.read_text()) if file.exists() else {}
    if arguments.network:
        stored["network"] = measure_network(folder, arguments.steps)
    else:
        stored["rows"] = measure(folder, arguments.rounds, arguments.steps)
        stored["data"] = f"generated, Melon at scale {arguments.scale}"
        stored["environment"] = environment()
    file.write_text(json.dumps(stored, indent=1) + "\n")
    (RESULTS / "distributed.md").write_text(report(stored))
    print(report(stored))


if __name__ == "__main__":
    main()
