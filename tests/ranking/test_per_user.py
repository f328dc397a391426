"""What single users may or must not get, and rules in `recommend`, from ids and attributes to frames."""

import warnings
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import InputError
from drm_triton.models import EASE
from drm_triton.ranking import per_user
from drm_triton.ranking.recommend import popular_index
from drm_triton.ranking.rules import Rules
from drm_triton.recommender import Recommender

USERS = ["u1", "u2", "u3"]
N_ITEMS = 60


@pytest.fixture(scope="module")
def data() -> Dataset:
    """60 items (0, 10, ...) with a genre, tags, a price and stock; the last two have no interactions."""
    users, items = generate(Shape(users=80, items=N_ITEMS - 2, interactions=900), 5)
    frame = pl.DataFrame({"user": [f"u{u}" for u in users], "item": [10 * i for i in items]})
    number = np.arange(N_ITEMS)
    attributes = pl.DataFrame(
        {
            "item": 10 * number,
            "genre": [["rock", "jazz", "folk", None][i % 4] for i in number],
            "tags": [["new|live", "live", "old", "old|rare"][i % 4] for i in (number * 7) // 3],
            "price": [float(i % 13) for i in number],
            "in_stock": number % 3 > 0,
        }
    )
    return Dataset.from_frame(frame, ratios=(1, 0, 0)).with_attributes(attributes)


@pytest.fixture(scope="module")
def models(data: Dataset) -> dict[str, Recommender[Any]]:
    return {"drm": DRM(factors=8, epochs=3).fit(data), "ease": EASE().fit(data)}


@pytest.fixture(params=["drm", "ease"])
def model(request: pytest.FixtureRequest, models: dict[str, Recommender[Any]]) -> Recommender[Any]:
    return models[request.param]


def lists(frame: pl.DataFrame) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {user: [] for user in USERS}
    for user, item in frame.select("user", "item").rows():
        found[user].append(item)
    return found


chosen = st.lists(st.integers(0, N_ITEMS - 1).map(lambda i: 10 * i), unique=True, max_size=30)
choices = st.none() | chosen | st.dictionaries(st.sampled_from([*USERS, "u9"]), chosen)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["drm", "ease"]),
    only=choices,
    without=choices,
    as_frame=st.booleans(),
    seen=st.booleans(),
    cheap=st.booleans(),
    k=st.integers(1, 20),
)
def test_only_and_without_of_users_keep_the_order_of_the_ranking(
    kind: str, only: Any, without: Any, as_frame: bool, seen: bool, cheap: bool, k: int,
    models: dict[str, Recommender[Any]],
) -> None:  # fmt: skip
    model = models[kind]

    def items_of(choice: Any, user: str, otherwise: set[int]) -> set[int]:
        if choice is None:
            return otherwise
        return set(choice.get(user, [])) if isinstance(choice, dict) else set(choice)

    def given(choice: Any) -> Any:
        if not as_frame or not isinstance(choice, dict):
            return choice
        pairs = [(user, item) for user, items in choice.items() for item in items]
        return pl.DataFrame(pairs, {"user": pl.String, "item": pl.Int64}, orient="row")

    table = model.interactions.items
    priced = set((table.filter(pl.col("price") <= 6) if cheap else table)["id"])
    allowed = {u: items_of(only, u, priced) & priced - items_of(without, u, set()) for u in USERS}
    everything = lists(model.recommend(USERS, k=N_ITEMS, exclude_seen=not seen))
    arguments: dict[str, Any] = {
        "k": k, "exclude_seen": not seen, "only": given(only), "without": given(without),
        "where": "price<=6" if cheap else None,
    }  # fmt: skip
    # What single users must not get may leave them nothing. What no user may get is an error.
    forbidden = set() if isinstance(without, dict) else items_of(without, "", set())
    possible = set.union(*(items_of(only, user, priced) for user in USERS)) & priced - forbidden
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not possible:
            with pytest.raises(InputError, match=r"`only`|no items are left"):
                model.recommend(USERS, **arguments)
            return
        found = lists(model.recommend(USERS, **arguments))
    for user in USERS:
        assert found[user] == [item for item in everything[user] if item in allowed[user]][:k]


