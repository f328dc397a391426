"""Reading tables as people write them."""

import bz2
import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import polars as pl
import pytest

from drm_triton import Dataset
from drm_triton.data.prepare.build import BuildOptions
from drm_triton.data.prepare.pipeline import prepare
from drm_triton.data.prepare.raw import FileFormat
from drm_triton.data.prepare.sources import find_source
from drm_triton.errors import InputError
from drm_triton.names import SplitName
from tests.data.conftest import ids, titles


class MakeTable(Protocol):
    def __call__(
        self,
        content: str | bytes,
        name: str = ...,
        split: SplitName = ...,
        min_rating: float | None = ...,
        **fields: Any,
    ) -> Dataset: ...


@pytest.fixture
def table(tmp_path: Path) -> MakeTable:
    """Return a function that prepares a data set from the content of a table."""

    def make(
        content: str | bytes,
        name: str = "data.csv",
        split: SplitName = "random",
        min_rating: float | None = None,
        **fields: Any,
    ) -> Dataset:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        options = BuildOptions(min_rating=min_rating, split=split)
        return prepare(find_source("table"), [file], tmp_path / "out", FileFormat(**fields), options, overwrite=True)

    return make


@pytest.mark.parametrize(
    ("content", "users", "items"),
    [
        ("user,item\n1,2\n\n3,4\n\n", [1, 3], [2, 4]),  # blank lines
        ("user,item\r\n1,2\r\n3,4\r\n", [1, 3], [2, 4]),
        ("\ufeffuser,item\n1,2\n", [1], [2]),
        ('user,item,review\n1,"a\nb","x, y"\n3,"q""z",y\n', [1, 3], ["a\nb", 'q"z']),
        ("user,item\nÜser,日本\n☃,ü\n", ["Üser", "☃"], ["ü", "日本"]),
        ("user;item;price\n1;2;4,5\n2;3;1,0\n", [1, 2], [2, 3]),
        ('user\titem\tname\n1\t2\t5" disk\n3\t4\t"open\n', [1, 3], [2, 4]),  # quotes that mean nothing
        ('"user"\t"item"\n"a b"\t"c"\n', ["a b"], ["c"]),
        ("user|item\n1|2\n", [1], [2]),
        ("user item rating\n1  2   5\n2 3 4\n", [1, 2], [2, 3]),
        ("user , item , rating\n1,2, 4.5\n", [1], [2]),  # spaces round names and numbers
        ("USER_ID,Movie-Id\n1,2\n", [1], [2]),
        ("user,item\n007,1\n7,2\n", ["007", "7"], [1, 2]),
        ("user,item\n1.0,2.0\n", ["1.0"], ["2.0"]),
        ("user,item\n1,a\nx,3\n", ["1", "x"], ["3", "a"]),
        ("user,item\n99999999999999999999,1\n5,2\n", ["5", "99999999999999999999"], [1, 2]),
        ("user,item\n-1,1\n-2,2\n0,3\n", [-2, -1, 0], [1, 2, 3]),
        ("user,item\n9223372036854775807,1\n-9223372036854775808,2\n", [-(2**63), 2**63 - 1], [1, 2]),
        ("user,item\n-0,1\n+5,2\n", ["+5", "-0"], [1, 2]),
        ("user,item\nNA,null\n", ["NA"], ["null"]),  # ids like any other
        ("user,item\n1,2", [1], [2]),  # no newline at the end
        ("\n\nuser,item\n1,2\n", [1], [2]),  # blank lines before the header
        ("\nuser::item\n1::2\n", [1], [2]),
        ("user,item\n1,2\n1, 2\n3 ,2\n", [1, 3], [2]),  # blanks around ids do not belong to them
        ("user,item\na,b c\n a,b c \n", ["a"], ["b c"]),
        ("user,item,review\n1,2,a\rb\n3,4,c\n", [1, 3], [2, 4]),
        (f"user,item,review\n1,2,{'x' * 200_000}\n3,4,y\n", [1, 3], [2, 4]),
    ],
)
def test_csv_and_its_kin(table: MakeTable, content: str, users: list[Any], items: list[Any]) -> None:
    assert ids(table(content)) == (users, items)


def test_an_id_that_would_change_late_in_the_file(table: MakeTable) -> None:
    rows = "".join(f"{k},{k}\n" for k in range(3000))
    users, items = ids(table(f"user,item\n{rows}0012,5\n"))
    assert "0012" in users
    assert "12" in users
    assert items == list(range(3000))  # the other column stays whole numbers


def test_headerless_with_any_separator(table: MakeTable) -> None:
    assert ids(table("1::10::5\n2::11::4\n", "ratings.dat", columns=("user", "item", "rating"))) == ([1, 2], [10, 11])
    assert ids(table("\n\n1,2\n3,4\n", columns=("user", "item"))) == ([1, 3], [2, 4])
    skipped = table("1,x,10\n2,y,11\n", columns=("user", "-", "item"))
    assert ids(skipped) == ([1, 2], [10, 11])
    assert ids(table("1#10\n2#11\n", columns=("item", "user"), separator="#")) == ([10, 11], [1, 2])
    assert ids(table("1||10\n2||11\n", columns=("user", "item"), separator="||")) == ([1, 2], [10, 11])


