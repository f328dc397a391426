"""Search for items by title and id."""

from hypothesis import given
from hypothesis import strategies as st

from drm_triton.serving.search import ItemSearch, folded

TITLES = ["Heat", "The Heat", "Wheat field", None, "Ámélie", "100% (a+b)*"]
SEARCH = ItemSearch([3, 30, 13, 4, 5, 6], TITLES, [5, 4, 3, 2, 1, 0])


def test_order_exact_id_then_beginnings_then_the_rest_by_popularity() -> None:
    assert SEARCH.find("heat", 9) == [0, 2, 1]
    assert SEARCH.find("3", 9) == [0, 1, 2]
    assert SEARCH.find("heat", 2) == [0, 2]
    assert SEARCH.find("", 3) == SEARCH.find("  ", 3) == [5, 4, 3]


def test_case_accents_and_signs() -> None:
    assert SEARCH.find("AMÉLIE", 9) == SEARCH.find("amelie", 9) == [4]
    assert SEARCH.find("(a+b)*", 9) == SEARCH.find("100%", 9) == [5]
    assert SEARCH.find(".*", 9) == []
    assert folded("Straße") == "strasse"


def test_without_titles_ids_are_searched() -> None:
    assert ItemSearch(["Rock", "rocky"], None, [1, 0]).find("rock", 5) == [0, 1]


@given(st.text(max_size=5), st.integers(1, 6))
def test_every_hit_contains_the_text(text: str, k: int) -> None:
    found = SEARCH.find(text, k)
    assert len(found) <= k
    assert len(set(found)) == len(found)
    ids = [3, 30, 13, 4, 5, 6]
    sought = folded(text.strip())
    every = [code for code in range(6) if sought in folded(TITLES[code] or "") or sought in str(ids[code])]
    assert set(found) <= set(every)
    assert len(found) == min(k, len(every))