def test_users_who_are_not_in_only_get_nothing(model: Recommender[Any]) -> None:
    with pytest.warns(UserWarning, match="`only` has no known items for 1 of 3 users, .*: 'u2'"):
        found = lists(model.recommend(USERS, only={"u1": [0, 10, 20, 30, 40], "u3": [50, 60]}, exclude_seen=False))
    assert [sorted(found[user]) for user in USERS] == [[0, 10, 20, 30, 40], [], [50, 60]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError, match="`only` has no known items for any of these users: 'u2'"):
            model.recommend(["u2"], only={"u1": [0]})
        with pytest.raises(InputError, match="no items are left to recommend: `only` has no item that these users"):
            model.recommend(["u1"], only={"u1": [0]}, without=[0])


def test_ids_of_another_type_and_unknown_ones(model: Recommender[Any]) -> None:
    plain = model.recommend(["u1"], k=5)
    best = plain["item"][0]
    assert model.recommend(["u1"], k=4, without={"u1": [str(best)]})["item"].to_list() == plain["item"][1:].to_list()
    with pytest.warns(UserWarning, match="`without`: the model does not know 1 of the 2 items: 7"):
        frame = model.recommend(["u1", "u2"], k=4, without={"u1": [best, 7]})
    assert frame.filter(user="u1")["item"].to_list() == plain["item"][1:].to_list()
    assert frame.filter(user="u2").equals(model.recommend(["u2"], k=4))
    with pytest.raises(InputError, match=r"a frame of `only` needs columns user and item; it has \['item'\]"):
        model.recommend(["u1"], only=pl.DataFrame({"item": [0]}))
    with pytest.raises(InputError, match="a frame of `without` has rows without a user"):
        model.recommend(["u1"], without=pl.DataFrame({"user": ["u1", None], "item": [0, 10]}))
    assert model.recommend([], only={"u1": [0]}).is_empty()
    assert model.recommend(["u1"], without={}).equals(model.recommend(["u1"]))


def test_a_pandas_frame(model: Recommender[Any]) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    plain = model.recommend(["u1"], k=5)
    without = pandas.DataFrame({"user": ["u1"], "item": [plain["item"][0]]})
    assert model.recommend(["u1"], k=4, without=without)["item"].to_list() == plain["item"][1:].to_list()


