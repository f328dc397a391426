"""Delimited text files."""

from typing import Any

import pytest

from tests.data.conftest import MakeTable, ids


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


def test_headerless_with_any_separator(table: MakeTable) -> None:
    assert ids(table("1::10::5\n2::11::4\n", "ratings.dat", columns=("user", "item", "rating"))) == ([1, 2], [10, 11])
    assert ids(table("\n\n1,2\n3,4\n", columns=("user", "item"))) == ([1, 3], [2, 4])
    skipped = table("1,x,10\n2,y,11\n", columns=("user", "-", "item"))
    assert ids(skipped) == ([1, 2], [10, 11])
    assert ids(table("1#10\n2#11\n", columns=("item", "user"), separator="#")) == ([10, 11], [1, 2])
    assert ids(table("1||10\n2||11\n", columns=("user", "item"), separator="||")) == ([1, 2], [10, 11])


def test_header_with_a_long_separator(table: MakeTable) -> None:
    assert ids(table("user::item\na::b\n", "x.dat")) == (["a"], ["b"])


def test_a_separator_of_several_bytes(table: MakeTable) -> None:
    assert ids(table("user¦item\n1¦2\n", separator="¦")) == ([1], [2])


def test_encoding(table: MakeTable) -> None:
    assert ids(table("user,item\n1,café\n".encode("latin-1"), encoding="latin-1"))[1] == ["café"]
    assert ids(table("user,item\n1,café\n".encode("utf-16"), encoding="utf-16"))[1] == ["café"]
