"""Fault injection: the n-th change of files fails, tears, waits or is the last one, for every n.

A library in C (`faults.c`) stands between the program and the system. It counts writes, renames, flushes, links and new
directories below the output, and spoils the n-th:

error     the call fails as on a broken disk (EIO)
full      half of a write is done, and all later ones fail as on a full disk (ENOSPC)
torn      half of a write is done, and the process is killed
late      the call is done, and the process is killed
delayed   a write waits until its file is flushed, and is lost if it never is, as in a power cut after the command

After each fault, the output must be absent or whole, and the same command again (for a run `train --resume`) must end
with the result of a command that nothing disturbed, bit for bit. An error must be one paragraph with exit code 1 or 2,
and leave no temporary file; after a kill, the next command removes what was left.

    python -m bench.faults --save                       # every n; continues a run that was stopped
    python -m bench.faults --every 10 --command train   # every tenth
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drm_triton.bench import commands
from drm_triton.bench.commands import COMMANDS, checked, command_line, in_child

SOURCE = Path(__file__).with_suffix(".c")
MODES = {"error": 1, "full": 2, "torn": 3, "late": 4, "delayed": 5}
KILLS = ("torn", "late")
LIBRARY = "DRM_FAULTS_LIBRARY"


def disturbed(arguments: list[str], out: Path, n: int = 0, mode: int = 0) -> dict[str, Any]:
    """Run a command with a fault at change n of files at `out`. Return also which changes were writes, by number."""
    shim = ctypes.CDLL(os.environ[LIBRARY])
    shim.faults_seen.restype = ctypes.c_long
    shim.faults_arm(os.fsencode(out.parent), ctypes.c_long(n), mode)
    try:
        result = command_line(arguments)
    finally:
        seen = int(shim.faults_seen())
        shim.faults_arm(b"", ctypes.c_long(0), 0)
    return {**result, "writes": [bool(shim.faults_is_write(ctypes.c_long(n))) for n in range(1, seen + 1)]}


def examine(name: str, base: Path, expected: Any, n: int, mode: str) -> None:
    """Disturb a command once; raise AssertionError if something is lost or damaged afterwards."""
    folder = Path(tempfile.mkdtemp(dir=base))
    out = folder / "out"
    try:
        commands.begin(name, base, out)
        status, result = in_child(lambda: disturbed(COMMANDS[name].arguments(base, out), out, n, MODES[mode]))
        if mode in KILLS:
            assert status == -signal.SIGKILL, f"status {status}, {result}"
        else:
            assert status == 0, f"status {status}"
            assert "traceback" not in result, result
            assert "Traceback" not in result["errors"], result
            assert "unexpected" not in result["errors"], result
            # What fails beside the output itself, such as the removal of a temporary file, need not be an error.
            assert result["code"] in (0, 1, 2), result
            assert mode != "delayed" or result["code"] == 0, result
            assert not list(folder.rglob("*.partial")), list(folder.rglob("*.partial"))
        commands.examine_rest(name, base, out, expected)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Disturb the commands, print a table, and exit with 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", action="append", choices=COMMANDS, help="all by default")
    parser.add_argument("--mode", action="append", choices=MODES, help="all by default")
    parser.add_argument("--every", type=int, default=1, help="disturb every so many-th change")
    parser.add_argument("--save", action="store_true", help="count in bench/results/faults.jsonl, and go on from there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drm-faults-", dir=commands.MEMORY_DISK) as folder:
        if LIBRARY not in os.environ:
            library = Path(folder) / "faults.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
            environment = {**os.environ, **commands.PRIVATE, LIBRARY: str(library), "LD_PRELOAD": str(library)}
            environment["XDG_CACHE_HOME"] = f"{folder}/cache"
            sys.exit(subprocess.run([sys.executable, "-m", "bench.faults", *sys.argv[1:]], env=environment).returncode)
        sys.exit(disturb(Path(folder), args.command or list(COMMANDS), args.mode or list(MODES), args.every, args.save))


def disturb(base: Path, names: list[str], modes: list[str], every: int, save: bool) -> int:
    """Disturb commands at every `every`-th change. Return the exit code."""
    commands.get_ready()
    commands.prepare_inputs(base)
    log = commands.Log("faults", ("command", "mode")) if save else None
    failures = 0
    for name in names:
        _, expected = commands.undisturbed(name, base)
        out = base / f"counted-{name}" / "out"
        out.parent.mkdir()
        commands.begin(name, base, out)
        writes = checked(in_child(lambda: disturbed(COMMANDS[name].arguments(base, out), out)), name)["writes"]  # noqa: B023
        for mode in modes:
            numbers = [n for n in range(1, len(writes) + 1, every) if writes[n - 1] or mode != "delayed"]
            row: dict[str, Any] = {"command": name, "mode": mode, "changes": len(numbers), "faults": 0, "lost": 0}
            if log is not None:
                row = log.row(row, same=("changes",))
            for n in numbers[row["faults"] :]:
                row["faults"] += 1
                try:
                    examine(name, base, expected, n, mode)
                except AssertionError as error:
                    row["lost"] += 1
                    print(f"{name}, {mode}, change {n}: {error}", flush=True)
                if log is not None:
                    log.write(row)
            failures += row["lost"]
            print(f"{name:<10}{mode:<8}{row['faults']:>5} faults{row['lost']:>4} lost", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    main()