def test_new_users_and_blocks(model: Recommender[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    histories = {f"new{n}": [10 * n, 10 * n + 20] for n in range(9)}
    rules: dict[str, Any] = {
        "only": {user: list(range(0, 300 + 10 * n, 10)) for n, user in enumerate(histories)},
        "without": pl.DataFrame({"user": ["new1"] * 2, "item": [40, 50]}),
        "where": ["in_stock", pl.col("price") > 2],
        "at_most": {"genre": 2, "tags": 3},
    }
    whole = model.recommend_from(histories, k=6, **rules)
    table = model.interactions.items
    for user, group in whole.group_by("user"):
        assert set(group["item"]) <= set(rules["only"][user[0]]) - set(histories[str(user[0])])
        rows = group.join(table, left_on="item", right_on="id")
        assert rows["in_stock"].all()
        assert rows["price"].min() > 2  # type: ignore[operator]
        assert rows["genre"].drop_nulls().value_counts()["count"].max() <= 2  # type: ignore[operator]
        assert rows["tags"].explode().value_counts()["count"].max() <= 3  # type: ignore[operator]
    assert not set(whole.filter(user="new1")["item"]) & {40, 50}
    monkeypatch.setattr(per_user, "MASK", 2 * N_ITEMS)
    blocks = list(model.recommend_blocks(histories=histories, k=6, **rules))
    assert len(blocks) == 5
    assert pl.concat(blocks).equals(whole)


def test_popular_items_obey_all_rules(model: Recommender[Any]) -> None:
    data = model.interactions
    popularity = dict(zip(data.item_ids.to_list(), data.train.popularity().tolist(), strict=True))
    genre = dict(data.items.select("id", "genre").rows())
    rules: dict[str, Any] = {"without": {"nobody": [0, 10]}, "where": "in_stock", "at_most": {"genre": 1}}
    frame = model.recommend(["u1", "nobody"], unknown="popular", k=6, **rules)
    assert frame.filter(user="u1").equals(model.recommend(["u1"], k=6, where="in_stock", at_most={"genre": 1}))
    expected: list[int] = []
    stocked = data.items.filter("in_stock")["id"].to_list()
    for item in sorted(stocked, key=lambda item: (-popularity[item], item)):
        full = genre[item] is not None and genre[item] in {genre[other] for other in expected}
        if item not in (0, 10) and not full and len(expected) < 6:
            expected.append(item)
    assert frame.filter(user="nobody")["item"].to_list() == expected
    assert frame.filter(user="nobody")["score"].is_null().all()


def test_no_rules_change_nothing(model: Recommender[Any]) -> None:
    plain = model.recommend(k=7)
    assert model.recommend(k=7, where=[], at_most={}, diversity=0).equals(plain)
    assert model.recommend(k=7, at_most={"genre": 7, "tags": 100}).equals(plain)
    assert type(model.ruled_index(Rules())) is type(model.index())


def test_diversity_re_ranks_the_best_items(models: dict[str, Recommender[Any]]) -> None:
    model = models["drm"]
    plain, diverse = model.recommend(USERS, k=3), model.recommend(USERS, k=3, diversity=0.5)
    assert not diverse.select("user", "item").equals(plain.select("user", "item"))
    wide = model.recommend(USERS, k=30)
    found = diverse.join(wide, on=["user", "item"], suffix="_wide")
    assert len(found) == 9
    assert found["score"].equals(found["score_wide"], check_names=False)
    assert diverse.filter(rank=1).equals(plain.filter(rank=1))
    assert model.recommend(["u2"], k=3, diversity=0.5).equals(diverse.filter(user="u2"))
    with pytest.raises(InputError, match="`diversity` compares the factors of items, which EASE does not have"):
        models["ease"].recommend(USERS, diversity=0.5)


def test_an_index_obeys_rules_for_single_requests(model: Recommender[Any]) -> None:
    data = model.interactions
    rules = Rules.of(["in_stock", "price>=1"], {"genre": 1})
    index = model.ruled_index(rules)
    user = data.encode_users(["u2"]).astype(np.int64)
    codes, scores = index.search(model.queries(user), 5, data.owned.take(user))
    frame = model.recommend(["u2"], k=5, where=["in_stock", "price>=1"], at_most={"genre": 1})
    assert data.item_ids[codes[0]].to_list() == frame["item"].to_list()
    np.testing.assert_array_equal(scores[0], frame["score"])
    popular = popular_index(data.popularity, index)
    found = popular.search(popular.stack([None]), 5)[0]
    expected = model.recommend(["?"], 5, unknown="popular", where=["in_stock", "price>=1"], at_most={"genre": 1})
    assert data.item_ids[found[0]].to_list() == expected["item"].to_list()


def test_rules_that_leave_nothing_or_name_no_attribute(model: Recommender[Any]) -> None:
    with pytest.raises(InputError, match="no item satisfies `where` price<0"):
        model.recommend(["u1"], where="price<0")
    with pytest.raises(InputError, match="no items are left to recommend: `where` removes all items that could be"):
        model.recommend(["u1"], where="price=1", only=[0])
    with pytest.raises(InputError, match="no attribute 'colour'"):
        model.recommend(["u1"], at_most={"colour": 1})
    with pytest.raises(InputError, match="no attribute 'colour'"):
        model.recommend(["u1"], where="colour=red")
