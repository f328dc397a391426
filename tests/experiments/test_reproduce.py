"""`drm-triton reproduce`: every table and figure, on tiny data."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.experiments import alignment, list_lengths, protocol
from drm_triton.experiments.stand_in import STAND_IN, WIDTH, find_data
from tests.conftest import call

TINY = ("--dataset", "sketchfab", "--scale", "0.005", "--workers", "1")
SMALL = ("--trials", "1", "--seeds", "2", "--epochs", "1", "--models", "cml,drm-dot,drm-l2")


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: None) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRM_DATA", raising=False)
    return tmp_path


def run(*arguments: object) -> tuple[str, str]:
    code, out, errors = call("reproduce", *arguments)
    assert code == 0, errors
    return out, errors


def result(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json")[0])
    return found


def save(folder: str, source: str, **options: Any) -> Path:
    """Store data as if it were prepared from a source."""
    users, items = generate(Shape(users=60, items=80, interactions=1800), 0)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}), **options)
    data.meta["source"] = source
    data.save(folder)
    return Path(folder)


# -- stand-ins -------------------------------------------------------------------------------------------------------


def check_labels(out: str, errors: str, files: list[Path], titles: list[str]) -> None:
    """Check that every line, file and picture says that the data is synthetic, and that lines fit on a screen."""
    for line in [*out.splitlines(), *errors.splitlines()]:
        assert STAND_IN in line, line
        assert len(line) <= WIDTH or "wrote" in line or "store" in line, line  # paths are as long as they are
    assert all(STAND_IN in title.replace("\n", " ") for title in titles)
    assert all(STAND_IN.replace(" ", "-") in file.name for file in files)
    found = json.loads(next(file for file in files if file.suffix == ".json").read_text("utf-8"))
    assert STAND_IN in found["caption"]
    assert all(one["stand_in"] for one in found["data"])
    assert all(STAND_IN in row["data"] for row in found["rows"])
    for file in (file for file in files if file.suffix in (".md", ".tex")):
        lines = file.read_text("utf-8").splitlines()
        header, *rows = (line for line in lines if line.startswith("| ") or line.endswith(r" \\"))
        assert len(rows) == len(found["rows"]), header
        assert all(STAND_IN in line for line in rows)


@pytest.mark.parametrize(
    ("arguments", "pictures"),
    [
        (("table1", *TINY[:4]), 0),
        (("table3", *TINY, *SMALL), 1),
        (("table5", *TINY[:4], "--seeds", "1", "--epochs", "5"), 0),
        (("figure2", *TINY, "--seeds", "1", "--epochs", "1"), 1),
        (("figure3", *TINY, *SMALL), 1),
    ],
)
def test_everything_about_a_stand_in_is_labelled(arguments: tuple[str, ...], pictures: int) -> None:
    with mock.patch("drm_triton.experiments.pictures.Figure.suptitle") as suptitle:
        out, errors = run(*arguments)
    titles = [shown.args[0] for shown in suptitle.call_args_list]
    files = sorted(Path(f"reproduce/{arguments[0]}-sketchfab").glob(f"{arguments[0]}*"))
    assert len(titles) == pictures
    assert [file.suffix for file in files] == [".json", ".md", *[".png"] * pictures, ".tex"]
    check_labels(out, errors, files, titles)
    assert "The real SketchFab is absent" in out
    assert "model_likes_anon.psv" in out


def test_a_stand_in_resembles_the_published_statistics() -> None:
    for name in ("sketchfab", "epinion", "ml-20m", "melon"):
        data = find_data(name)
        assert (data.paper, data.stand_in) == (name, True)
        assert data.dataset.n_interactions == 50_000
        per_user = {"sketchfab": 36.0, "epinion": 29.6, "ml-20m": 73.4, "melon": 39.4}[name]
        assert data.dataset.n_interactions / data.dataset.n_users == pytest.approx(per_user, rel=0.01)
        assert data.dataset.n_interactions / (data.dataset.n_users * data.dataset.n_items) < 0.0501
    assert find_data("melon").dataset.checksum == data.dataset.checksum  # not generated again


def test_table_1_without_a_data_set_has_all_four() -> None:
    save("data/epinion", "epinion")
    out, _ = run("table1", "--scale", "0.005")
    found = json.loads(Path("reproduce/table1/table1.json").read_text("utf-8"))
    assert [one["stand_in"] for one in found["data"]] == [True, False, True, True]
    labels = {row["data"] for row in found["rows"]}
    assert labels == {"epinion", *(f"{name} ({STAND_IN})" for name in ("sketchfab", "ml-20m", "melon"))}
    rows = {(row["data"], row["statistic"]): row for row in found["rows"]}
    assert rows["epinion", "users"]["ours"] == 60
    assert rows["epinion", "users"]["published"] == 21_300
    assert rows["epinion", "per_item"]["ours"] == 1800 / 80
    assert rows["epinion", "density"]["published"] == 0.00048
    assert re.search(r"^epinion +users +60 +21,300 +-99\.7%$", out, re.MULTILINE)
    assert re.search(r"^epinion +density +37\.500% +0\.048%", out, re.MULTILINE)


# -- trainings -------------------------------------------------------------------------------------------------------


def test_tables_3_and_4_and_figure_3_share_their_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    save("data/sketchfab", "sketchfab")
    common = ("--dataset", "sketchfab", "--workers", "1", *SMALL[:6])
    out, _ = run("table3", *common, *SMALL[6:])
    assert STAND_IN not in out
    found = json.loads(Path("reproduce/table3-sketchfab/table3.json").read_text("utf-8"))
    assert [row["metric"] for row in found["rows"][::3]] == ["map_k@10", "ndcg@10", "recall@50", "ndcg@50", "map@10"]
    rows = {(row["metric"], row["model"]): row for row in found["rows"]}
    assert rows["map_k@10", "drm-dot"]["published"] == 0.0399
    assert rows["ndcg@50", "cml"]["published"] == 0.1778
    assert rows["map@10", "cml"]["published"] is None

    outcomes = Path("reproduce/trainings-sketchfab/outcomes.jsonl")
    finals = [one for one in map(json.loads, outcomes.read_text("utf-8").splitlines()) if one["stage"] == "test"]
    values = [one["map_k@10"] for one in finals if one["model"] == "drm-dot"]
    assert len(values) == 2
    ours = rows["map_k@10", "drm-dot"]["ours"]
    assert ours == pytest.approx(sum(values) / 2)
    assert all(one["options"].get("epochs", 1) == 1 for one in finals)
    assert f"{ours:.4f}" in out
    assert f"{ours - 0.0399:+.4f}" in out
    assert any(re.match(r"ndcg@10: drm-\S+ 0\.\d+, best baseline cml 0\.\d+ \(Welch", note) for note in found["notes"])
    assert any("Not trained here: slim, cdae" in note for note in found["notes"])

    trained: list[str] = []
    real = protocol.run_task
    monkeypatch.setattr(protocol, "run_task", lambda task: (trained.append(task["model"]), real(task))[1])
    run("table4", *common)
    assert set(trained) == {"drm-alone-l2"}
    found = json.loads(Path("reproduce/table4-sketchfab/table4.json").read_text("utf-8"))
    assert [row["model"] for row in found["rows"][:3]] == ["cml", "drm-alone-l2", "drm-l2"]
    assert [row["published"] for row in found["rows"][:3]] == [0.0358, 0.0310, 0.0390]

    trained.clear()
    run("figure3", *common, *SMALL[6:])
    assert not trained
    found = json.loads(Path("reproduce/figure3-sketchfab/figure3.json").read_text("utf-8"))
    first, second = (
        pl.read_parquet(Path("reproduce/trainings-sketchfab") / one["users"]) for one in finals if one["model"] == "cml"
    )
    of_cml = [row for row in found["rows"] if row["model"] == "cml"]
    assert sum(row["users"] for row in of_cml) == len(first)
    least = of_cml[0]["interactions"].split("–")
    group = first.filter(pl.col("n_train").is_between(int(least[0]), int(least[-1])))
    assert len(group) == of_cml[0]["users"]
    again = second.filter(pl.col("user").is_in(group["user"].to_list()))
    mean = float(pl.concat([group, again])["ndcg@10"].to_numpy().mean())
    assert of_cml[0]["ours"] == pytest.approx(mean)
    assert any("picture only" in note and "claim" in note for note in found["notes"])
    assert any(re.search(r"drm-dot is above the best baseline in \d of 5 groups", note) for note in found["notes"])


def test_a_stopped_table_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("table3", *TINY, "--trials", "2", "--seeds", "1", "--epochs", "1", "--models", "drm-dot")
    whole = result(*arguments)
    outcomes = Path("reproduce/trainings-sketchfab/outcomes.jsonl")
    lines = outcomes.read_text("utf-8").splitlines(keepends=True)
    outcomes.write_text("".join(lines[:1]), "utf-8")
    trained: list[str] = []
    real = protocol.run_task
    monkeypatch.setattr(protocol, "run_task", lambda task: (trained.append(task["stage"]), real(task))[1])
    assert result(*arguments) == whole
    assert trained == ["tune", "test"]


def test_another_budget_in_the_same_directory_replaces_nothing() -> None:
    arguments = (*TINY, "--trials", "1", "--seeds", "1", "--models", "drm-dot", "--epochs")
    short = result("figure3", *arguments, "1")
    long = result("figure3", *arguments, "3")
    assert long["rows"] != short["rows"]
    assert result("figure3", *arguments, "1") == short


def test_table_5_stores_each_training(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: dict[str, float | None] = {**dict.fromkeys(alignment.MEASURED, -0.5), "train map@10": None}
    calls: list[tuple[str, int]] = []

    def correlations(data: Dataset, objective: str, epochs: int, seed: int) -> dict[str, float | None]:
        calls.append((objective, seed))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measured

    monkeypatch.setattr(alignment, "correlations", correlations)
    arguments = ("table5", "-d", "ml-20m", "--scale", "0.001", "--seeds", "2")
    assert call("reproduce", *arguments)[0] != 0
    found = result(*arguments)
    assert len(calls) == 3 + 8 - 2
    rows = {(row["metric"], row["objective"]): row for row in found["rows"]}
    assert rows["valid ndcg@10", "mse"]["published"] == -0.745
    assert rows["valid ndcg@10", "mse"]["ours"] == -0.5
    assert rows["train map@10", "mse"]["ours"] is None  # undefined, not NaN
    assert rows["train map_k@10", "hinge"]["published"] == -0.983
    assert not any("other data" in note for note in found["notes"])
    result(*arguments)
    assert len(calls) == 3 + 8 - 2


def test_correlations_are_of_the_epochs_after_the_second() -> None:
    data = find_data("sketchfab", scale=0.005).dataset
    found = alignment.correlations(data, "hinge+drm", 5, seed=0)
    assert found.keys() == set(alignment.MEASURED)
    records: list[dict[str, Any]] = []
    options = {**alignment.OPTIONS, "objective": "hinge+drm", "epochs": 5}
    DRM(**options).fit(data, [lambda end: records.append(end.record)])
    loss, ndcg = (pl.Series([record[name] for record in records[2:]]) for name in ("loss", "valid/ndcg@10"))
    expected = pl.DataFrame({"loss": loss, "ndcg": ndcg}).select(pl.corr("loss", "ndcg")).item()
    assert found["valid ndcg@10"] == pytest.approx(expected)


def test_figure_2_varies_rho_and_eta_together_and_apart() -> None:
    lists = {way: pairs for way, pairs, _ in list_lengths.WAYS}
    assert lists["rho, eta = 15 rho"] == ((1, 15), (2, 30), (3, 45), (4, 60), (5, 75))
    assert lists["rho, eta = 75"] == ((1, 75), (2, 75), (3, 75), (4, 75), (5, 75))
    assert lists["eta, rho = 1"] == ((1, 15), (1, 30), (1, 45), (1, 60), (1, 75))
    found = result("figure2", *TINY, "--seeds", "1", "--epochs", "2", "--quick")
    assert len(found["rows"]) == 2 * 3 * 5
    assert {row["epochs"] for row in found["rows"] if row["vary"] == "rho, eta = 15 rho"} == {2}
    store = Path("reproduce/figure2-sketchfab/trainings-sketchfab-quick/outcomes.jsonl")
    outcomes = [json.loads(line) for line in store.read_text("utf-8").splitlines()]
    assert len(outcomes) == 2 * 12
    assert all(one["options"]["lambda"] == 1 for one in outcomes)
    row = next(row for row in found["rows"] if (row["score"], row["rho"], row["eta"]) == ("l2", 3, 75))
    one = next(one for one in outcomes if one["model"] == "l2-rho3-eta75")
    assert (one["options"]["rho"], one["options"]["eta"], one["options"]["score"]) == (3, 75, "l2")
    assert row["ours"] == one["ndcg@10"]
    assert "Quick look" in found["caption"]
    assert all("-quick-" in Path(file).name for file in found["files"])


def test_figure_3_of_given_runs() -> None:
    place = save("data/mine", "table")
    for score in ("dot", "l2"):
        DRM(score=score, objective="hinge+drm", factors=4, epochs=1).fit(Dataset.load(place), run=f"runs/{score}")
    found = result("figure3", "--run", "runs/dot", "--run", "runs/l2")
    assert found["caption"].startswith("Figure 3 of the paper, on mine:")
    assert {row["model"] for row in found["rows"]} == {"runs/dot", "runs/l2"}
    assert Path("reproduce/figure3-mine/figure3.png").is_file()
    says = "leave out --seeds"
    assert says in fails("figure3", "--run", "runs/dot", "--seeds", "2")
    save("data/other", "table", seed=1)
    assert "was not trained on" in fails("figure3", "--run", "runs/dot", "-d", "other")


# -- data ------------------------------------------------------------------------------------------------------------


def test_other_data_has_no_published_figures() -> None:
    save("data/mine", "table")
    found = result("table1", "-d", "mine")
    assert all(row["published"] is None for row in found["rows"])
    assert any("The paper does not have the data set mine" in note for note in found["notes"])


def test_raw_files_are_prepared() -> None:
    rows = [f"{u} {i} 5" for u in range(12) for i in range(u, u + 9)]
    Path("ratings_data.txt").write_text("\n".join(rows) + "\n")
    for _ in range(2):  # the second time it is prepared already
        found = result("table1", "--dataset", "epinion", "--raw", "ratings_data.txt")
        assert not found["data"][0]["stand_in"]
        assert Path(found["data"][0]["path"]) == Path("data/epinion").resolve()
    Path("data/raw/ml-20m").mkdir(parents=True)
    Path("data/raw/ml-20m/ratings.csv").write_text("userId,movieId,rating\n1,1,4.0\n1,2,3.5\n2,1,5.0\n2,3,4.5\n")
    found = result("table1", "--dataset", "ml-20m")
    assert [row["ours"] for row in found["rows"][:3]] == [2, 2, 3]  # ratings of 4 and more


def test_another_preparation_is_noted() -> None:
    save("data/epinion", "epinion", split="per-user", ratios=(80, 10, 10))
    assert any("split per-user, not random" in note for note in result("table1", "-d", "epinion")["notes"])
    save("data/melon", "melon", ratios=(7, 1, 2))
    assert not any("prepared" in note for note in result("table1", "-d", "melon")["notes"])


# -- bad input -------------------------------------------------------------------------------------------------------


def fails(*arguments: object) -> str:
    code, out, errors = call("reproduce", *arguments)
    assert (code, out) == (2, ""), errors
    return errors


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("table2",), "table2"),
        (("table3", "-d", "nothing"), "no data set at nothing"),
        (("table3", "-d", "nothing", "--scale", "0.1"), "--scale is for the data sets of the paper"),
        (("table1", "--trials", "3"), "table1 does not use --trials"),
        (("table4", "--models", "cml"), "table4 does not use --models"),
        (("figure2", "--run", "runs/x"), "figure2 does not use --run"),
        (("table3", "--seeds", "0"), "--seeds must be at least 1, got 0"),
        (("table5", "--epochs", "4", "--scale", "0.001"), "--epochs must be at least 5"),
        (("table1", "--raw", "x.csv"), "--raw needs --dataset"),
        (("table1", "-d", "melon", "--scale", "0"), "--scale must be between 0.001 and 100"),
        (("table3", "-d", "melon", "--scale", "0.001", "--models", "slim,nothing"), "nothing"),
        (("table3", "-d", "melon", "--scale", "0.001", "--models", "popularity"), "the paper does not have popularity"),
        (("table1", "-d", "melon", "--scale", "0.001", "--out", "file"), "is not a directory"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], says: str) -> None:
    Path("file").write_text("")
    assert says in fails(*arguments)