def test_header_with_a_long_separator(table: MakeTable) -> None:
    assert ids(table("user::item\na::b\n", "x.dat")) == (["a"], ["b"])


def test_compressed_and_other_formats(table: MakeTable, tmp_path: Path) -> None:
    plain = "user,item\n1,2\n3,4\n"
    frame = pl.DataFrame({"user": [1, 3], "item": [2, 4]})
    expected = ([1, 3], [2, 4])
    assert ids(table(gzip.compress(plain.encode()), "a.csv.gz")) == expected
    assert ids(table(bz2.compress(plain.encode()), "a.csv.bz2")) == expected
    assert ids(table(plain, "misnamed.csv.gz")) == expected
    frame.write_parquet(tmp_path / "a.parquet")
    assert ids(table((tmp_path / "a.parquet").read_bytes(), "a.parquet")) == expected
    assert ids(table('{"user":1,"item":2}\n{"user":3,"item":4}\n', "a.jsonl")) == expected
    assert ids(table('[{"user":1,"item":2},{"user":3,"item":4}]', "a.json")) == expected
    assert ids(table(frame.write_csv(separator="\t"), "a.tsv")) == expected


def test_a_separator_of_several_bytes(table: MakeTable) -> None:
    assert ids(table("user¦item\n1¦2\n", separator="¦")) == ([1], [2])


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_json_may_begin_with_a_byte_order_mark(table: MakeTable, start: bytes, pack: Callable[[bytes], bytes]) -> None:
    suffix = ".gz" if pack is gzip.compress else ""
    assert ids(table(pack(start + b'{"user":1,"item":2}\n{"user":3,"item":4}\n'), f"a.jsonl{suffix}")) == (
        [1, 3],
        [2, 4],
    )
    assert ids(table(pack(start + b'[{"user":1,"item":2}]'), f"a.json{suffix}")) == ([1], [2])


