"""Training in several processes: results, resuming, and what is said and left when something fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drm_triton import DRM, Dataset
from drm_triton.bench.commands import run_content
from drm_triton.bench.distributed_faults import epochs_of, kill_at_random, wait_for_epochs
from tests.conftest import call, environment
from tests.distributed.nursery import Nursery

OPTIONS = ["--factors", "8", "--objective", "hinge+drm", "--batch-size", "64", "--init", "normal"]
SMALL = [*OPTIONS, "--epochs", "4", "--backend", "reference"]
STEPS = 6  # of an epoch
PATIENCE = "30"  # seconds, for a rank that never answers; one that is slow because the machine is busy must be heard
VARIABLES = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks processes and stops them as Linux does")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(1)
    pairs = {(user, int(60 * x * x)) for user in range(60) for x in rng.random(10)}
    rows = "".join(f"u{user},i{item}\n" for user, item in sorted(pairs))
    (folder / "table.csv").write_text("user,item\n" + rows)
    assert call("prepare", "table", "--raw", folder / "table.csv", "--out", folder / "x", "--quiet")[0] == 0
    assert (STEPS - 1) * 64 < Dataset.load(folder / "x").train.nnz <= STEPS * 64
    return folder / "x"


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    # A rank sets this variable before it imports torch. Here, torch is imported before.
    with Nursery(environment(**VARIABLES, TORCH_CPP_LOG_LEVEL="ERROR"), tmp_path_factory.mktemp("work")) as started:
        yield started


@pytest.fixture(scope="module")
def whole(nursery: Nursery, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the content of a run of a single process that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    code, said = nursery.alone("train", data, "--run", run, *SMALL)
    assert code == 0, said
    return run_content(run)


def errors(said: list[str]) -> list[str]:
    """Return the error messages that ranks wrote."""
    return [line for text in said for line in text.splitlines() if line.startswith("error:")]


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if ".partial" in path.name or ".shared" in path.name]


# -- results -----------------------------------------------------------------------------------------------------------


def test_any_number_of_processes_gives_the_files_of_one(nursery: Nursery, data: Path, tmp_path: Path) -> None:
    options = ["train", data, *OPTIONS, "--epochs", "3", "--backend", "cpu", "--run"]
    code, said = nursery.alone(*options, tmp_path / "alone")
    assert code == 0, said
    for size in (1, 2, 3):
        codes, texts = nursery.together(size, *options, tmp_path / str(size))
        assert codes == [0] * size, texts
        assert run_content(tmp_path / str(size)) == run_content(tmp_path / "alone"), size
        assert not any(texts[1:]), "only rank 0 prints"
        assert texts[0].count("valid/ndcg@10  ") == 1, "progress is one table"


def test_a_run_resumes_with_any_number_of_processes(nursery: Nursery, data: Path, whole: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    codes, said = nursery.together(2, "train", data, "--run", run, *SMALL, "--stop-after", "1")
    assert codes == [0, 0], said
    code, text = nursery.alone("train", "--resume", run, "--stop-after", "2")
    assert code == 0, text
    codes, said = nursery.together(3, "train", "--resume", run, "--stop-after", "4")
    assert codes == [0, 0, 0], said
    assert run_content(run) == whole
    assert len(list((run / "last").glob("model-*"))) == 3, "the shards of the last checkpoint only"


def test_other_commands_read_the_run(nursery: Nursery, data: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert nursery.alone("train", data, "--run", one, *SMALL)[0] == 0
    assert nursery.together(2, "train", data, "--run", two, *SMALL)[0] == [0, 0]
    results = {}
    for run in (one, two):
        code, measured = nursery.alone("evaluate", run, "--json")
        assert code == 0, measured
        code, lists = nursery.alone("recommend", run, "--user", "u3")
        assert code == 0, lists
        refitted = tmp_path / f"{run.name}-refit"
        code, said = nursery.alone("refit", run, "--out", refitted, "--quiet")
        assert code == 0, said
        text = (measured + lists).replace(str(run), "RUN")
        results[run] = text, run_content(refitted), DRM.load(run).user_factors.numpy().tobytes()
    assert results[one] == results[two]
    codes, texts = nursery.together(3, "evaluate", two, "--json")
    assert codes == [0, 0, 0], texts
    assert texts == [nursery.alone("evaluate", two, "--json")[1], "", ""], "the figures of one process, printed once"
    codes, texts = nursery.together(2, "evaluate", tmp_path / "absent")
    assert codes == [2, 2]
    assert len(errors(texts)) == 1


def test_more_processes_than_rows(nursery: Nursery, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("user,item\n" + "".join(f"u{u},i{i}\n" for u in range(3) for i in range(3) if u != i))
    assert call("prepare", "table", "--raw", table, "--out", tmp_path / "tiny", "--quiet", "--min-user", "1")[0] == 0
    options = ["train", tmp_path / "tiny", *SMALL, "--run"]
    codes, said = nursery.together(5, *options, tmp_path / "five")
    assert codes == [0] * 5, said
    assert nursery.alone(*options, tmp_path / "one")[0] == 0
    assert run_content(tmp_path / "five") == run_content(tmp_path / "one")


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank", "message", "codes"),
    [
        ("hang", 1, rf"rank 0 of 2: another rank does not answer, waited {PATIENCE} s \(.*\); the run can", [1, -9]),
        ("kill", 1, r"rank 0 of 2: another rank has ended \(.*\); the run can be resumed from", [1, -9]),
        ("kill", 0, r"rank 1 of 2: another rank has ended \(.*\); the run can be resumed from", [-9, 1]),
        ("memory", 1, "not enough memory", [1, 1]),
        ("overflow", 1, "Adagrad's sums of the user gradients overflow in epoch 2", [1, 1]),
        ("full", 1, r"rank 1: no space left to write .*-1-of-2.safetensors; what was saved before is intact", [1, 1]),
        ("full", 0, r"rank 0: no space left to write .*; what was saved before is intact", [1, 1]),
    ],
)
def test_a_rank_that_fails_is_one_error_and_the_run_goes_on(
    name: str, rank: int, message: str, codes: list[int], nursery: Nursery, data: Path, whole: Any, tmp_path: Path
) -> None:
    run, fault = tmp_path / "run", {"name": name, "rank": rank, "step": STEPS + 2}
    timeout = ["--timeout", PATIENCE] if name == "hang" else []
    found, said = nursery.together(2, "train", data, "--run", run, *SMALL, *timeout, fault=fault)
    assert found == codes, said
    assert len(errors(said)) == 1, said
    assert re.match(f"error: {message}", errors(said)[0]), said
    assert "Traceback" not in "".join(said)
    shards = {path.name for path in (run / "last").glob("model-*")}
    assert shards == {f"model-e1-p0-{rank}-of-2.safetensors" for rank in (0, 1)}, "only those of the last checkpoint"
    code, text = nursery.alone("train", "--resume", run, "--quiet")
    assert code == 0, text
    assert run_content(run) == whole
    assert not leftovers(tmp_path)


@pytest.mark.parametrize(("name", "rank", "code"), [("interrupt", 1, 130), ("terminate", 0, 143)])
def test_a_signal_to_one_rank_stops_and_saves_all(
    name: str, rank: int, code: int, nursery: Nursery, data: Path, whole: Any, tmp_path: Path
) -> None:
    run, fault = tmp_path / "run", {"name": name, "rank": rank, "step": STEPS + 2}
    codes, said = nursery.together(2, "train", data, "--run", run, *SMALL, fault=fault)
    assert codes == [code, code], said
    assert said[0].endswith(f"stopped; continue with: drm-triton train --resume {run}\n")
    assert said[1] == ""
    codes, said = nursery.together(3, "train", "--resume", run)
    assert codes == [0, 0, 0], said
    assert run_content(run) == whole


def test_ranks_that_differ_are_refused(nursery: Nursery, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    usual = list(map(str, ["train", data, "--run", run, *SMALL]))
    other = tmp_path / "other"
    table = tmp_path / "table.csv"
    table.write_text((data.parent / "table.csv").read_text() + "u0,new\n")
    assert call("prepare", "table", "--raw", table, "--out", other, "--quiet")[0] == 0
    checksum = Dataset.load(other).checksum[:12]
    cases: list[tuple[list[str], dict[str, Any], str]] = [
        ([*usual, "--seed", "5"], {}, "rank 1 has --seed 5, rank 0 has 0; start all ranks with the same command"),
        (["train", str(other), *usual[2:]], {}, f"rank 1 has data set with checksum {checksum}, rank 0 has"),
        (usual, {"fault": {"name": "version", "rank": 1}}, "rank 1 has drm-triton 0.0.1, rank 0 has "),
        (["train", str(tmp_path / "none"), *usual[2:]], {}, "rank 1: "),
        ([*usual, "--score", "l3"], {}, ""),
    ]
    for arguments, job, message in cases:
        codes, said = nursery.run(ranks=[usual, arguments], **job)
        assert codes == [2, 2], said
        assert len(errors(said)) == 1, said
        assert errors(said)[0].startswith(f"error: {message}"), said
        assert not run.exists(), "nothing is written"
    codes, said = nursery.run(ranks=[[*usual, "--score", "l3"]] * 2)
    assert codes == [2, 2]
    assert len(errors(said)) == 1, said


def test_a_directory_that_is_not_shared_is_refused(nursery: Nursery, data: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    place = tmp_path / "local"
    place.mkdir()
    codes, said = nursery.together(2, "train", data, "--run", place / "run", *SMALL, private=str(place))
    assert codes == [2, 2], said
    assert errors(said) == [
        f"error: rank 1: {place / 'run'} is not shared: all machines must see the same directory of the run"
    ]
    assert not list(place.iterdir())


def test_options_that_cannot_be_used(data: Path, tmp_path: Path) -> None:
    common = ["train", data, "--run", tmp_path / "run", *SMALL]
    cases = {
        ("--devices", "0"): "--devices must be from 1 to 64, got 0",
        ("--devices", "65"): "--devices must be from 1 to 64, got 65",
        ("--devices", "2", "--timeout", "0"): "--timeout must be from 1 to 86,400 seconds, got 0",
        ("--devices", "2", "--timeout", "nan"): "--timeout must be from 1 to 86,400 seconds, got nan",
        ("--devices", "2", "--factors", "0"): "--factors must be",
        ("--devices", "2", "--from", "x"): "--from works in one process; leave out --devices and torchrun",
    }
    for words, message in cases.items():
        code, _, said = call(*common, *words)
        assert (code, said.count("error:")) == (2, 1), said
        assert said.startswith(f"error: {message}"), said
    code, _, said = call("train", data, "--run", tmp_path / "run", "--model", "ease", "--devices", "2")
    assert code == 2
    assert "several processes train --model drm only, not ease" in said
    memory = {}
    for size in ("1", "2"):
        code, plan, _ = call(*common, "--devices", size, "--dry-run", "--json")
        assert code == 0
        assert json.loads(plan)["config"]["factors"] == 8
        memory[size] = json.loads(plan)["memory_bytes"]
    assert memory["2"] == {
        name: n if name in ("interactions", "items for validation") else -(-n // 2) for name, n in memory["1"].items()
    }
    assert "# memory of each of 2 processes\n# factors: 0.0 MiB" in call(*common, "--devices", "2", "--dry-run")[1]
    assert not (tmp_path / "run").exists()


def test_torchrun_with_other_options(nursery: Nursery, data: Path, tmp_path: Path) -> None:
    codes, said = nursery.together(2, "train", data, "--run", tmp_path / "run", *SMALL, "--devices", "3")
    assert codes == [2, 2]
    assert errors(said) == ["error: torchrun has started 2 processes; leave out --devices"]
    codes, said = nursery.together(2, "train", data, *SMALL, variables={"TORCHELASTIC_MAX_RESTARTS": "3"})
    assert codes == [2, 2]
    assert errors(said) == [
        "error: give --out: after a restart, the processes must find the directory of the run again"
    ]


@pytest.fixture
def network() -> Iterator[list[tuple[str, str]]]:
    """Yield two hosts, each a network namespace with an interface, which are linked: 10.77.0.1 and 10.77.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, to make network namespaces")
    names = [f"drm{os.getpid()}{letter}" for letter in "ab"]
    commands = [
        *(f"netns add {name}" for name in names),
        f"link add {names[0]} type veth peer name {names[1]}",
        *(f"link set {name} netns {name}" for name in names),
        *(f"-n {name} addr add 10.77.0.{number}/24 dev {name}" for number, name in enumerate(names, 1)),
        *(f"-n {name} link set {interface} up" for name in names for interface in (name, "lo")),
    ]
    try:
        for command in commands:
            if subprocess.run(["ip", *command.split()], capture_output=True).returncode:
                pytest.skip(f"cannot make network namespaces: ip {command}")
        yield [(name, name) for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def test_a_lost_network_is_an_error_on_both_sides(
    network: list[tuple[str, str]], nursery: Nursery, data: Path, whole: Any, tmp_path: Path
) -> None:
    run, fault = tmp_path / "run", {"name": "cut", "rank": 1, "step": STEPS + 2}
    arguments = ["train", data, "--run", run, *SMALL, "--timeout", PATIENCE]
    codes, said = nursery.together(2, *arguments, fault=fault, interfaces=network, address="10.77.0.1")
    assert codes == [1, 1], said
    for rank, text in enumerate(said):  # they cannot agree on who reports it
        (message,) = errors([text])
        assert message.startswith(f"error: rank {rank} of 2: another rank does not answer, waited {PATIENCE} s"), (
            message
        )
    assert nursery.alone("train", "--resume", run, "--quiet")[0] == 0
    assert run_content(run) == whole


# -- with torchrun -----------------------------------------------------------------------------------------------------


def test_kills_under_torchrun_change_no_bit(nursery: Nursery, data: Path, whole: Any, tmp_path: Path) -> None:
    """The command of the documentation, with three kills of a random rank at a random moment."""
    torchrun_words = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 3"
    words = [sys.executable, *torchrun_words.split(), "-m", "drm_triton", "train", "--dataset", str(data)]
    with open(tmp_path / "said", "w+") as said:
        torchrun = subprocess.Popen(
            [*words, "--out", "run", *SMALL], stdout=said, stderr=said, cwd=tmp_path, env=environment(**VARIABLES)
        )
        kills = [kill_at_random(torchrun, tmp_path / "run", epochs) for epochs in ((0, 0), (1, 1), (2, 2))]
        code = torchrun.wait()
        text = Path(said.name).read_text()
    assert code == 0, text
    assert all(kills), text
    assert "restart 3 of 3" in text
    assert run_content(tmp_path / "run") == whole


def test_devices_prints_only_our_messages(data: Path, tmp_path: Path) -> None:
    """Ctrl-C to the command saves; then it is resumed, and one of its processes is killed."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "drm_triton", "train", "--devices", "2"]
    for words, stop, code, message in (
        (
            [str(data), "--run", str(run), *SMALL, "--epochs", "1000"],
            lambda process: wait_for_epochs(process, run, 1) and process.send_signal(signal.SIGINT),
            128 + signal.SIGINT,
            f"stopped; continue with: drm-triton train --resume {run}",
        ),
        (
            ["--resume", str(run)],
            lambda process: kill_at_random(process, run, (epochs_of(run) + 1,) * 2, rank=1),
            128 + signal.SIGKILL,
            "error: process 1 of 2 was killed (SIGKILL, perhaps because memory was short); the run can be resumed from "
            "its last checkpoint with --resume",
        ),
    ):
        with open(tmp_path / "said", "w+") as said:
            process = subprocess.Popen([*command, *words], stdout=said, stderr=said, env=environment(**VARIABLES))
            stop(process)
            found = process.wait()
            text = Path(said.name).read_text()
        assert found == code, text
        assert text.splitlines()[-1] == message
        assert not re.search("torch|Traceback|Signal", text), text


RANK = "from drm_triton.cli.together import settle; settle(); print('ready', flush=True); import time; time.sleep(60)"
LAUNCHER = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {RANK + "; print('survived')"!r}])
"""


def test_a_rank_ends_when_its_launcher_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True, env=environment())
    assert launcher.stdout is not None
    with launcher, launcher.stdout as said:
        assert said.readline() == "ready\n"
        launcher.kill()
        assert said.read() == ""  # at its end, nobody can write any more
