"""`export` from the command line. tests/test_export.py tests the exported files."""

import json
from pathlib import Path

import polars as pl

from drm_triton import Dataset
from drm_triton.models import ItemKNN
from tests.conftest import call


def test_the_printed_summary_and_json(saved_model: Path, tmp_path: Path) -> None:
    code, out, _ = call("export", saved_model, tmp_path / "text")
    assert code == 0
    assert out.startswith(f"exported {saved_model} to {tmp_path / 'text'}:\n200 users, ")
    assert "factors.npz" in out
    code, out, errors = call("export", saved_model, tmp_path / "json", "--to", "parquet", "--json")
    assert (code, errors) == (0, "")
    assert json.loads(out) == json.loads((tmp_path / "json" / "export.json").read_text())


def test_an_existing_export_needs_overwrite(saved_model: Path, tmp_path: Path) -> None:
    assert call("export", saved_model, tmp_path / "out", "--quiet")[0] == 0
    code, out, errors = call("export", saved_model, tmp_path / "out")
    assert (code, out) == (2, "")
    assert "--overwrite" in errors
    assert call("export", saved_model, tmp_path / "out", "--overwrite", "--quiet")[0] == 0


def test_an_item_item_model(tmp_path: Path) -> None:
    data = Dataset.from_csr(([0, 2, 4, 6], [0, 1, 1, 2, 0, 2]), n_items=3)
    ItemKNN(neighbors=2).fit(data).save(tmp_path / "model")
    for form, file in (("npz", "weights.npz"), ("parquet", "weights.parquet")):
        code, out, errors = call("export", tmp_path / "model", tmp_path / form, "--to", form)
        assert (code, errors) == (0, "")
        assert f"exported {tmp_path / 'model'} to {tmp_path / form}:\n3 users, 3 items\n" in out
        assert file in out
    weights = pl.read_parquet(tmp_path / "parquet" / "weights.parquet")
    assert weights.columns == ["item", "other", "weight"]
    code, _, errors = call("export", tmp_path / "model", tmp_path / "index", "--to", "faiss")
    assert code == 2
    assert "needs factors" in errors
