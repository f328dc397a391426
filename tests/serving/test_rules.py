"""Rules of recommendation lists and cold items in the service: the same answers as those of the model."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.serving.app import create_app
from tests.serving.test_app import Client

RULES: list[dict[str, Any]] = [
    {"where": ["price<=12"]},
    {"where": ["price<=12", "genre=rock|jazz"]},
    {"at_most": ["genre=2"]},
    {"diversity": 0.5},
    {"where": ["price>3"], "at_most": ["genre=1"], "diversity": 0.3},
]


@pytest.fixture(scope="module")
def model() -> DRM:
    users, items = generate(Shape(users=80, items=60, interactions=1200), 3)
    data = Dataset.from_frame(pl.DataFrame({"user": [f"u{u}" for u in users], "item": items}))
    rng = np.random.default_rng(0)
    table = {"item": range(63), "genre": rng.choice(["rock", "jazz", "folk"], 63), "price": rng.integers(1, 20, 63)}
    people = pl.DataFrame({"user": [*(f"u{u}" for u in range(80)), "fan"], "taste": ["rock", "jazz", "rock"] * 27})
    return DRM(factors=8, epochs=3).fit(data.with_attributes(pl.DataFrame(table), people))  # three items are cold


@pytest.fixture(scope="module")
def client(model: DRM) -> Client:
    return Client(create_app(model))


def python(rules: dict[str, Any]) -> dict[str, Any]:
    """Return rules as the arguments of `recommend`."""
    limits = {limit.split("=")[0]: int(limit.split("=")[1]) for limit in rules.get("at_most", [])}
    return {**rules, "at_most": limits} if limits else rules


@pytest.mark.parametrize("rules", RULES)
def test_answers_obey_rules_as_the_model_does(model: DRM, client: Client, rules: dict[str, Any]) -> None:
    for k in (3, 10):  # together with other requests, whose lists are shorter or longer
        answer = client("GET", "/recommendations", params={"user": "u5", "k": k, **rules})
        assert answer.status_code == 200, answer.text
        expected = model.recommend(["u5"], k=k, **python(rules))
        assert [row["item"] for row in answer.json()["items"]] == expected["item"].to_list()
        assert [row["cold"] for row in answer.json()["items"]] == expected["cold"].to_list()
        new = client("POST", "/recommendations", json={"liked": [3, 7], "k": k, **rules}).json()
        expected = model.recommend_from({"new": [3, 7]}, k=k, **python(rules))
        assert [row["item"] for row in new["items"]] == expected["item"].to_list()
        popular = client("GET", "/recommendations", params={"user": "?", "k": k, "unknown": "popular", **rules}).json()
        expected = model.recommend(["?"], k=k, unknown="popular", **python(rules))
        assert [row["item"] for row in popular["items"]] == expected["item"].to_list()


def test_items_to_choose_from_and_to_leave_out(model: DRM, client: Client) -> None:
    only, exclude = list(range(10, 40)), [12, 15, 20]
    chosen: dict[str, Any] = {"only": only, "exclude": exclude, "k": 30}
    found = client("GET", "/recommendations", params={"user": "u5", **chosen}).json()
    expected = model.recommend(["u5"], k=30, only=only, without=exclude)
    assert [row["item"] for row in found["items"]] == expected["item"].to_list()
    found = client("POST", "/recommendations", json={"liked": [3, 7], **chosen}).json()
    expected = model.recommend_from({"new": [3, 7]}, k=30, only=only, without=exclude)
    assert [row["item"] for row in found["items"]] == expected["item"].to_list()
    found = client("GET", "/recommendations", params={"user": "?", "unknown": "popular", **chosen}).json()
    assert {row["item"] for row in found["items"]} == set(only) - set(exclude)


def test_cold_users_are_served_by_their_attributes(model: DRM, client: Client) -> None:
    answer = client("GET", "/recommendations", params={"user": "fan", "k": 4}).json()
    assert answer["cold"] is True
    assert [row["item"] for row in answer["items"]] == model.recommend(["fan"], k=4)["item"].to_list()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"where": ["colour=red"]}, "the items have no attribute 'colour'"),
        ({"where": ["price<=many"]}, "price"),
        ({"where": ["price<=0"]}, "no items are left"),
        ({"at_most": ["genre"]}, "is not an attribute and a number"),
        ({"at_most": ["genre=2147483648"]}, "must be an integer from 1 to 2147483647"),
        ({"at_most": ["genre=" + "9" * 100]}, "is not an attribute and a number"),
        ({"diversity": 1}, "diversity: Input should be less than 1"),
        ({"where": ["price>1"] * 9}, "at most 8 items"),
    ],
)
def test_bad_rules_are_invalid_input(client: Client, rules: dict[str, Any], message: str) -> None:
    answers = [
        client("GET", "/recommendations", params={"user": "u5", **rules}),
        client("POST", "/recommendations", json={"liked": [3], **rules}),
    ]
    for answer in answers:
        assert answer.status_code == 422, answer.text
        assert message in answer.json()["detail"]
