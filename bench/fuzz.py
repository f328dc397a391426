"""Fuzzing of what the program reads: raw tables, data sets, model files, configurations, files of a run, HTTP requests.

A case changes one input at random: bits, cut ends, blocks of zeros, repeated or inserted pieces, and in text also
values of extreme or wrong kinds. The input must then be refused with an `InputError` (or `DrmError`; for HTTP a status
from 400 to 499), or be read as what it was before. Everything else is a finding: another exception, a crash, a hang (20
s of processor time), 4 GB of memory, or damaged data that is accepted. Text carries no checksum, so a changed text may
be accepted as what it says now: a data set made of it must then be sound, and a response must be complete.

    python -m bench.fuzz --save                      # all cases, and bench/results/fuzz.jsonl and fuzz.md
    python -m bench.fuzz --kind store --cases 20000 --seed 7

A batch of cases is one process, forked from one that has imported everything. Batches that bench/results/fuzz.jsonl has
without a finding are not run again, so that a run can be stopped and continued. The inputs in `tests/bench/corpus` were
findings once, or are of a kind that would be; all of them must be refused.
"""

import argparse
import faulthandler
import json
import os
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from drm_triton.bench import fuzz_http
from drm_triton.bench.commands import MEMORY_DISK
from drm_triton.bench.fuzz_files import config_kind, model_kind, run_kind, shards_kind, store_kind, table_kind
from drm_triton.bench.record import RESULTS, environment
from drm_triton.errors import DrmError

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "bench" / "corpus"
MEMORY = 4 << 30  # bytes that the cases of a batch may take
SECONDS = 20  # of processor time for one case
WORDS = [
    b"-1", b"0", b"1e400", b"NaN", b"Infinity", b"null", b"true", b'""', b"[]", b"{}", b"99999999999999999999",
    b"9223372036854775807", b"-9223372036854775808", b"1.5", b'"x"', b"\xff\xfe", b"\x00", "٣".encode(), b"[" * 3000,
]  # fmt: skip


class Kind(Protocol):
    """Inputs of one kind, and how they are read.

    Attributes
    ----------
    inputs : the inputs that are changed, by name
    """

    inputs: dict[str, bytes]

    def read(self, name: str, content: bytes) -> str | None:
        """Read a changed input. Return what is wrong with what was accepted, None if nothing is.

        An input that is refused raises DrmError.
        """


# Each makes its inputs in a folder. The number is that of the cases of a run at full length: by what a case costs.
KINDS: dict[str, tuple[Callable[[Path], Kind], int]] = {
    "config": (config_kind, 400_000),
    "run": (run_kind, 100_000),
    "model": (model_kind, 200_000),
    "shards": (shards_kind, 20_000),
    "http": (fuzz_http.Requests, 220_000),
    "store": (store_kind, 50_000),
    "table": (table_kind, 30_000),
}
BATCHES = 10  # of each kind in a run at full length


