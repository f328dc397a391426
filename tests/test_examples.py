"""The examples run and do what their descriptions say."""

import json
import runpy
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.conftest import call, repository_root


def example(name: str) -> dict[str, Any]:
    """Run the module of an example and return its names."""
    return runpy.run_path(str(repository_root() / "examples" / f"{name}.py"))


def test_two_tower_learns_from_features(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = example("two_tower")["main"](steps=100, n_users=200, n_items=300, seed=0)
    assert after > 0.3 > 5 * before  # a random ranking has about 0.02
    assert f"after {after:.4f}" in capsys.readouterr().out


def test_own_csv_recommends_fruit_to_users_who_eat_fruit(tmp_path: Path) -> None:
    own_csv = example("own_csv")
    best = own_csv["main"](own_csv["write_tiny_csv"](tmp_path / "ratings.csv"))
    assert best["user"].n_unique() == 60
    fits = [item in own_csv["FRUIT"] for item in best["item"]]
    eats = [int(user[1:]) % 2 == 0 for user in best["user"]]
    assert sum(fit == eat for fit, eat in zip(fits, eats, strict=True)) > 0.9 * len(best)
    assert pl.read_csv(tmp_path / "ratings.recommendations.csv").height == len(best)
    assert len(own_csv["main"](tmp_path / "ratings.csv")) == len(best)  # it can be run again


def test_side_by_side_shows_titles_and_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRM_DATA", raising=False)
    for command in (
        "prepare melon --synthetic --scale 0.005 --out data/demo -q",
        "train --dataset demo --run runs/demo --factors 16 --epochs 5 -q",
    ):
        code, _, errors = call(*command.split())
        assert code == 0, errors
    main = example("side_by_side")["main"]
    lines = main("runs/demo", None, k=8)
    assert sum(line.startswith("user ") for line in lines) == 3
    shown = [line for line in lines if " – " in line]
    assert len(shown) == 3 * 8
    assert all(line.count(" – ") == 2 for line in shown)  # one title on each side
    # The first hundred recommendations contain held-out songs.
    assert any("✓" in line for line in main("runs/demo", None, k=100))
    user = next(line for line in lines if line.startswith("user ")).split()[1]
    assert main("runs/demo", [user], k=3)[1] == f"user {user}"


def test_rectools_cross_validates_drm() -> None:
    pytest.importorskip("rectools", reason="RecTools is not installed (pip install rectools)")
    rectools_model = example("rectools_model")
    shape = rectools_model["Shape"](users=300, items=150, interactions=6000)
    table = rectools_model["main"](shape, epochs=5)
    assert (table["NDCG@10"].drop("popularity") > table["NDCG@10"]["popularity"]).all()
    model = rectools_model["DRMModel"](factors=8, score="l2")
    assert rectools_model["DRMModel"].from_config(model.get_config()).train_config == model.train_config
    with pytest.raises(Exception, match="did you mean 'factors'"):
        rectools_model["DRMModel"](facters=8)


def test_the_notebook_runs(repository: Path) -> None:
    notebook = json.loads((repository / "examples" / "quickstart.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)  # a reader sees results without running it
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    means = names["measured"]
    assert means["DRM"]["ndcg@10"] > 1.5 * means["most popular songs"]["ndcg@10"]
    assert names["final"].interactions.train.nnz == names["data"].n_interactions
