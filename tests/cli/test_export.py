"""`export` from the command line. tests/test_export.py tests the exported files."""

import json
from pathlib import Path

from tests.conftest import call


def test_the_printed_summary_and_json(saved_model: Path, tmp_path: Path) -> None:
    code, out, _ = call("export", saved_model, tmp_path / "text")
    assert code == 0
    assert out.startswith(f"exported {saved_model} to {tmp_path / 'text'}: 200 users, ")
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