def changed(content: bytes, rng: random.Random) -> bytes:
    """Return an input with one to four random changes."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(data) + 1)
        size = min(rng.choice([1, 2, 4, 8, 64, 4096]), len(data) - at)
        how = rng.randrange(7)
        if how == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at : at + size] = bytes(size)
        elif how == 3:
            data[at : at + size] = rng.randbytes(size)
        elif how == 4:
            data[at:at] = data[at : at + size]
        elif how == 5:
            del data[at : at + size]
        else:
            data[at : at + rng.choice([0, 1, 2, 4])] = rng.choice(WORDS)
        if not data:
            break
    return bytes(data)


class TooLong(BaseException):
    """A case has taken too much time. Not an Exception, so that no handler of the program takes it for its own."""


def finding(kind: Kind, name: str, content: bytes) -> str | None:
    """Read a changed input. Return what is wrong with the outcome, None if nothing is."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        return kind.read(name, content)
    except DrmError:
        return None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def fuzz(name: str, cases: int, seed: int, keep: Path | None = None) -> list[str]:
    """Read random changes of the inputs of a kind. Return the findings; `keep` is a folder for what led to them."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"more than {SECONDS} s")

    findings, rng = [], random.Random(seed)
    before = signal.signal(signal.SIGVTALRM, end) if hasattr(signal, "SIGVTALRM") else None
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY_DISK))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        kind = KINDS[name][0](Path(folder))
        names = sorted(kind.inputs)
        last = None if keep is None else stack.enter_context((keep / f"{name}--last--{seed}").open("wb", buffering=0))
        for number in range(cases):
            which = rng.choice(names)
            content = changed(kind.inputs[which], rng)
            if content == kind.inputs[which]:
                continue
            if last is not None:  # before it is read, which may be the end of the process
                last.seek(0)
                last.truncate()
                last.write(which.encode() + b"\n" + content)
            problem = finding(kind, which, content)
            if problem:
                findings.append(f"{name}, {which}, seed {seed}, case {number}: {problem}")
                if keep is not None:
                    (keep / f"{name}--{which}--{seed}-{number}").write_bytes(content)
    if before is not None:
        signal.signal(signal.SIGVTALRM, before)
    return findings


def refused(name: str, inputs: list[Path]) -> dict[str, str | None]:
    """Read kept inputs; return the error that refused each, None if one was accepted."""
    outcomes: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = KINDS[name][0](Path(folder))
        for path in inputs:
            try:
                kind.read(path.name.split("--")[1], path.read_bytes())
                outcomes[path.name] = None
            except DrmError as error:
                outcomes[path.name] = str(error)
    return outcomes


# -- batches -----------------------------------------------------------------------------------------------------------


def batch(name: str, cases: int, seed: int, keep: Path) -> tuple[list[str], float]:
    """Run cases in a fork, so that a crash is found and does not end the rest. Return findings and CPU seconds."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Polars prints each panic
        faulthandler.disable()
        with suppress(OSError, ValueError):
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
        try:
            found = fuzz(name, cases, seed, keep)
        except BaseException as error:
            found = [f"{name}, seed {seed}: the batch ended with {type(error).__name__}: {error}"]
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    findings = json.loads(text) if text else [f"{name}, seed {seed}: the process died ({code}); see {keep}"]
    return findings, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Fuzz in batches, each in a process of its own, and exit with 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=KINDS, help="all by default")
    parser.add_argument("--cases", type=int, help="cases of each kind, in one batch; by default a run at full length")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="folder for inputs of findings")
    parser.add_argument("--save", action="store_true", help="record the batches, and skip those that are recorded")
    args = parser.parse_args()
    args.keep.mkdir(parents=True, exist_ok=True)
    log, rows = RESULTS / "fuzz.jsonl", {}
    if args.save and log.exists():
        for line in log.read_text("utf-8").splitlines():
            row = json.loads(line)
            rows[row["kind"], row["seed"]] = row
    failed = False
    full = [(seed, name) for seed in range(args.seed, args.seed + BATCHES) for name in args.kind or KINDS]
    for seed, name in full if args.cases is None else full[: len(args.kind or KINDS)]:
        cases = args.cases or KINDS[name][1] // BATCHES
        if (name, seed) in rows and rows[name, seed]["cases"] == cases and not rows[name, seed]["findings"]:
            continue
        findings, seconds = batch(name, cases, seed, args.keep)
        failed = failed or bool(findings)
        print("\n".join([*findings, f"{name}, seed {seed}: {cases:,} cases, {seconds:.0f} s"]), flush=True)
        if args.save:
            about = {key: environment()[key] for key in ("date", "commit", "processor")}
            numbers = {"cases": cases, "findings": len(findings), "cpu_seconds": round(seconds, 1)}
            rows[name, seed] = {"kind": name, "seed": seed, **numbers, **about}
            RESULTS.mkdir(exist_ok=True)
            log.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), "utf-8")
            (RESULTS / "fuzz.md").write_text(table(list(rows.values())), "utf-8")
    sys.exit(failed)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the cases and findings of each kind as a table in Markdown."""
    lines = [
        "# Fuzzing",
        "",
        "`python -m bench.fuzz --save`; the batches, with dates and commits, are in fuzz.jsonl.",
        "",
    ]
    lines += ["| kind | cases | findings | CPU seconds | CPU ms of a case |", "|---|---|---|---|---|"]
    sums = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS} | {"all": rows}
    for kind, found in sums.items():
        cases, findings, seconds = (sum(row[key] for row in found) for key in ("cases", "findings", "cpu_seconds"))
        if cases:
            lines.append(f"| {kind} | {cases:,} | {findings} | {seconds:,.0f} | {1000 * seconds / cases:.2f} |")
    last = max(rows, key=lambda row: row["date"])
    return "\n".join([*lines, "", f"{last['processor']}, {last['date'][:10]}, commit {last['commit']}.", ""])


if __name__ == "__main__":
    main()
