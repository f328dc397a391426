"""Fault injection: the n-th change of files fails, tears or is the last one, for every n.

A library in C (`faults.c`) stands between the program and the system. It counts writes, renames, flushes, links and new
directories below the output, and spoils the n-th:

error   the call fails as on a broken disk (EIO)
full    half of a write is done, and all later ones fail as on a full disk (ENOSPC)
torn    half of a write is done, and the process is killed
late    the call is done, and the process is killed

After each fault, the output must be absent or whole, and the same command again (for a run `train --resume`) must end
with the result of a command that nothing disturbed, bit for bit. An error must be one paragraph with exit code 1 or 2,
and leave no temporary file; after a kill, the next command removes what was left.

    python -m bench.faults                              # every n
    python -m bench.faults --every 10 --command train   # every tenth
"""

import argparse
import ctypes
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_suffix(".c")
MODES = {"error": 1, "full": 2, "torn": 3, "late": 4}
KILLS = ("torn", "late")
LIBRARY = "DRM_FAULTS_LIBRARY"

SMALL = ["--factors", "4", "--epochs", "2", "--backend", "reference", "--quiet"]


@dataclass(frozen=True)
class Command:
    """A command to disturb.

    Attributes
    ----------
    arguments : of `drm-triton`, from the folder with the inputs and the output
    again : the arguments that continue it if the output exists after a fault; None if the output is then whole
    content : what the output must be in the end, from the output; equal values are equal results
    """

    arguments: Callable[[Path, Path], list[str]]
    again: Callable[[Path, Path], list[str]] | None
    content: Callable[[Path], Any]


def data_content(out: Path) -> Any:
    """Return the checksum of a data set, recomputed."""
    from drm_triton import Dataset

    data = Dataset.load(out)
    data.verify()
    return data.checksum


def run_content(out: Path) -> Any:
    """Return the checksums of both checkpoints and the metrics of a run, without times."""
    from drm_triton.training.checkpoint import FILE, read_tensors
    from drm_triton.training.run import read_metrics
    from drm_triton.training.tensor_file import checksum

    models = [checksum(read_tensors(out / which / FILE)[0], "") for which in ("last", "best")]
    times = ("seconds", "lists_per_second")
    return models, [{k: v for k, v in record.items() if k not in times} for record in read_metrics(out)]


def study_content(out: Path) -> Any:
    """Return the trials without their times, and the best configuration."""
    trials = [json.loads(line) for line in (out / "trials.jsonl").read_text("utf-8").splitlines()]
    best = (out / "best.toml").read_text("utf-8")
    return [{k: v for k, v in trial.items() if k != "seconds"} for trial in trials], best


def files_content(out: Path) -> Any:
    """Return the names and bytes of the files of an export."""
    return {path.name: path.read_bytes().hex() for path in sorted(out.iterdir())}


def page_content(out: Path) -> Any:
    """Return the names of the files of a report, whose page must be complete."""
    pages = list(out.rglob("*.html"))
    assert pages, "no page"
    assert all(page.read_text("utf-8").rstrip().endswith("</html>") for page in pages), "a page is cut off"
    return sorted(path.name for path in out.rglob("*"))


COMMANDS = {
    "prepare": Command(
        lambda base, out: ["prepare", "table", "--raw", str(base / "table.csv"), "--out", str(out), "--quiet"],
        None,
        data_content,
    ),
    "train": Command(
        lambda base, out: ["train", "-d", str(base / "data"), "--run", str(out), *SMALL],
        lambda base, out: ["train", "--resume", str(out), "--quiet"],
        run_content,
    ),
    "tune": Command(
        lambda base, out: ["tune", "-d", str(base / "data"), "--study", str(out), "--trials", "2", *SMALL],
        lambda base, out: ["tune", "-d", str(base / "data"), "--study", str(out), "--trials", "2", *SMALL],
        study_content,
    ),
    "export": Command(
        lambda base, out: ["export", str(base / "run"), str(out), "--to", "parquet", "--quiet"], None, files_content
    ),
    "report": Command(
        lambda base, out: ["report", str(base / "run"), "--out", str(out), "--quiet"], None, page_content
    ),
    "overwrite": Command(
        lambda base, out: ["export", str(base / "run"), str(out), "--to", "parquet", "--quiet", "--overwrite"],
        None,
        files_content,
    ),
}


# -- one child for each step -------------------------------------------------------------------------------------------
# The libraries are imported once, and each step runs in a fork. The parent itself uses no library that has threads.


