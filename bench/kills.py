"""SIGKILL at random moments, and one training that is killed and resumed 200 times.

Each command is started in a fork and killed after a random part of the time that it takes undisturbed. As in
`bench.faults`, its output must then be absent or whole, and the command again (for a run `train --resume`) must end
with the result of a command that nothing disturbed, bit for bit. The same holds for the training that is resumed again
and again. It is killed at random moments after zero to five saved epochs.

    python -m bench.kills --save                  # 500 kills, 200 resumes; continues a run that was stopped
    python -m bench.kills --kills 10 --resumes 0
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from drm_triton.bench import commands
from drm_triton.bench.commands import COMMANDS, checked, command_line, in_child

READY = "DRM_KILLS_READY"
MOST_SAVES = 5  # epochs that are saved between two kills of one training
LONG = ["--factors", "4", "--backend", "reference", "--eval-every", "50", "--quiet"]


def killed(run: Callable[[], object], seconds: float) -> bool:
    """Run a function in a fork and kill it after some seconds. Return whether it was still running."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            run()
        finally:
            os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def duration(run: Callable[[], Any]) -> float:
    """Return the seconds that a function takes in a fork, on the machine as busy as it is now."""
    began = time.monotonic()
    checked(in_child(run), "undisturbed")
    return time.monotonic() - began


def kill_at_random(base: Path, kills: int, log: commands.Log | None) -> int:
    """Kill each command `kills` / len(COMMANDS) times. Return how often something was lost."""
    lost = 0
    for place, name in enumerate(COMMANDS):
        share = kills // len(COMMANDS) + (place < kills % len(COMMANDS))
        row: dict[str, Any] = {"command": name, "kills": 0, "running": 0, "lost": 0}
        if log is not None:
            row = log.row(row)
        if row["kills"] >= share:
            continue
        out, expected = commands.undisturbed(name, base)
        shutil.rmtree(out)
        commands.begin(name, base, out)
        whole = duration(lambda: command_line(COMMANDS[name].arguments(base, out)))  # noqa: B023
        while row["kills"] < share:
            rng = random.Random(f"{name} {row['kills']}")
            folder = Path(tempfile.mkdtemp(dir=base))
            out = folder / "out"
            commands.begin(name, base, out)
            row["running"] += killed(lambda: command_line(COMMANDS[name].arguments(base, out)), rng.random() * whole)  # noqa: B023
            row["kills"] += 1
            try:
                commands.examine_rest(name, base, out, expected)
            except AssertionError as error:
                row["lost"] += 1
                print(f"{name}, kill {row['kills']}: {error}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            if log is not None:
                log.write(row)
        lost += row["lost"]
        print(
            f"{name:<10}{row['kills']:>5} kills ({row['running']} of a running command){row['lost']:>4} lost",
            flush=True,
        )
    return lost


def die_after(saves: int, seconds: float) -> None:
    """End this process by SIGKILL some time after it has saved so many epochs."""
    from drm_triton.training.run import Run

    left, save = saves, Run.save

    def end() -> None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal left
        save(*arguments, **options)
        left -= 1
        if left == 0:
            end()

    Run.save = counted  # type: ignore[method-assign]
    if saves == 0:
        end()


def mortal(arguments: list[str], saves: int, seconds: float) -> dict[str, Any]:
    """Run a command in a process that is to die."""
    die_after(saves, seconds)
    return command_line(arguments)


def resume_often(base: Path, resumes: int, log: commands.Log | None) -> int:
    """Kill and resume one training. Return 1 if its result differs from that of a training without a stop."""
    epochs = (MOST_SAVES + 3) * resumes
    train = ["train", "-d", str(base / "data"), *LONG, "--epochs", str(epochs)]
    whole, run = base / "long" / "out", base / "often" / "out"
    checked(in_child(lambda: command_line([*train, "--run", str(whole)])), "whole")
    expected = checked(in_child(lambda: commands.run_content(whole)), "whole")
    again = ["train", "--resume", str(run), "--quiet"]
    rng, done, status = random.Random(resumes), 0, -signal.SIGKILL
    while done < resumes and status == -signal.SIGKILL:
        arguments = again if (run / "config.toml").exists() else [*train, "--run", str(run)]
        status, _ = in_child(partial(mortal, arguments, rng.randint(0, MOST_SAVES), rng.random() * 0.02))
        done += status == -signal.SIGKILL
    checked(in_child(lambda: command_line(again)), "last resume")
    equal = done == resumes and checked(in_child(lambda: commands.run_content(run)), "resumed") == expected
    print(f"one training of {epochs} epochs, killed and resumed {done} times: {'equal' if equal else 'DIFFERENT'}")
    if log is not None:
        log.write({"command": "one training, resumed", "kills": done, "running": done, "lost": int(not equal)})
    return int(not equal)


def main() -> None:
    """Kill, print a table, and exit with 1 if something was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="kills at random moments, over all commands")
    parser.add_argument("--resumes", type=int, default=200, help="kills of one training")
    parser.add_argument("--save", action="store_true", help="count in bench/results/kills.jsonl, and go on from there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drm-kills-", dir=commands.MEMORY_DISK) as folder:
        if READY not in os.environ:
            environment = {**os.environ, **commands.PRIVATE, READY: "1", "XDG_CACHE_HOME": f"{folder}/cache"}
            sys.exit(subprocess.run([sys.executable, "-m", "bench.kills", *sys.argv[1:]], env=environment).returncode)
        base = Path(folder)
        commands.get_ready()
        commands.prepare_inputs(base)
        log = commands.Log("kills", ("command",)) if args.save else None
        lost = kill_at_random(base, args.kills, log)
        if args.resumes:
            lost += resume_often(base, args.resumes, log)
        sys.exit(lost > 0)


if __name__ == "__main__":
    main()
