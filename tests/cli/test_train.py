"""`train` from the command line."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from drm_triton import DRM, Dataset, TrainConfig
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.names import HEADLINE_METRICS
from drm_triton.training.run import read_metrics
from tests.conftest import call

pytestmark = pytest.mark.usefixtures("no_curves")


def test_progress_is_a_table_on_stderr(stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, errors = call("train", stored, "--out", "run", "--factors", 4, "--epochs", 12)
    assert code == 0
    records = read_metrics(tmp_path / "run")
    best = max(records, key=lambda record: record["valid/ndcg@10"])
    values = ", ".join(f"{name} {best[name]:.4f}" for name in HEADLINE_METRICS)
    assert out == f"trained run\nbest epoch {best['epoch']}: {values}\n"
    data = Dataset.load(stored)
    _, header, *rows = errors.split(" the kernels (", 1)[1].splitlines()
    assert errors.splitlines()[:3] == [
        f"drm on songs: {data.n_users} users, {data.n_items} items, {data.n_interactions:,} interactions",
        f"temperature {TrainConfig().temperature_for(data.n_items):.3g}, from the number of items",
        "run directory run",
    ]
    assert header.split() == ["epoch", "loss", "valid/ndcg@10", "lists/s", "time", "time", "left"]
    assert [row.split()[0] for row in rows] == [f"{epoch}/12" for epoch in range(1, 13)]
    assert {row.index(" s") for row in rows[:-1]} == {rows[0].index(" s")}  # aligned
    so_far = -1.0
    for row, record in zip(rows, records, strict=True):
        assert f"{record['valid/ndcg@10']:.4f} {'*' if record['valid/ndcg@10'] > so_far else ' '}  " in row
        so_far = max(so_far, record["valid/ndcg@10"])
    assert max(map(len, (out + errors).splitlines())) <= 80


def test_a_data_set_is_an_argument_or_an_option(stored: Path, tmp_path: Path) -> None:
    plans = [call(*line, "--dry-run", "--json") for line in (["train", stored], ["train", "--dataset", stored])]
    assert plans[0] == plans[1]
    assert plans[0][0] == 0
    code, _, errors = call("train", stored, "-d", "other", "--dry-run")
    assert (code, errors) == (2, f"error: --dataset is given twice, as {stored} and as other; give it once\n")


def test_a_run_is_replaced_only_on_request(stored: Path, tmp_path: Path) -> None:
    path, options = tmp_path / "run", ["--factors", 4, "--quiet"]
    assert call("train", stored, "--out", path, "--epochs", 2, *options)[0] == 0
    code, _, errors = call("train", stored, "--out", path, "--epochs", 1, *options)
    assert (code, len(read_metrics(path))) == (2, 2)
    assert "resume it with --resume, replace it with --overwrite, or give another --out" in errors
    (path / "notes.txt").touch()
    assert call("train", stored, "--out", path, "--epochs", 1, "--overwrite", *options)[0] == 0
    assert len(read_metrics(path)) == 1
    assert not (path / "notes.txt").exists()  # the directory is a new one
    # Something else is never replaced, whatever its files are called.
    other = tmp_path / "project"
    other.mkdir()
    (other / "config.toml").write_text("mine")
    code, _, errors = call("train", stored, "--out", other, "--epochs", 1, "--overwrite", *options)
    assert (code, (other / "config.toml").read_text()) == (2, "mine")
    assert "was not made by this program" in errors
    code, _, errors = call("train", "--resume", path, "--overwrite")
    assert (code, errors.count("\n")) == (2, 1)
    assert "leave out --run, --config and --overwrite" in errors


def test_logging_to_tensorboard(stored: Path, tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code, _, errors = call(
        "train", stored, "-o", tmp_path / "run", "--factors", 4, "--epochs", 2, "--log", "tensorboard"
    )
    assert code == 0, errors
    found = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    values = [(event.step, event.value) for event in found.Scalars("valid/ndcg@10")]
    records = read_metrics(tmp_path / "run")
    assert values == [(record["epoch"], pytest.approx(record["valid/ndcg@10"])) for record in records]


def test_a_log_without_its_package_is_refused_before_the_training(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, errors = call("train", stored, "--out", tmp_path / "run", "--log", "wandb", "--quiet")
    assert (code, errors.count("\n")) == (2, 1)
    assert "--log wandb needs the package wandb" in errors
    assert "pip install 'drm-triton[wandb]'" in errors
    assert not (tmp_path / "run").exists()


def test_a_split_by_users_is_trained_without_validation(tmp_path: Path) -> None:
    users, items = generate(Shape(users=60, items=50, interactions=900), 0)
    Dataset.from_frame(pl.DataFrame({"user": users, "item": items}), split="users").save(tmp_path / "data")
    code, out, errors = call("train", "-d", tmp_path / "data", "--run", tmp_path / "run", "--factors", 4, "--epochs", 2)
    assert (code, out) == (0, f"trained {tmp_path / 'run'}\n")
    assert errors.count("warning: training without validation: no user has both") == 1
    best, last = ((tmp_path / "run" / part / "model.safetensors").read_bytes() for part in ("best", "last"))
    assert best == last
    code, _, errors = call("tune", "-d", tmp_path / "data", "--study", tmp_path / "study", "--trials", 1)
    assert code == 2
    assert "tune: no user has both" in errors


def test_json_and_quiet(stored: Path, tmp_path: Path) -> None:
    code, out, errors = call("train", "-d", stored, "--run", tmp_path / "a", "--factors", 4, "--epochs", 1, "--json")
    assert (code, errors) == (0, "")
    result = json.loads(out)
    assert result["run"] == str(tmp_path / "a")
    assert 0 <= result["valid/ndcg@10"] <= 1
    code, _, errors = call("train", "-d", stored, "--run", tmp_path / "b", "--factors", 4, "--epochs", 1, "--quiet")
    assert (code, errors) == (0, "")


def test_dataset_by_name_under_the_data_directory(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRM_DATA", str(stored.parent))
    monkeypatch.chdir(tmp_path)
    code, out, _ = call("train", "--dataset", "songs", "--factors", 4, "--epochs", 1)
    assert code == 0
    assert out.startswith("trained runs/songs-")


def test_weights_of_interactions(tmp_path: Path) -> None:
    users, items = generate(Shape(users=60, items=50, interactions=900), 0)
    frame = pl.DataFrame({"user": users, "item": items, "plays": users + items + 1})
    Dataset.from_frame(frame, weight="plays").save(tmp_path / "data")
    weights = ["--interaction-weights", "bm25", "--interaction-weight-cap", 4]
    code, _, errors = call(
        "train", "-d", tmp_path / "data", "--run", tmp_path / "run", "--factors", 4, "--epochs", 1, *weights
    )
    assert code == 0, errors
    recorded = (tmp_path / "run" / "config.toml").read_text()
    assert 'interaction_weights = "bm25"\ninteraction_weight_cap = 4.0\n' in recorded


def test_flags_override_the_file_and_unknown_keys_are_errors(stored: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('factors = 4\nscore = "l2"\nlambda = 2\n')
    code, out, _ = call("train", "-d", stored, "--config", file, "--factors", 6, "--dry-run", "--json")
    plan = json.loads(out)
    assert code == 0
    assert (plan["config"]["factors"], plan["config"]["score"], plan["config"]["lambda"]) == (6, "l2", 2.0)
    data = Dataset.load(stored)
    assert plan["memory_bytes"]["factors"] == 4 * 6 * (data.n_users + data.n_items)
    assert plan["data"]["train"] == data.train.nnz
    code, _, errors = call("train", "-d", stored, "--config", file, "--factors", 0)
    assert (code, errors) == (2, "error: --factors must be at least 1, got 0\n")
    file.write_text("lam = 2\nlambda = 2\n")
    for command in ("train", "tune"):
        code, _, errors = call(command, "-d", stored, "--config", file)
        assert (code, errors.count("\n")) == (2, 1)
        assert f"{file}: 'lam' and 'lambda' are the same option" in errors
    file.write_text("epoch = 3\n")
    code, _, errors = call("train", "-d", stored, "--config", file)
    assert code == 2
    assert "unknown option 'epoch'; did you mean 'epochs'?" in errors


def test_resume_changes_only_what_may_change(stored: Path, run: Path) -> None:
    code, _, errors = call("train", "--resume", run, "--factors", 16)
    assert code == 2
    assert "a resumed run cannot change --factors" in errors
    code, _, errors = call("train", "--resume", run, "--epochs", 3)
    assert code == 2
    assert "a resumed run cannot change --epochs: the linear schedule of the learning rate depends on it" in errors


def test_resume_adds_epochs_at_a_constant_rate(stored: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    options = ["--factors", 4, "--schedule", "constant"]
    assert call("train", "-d", stored, "--run", path, "--epochs", 2, *options)[0] == 0
    code, out, errors = call("train", "--resume", path, "--epochs", 3, "--json")
    assert code == 0, errors
    assert json.loads(out)["epochs"] == 3


def test_resuming_tells_of_the_whole_run(stored: Path, tmp_path: Path) -> None:
    path, options = tmp_path / "run", ["--factors", 4, "--schedule", "constant", "--lr", 1, "--epochs", 4]
    code, out, _ = call("train", "-d", stored, "--run", path, *options, "--json")
    first = json.loads(out)
    assert (code, first["epochs"]) == (0, 4)
    code, out, _ = call("train", "--resume", path, "--json")
    assert (code, json.loads(out)) == (0, first)
    code, out, _ = call("train", "--resume", path)
    assert out.startswith(f"trained {path}\nbest epoch ")
    assert out.endswith(": " + ", ".join(f"{n} {first[n]:.4f}" for n in HEADLINE_METRICS) + "\n")
    # More epochs, of which none is better, do not hide the best one.
    records = read_metrics(path)
    best = max(records, key=lambda record: record["valid/ndcg@10"])
    best["valid/ndcg@10"] = 1.0
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    code, out, _ = call("train", "--resume", path, "--epochs", 5, "--json")
    assert (code, json.loads(out)["epochs"], json.loads(out)["valid/ndcg@10"]) == (0, 5, 1.0)


def pairs_of(path: Path) -> pl.DataFrame:
    data = Dataset.load(path)
    users = np.repeat(np.arange(data.n_users), data.liked.degrees())
    return pl.DataFrame({"user": data.user_ids[users], "item": data.item_ids[data.liked.indices]})


@pytest.fixture(scope="module")
def more(stored: Path, delta: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of `stored` with 20 more users and items."""
    path = tmp_path_factory.mktemp("more") / "songs-new"
    Dataset.from_frame(pl.concat([pairs_of(stored), pairs_of(delta)])).save(path)
    return path


