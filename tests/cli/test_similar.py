"""`similar` from the command line. tests/cli/test_recommend.py tests the output that it shares with `recommend`."""

from pathlib import Path

import pytest

from drm_triton import DRM
from tests.cli.conftest import rows
from tests.conftest import call


def test_similar(saved_model: Path) -> None:
    model = DRM.load(saved_model)
    item = int(model.interactions.item_ids[12])
    found = rows("similar", saved_model, "--item", item, "-k", 3)
    assert [row["similar"] for row in found] == model.similar_items([item], 3)["similar"].to_list()
    assert found[0]["title"] == f"Song No. {found[0]['similar']}"
    found = rows("similar", saved_model, "--user", "u5", "-k", 3)
    assert [row["similar"] for row in found] == model.similar_users(["u5"], 3)["similar"].to_list()
    code, out, _ = call("similar", saved_model, "--user", "u5", "--user", "u6", "-k", 1)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("user")] == ["user u5", "user u6"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give either --item ID or --user ID"),
        (["--item", "5", "--user", "u1"], "give either --item ID or --user ID"),
        (["--item", "9999"], "unknown item id: '9999'"),
        (["--item", "5", "--k", "-3"], "--k must be an integer of at least 1, got -3"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(saved_model: Path, options: list[str], message: str) -> None:
    code, out, errors = call("similar", saved_model, *options)
    assert (code, out) == (2, "")
    assert errors.startswith("error: ")
    assert message in errors
    assert errors.count("\n") == 1