@pytest.mark.parametrize(
    ("late", "users", "items"),
    [
        ('{"user": 1, "item": 2, "rating": 3.5}', [0, 1, 2], [1, 2]),
        ('{"user": "x", "item": 2, "rating": 4}', ["0", "1", "2", "x"], [1, 2]),
        ('{"user": 1, "item": "2", "rating": null}', [0, 1, 2], ["1", "2"]),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_types_may_change_late(table: MakeTable, late: str, users: list[Any], items: list[Any], name: str) -> None:
    rows = [f'{{"user": {k % 3}, "item": 1, "rating": 5}}' for k in range(2000)] + [late]
    assert ids(table("\n".join(rows) if name == "a.jsonl" else f"[{','.join(rows)}]", name)) == (users, items)


def test_zstd(table: MakeTable, tmp_path: Path) -> None:
    # Polars writes Parquet, not CSV, with zstd; a stored (uncompressed) frame is valid zstd and needs no library.
    payload = b"user,item\n1,2\n"
    frame = (
        b"\x28\xb5\x2f\xfd" + bytes([0x20, len(payload)]) + ((len(payload) << 3) | 1).to_bytes(3, "little") + payload
    )
    assert ids(table(frame, "a.csv.zst")) == ([1], [2])


def test_zip_with_several_members(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.csv", "user,item\n1,2\n")
        archive.writestr("sub/b.csv", "item,user\n4,3\n")
        archive.writestr("readme.md", "hello")
    data = prepare(find_source("table"), [tmp_path / "a.zip"], tmp_path / "out")
    assert ids(data) == ([1, 3], [2, 4])


def test_zip_in_capitals_with_a_file_about_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("A/RATINGS.CSV", "user,item,rating\n1,2,5\n")
        archive.writestr("A/README.txt", "Thank you for your interest")
    for name in ("table", "ml-20m"):
        assert ids(prepare(find_source(name), [tmp_path / "a.zip"], tmp_path / name)) == ([1], [2])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "Ratings.csv").write_text("user,item,rating\n1,2,5\n")
    assert ids(prepare(find_source("ml-20m"), [tmp_path / "folder"], tmp_path / "out")) == ([1], [2])


def test_glob_and_several_files(tmp_path: Path) -> None:
    (tmp_path / "a1.csv").write_text("user,item\n1,2\n")
    (tmp_path / "a2.csv").write_text("item,user\n9,1\n")
    pl.DataFrame({"user": ["x"], "item": ["y"]}).write_parquet(tmp_path / "b.parquet")
    source = find_source("table")
    assert ids(prepare(source, [tmp_path / "a*.csv"], tmp_path / "out")) == ([1], [2, 9])
    mixed = prepare(source, [tmp_path / "a1.csv", tmp_path / "b.parquet"], tmp_path / "out2")
    assert ids(mixed) == (["1", "x"], ["2", "y"])
    assert [f["file"] for f in mixed.meta["files"]] == ["a1.csv", "b.parquet"]


def test_a_name_with_glob_characters(tmp_path: Path) -> None:
    (tmp_path / "we[i]rd.csv").write_text("user,item\n1,2\n")
    assert ids(prepare(find_source("table"), [tmp_path / "we[i]rd.csv"], tmp_path / "out")) == ([1], [2])


def test_typed_ids(table: MakeTable, tmp_path: Path) -> None:
    def through_parquet(**columns: Any) -> tuple[list[Any], list[Any]]:
        pl.DataFrame(columns).write_parquet(tmp_path / "t.parquet")
        return ids(table((tmp_path / "t.parquet").read_bytes(), "t.parquet"))

    assert through_parquet(user=["1", "2"], item=[1.0, 2.0]) == (["1", "2"], [1, 2])
    assert through_parquet(user=[True, False], item=[1, 2]) == (["false", "true"], [1, 2])
    assert through_parquet(user=pl.Series([2**64 - 1, 2], dtype=pl.UInt64), item=[1, 2])[0] == [
        "18446744073709551615",
        "2",
    ]
    assert through_parquet(user=pl.Series(["b", "a"], dtype=pl.Categorical), item=[1, 2])[0] == ["a", "b"]


def test_ids_of_other_types_in_other_files_are_the_same_ids(tmp_path: Path) -> None:
    def both(**other: Any) -> tuple[list[Any], list[Any]]:
        pl.DataFrame({"user": [1, 2], "item": [2, 3]}).write_parquet(tmp_path / "a.parquet")
        pl.DataFrame({"user": [1], "item": [2]} | other).write_parquet(tmp_path / "b.parquet")
        source, raw = find_source("table"), [tmp_path / "a.parquet", tmp_path / "b.parquet"]
        return ids(prepare(source, raw, tmp_path / "out", overwrite=True))

    assert both(item=[2.0]) == ([1, 2], [2, 3])
    assert both(item=["2"]) == ([1, 2], ["2", "3"])
    with pytest.raises(InputError, match=r"row 1 of .*b\.parquet has no usable item id \(2\.5\)"):
        both(item=[2.5])
    with pytest.raises(InputError, match="no usable item id"):
        both(item=[2.0**53])  # 2^53 + 1 would be the same float


def test_titles(table: MakeTable, tmp_path: Path) -> None:
    (tmp_path / "names.tsv").write_text('id\tname\turl\n2\tMot\u00f6rhead\tx\n4\t"Weird Al\ty\n2\tagain\tz\n')
    data = table("user,artistID\n1,2\n1,4\n1,6\n", titles=str(tmp_path / "names.tsv"))
    assert titles(data) == ["Mot\u00f6rhead", '"Weird Al', None]
    assert table("user,item\n1,2\n").item_titles is None


@pytest.mark.parametrize(
    "times",
    [
        ("5", "30", "7"),
        ("5.5", "30", "7"),
        ("2020-01-01", "2021-01-01 10:00:00", "2020-12-31T23:59:59.5Z"),
        ("2021-01-01T01:00:00+02:00", "2021-01-01T00:30:00+00:00", "2021-01-01 00:15:00.000001+0000"),
        ("2021-01-01 05:00-01", "2021-01-01 06:30 UTC", "2021-01-01T06:15Z"),
    ],
)
def test_times_as_text(table: MakeTable, times: tuple[str, ...]) -> None:
    rows = "".join(f"1,{k},{time}\n" for k, time in enumerate(times))
    data = table(f"user,item,timestamp\n{rows}", split="leave-last")
    assert data.test.row(0).tolist() == [1]
    assert data.valid.row(0).tolist() == [2]


def test_encoding(table: MakeTable) -> None:
    assert ids(table("user,item\n1,café\n".encode("latin-1"), encoding="latin-1"))[1] == ["café"]
    assert ids(table("user,item\n1,café\n".encode("utf-16"), encoding="utf-16"))[1] == ["café"]


def test_rating_is_used_only_when_asked(table: MakeTable) -> None:
    content = "user,item,rating\n1,2,5\n1,3,\n1,4,1\n"
    assert table(content).n_items == 3  # a missing rating does not matter
    with pytest.raises(InputError, match=r"row 2 of .* rating that is missing"):
        table(content, min_rating=2)
    assert ids(table("user,item,rating\n1,2,5\n1,4,1\n", min_rating=2))[1] == [2]


def test_several_ratings_are_ambiguous_only_if_needed(table: MakeTable) -> None:
    content = "user,item,rating,score\n1,2,5,x\n"
    assert table(content).n_items == 1
    with pytest.raises(InputError, match="`rating`"):
        table(content, min_rating=1)
    assert table(content, min_rating=1, rating="rating").n_items == 1