@pytest.fixture(scope="module")
def delta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New interactions only, also of 20 new users and items."""
    users, items = generate(Shape(users=220, items=170, interactions=900), 1)
    frame = pl.DataFrame({"user": [f"u{u}" for u in users], "item": [f"song {i}" for i in items]})
    path = tmp_path_factory.mktemp("more") / "delta"
    Dataset.from_frame(frame).save(path)
    return path


def test_an_update_from_a_run(run: Path, more: Path, tmp_path: Path) -> None:
    code, out, errors = call("train", "--from", run, "-d", more, "--run", tmp_path / "new", "--lr", 0.1, "--json")
    assert (code, errors) == (0, "")
    assert json.loads(out)["epochs"] == 2
    assert [record["epoch"] for record in read_metrics(tmp_path / "new")] == [2]
    recorded = json.loads((tmp_path / "new" / "env.json").read_text())
    assert recorded["from"]["path"] == str(run / "best")
    assert recorded["from"]["users"]["new"] >= 20
    assert "lr = 0.1\n" in (tmp_path / "new" / "config.toml").read_text()
    data, model = Dataset.load(more), DRM.load(tmp_path / "new")
    assert (model.interactions.n_users, model.interactions.train.nnz) == (data.n_users, data.train.nnz)
    assert call("evaluate", tmp_path / "new")[0] == 0
    code, out, _ = call("train", "--resume", tmp_path / "new", "--json")
    assert (code, json.loads(out)["epochs"]) == (0, 2)
    code, _, errors = call("train", "--from", run, "-d", more, "--run", tmp_path / "two", "--epochs", 2)
    assert code == 0
    assert re.search(r"^ *1/2 ", errors, re.MULTILINE)
    code, out, _ = call("train", "--from", run, "-d", more, "--dry-run", "--json")
    assert json.loads(out)["config"]["factors"] == 8


def test_an_update_with_new_interactions_only(run: Path, stored: Path, delta: Path, tmp_path: Path) -> None:
    place, old, new = tmp_path / "new", Dataset.load(stored), Dataset.load(delta)
    code, _, errors = call("train", delta, "--from", run, "--run", place)
    assert code == 0
    both = Dataset.load(place / "last" / "data")
    kept = both.n_interactions - new.n_interactions
    assert f"{both.n_users - new.n_users} users and {kept:,} interactions of the old model are kept\n" in errors
    code, out, _ = call("train", delta, "--from", run, "--dry-run", "--json")
    assert json.loads(out)["data"]["train"] == both.train.nnz
    assert call("recommend", place, "--all", "-q", "--out", tmp_path / "top.parquet")[0] == 0
    best = pl.read_parquet(tmp_path / "top.parquet")
    assert set(best["user"]) == {*old.user_ids, *new.user_ids}
    for owned in (pairs_of(stored), pairs_of(delta)):
        assert best.join(owned, on=["user", "item"], how="semi").is_empty()
    assert call("evaluate", place, "-q")[0] == 0
    assert call("train", "--resume", place, "-q")[0] == 0
    assert call("refit", place, "-q")[0] == 0
    assert call("report", place, "--out", tmp_path / "report", "-q")[0] == 0


def test_an_update_of_a_model_that_is_trained_anew(stored: Path, more: Path, tmp_path: Path) -> None:
    assert call("train", "-d", stored, "--model", "popularity", "--run", tmp_path / "old", "-q")[0] == 0
    code, _, errors = call("train", "--from", tmp_path / "old", "-d", more, "--run", tmp_path / "new")
    assert code == 0
    assert "popularity has no vectors to start from: it is trained anew" in errors
    assert json.loads((tmp_path / "new" / "env.json").read_text())["from"]["start"] == "anew"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--factors", 4], "an update cannot change --factors; train a new model"),
        (["--score", "l2"], "an update cannot change --score; train a new model"),
        (["--model", "ease"], "an update cannot change --model; train a new model"),
        (["--config", "c.toml"], "--from uses the options of the run; leave out --config and --resume"),
        (["--epochs", 3], "--epochs of an update must be from 1 to 2, the epochs of the training, got 3"),
        (["--confidence", 3], "unknown option --confidence"),
    ],
)
def test_what_an_update_refuses(options: list[object], message: str, run: Path, more: Path, tmp_path: Path) -> None:
    code, _, errors = call("train", "--from", run, "-d", more, "--run", tmp_path / "new", "-q", *options)
    assert (code, errors.count("\n")) == (2, 1)
    assert message in errors
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "DATASET is missing"),
        (["train", "--from", "{run}"], "DATASET is missing"),
        (["train", "--from", "nowhere", "-d", "{data}"], "nowhere: there is no model"),
        (["train", "-d", "nowhere"], "no data set at nowhere"),
        (["train", "-d", "{data}", "--tau", "0"], "--tau must be at least 1e-32, got 0.0"),
        (["train", "-d", "{data}", "--score", "hamming"], "--score must be one of dot, l2, cosine, got 'hamming'"),
        (["train", "{data}", "--backend", "triton", "-q"], "triton cannot be used"),
        (["train", "{data}", "--run", "{run}", "-q"], "already contains a run"),
        (["train", "--resume", "{data}"], "is not a run directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, stored: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, _, errors = call(*(a.format(data=stored, run=run) for a in arguments))
    assert code == 2
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "triton"], "triton cannot be used"),
        (["--seed", 2**63], "--seed must be at most 9223372036854775807"),
        (["--tau", "1e-33"], "--tau must be at least 1e-32"),
        (["--tau", "1e33"], "--tau must be at most 1e+32"),
        (["--interaction-weights", "log"], "--interaction-weights log needs weights, which the data set does not have"),
    ],
)
def test_what_cannot_be_trained_leaves_no_directory(
    options: list[object], message: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, _, errors = call("train", stored, "--run", tmp_path / "runs" / "new", "--quiet", *options)
    assert (code, errors.count("\n")) == (2, 1)
    assert message in errors
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_weights_that_the_data_set_does_not_have(stored: Path) -> None:
    code, out, errors = call("train", "-d", stored, "--dry-run", "--interaction-weights", "log")
    assert (code, out, errors.count("\n")) == (2, "", 1)
    assert "--interaction-weights log needs weights, which the data set does not have" in errors


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\x00"])
def test_a_damaged_env_json_is_reported(run: Path, stored: Path, text: str) -> None:
    file = run / "env.json"
    whole = file.read_text()
    try:
        file.write_text(text)
        for arguments in (["evaluate", run], ["train", "--resume", run]):
            code, _, errors = call(*arguments)
            assert code == 2
            assert errors.startswith(f"error: cannot read {file}: ")
            assert "move the file away, or start a new run" in errors
        assert call("evaluate", run, "--dataset", stored)[0] == 0
    finally:
        file.write_text(whole)


def test_factors_that_do_not_fit_into_the_memory_are_refused(stored: Path, tmp_path: Path) -> None:
    code, _, errors = call(
        "train", stored, "--out", tmp_path / "run", "--factors", 10**9, "--backend", "cpu", "--quiet"
    )
    assert code == 2
    assert re.match(r"error: drm needs [\d,.]+ GiB of memory for .* are free; choose fewer --factors", errors), errors
    assert not (tmp_path / "run").exists()
