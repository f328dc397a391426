"""`drm-triton report`: help, output and errors. tests/report tests the page."""

from pathlib import Path

import pytest

from tests.conftest import call


def test_help_has_examples() -> None:
    code, out, _ = call("report", "--help")
    assert code == 0
    assert "drm-triton report runs/melon --out reports/melon" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{run}"], "there is no model"),
        (["{run}", "{run}/"], "a run is given twice"),
        (["{run}", "--dataset", "{run}"], "no data set at"),
        (["{run}", "--out", "{run}"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    run = tmp_path / "nowhere"
    if message == "cannot write":
        (tmp_path / "file").write_text("")
        run = tmp_path / "file" / "run"
    before = list(tmp_path.iterdir())
    code, _, errors = call("report", "--out", tmp_path / "page", *(a.format(run=run) for a in arguments))
    assert code == 2
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == before
