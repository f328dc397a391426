"""Tables of any common format."""

import bz2
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.data.conftest import MakeTable, ids, titles


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


def test_titles(table: MakeTable, tmp_path: Path) -> None:
    (tmp_path / "names.tsv").write_text('id\tname\turl\n2\tMot\u00f6rhead\tx\n4\t"Weird Al\ty\n2\tagain\tz\n')
    data = table("user,artistID\n1,2\n1,4\n1,6\n", titles=str(tmp_path / "names.tsv"))
    assert titles(data) == ["Mot\u00f6rhead", '"Weird Al', None]
    assert table("user,item\n1,2\n").item_titles is None
