"""Which column of a table is which."""

import pytest

from drm_triton.data.prepare.columns import find_columns
from drm_triton.errors import InputError


def test_common_names_are_recognised() -> None:
    found = find_columns(["userId", "movie_id", "Rating", "time stamp", "genres"], {}, "a.csv")
    assert found == {"user": "userId", "item": "movie_id", "rating": "Rating", "timestamp": "time stamp"}


def test_given_names_come_first_and_may_differ_in_spelling() -> None:
    given = {"user": "reader_id", "item": "x"}
    assert find_columns(["user", "ReaderID", "x"], given, "a.csv") == {"user": "ReaderID", "item": "x"}


def test_ratings_and_times_may_be_ignored_or_ambiguous() -> None:
    assert set(find_columns(["user", "item", "rating"], {"rating": ""}, "a.csv")) == {"user", "item"}
    assert set(find_columns(["user", "item", "rating", "score"], {}, "a.csv")) == {"user", "item"}


def test_weights_are_read_only_if_they_are_named() -> None:
    columns = ["user", "item", "weight"]
    assert find_columns(columns, {}, "a.csv") == {"user": "user", "item": "item", "rating": "weight"}
    assert find_columns(columns, {"weight": "Weight", "rating": ""}, "a.csv") == {
        "user": "user",
        "item": "item",
        "weight": "weight",
    }
    with pytest.raises(InputError, match=r"a\.csv has no column 'plays', given as `weight`"):
        find_columns(columns, {"weight": "plays"}, "a.csv")


@pytest.mark.parametrize(
    ("columns", "given", "message"),
    [
        (["a", "item"], {}, r"^f has no column that is recognised as the users; .* name one as `user`$"),
        (["user", "movie", "song"], {}, r"^several columns of f could contain the items: 'movie', 'song'; .* `item`$"),
        (
            ["user", "item"],
            {"user": "who"},
            r"^f has no column 'who', given as `user`; its columns are 'user'",
        ),
        (["id", "x"], {"user": "id", "item": "id"}, r"'id' cannot be both user and item"),
    ],
)
def test_errors_name_parameters(columns: list[str], given: dict[str, str | None], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_columns(columns, given, "f")