def in_child(function: Callable[[], Any]) -> tuple[int, Any]:
    """Call a function in a fork. Return the exit status of the process, and what the function returned."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            result = json.dumps(function())
        except BaseException:
            result = json.dumps({"traceback": traceback.format_exc()})
        with os.fdopen(write, "w") as pipe:
            pipe.write(result)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, json.loads(text) if text else None


def command_line(arguments: list[str], out: Path, n: int = 0, mode: int = 0) -> dict[str, Any]:
    """Run a command with a fault at change n of files at `out`. Return its exit code, its errors and the changes."""
    from drm_triton.cli import main

    shim = ctypes.CDLL(os.environ[LIBRARY])
    shim.faults_seen.restype = ctypes.c_long
    text, code = io.StringIO(), 0
    sys.argv = ["drm-triton", *arguments]
    with redirect_stderr(text), redirect_stdout(io.StringIO()):
        shim.faults_arm(os.fsencode(out.parent), ctypes.c_long(n), mode)
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            seen = int(shim.faults_seen())
            shim.faults_arm(b"", ctypes.c_long(0), 0)
    return {"code": code, "errors": text.getvalue(), "changes": seen}


def checked(step: tuple[int, Any], what: str) -> Any:
    """Return the result of a step that must succeed."""
    status, result = step
    if status != 0 or (isinstance(result, dict) and "traceback" in result):
        raise AssertionError(f"{what}: status {status}, {result}")
    if isinstance(result, dict) and result.get("code"):
        raise AssertionError(f"{what}: exit code {result['code']}, {result['errors']}")
    return result


def examine(name: str, base: Path, expected: Any, n: int, mode: str) -> None:
    """Disturb a command once; raise AssertionError if something is lost or damaged afterwards."""
    command, folder = COMMANDS[name], Path(tempfile.mkdtemp(dir=base))
    out = folder / "out"
    try:
        if name == "overwrite":
            shutil.copytree(base / "export", out)
        status, result = in_child(lambda: command_line(command.arguments(base, out), out, n, MODES[mode]))
        if mode in KILLS:
            assert status == -signal.SIGKILL, f"status {status}, {result}"
        else:
            assert status == 0, f"status {status}"
            assert "traceback" not in result, result
            assert "Traceback" not in result["errors"], result
            assert "unexpected" not in result["errors"], result
            # What fails beside the output itself, such as the removal of a temporary file, need not be an error.
            assert result["code"] in (0, 1, 2), result
            assert not list(folder.rglob("*.partial")), list(folder.rglob("*.partial"))
        marked = out.exists() and any(out.iterdir())
        if marked and command.again is None:
            assert checked(in_child(lambda: command.content(out)), "what is there") == expected
        if name == "overwrite":
            assert marked, "the old export is gone"
        if not marked or command.again is not None or name == "overwrite":
            is_run = name == "train" and (out / "config.toml").exists()
            arguments = command.again if command.again is not None and (is_run or name == "tune") else command.arguments
            checked(in_child(lambda: command_line(arguments(base, out), out)), "again")
            assert checked(in_child(lambda: command.content(out)), "after again") == expected
        left = [*folder.rglob(".out.*"), *out.rglob("*.partial")]
        assert mode not in KILLS or not marked or command.again is None or not left, left
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def prepare_inputs(base: Path) -> None:
    """Make a table, a data set, a run and an export of it in `base`."""
    rows = [f"u{u},i{(u * 7 + j * j) % 31}" for u in range(24) for j in range(9)]
    (base / "table.csv").write_text("user,item\n" + "\n".join(dict.fromkeys(rows)) + "\n")
    for name, out in (("prepare", "data"), ("train", "run"), ("export", "export")):
        checked(in_child(lambda: command_line(COMMANDS[name].arguments(base, base / out), base / out)), name)  # noqa: B023


def main() -> None:
    """Disturb the commands, print a table, and exit with 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", action="append", choices=COMMANDS, help="all by default")
    parser.add_argument("--mode", action="append", choices=MODES, help="all by default")
    parser.add_argument("--every", type=int, default=1, help="disturb every so many-th change")
    parser.add_argument("--save", action="store_true", help="write bench/results/faults.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drm-faults-") as folder:
        if LIBRARY not in os.environ:
            library = Path(folder) / "faults.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
            private = {"XDG_CACHE_HOME": f"{folder}/cache", "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
            environment = {**os.environ, **private, LIBRARY: str(library), "LD_PRELOAD": str(library)}
            sys.exit(subprocess.run([sys.executable, "-m", "bench.faults", *sys.argv[1:]], env=environment).returncode)
        sys.exit(disturb(Path(folder), args.command or list(COMMANDS), args.mode or list(MODES), args.every, args.save))


def disturb(base: Path, commands: list[str], modes: list[str], every: int, save: bool) -> int:
    """Disturb commands at every `every`-th change. Return the exit code."""
    import matplotlib.pyplot as plt  # noqa: F401 (once, before the forks)
    import polars as pl  # noqa: F401

    import drm_triton.cli
    import drm_triton.export
    import drm_triton.model
    import drm_triton.report.page
    import drm_triton.training.tune  # noqa: F401

    prepare_inputs(base)
    rows, failures = [], 0
    for name in commands:
        out = base / f"whole-{name}" / "out"
        out.parent.mkdir()
        if name == "overwrite":
            shutil.copytree(base / "export", out)
        whole = checked(in_child(lambda: command_line(COMMANDS[name].arguments(base, out), out)), name)  # noqa: B023
        expected = checked(in_child(lambda: COMMANDS[name].content(out)), name)  # noqa: B023
        for mode in modes:
            failed = 0
            numbers = range(1, whole["changes"] + 1, every)
            for n in numbers:
                try:
                    examine(name, base, expected, n, mode)
                except AssertionError as error:
                    failed += 1
                    print(f"{name}, {mode}, change {n}: {error}", flush=True)
            failures += failed
            rows.append({"command": name, "mode": mode, "faults": len(numbers), "lost": failed})
            print(f"{name:<10}{mode:<7}{len(numbers):>5} faults{failed:>4} lost", flush=True)
    if save:
        from drm_triton.bench.record import environment
        from drm_triton.bench.record import save as record

        record("faults", environment(), rows)
    return int(failures > 0)


if __name__ == "__main__":
    main()
