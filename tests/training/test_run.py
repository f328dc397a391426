"""The run directory: written atomically, resumed to the bit, safe when the process or the disk fails."""

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from drm_triton import DRM, Dataset, kernels
from drm_triton.config import TrainConfig
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import DrmError, InputError
from drm_triton.names import BackendChoice
from drm_triton.training.checkpoint import FILE, read_tensors, write_tensors
from drm_triton.training.run import Run, environment, read_metrics
from drm_triton.training.state import EpochEnd, State
from tests.conftest import HANG, call, run_python

pytestmark = pytest.mark.usefixtures("no_curves")  # `whole`, which is made before that, has them

OPTIONS = {"factors": 8, "epochs": 4, "batch_size": 32, "init": "normal"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    users, items = generate(Shape(users=300, items=200, interactions=6000), 0)
    path = tmp_path_factory.mktemp("data") / "small"
    Dataset.from_frame(pl.DataFrame({"user": users, "item": items})).save(path)
    return path


@pytest.fixture(scope="module")
def data(stored: Path) -> Dataset:
    return Dataset.load(stored)


@pytest.fixture(scope="module")
def whole(data: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    DRM(**OPTIONS).fit(data, run=path)
    return path


def tensors(run: Path, which: str = "last") -> dict[str, torch.Tensor]:
    return read_tensors(run / which / FILE)[0]


def assert_same_run(a: Path, b: Path) -> None:
    for which in ("last", "best"):
        ours, theirs = tensors(a, which), tensors(b, which)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    timing = ("seconds", "lists_per_second")
    lines = [[{k: v for k, v in r.items() if k not in timing} for r in read_metrics(run)] for run in (a, b)]
    assert lines[0] == lines[1]


def test_what_a_run_leaves(whole: Path, data: Dataset) -> None:
    records = read_metrics(whole)
    assert [record["epoch"] for record in records] == [1, 2, 3, 4]
    named = {
        "epoch",
        "loss",
        "hinge",
        "drm",
        "lists",
        "seconds",
        "lists_per_second",
        "valid/ndcg@10",
        "valid/recall@50",
    }
    assert named <= records[0].keys()
    with open(whole / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [record["loss"] for record in records]
    assert TrainConfig.from_toml(whole / "config.toml") == TrainConfig(**OPTIONS).resolved()
    environment = json.loads((whole / "env.json").read_text())
    assert environment["data"]["checksum"] == data.checksum
    assert environment["following"] == TrainConfig(**OPTIONS).following(data.n_items)
    assert environment["packages"]["torch"] == torch.__version__
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not list(whole.rglob("*.partial"))
    assert not [path for path in whole.rglob("*") if path.suffix in (".pkl", ".pickle", ".pt", ".pth")]


@pytest.mark.parametrize(
    ("backend", "variable", "recorded"),
    [("triton", None, True), ("cpu", None, False), ("auto", None, True), ("auto", "cpu", False)],
)
def test_the_gpu_is_recorded_if_it_trains(
    backend: BackendChoice, variable: str | None, recorded: bool, data: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is available on Linux only")
    from drm_triton.kernels.gpu import tuning

    if variable is None:
        monkeypatch.delenv("DRM_BACKEND", raising=False)
    else:
        monkeypatch.setenv("DRM_BACKEND", variable)
    monkeypatch.setattr(kernels, "why_no_gpu", lambda: None)
    monkeypatch.setattr(tuning, "in_force", lambda: {"gpu": "A", "choices": {}})
    found = environment(TrainConfig(backend=backend), data)
    assert found["gpu"] == ({"gpu": "A", "choices": {}} if recorded else None)


def test_the_best_epoch_is_what_loads(whole: Path) -> None:
    records = read_metrics(whole)
    best = max(records, key=lambda record: record["valid/ndcg@10"])["epoch"]
    assert read_tensors(whole / "best" / FILE)[1]["training"]["epoch"] == best
    model = DRM.load(whole)
    assert torch.equal(model.user_factors, tensors(whole, "best")["user_factors"])
    assert model.config == TrainConfig(**OPTIONS).resolved()


def test_more_epochs_later_equal_all_at_once(data: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    constant = {**OPTIONS, "schedule": "constant"}
    DRM(**constant).fit(data, run=tmp_path / "whole")
    DRM(**{**constant, "epochs": 2}).fit(data, run=run)
    DRM(**constant).fit(data, run=run, resume=True)
    assert_same_run(run, tmp_path / "whole")


def test_the_configuration_of_a_run_says_all_and_gives_the_same_training(data: Dataset, tmp_path: Path) -> None:
    first, options = tmp_path / "first", {**OPTIONS, "rho": 4, "epochs": 2}
    DRM(**options).fit(data, run=first, on_batch=lambda state, n_lists: state.step >= 5)
    written = (first / "config.toml").read_text()
    assert "k = 4" in written.splitlines()
    saved = read_tensors(first / "last" / FILE)[1]["config"]
    assert (saved.get("eta"), saved["k"]) == (None, 4)  # eta follows the catalogue
    DRM(**options).fit(data, run=first, resume=True)  # eta and k left open, as when it began
    again = DRM(TrainConfig.from_toml(first / "config.toml")).fit(data, run=tmp_path / "again")
    assert_same_run(first, tmp_path / "again")
    again.fit(data, run=first, resume=True)
    assert (first / "config.toml").read_text() == written


def test_a_run_whose_configuration_leaves_eta_and_k_open_is_resumed(data: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    DRM(**OPTIONS).fit(data, run=run, on_batch=lambda state, n_lists: state.step >= 5)
    (run / "config.toml").write_text(TrainConfig(**OPTIONS).to_toml())
    assert "eta" not in (run / "config.toml").read_text()
    DRM(TrainConfig.from_toml(run / "config.toml")).fit(data, run=run, resume=True)
    assert len(read_metrics(run)) == OPTIONS["epochs"]


@pytest.mark.parametrize("options", [{"objective": "hinge+drm"}, {}])
def test_a_run_that_recorded_the_earlier_default_of_eta_keeps_it(
    options: dict[str, Any], data: Dataset, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    run, options = tmp_path / "run", {**OPTIONS, **options}
    DRM(**options, eta=45).fit(data, run=tmp_path / "whole")
    DRM(**options, eta=45).fit(data, run=run, on_batch=lambda state, n_lists: state.step >= 5)
    DRM(**options).fit(data, run=run, resume=True)
    assert_same_run(run, tmp_path / "whole")
    assert "eta = 45\n" in (run / "config.toml").read_text()
    assert not [warning for warning in recwarn if "eta" in str(warning.message)]


def test_a_run_with_another_eta_is_not_resumed_with_the_default(data: Dataset, tmp_path: Path) -> None:
    options = {**OPTIONS, "objective": "hinge+drm"}
    DRM(**options, eta=30).fit(data, run=tmp_path / "run", on_batch=lambda state, n_lists: state.step >= 5)
    with pytest.raises(InputError, match="a resumed run cannot change `eta`"):
        DRM(**options).fit(data, run=tmp_path / "run", resume=True)


def test_stopped_within_an_epoch_and_resumed_equals_uninterrupted(data: Dataset, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    DRM(**OPTIONS).fit(data, run=run, on_batch=lambda state, n_lists: state.step >= 25)
    assert read_tensors(run / "last" / FILE)[1]["training"]["position"] > 0
    DRM(**OPTIONS).fit(data, run=run, resume=True)
    assert_same_run(run, whole)


# Resumes a run and kills itself. Before that, it copies the run at other moments: a kill would leave the same files.
KILLED = """
import json, os, shutil, signal, sys
from drm_triton import DRM, Dataset

stored, run, place = sys.argv[1:4]
options, moments = map(json.loads, sys.argv[4:])
events = 0  # batches, and changes of files after the first batch


def count(batch=False):
    global events
    events += batch or events > 0
    if events == moments[-1]:
        os.kill(os.getpid(), signal.SIGKILL)
    if events in moments and not os.path.exists(f"{place}/{events}"):
        shutil.copytree(run, f"{place}/{events}")


def counted(function):
    def call(*args, **keywords):
        count()
        return function(*args, **keywords)

    return call


for name in ("fsync", "rename", "replace", "unlink"):
    setattr(os, name, counted(getattr(os, name)))
DRM(**options).fit(Dataset.load(stored), run=run, resume=True, on_batch=lambda *_: count(batch=True))
"""


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_killed_at_any_moment_and_resumed_equals_uninterrupted(
    stored: Path, data: Dataset, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    batches = []
    DRM(**OPTIONS).fit(data, [lambda end: True], run=run, on_batch=lambda state, n_lists: batches.append(state.step))
    # Early in an epoch, at its end, and before every other change of files in the save that follows.
    moments = [1, *range(len(batches), len(batches) + 13, 2)]
    done = run_python("-c", KILLED, stored, run, tmp_path, json.dumps(OPTIONS), json.dumps(moments))
    assert done.returncode == -signal.SIGKILL, done.stderr
    for left in (*(tmp_path / str(moment) for moment in moments[:-1]), run):
        DRM(**OPTIONS).fit(data, run=left, resume=True)
        assert_same_run(left, whole)


def test_a_kill_between_metrics_and_checkpoint_leaves_no_line_too_many(
    data: Dataset, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    DRM(**OPTIONS).fit(data, [lambda end: end.record["epoch"] == 2], run=run)
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"epoch": 3, "loss": 0}) + "\n")
    DRM(**OPTIONS).fit(data, run=run, resume=True)
    assert_same_run(run, whole)


@pytest.mark.parametrize("rest", [b"", b'{"epoch": 2, "los', b"\x00\x00\x00\x00", b'{"epoch": 2, "loss": \xff', b"17"])
def test_a_last_line_that_was_cut_off_is_dropped(rest: bytes, data: Dataset, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    DRM(**OPTIONS).fit(data, [lambda end: end.record["epoch"] == 2], run=run)
    first, second = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(first + rest)
    assert [record["epoch"] for record in read_metrics(run)] == [1]
    DRM(**OPTIONS).fit(data, run=run, resume=True)
    assert [record["epoch"] for record in read_metrics(run)] == [1, 3, 4]
    assert torch.equal(tensors(run)["user_factors"], tensors(whole)["user_factors"])
    (run / "metrics.jsonl").write_bytes(first + second.rstrip(b"\n"))  # cut off, but all is there
    assert [record["epoch"] for record in read_metrics(run)] == [1, 2]


@pytest.mark.parametrize("line", ['{"epoch": 2, "los', "", "17", '{"loss": 1}'])
def test_damage_elsewhere_is_told_with_its_line(line: str, data: Dataset, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for number in (2, 4):
        text = "".join(f"{line if n == number else whole_line}\n" for n, whole_line in enumerate(lines, 1))
        (run / "metrics.jsonl").write_text(text)
        with pytest.raises(DrmError, match=rf"metrics\.jsonl is damaged: line {number} \(.*remove it and resume"):
            DRM(**OPTIONS).fit(data, run=run, resume=True)


def test_a_finished_run_gets_whole_files_by_resuming(data: Dataset, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"epoch": 5')
    DRM(**OPTIONS).fit(data, run=run, resume=True)
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_save_and_say_how_to_resume(number: signal.Signals, stored: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ["-d", stored, "--run", run, "--epochs", 100_000, "--factors", 8]
    command = [sys.executable, "-m", "drm_triton", "train", *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (run / "last" / FILE).exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + number, errors
    assert f"drm-triton train --resume {run}" in errors
    assert read_tensors(run / "last" / FILE)[1]["training"]["epoch"] >= 1


@pytest.mark.parametrize("how", ["--quiet", "--json"])
def test_ctrl_c_prints_one_line_if_it_shall_print_little(
    how: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, save = tmp_path / "run", Run.save

    def save_and_interrupt(self: Run, state: State, best: bool = False) -> None:
        monkeypatch.setattr(Run, "save", save)
        self.save(state, best)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "save", save_and_interrupt)
    code, output, errors = call("train", "-d", stored, "--run", run, "--factors", 8, "--epochs", 100_000, how)
    assert code == 130, errors
    assert f"drm-triton train --resume {run}" in errors
    assert errors.count("\n") == 1
    if how == "--json":
        result = json.loads(output)
        assert (result["interrupted"], result["epochs"]) == (True, len(read_metrics(run)))
    assert read_tensors(run / "last" / FILE)[1]["training"]["epoch"] == 1


def test_a_full_disk_says_so_and_keeps_the_last_checkpoint(data: Dataset, tmp_path: Path) -> None:
    run, options = tmp_path / "run", {**OPTIONS, "schedule": "constant"}
    DRM(**{**options, "epochs": 1}).fit(data, run=run)
    before = (run / "last" / FILE).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write fails instead of the process
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        with pytest.raises(DrmError, match=r"no space left to write .*; what was saved before is intact"):
            DRM(**options).fit(data, run=run, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (run / "last" / FILE).read_bytes() == before
    assert not list(run.rglob("*.partial"))


def test_nan_keeps_the_last_good_checkpoint(data: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def poison(state: object, n_lists: int) -> None:
        if state.epoch == 2:  # type: ignore[attr-defined]
            state.U[:] = float("nan")  # type: ignore[attr-defined]

    with pytest.raises(DrmError, match="the loss became nan in epoch 3"):
        DRM(**OPTIONS).fit(data, run=run, on_batch=poison)
    assert read_tensors(run / "last" / FILE)[1]["training"]["epoch"] == 2
    assert torch.isfinite(tensors(run)["user_factors"]).all()


def test_refusals(data: Dataset, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="already contains a run; resume it with"):
        Run.create(whole, TrainConfig(), data, data.train)
    with pytest.raises(InputError, match="is not a run directory"):
        Run.open(tmp_path, data, TrainConfig())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InputError, match="exists and is not empty"):
        Run.create(tmp_path / "full", TrainConfig(), data, data.train)
    other = Dataset.from_csr(([0, 1, 2], [0, 1]), n_items=3)
    with pytest.raises(InputError, match="was trained on other data"):
        Run.open(whole, other, TrainConfig.from_toml(whole / "config.toml"))


def test_a_damaged_model_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no model"):
        DRM.load(tmp_path)
    (tmp_path / FILE).write_bytes((whole / "last" / FILE).read_bytes()[:1000])
    with pytest.raises(InputError, match="not a readable model file"):
        DRM.load(tmp_path)


def test_save_and_load_round_trip(data: Dataset, tmp_path: Path) -> None:
    model = DRM(**OPTIONS).fit(data)
    model.save(tmp_path / "model")
    loaded = DRM.load(tmp_path / "model")
    assert loaded.recommend(k=3).equals(model.recommend(k=3))
    loaded.save(tmp_path / "again")
    assert loaded.interactions.path == tmp_path / "model" / "data"
    with pytest.raises(InputError, match="already exists"):
        model.save(tmp_path / "model")
    model.save(tmp_path / "model", overwrite=True)


def test_resuming_a_finished_run_changes_nothing(data: Dataset, tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 40, "patience": 2, "lr": 0.5, "schedule": "constant"}
    run = tmp_path / "run"
    DRM(**options).fit(data, run=run)
    before, epochs = tensors(run), len(read_metrics(run))
    assert epochs < 40
    DRM(**options).fit(data, run=run, resume=True)
    assert len(read_metrics(run)) == epochs
    assert all(torch.equal(before[name], value) for name, value in tensors(run).items())


def test_a_resumed_run_keeps_its_configuration(data: Dataset, tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 1, "schedule": "constant"}
    run = tmp_path / "run"
    DRM(**options).fit(data, run=run)
    with pytest.raises(InputError, match="a resumed run cannot change `factors`, `score`"):
        DRM(**{**options, "factors": 16, "score": "l2"}).fit(data, run=run, resume=True)
    (run / "last" / ".model.safetensors.cc35c411.partial").touch()  # as a killed process leaves it
    (tmp_path / f".{run.name}.cc35c411.partial").mkdir()  # as one does that is killed as soon as the run has its name
    DRM(**{**options, "epochs": 2}).fit(data, run=run, resume=True)
    assert TrainConfig.from_toml(run / "config.toml").epochs == 2
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_killed_while_it_is_made_leaves_its_place_free(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("drm_triton.training.run.environment", killed)
        with pytest.raises(KeyboardInterrupt):
            Run.create(tmp_path / "run", TrainConfig(), data, data.train)
    Run.create(tmp_path / "run", TrainConfig(), data, data.train)
    assert os.listdir(tmp_path) == ["run"]


def test_others_may_read_the_model(whole: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for which in ("last", "best"):
        assert (whole / which / FILE).stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_environment_records_what_decides_the_rounding(data: Dataset) -> None:
    machine = environment(TrainConfig(), data)["machine"]
    assert machine["compiled_for"]
    assert machine["vector_bits"] in (256, 512)


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> None:
    """Change tensors and metadata of a model file, and write it with the checksum that belongs to them."""
    found, metadata = read_tensors(file)
    change(found, metadata)
    del metadata["format"], metadata["version"]
    write_tensors(file, found, metadata)


def narrow(tensors: dict[str, torch.Tensor], width: int) -> None:
    """Cut all rows to `width` factors."""
    tensors.update({name: table[:, :width].clone() for name, table in tensors.items()})


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def test_every_flipped_bit_of_a_model_is_noticed(whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    file = run / "best" / FILE
    content = file.read_bytes()
    metadata, tensor = content.index(b"lr"), len(content) - 7
    for position in (metadata, content.index(b"user_factors"), tensor, len(content) // 2):
        file.write_bytes(content)
        flip(file, position)
        with pytest.raises(InputError, match=r"damaged|not a readable model file"):
            DRM.load(run)
    file.write_bytes(content)
    DRM.load(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, metadata: metadata.update(config=[1]), "config in its metadata is"),
        (lambda tensors, metadata: metadata.update(model=["drm"]), "model in its metadata is"),
        (lambda tensors, metadata: metadata.update(config={"factors": "eight"}), "'factors' must be int"),
        (lambda tensors, metadata: metadata.pop("config"), "metadata is damaged"),
        (lambda tensors, metadata: tensors.update(user_factors=tensors["user_factors"][0]), r"float32 \[8\], but"),
        (lambda tensors, metadata: tensors.update(user_factors=tensors["user_factors"].long()), "has int64"),
        (lambda tensors, metadata: tensors.update(item_factors=tensors["item_factors"][:, :4]), r"\[200, 4\], but"),
        (lambda tensors, metadata: narrow(tensors, 4), r"user_factors it has float32 \[300, 4\], but"),
        (lambda tensors, metadata: narrow(tensors, 0), r"user_factors it has float32 \[300, 0\], but"),
    ],
)
def test_a_model_file_with_wrong_types_is_refused(
    change: Callable[..., object], message: str, whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    rewrite(run / "best" / FILE, change)
    with pytest.raises(InputError, match=message):
        DRM.load(run)


@pytest.mark.parametrize(
    "change", [{"epoch": "two"}, {"epoch": -1}, {"sums": []}, {"best": "high"}, {"stale": None}, {"position": True}]
)
def test_counters_of_wrong_types_are_refused(
    change: dict[str, Any], data: Dataset, whole: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    rewrite(run / "last" / FILE, lambda tensors, metadata: metadata["training"].update(change))
    with pytest.raises(InputError, match=f"cannot be resumed: its counter {next(iter(change))} is"):
        DRM(**OPTIONS).fit(data, run=run, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("item_state"), r"item_state it has none, but .* need float32 \[200, 8\]"),
        (lambda tensors: narrow(tensors, 4), r"user_factors it has float32 \[300, 4\], but .* need float32 \[300, 8\]"),
        (lambda tensors: tensors.update(user_state=tensors["user_state"].double()), "user_state it has float64"),
        (
            lambda tensors: tensors.update(user_state=tensors["user_state"][:9].clone()),
            r"user_state it has .* \[9, 8\]",
        ),
        (lambda tensors: tensors.update(other=torch.zeros(1)), r"other it has float32 \[1\], but .* need none"),
    ],
)
def test_tensors_that_are_not_those_of_the_options_are_not_resumed(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, stored: Path, whole: Path, tmp_path: Path
) -> None:
    """With a valid checksum."""
    run = shutil.copytree(whole, tmp_path / "run")
    rewrite(run / "last" / FILE, lambda tensors, metadata: change(tensors))
    code, _, errors = call("train", "--resume", run, "-d", stored, "-q")
    assert code == 2
    assert re.search(message, " ".join(errors.split()))


def test_two_processes_cannot_resume_one_run(stored: Path, data: Dataset, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    held, _ = Run.open(run, data, TrainConfig.from_toml(run / "config.toml"))
    code, _, errors = call("train", "--resume", run, "-d", stored, "-q")
    assert (code, errors.count("\n")) == (2, 1)
    assert "another process works on this run" in errors
    held.lock.release()
    assert call("train", "--resume", run, "-d", stored)[0] == 0


def test_a_run_at_work_is_not_overwritten(stored: Path, data: Dataset, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole, tmp_path / "run")
    before = (run / "config.toml").read_text()
    line = ("train", stored, "--run", run, "--overwrite", "--epochs", 1, "--factors", 4, "-q")
    held, _ = Run.open(run, data, TrainConfig.from_toml(run / "config.toml"))
    code, _, errors = call(*line)
    assert (code, errors.count("\n")) == (2, 1)
    assert "another process works on this directory" in errors
    assert (run / "config.toml").read_text() == before
    assert os.listdir(tmp_path) == ["run"]
    held.write_metrics()  # it is still its own
    held.lock.release()
    assert call(*line)[0] == 0
    assert "factors = 4" in (run / "config.toml").read_text()


def test_a_new_run_is_locked_as_soon_as_it_exists(data: Dataset, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", TrainConfig(), data, data.train)
    for overwrite in (False, True):
        with pytest.raises(InputError, match=r"already contains a run|another process works on"):
            Run.create(tmp_path / "run", TrainConfig(), data, data.train, overwrite)
    with pytest.raises(InputError, match="another process works on this run"):
        Run.open(tmp_path / "run", data, TrainConfig())
    run.write_metrics()


def test_a_run_that_was_replaced_stops_its_training(data: Dataset, whole: Path, tmp_path: Path) -> None:
    """As on a file system without locks, or by hand."""
    run = tmp_path / "run"

    def replace(end: EpochEnd) -> None:
        run.rename(tmp_path / "old")
        shutil.copytree(whole, run)

    with pytest.raises(DrmError, match="run was moved, removed or replaced while this process worked on it"):
        DRM(**OPTIONS).fit(data, run=run, callbacks=[replace])
    assert_same_run(run, whole)
    assert not (tmp_path / "old" / "metrics.jsonl").exists()


def test_a_damaged_run_can_be_opened_again_after_the_error(data: Dataset, whole: Path, tmp_path: Path) -> None:
    """The lock is released with the error, even while its traceback is kept, as notebooks do."""
    run = shutil.copytree(whole, tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text("17\n" + text)
    with pytest.raises(DrmError, match="is damaged") as raised:
        DRM(**OPTIONS).fit(data, run=run, resume=True)
    (run / "metrics.jsonl").write_text(text)
    DRM(**OPTIONS).fit(data, run=run, resume=True)
    assert raised.value


def test_resuming_recomputes_the_checksum_of_the_data(stored: Path, whole: Path, tmp_path: Path) -> None:
    """Rows that changed without a trace in size and times, as on a failing disk."""
    place = shutil.copytree(stored, tmp_path / "data")
    data = Dataset.load(place)  # verified now
    flip(place / "train.indices.npy", (place / "train.indices.npy").stat().st_size - 4)
    run = shutil.copytree(whole, tmp_path / "run")
    with pytest.raises(InputError, match="is damaged"):
        DRM(**OPTIONS).fit(data, run=run, resume=True)
    with pytest.raises(InputError, match="is damaged"):
        DRM(**OPTIONS).fit(data, run=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_run_in_a_mount_point_where_another_was_killed(
    data: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / ".run.0123abcd.partial" / "last").mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == run)
    DRM(**{**OPTIONS, "epochs": 1}).fit(data, run=run)
    assert (run / "best" / FILE).exists()
    assert not list(run.glob("*.partial"))


@pytest.mark.parametrize("kind", ["link", "dangling"])
def test_a_run_in_a_linked_directory(kind: str, data: Dataset, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    if kind == "link":
        (tmp_path / "disk" / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "run")
    DRM(**{**OPTIONS, "epochs": 1}).fit(data, run=tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "run" / "best" / FILE).exists()
    assert os.listdir(tmp_path / "disk") == ["run"]


@pytest.mark.parametrize("options", [{"lam": 1e30}, {"lam": 1e25, "objective": "softmax+drm"}])
def test_gradients_that_overflow_adagrad_are_an_error(options: dict[str, Any], data: Dataset) -> None:
    settings = {"factors": 8, "epochs": 1, "init": "normal", "objective": "hinge+drm", **options}
    with pytest.raises(DrmError, match=r"overflow in epoch 1 .* start again with a lower `lr` or a lower `lam`"):
        DRM(**settings).fit(data)
