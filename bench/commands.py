"""Commands of the program in forks of one process, so that `bench.faults` and `bench.kills` can run them very often.

The libraries are imported once, and each step runs in a fork. The parent itself uses no library that has threads. What
costs most is done once or left out: the command line is built in the parent, and the picture of the learning curves is
a few bytes, which are written as any other file.
"""

import importlib
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

MEMORY_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # for the files of thousands of cases
# The environment of the forks. They have a cache of their own, but need not look for all fonts again.
PRIVATE = {
    "OMP_NUM_THREADS": "1",
    "POLARS_MAX_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib")),
}
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
    "refit": Command(
        lambda base, out: ["refit", str(base / "run"), "--out", str(out), "--quiet"],
        lambda base, out: ["train", "--resume", str(out), "--quiet"],
        run_content,
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


def get_ready() -> None:
    """Import all libraries, and have the command line built once, before the forks."""
    import polars as pl  # noqa: F401
    import typer

    import drm_triton.cli
    import drm_triton.export
    import drm_triton.model
    import drm_triton.plots
    import drm_triton.report.page
    import drm_triton.training.tune

    def picture(records: Any, path: Path, *options: Any) -> None:
        path.write_bytes(b"curves")

    drm_triton.plots.learning_curves = picture  # type: ignore[assignment]
    typer.main.get_command = cache(typer.main.get_command)
    typer.main.get_command(drm_triton.cli.app)


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


def command_line(arguments: list[str]) -> dict[str, Any]:
    """Run a command in this process. Return its exit code, its errors and the modules that it has imported."""
    from drm_triton.cli import main

    text, code = io.StringIO(), 0
    sys.argv = ["drm-triton", *arguments]
    with redirect_stderr(text), redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return {"code": code, "errors": text.getvalue(), "modules": [*sys.modules]}


def checked(step: tuple[int, Any], what: str) -> Any:
    """Return the result of a step that must succeed."""
    status, result = step
    if status != 0 or (isinstance(result, dict) and "traceback" in result):
        raise AssertionError(f"{what}: status {status}, {result}")
    if isinstance(result, dict) and result.get("code"):
        raise AssertionError(f"{what}: exit code {result['code']}, {result['errors']}")
    return result


def begin(name: str, base: Path, out: Path) -> None:
    """Make what stands at `out` before a command: an old export, where it is to be overwritten."""
    if name == "overwrite":
        shutil.copytree(base / "export", out)


def examine_rest(name: str, base: Path, out: Path, expected: Any) -> None:
    """Raise AssertionError if something is lost after a command was disturbed, or if it cannot be done again."""
    command = COMMANDS[name]
    marked = out.exists() and any(out.iterdir())
    if marked and command.again is None:
        assert checked(in_child(lambda: command.content(out)), "what is there") == expected
    if name == "overwrite":
        assert marked, "the old export is gone"
    if not marked or command.again is not None or name == "overwrite":
        continued = command.again is not None and (name == "tune" or (out / "config.toml").exists())
        arguments = (command.again if continued else None) or command.arguments
        checked(in_child(lambda: command_line(arguments(base, out))), "again")
        assert checked(in_child(lambda: command.content(out)), "after again") == expected
        left = [*out.parent.rglob(".out.*"), *out.rglob("*.partial")]
        assert not left, left  # what a killed process left is removed


def prepare_inputs(base: Path) -> None:
    """Make a table, a data set, a run and an export of it in `base`."""
    rows = [f"u{u},i{(u * 7 + j * j) % 31}" for u in range(24) for j in range(9)]
    (base / "table.csv").write_text("user,item\n" + "\n".join(dict.fromkeys(rows)) + "\n")
    for name, out in (("prepare", "data"), ("train", "run"), ("export", "export"), ("report", "page")):
        result = checked(in_child(partial(command_line, COMMANDS[name].arguments(base, base / out))), name)
        for module in result["modules"]:
            with suppress(ImportError):
                importlib.import_module(module)  # once, for all forks that follow


def undisturbed(name: str, base: Path) -> tuple[Path, Any]:
    """Run a command as it is. Return its output and what it holds."""
    out = base / f"whole-{name}" / "out"
    out.parent.mkdir()
    begin(name, base, out)
    checked(in_child(lambda: command_line(COMMANDS[name].arguments(base, out))), name)
    return out, checked(in_child(lambda: COMMANDS[name].content(out)), name)


class Log:
    """Rows of counts in bench/results/<name>.jsonl, which a run that was stopped goes on with.

    Parameters
    ----------
    name : of the file
    key : the columns that identify a row
    """

    def __init__(self, name: str, key: tuple[str, ...]) -> None:
        from drm_triton.bench.record import RESULTS, environment

        self._about = {key: environment()[key] for key in ("date", "commit", "processor")}
        self.file, self.key = RESULTS / f"{name}.jsonl", key
        lines = self.file.read_text("utf-8").splitlines() if self.file.exists() else []
        rows = [json.loads(line) for line in lines]
        self.rows = {self._key(row): row for row in rows}

    def row(self, new: dict[str, Any], same: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the row that was begun, unless something was lost in it or its columns `same` differ; else `new`."""
        old = self.rows.get(self._key(new))
        fits = old is not None and not old["lost"] and all(old[name] == new[name] for name in same)
        return dict(old) if old is not None and fits else new

    def write(self, row: dict[str, Any]) -> None:
        """Add or replace a row, with date, commit and processor."""
        from drm_triton import atomic

        self.rows[self._key(row)] = {**row, **self._about}
        atomic.write_text(self.file, "".join(json.dumps(row) + "\n" for row in self.rows.values()), parents=True)

    def _key(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)
