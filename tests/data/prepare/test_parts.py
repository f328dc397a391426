"""Files that are already split: the parts stay as they are, and ids are encoded over all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from drm_triton import Dataset
from drm_triton.data.prepare.build import BuildOptions
from drm_triton.data.prepare.parts import PartsOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.raw import FileFormat
from drm_triton.data.prepare.sources import find_source
from drm_triton.errors import InputError
from drm_triton.names import SplitPart
from tests.data.conftest import ids

TRAIN = "0 3 1\n1 1\n2 5 3 1\n4\n"  # user 4 has no training item
TEST = "0 5 \n1\n4 9 1\n"  # user 1 has no test item; user 4 and item 9 are only here


def make(place: Path, source: str = "lists", options: Any = None, name: str = "out", **content: str | Path) -> Dataset:
    """Prepare the parts of a split: the content of each file, or its path."""
    files: dict[SplitPart, Path] = {}
    for part in ("train", "valid", "test"):
        given = content.get(part)
        if isinstance(given, str):
            files[part] = place / f"{part}.txt"
            files[part].write_text(given)
        elif given is not None:
            files[part] = given
    return prepare(find_source(source), None, place / name, options=options, parts=files, overwrite=True)


def pairs(data: Dataset, part: SplitPart) -> set[tuple[Any, Any]]:
    """Return the interactions of a part by their ids."""
    matrix = getattr(data, part)
    users = np.repeat(np.arange(data.n_users), matrix.degrees())
    return set(zip(data.user_ids[users].to_list(), data.item_ids[matrix.indices].to_list(), strict=True))


def test_the_parts_are_kept_and_ids_are_encoded_over_all_of_them(tmp_path: Path) -> None:
    data = make(tmp_path, train=TRAIN, test=TEST)
    assert ids(data) == ([0, 1, 2, 4], [1, 3, 5, 9])
    assert pairs(data, "train") == {(0, 3), (0, 1), (1, 1), (2, 5), (2, 3), (2, 1)}
    assert pairs(data, "test") == {(0, 5), (4, 9), (4, 1)}
    assert data.valid.nnz == 0
    assert data.meta["options"] == {"split": "predefined", "valid_ratio": 0.0, "seed": 0}
    assert [file["file"] for file in data.meta["files"]] == ["train.txt", "test.txt"]
    assert "public_split" not in data.meta


def test_a_validation_part_and_text_ids(tmp_path: Path) -> None:
    data = make(tmp_path, train="ann x y\nbob y\n", valid="ann z\n", test="bob 007\n")
    assert ids(data) == (["ann", "bob"], ["007", "x", "y", "z"])
    assert pairs(data, "valid") == {("ann", "z")}
    assert pairs(data, "test") == {("bob", "007")}


def test_ids_that_are_numbers_in_one_part_only_are_text(tmp_path: Path) -> None:
    data = make(tmp_path, train="1 2\n2 3\n", test="1 x\n")
    assert ids(data) == ([1, 2], ["2", "3", "x"])


def test_repeated_interactions_of_a_part_count_once(tmp_path: Path) -> None:
    data = make(tmp_path, train="1 2 2\n1 2 3\n", test="1 4\n")
    assert pairs(data, "train") == {(1, 2), (1, 3)}
    assert [step["interactions"] for step in data.meta["steps"]] == [5, 3]


def test_tables_of_different_kinds_with_weights(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("user,item,plays\nann,x,3\nann,y,2\n")
    pl.DataFrame({"item": ["z"], "user": ["bob"], "plays": [4.5]}).write_parquet(tmp_path / "b.parquet")
    parts: dict[SplitPart, Path] = {"train": tmp_path / "a.csv", "test": tmp_path / "b.parquet"}
    data = prepare(find_source("table"), None, tmp_path / "out", FileFormat(weight="plays"), parts=parts)
    assert pairs(data, "train") == {("ann", "x"), ("ann", "y")}
    assert data.test.weights is not None
    assert data.test.weights.tolist() == [4.5]
    assert data.meta["weights"]["column"] == "plays"


def test_blank_lines_of_a_table_are_skipped(tmp_path: Path) -> None:
    data = make(tmp_path, "table", train="user,item\n1,2\n\n 1 ,3\n", test="user,item\n\n1,4\n")
    assert pairs(data, "train") == {(1, 2), (1, 3)}
    assert pairs(data, "test") == {(1, 4)}


def many(n: int = 400) -> str:
    return "".join(f"{user} {' '.join(str(user + item) for item in range(10))}\n" for user in range(n // 10))


def test_valid_ratio_moves_a_seeded_share_of_train(tmp_path: Path) -> None:
    whole = make(tmp_path, train=many(), test="0 99\n")
    data = make(tmp_path, train=many(), test="0 99\n", options=PartsOptions(0.1, seed=3))
    assert (data.train.nnz, data.valid.nnz, data.test.nnz) == (360, 40, 1)
    assert pairs(data, "train") | pairs(data, "valid") == pairs(whole, "train")
    assert not pairs(data, "train") & pairs(data, "valid")
    shuffled = "".join(reversed(many().splitlines(keepends=True)))
    again = make(tmp_path, train=shuffled, test="0 99\n", options=PartsOptions(0.1, seed=3))
    other = make(tmp_path, train=many(), test="0 99\n", options=PartsOptions(0.1, seed=4))
    assert again.checksum == data.checksum != other.checksum


def test_valid_ratio_keeps_the_weights(tmp_path: Path) -> None:
    rows = [(user, item, 100 * user + item + 1) for user in range(9) for item in range(9)]
    (tmp_path / "a.csv").write_text("user,item,n\n" + "".join(f"{u},{i},{n}\n" for u, i, n in rows))
    (tmp_path / "b.csv").write_text("user,item,n\n0,9,1\n")
    parts: dict[SplitPart, Path] = {"train": tmp_path / "a.csv", "test": tmp_path / "b.csv"}
    data = prepare(find_source("table"), None, tmp_path / "out", FileFormat(weight="n"), PartsOptions(0.2), parts=parts)
    for part in (data.train, data.valid):
        users = np.repeat(np.arange(9), part.degrees())
        assert part.weights is not None
        assert np.array_equal(part.weights, 100 * users + part.indices + 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train": TRAIN}, "`test` is missing"),
        ({"test": TEST}, "`train` is missing"),
        ({"train": TRAIN, "test": ""}, "test.txt is empty"),
        ({"train": "", "test": TEST}, "train.txt is empty"),
        ({"train": TRAIN, "test": "0\n1\n"}, r"test.txt has no interactions: give the test part"),
        ({"train": "0\n1\n", "test": TEST}, r"train.txt has no interactions: give the train part"),
        ({"train": TRAIN, "test": Path("nowhere.txt")}, "there is no file nowhere.txt: check `test`"),
        ({"train": TRAIN, "valid": Path("nowhere.txt"), "test": TEST}, "check `valid`"),
        (
            {"train": TRAIN, "test": "0 5 3\n"},
            "1 of 2 interactions of `test` are in `train` too, .* user 0 with item 3",
        ),
        ({"train": TRAIN, "test": TRAIN}, "6 of 6 interactions of `test` are in `train` too"),
        ({"train": TRAIN, "valid": "0 5\n", "test": TEST}, "1 of 3 interactions of `test` are in `valid` too"),
    ],
)
def test_bad_parts(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(tmp_path, **content)
    assert not (tmp_path / "out").exists()


def test_one_file_for_two_parts(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(TRAIN)
    (tmp_path / "link.txt").symlink_to(tmp_path / "train.txt")
    with pytest.raises(InputError, match=r"`train` and `test` are the same file, .*train.txt"):
        make(tmp_path, train=tmp_path / "train.txt", test=tmp_path / "link.txt")


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan"), "half"])
def test_bad_valid_ratio(ratio: Any) -> None:
    with pytest.raises(InputError, match=r"`valid_ratio` must be at least 0 and below 1"):
        PartsOptions(ratio)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leave out `valid_ratio`, or leave out `valid`"):
        make(tmp_path, train=TRAIN, valid="0 7\n", test=TEST, options=PartsOptions(0.1))
    with pytest.raises(InputError, match=r"`valid_ratio` 0.01 of 6 training .* leaves none for validation"):
        make(tmp_path, train=TRAIN, test=TEST, options=PartsOptions(0.01))
    with pytest.raises(InputError, match="leaves none for training"):
        make(tmp_path, train=TRAIN, test=TEST, options=PartsOptions(0.99))
    with pytest.raises(InputError, match="already split: give PartsOptions"):
        make(tmp_path, train=TRAIN, test=TEST, options=BuildOptions())
    with pytest.raises(InputError, match="not split: give BuildOptions"):
        prepare(find_source("lists"), [tmp_path / "train.txt"], tmp_path / "out", options=PartsOptions())
    with pytest.raises(InputError, match="source melon does not use `train` and `test`"):
        make(tmp_path, "melon", train=TRAIN, test=TEST)
    parts: dict[SplitPart, Path] = {"train": tmp_path / "train.txt", "test": tmp_path / "test.txt"}
    with pytest.raises(InputError, match="leave out `raw`"):
        prepare(find_source("lists"), [tmp_path / "train.txt"], tmp_path / "out", parts=parts)
    with pytest.raises(InputError, match="`seed` must be a whole number"):
        PartsOptions(seed=0.5)  # type: ignore[arg-type]
