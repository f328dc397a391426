"""Files of ids and of histories."""

from pathlib import Path

import polars as pl
import pytest

from drm_triton.data.histories import read_choice, read_histories, read_ids
from drm_triton.errors import InputError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file.txt"


def test_ids(file: Path) -> None:
    file.write_bytes("\ufeff 5 \r\n\r\nb c\r\n".encode())
    assert read_ids(file) == ["5", "b c"]
    file.write_text("\n \n")
    with pytest.raises(InputError, match="is empty: give a file with one id per line"):
        read_ids(file)


def test_items_for_all_users_or_for_each(file: Path) -> None:
    file.write_text("5\nuser\na,b\n")
    assert read_choice(file) == ["5", "user", "a,b"]
    file.write_bytes(b"x\ry\r\nz\r\n")
    assert read_choice(file) == ["x\ry", "z"]
    file.write_text("user;item\nann;5\nbob;6\n")
    table = read_choice(file)
    assert isinstance(table, pl.DataFrame)
    assert table.rows() == [("ann", "5"), ("bob", "6")]
    table.write_parquet(file)
    assert table.equals(read_choice(file))  # type: ignore[arg-type]
    file.write_text(" \n")
    with pytest.raises(InputError, match="is empty: give a file with one id per line"):
        read_choice(file)


@pytest.mark.parametrize("text", ["5\t6\n\n7\n", "5, 6\n\n7\n", "5 6\n\n7\n"])
def test_one_user_per_line(file: Path, text: str) -> None:
    file.write_text(text)
    assert read_histories(file).rows() == [(1, "5"), (1, "6"), (3, "7")]


@pytest.mark.parametrize("separator", ["\t", ";", "|", ","])
def test_a_header_makes_it_a_table(file: Path, separator: str) -> None:
    file.write_text("userId,n,movie\nann,1,5\nbob,2, 6\n".replace(",", separator))
    assert read_histories(file).rows() == [("ann", "5"), ("bob", "6")]


def test_parquet(tmp_path: Path) -> None:
    pl.DataFrame({"user": [1, 2], "item": [5, 6]}).write_parquet(tmp_path / "a.bin")
    assert read_histories(tmp_path / "a.bin").rows() == [(1, 5), (2, 6)]
    (tmp_path / "b.parquet").write_text("user,item\n1,2\n")
    with pytest.raises(InputError, match="not a Parquet file despite its name"):
        read_histories(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"5\0\n", "contains NUL bytes"),
        (b"user,item\n", "has a header but no rows"),
        (b"user,item\na,5\nb,\n", "data row 2 has no user or no item"),
        (b"user,item,movie\na,5,6\n", "needs one column of users and one of items"),
    ],
)
def test_bad_files(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_histories(file)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_histories(tmp_path / "none.txt")
