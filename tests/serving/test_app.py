"""The HTTP application in process: responses equal the model's, errors have one form, the description is true."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from drm_triton import DRM, Dataset
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.serving.app import MAX_BODY, create_app

# Ids that a path, a query or a careless lookup would change.
ODD = ["a/b", "..", "", "ü 100%", "x?y=1&z#", "a+b", "%2F", "🎧", "17", "017", " ann", "ann", "None", "a\nb", "\u0000"]
N_USERS, N_ITEMS, MAX_K = 120, 90, 40


def dataset(titles: bool) -> Dataset:
    users, items = generate(Shape(users=N_USERS, items=N_ITEMS, interactions=1800), 3)
    pairs = np.unique(users.astype(np.int64) * N_ITEMS + items)
    indptr = np.searchsorted(pairs, np.arange(N_USERS + 1) * N_ITEMS)
    names = [*ODD, *(f"u{u}" for u in range(len(ODD), N_USERS))]
    data = Dataset.from_csr((indptr, pairs % N_ITEMS), user_ids=names, item_ids=[10 * i for i in range(N_ITEMS)])
    if not titles:
        return data
    named = data.items.with_columns(title=pl.Series([None, *(f"Lied {i} ♪" for i in range(1, N_ITEMS))]))
    return Dataset(data.train, data.valid, data.test, data.users, named)


MODELS = {score: DRM(score=score, factors=8, epochs=3).fit(dataset(score == "l2")) for score in ("dot", "l2")}
APPS = {score: create_app(model, f"{score}-model", MAX_K, max_liked=20) for score, model in MODELS.items()}


@pytest.fixture(params=["dot", "l2"])
def score(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Client:
    """Sends requests to an application in process; exceptions become responses, as behind a server."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app

    async def all(self, *requests: tuple[str, str, dict[str, Any]]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await asyncio.gather(*(client.request(method, url, **sent) for method, url, sent in requests))

    def __call__(self, method: str, url: str, **sent: Any) -> httpx.Response:
        return asyncio.run(self.all((method, url, sent)))[0]


@pytest.fixture
def client(score: str) -> Client:
    return Client(APPS[score])


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield b" " * 70_000


def get(client: Client, path: str, **query: Any) -> dict[str, Any]:
    answer = client("GET", path, params=query)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def pairs(listed: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    return [(row["item"], row["score"]) for row in listed]


# -- responses equal the model's ---------------------------------------------------------------------------------------


def test_recommendations_of_every_user(client: Client, score: str) -> None:
    for seen in (True, False):
        lists = MODELS[score].recommend(k=7, exclude_seen=not seen).partition_by("user", as_dict=True)
        for (user,), frame in lists.items():
            answer = get(client, "/recommendations", user=user, k=7, exclude_seen=not seen)
            assert answer["user"] == user
            assert pairs(answer["items"]) == frame.select("item", "score").rows()


def test_similar_items(client: Client, score: str) -> None:
    for item in range(0, 10 * N_ITEMS, 70):
        answer = get(client, "/similar", item=item)
        assert answer["item"] == item
        assert pairs(answer["items"]) == MODELS[score].similar_items([item]).select("similar", "score").rows()


@pytest.mark.parametrize("liked", [[10], [20, "30", 20, 450.0], list(range(0, 200, 10))])
def test_recommendations_from_likes(client: Client, score: str, liked: list[Any]) -> None:
    body = {"liked": liked, "k": 5, "exclude": [0, "50", 7]}  # the model does not know 7
    answer = client("POST", "/recommendations", json=body)
    assert answer.status_code == 200
    with pytest.warns(UserWarning, match="does not know 1 of the 3"):
        want = MODELS[score].recommend_from([[int(i) for i in liked]], k=5, without=[0, 50, 7])
    assert pairs(answer.json()["items"]) == want.select("item", "score").rows()
    assert answer.json()["unknown"] == []


def test_fewer_items_than_k(client: Client, score: str) -> None:
    everything = [10 * i for i in range(N_ITEMS)]
    answer = client("POST", "/recommendations", json={"liked": everything[:20], "k": MAX_K, "exclude": everything[:-3]})
    assert sorted(row["item"] for row in answer.json()["items"]) == everything[-3:]
    answer = client("POST", "/recommendations", json={"liked": [0], "exclude": everything})
    assert answer.json() == {"items": [], "unknown": []}


def test_titles_where_the_data_has_them(client: Client, score: str) -> None:
    rows = get(client, "/recommendations", user="ann", k=MAX_K, exclude_seen=False)["items"]
    rows += get(client, "/similar", item=10, k=MAX_K)["items"]
    for row in rows:
        assert row.get("title", "none") == (
            "none" if score == "dot" else f"Lied {row['item'] // 10} ♪" if row["item"] else None
        )


def test_unknown_ids_may_get_popular_items(client: Client, score: str) -> None:
    counts = np.bincount(MODELS[score].interactions.train.indices, minlength=N_ITEMS)
    popular = [10 * int(i) for i in np.argsort(-counts, kind="stable")]
    answer = get(client, "/recommendations", user="nobody", k=4, unknown="popular")
    assert (answer["user"], pairs(answer["items"])) == ("nobody", [(item, None) for item in popular[:4]])
    body = {"liked": ["?", 3], "exclude": popular[:2], "k": 4, "unknown": "popular"}
    answer = client("POST", "/recommendations", json=body).json()
    assert answer["unknown"] == ["?", 3]
    assert pairs(answer["items"]) == [(item, None) for item in popular[2:6]]
    body = {"liked": ["?", 30], "k": 4, "unknown": "popular"}
    answer = client("POST", "/recommendations", json=body).json()
    assert answer["unknown"] == ["?"]
    assert pairs(answer["items"]) == MODELS[score].recommend_from([[30]], k=4).select("item", "score").rows()


def test_a_user_without_interactions_is_unknown() -> None:
    data = Dataset.from_csr((np.array([0, 2, 2, 4]), np.array([0, 1, 1, 2])), user_ids=[7, 8, 9])
    client = Client(create_app(DRM(factors=2, epochs=1).fit(data)))
    answer = client("GET", "/recommendations", params={"user": 8})
    assert (answer.status_code, answer.json()["error"]) == (404, "not found")
    assert "user '8' has no interactions in the data set" in answer.json()["detail"]
    popular = get(client, "/recommendations", user=8, k=1, unknown="popular")
    assert (popular["user"], pairs(popular["items"])) == (8, [(1, None)])


def test_fifty_requests_at_once(score: str) -> None:
    """GET and POST in one event loop, so that they share batches, with different k."""
    model = MODELS[score]
    users = model.interactions.user_ids.to_list()[:50]

    gets = [("GET", "/recommendations", {"params": {"user": u, "k": 1 + i % 20}}) for i, u in enumerate(users)]
    posts = [("POST", "/recommendations", {"json": {"liked": [10 * i], "k": 1 + i % 9}}) for i in range(50)]
    answers = [pairs(answer.json()["items"]) for answer in asyncio.run(Client(APPS[score]).all(*gets, *posts))]
    for i in range(50):
        assert answers[i] == model.recommend([users[i]], k=1 + i % 20).select("item", "score").rows()
        want = model.recommend_from([[10 * i]], k=1 + i % 9).select("item", "score").rows()
        assert answers[50 + i] == want


def test_health(client: Client, score: str) -> None:
    health = get(client, "/health")
    assert health.pop("version").count(".") >= 1
    assert health.pop("loaded").endswith("Z")
    sizes = {"users": N_USERS, "items": N_ITEMS, "factors": 8}
    assert health == {"status": "ok", "model": f"{score}-model", "kind": "drm", "score": score, **sizes}


# -- errors ------------------------------------------------------------------------------------------------------------

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("method", "url", "sent", "status", "says"),
    [
        ("GET", "/recommendations?user=nobody", {}, 404, "unknown user id: 'nobody'"),
        ("GET", "/recommendations?user=" + "x" * 9000, {}, 404, "unknown user id: 'xxx"),
        ("GET", "/recommendations?user=%ff", {}, 404, "unknown user id"),
        ("GET", "/recommendations", {}, 422, "user: Field required"),
        ("GET", "/recommendations?user=ann&k=0", {}, 422, "k: Input should be greater than or equal to 1"),
        ("GET", f"/recommendations?user=ann&k={MAX_K + 1}", {}, 422, "k: Input should be less than or equal to 40"),
        ("GET", "/recommendations?user=ann&k=ten", {}, 422, "k: Input should be a valid integer"),
        ("GET", "/recommendations?user=ann&exclude_seen=maybe", {}, 422, "exclude_seen: Input should be a valid bool"),
        ("GET", "/recommendations?user=ann&unknown=skip", {}, 422, "unknown: Input should be 'error' or 'popular'"),
        ("GET", "/recommendations?user=ann&top=5", {}, 422, "top: There is no such field, choose from user, k, ex"),
        ("GET", "/recommendations?user=ann&user=u40", {}, 422, "user: Given more than once"),
        ("GET", "/recommendations?user=ann&k=3&k=3", {}, 422, "k: Given more than once"),
        ("GET", "/similar?item=10&k=3&item=20&k=3", {}, 422, "item: Given more than once; k: Given more than once"),
        ("GET", "/similar?item=7", {}, 404, "unknown item id: '7'"),
        ("GET", "/similar?item=10&k=-1", {}, 422, "k: Input should be greater"),
        ("POST", "/recommendations", {"json": {}}, 422, "liked: Field required"),
        ("POST", "/recommendations", {"json": {"liked": []}}, 422, "liked: List should have at least 1 item"),
        ("POST", "/recommendations", {"json": {"liked": [10] * 21}}, 422, "liked: List should have at most 20 items"),
        ("POST", "/recommendations", {"json": {"liked": "10"}}, 422, "liked: Input should be a valid list"),
        ("POST", "/recommendations", {"json": {"liked": [1.5, True, None]}}, 422, "liked.0.int: Input should be"),
        ("POST", "/recommendations", {"json": {"liked": [10], "k": "5"}}, 422, "k: Input should be a valid integer"),
        ("POST", "/recommendations", {"json": {"liked": [10], "k": 0}}, 422, "k: Input should be greater"),
        ("POST", "/recommendations", {"json": {"liked": [10], "k": MAX_K + 1}}, 422, "k: Input should be less"),
        ("POST", "/recommendations", {"json": {"liked": [10], "excluded": []}}, 422, "did you mean exclude?"),
        ("POST", "/recommendations", {"json": {"liked": [10, 7, "?"]}}, 404, "unknown item ids: 7, '?'"),
        ("POST", "/recommendations", {"json": {"liked": list(range(1, 10))}}, 404, "5 and 4 more"),
        ("POST", "/recommendations", {"json": [10]}, 422, "body: Input should be"),
        ("POST", "/recommendations", {}, 422, "body: Field required"),
        ("POST", "/recommendations", {"content": b'{"liked": [', "headers": JSON}, 422, "the body is not JSON"),
        ("POST", "/recommendations", {"content": b"\xff\xfe\xfd", "headers": JSON}, 422, "not JSON in UTF-8"),
        ("POST", "/recommendations", {"content": '{"liked": [10]}'.encode("utf-16"), "headers": JSON}, 422, "in UTF-8"),
        ("POST", "/recommendations", {"content": b"[" * 50_000, "headers": JSON}, 422, "recursion limit exceeded"),
        ("POST", "/recommendations", {"content": b"[" * 50_001, "headers": JSON}, 422, "At most 50,000 opening bra"),
        ("POST", "/recommendations", {"content": b'{"liked": ["\\ud800"]}', "headers": JSON}, 422, "hex escape"),
        ("POST", "/recommendations", {"content": b'{"liked": [' + b"9" * 9000 + b"]}", "headers": JSON}, 422, "range"),
        ("POST", "/recommendations", {"content": b'{"liked": [NaN]}', "headers": JSON}, 422, "not JSON in UTF-8"),
        ("POST", "/recommendations", {"json": dict.fromkeys(map(str, range(257)))}, 422, "body: At most 256 fields"),
        ("GET", "/recommendations?user=ann" + "&k=3" * 256, {}, 422, "query: At most 256 fields are allowed"),
        ("POST", "/recommendations", {"content": b'{"liked": [10]}'}, 422, "body: "),
        ("POST", "/recommendations", {"content": b" " * (MAX_BODY + 1), "headers": JSON}, 413, "1,048,576 bytes"),
        ("POST", "/recommendations", {"content": endless(), "headers": JSON}, 413, "1,048,576 bytes"),
        ("PUT", "/recommendations", {}, 405, "/recommendations allows GET, HEAD, POST, not PUT"),
        ("POST", "/similar?item=10", {}, 405, "/similar allows GET, HEAD, not POST"),
        ("GET", "/items?query=" + "x" * 201, {}, 422, "query: String should have at most 200 characters"),
        ("GET", f"/items?k={MAX_K + 1}", {}, 422, "k: Input should be less than or equal to 40"),
        ("POST", "/reload", {}, 404, "there is no path /reload;"),
        ("GET", "/" + "x" * 9000, {}, 404, "there is no path /xxx"),
        ("GET", "/health/", {}, 404, "there is no path /health/;"),
        ("GET", "/redoc", {}, 404, "there is no path /redoc;"),
    ],
)  # fmt: skip
def test_errors_have_one_form(method: str, url: str, sent: dict[str, Any], status: int, says: str) -> None:
    answer = Client(APPS["dot"])(method, url, **sent)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert sorted(answer.json()) == ["detail", "error"]
    assert says in answer.json()["detail"]
    assert len(answer.text) < 1000
    assert status != 405 or answer.headers["allow"] in answer.json()["detail"]


@pytest.mark.parametrize(
    "url",
    [
        "/health",
        "/openapi.json",
        "/recommendations?user=ann&k=3",
        "/recommendations?user=nobody",
        "/recommendations?user=ann&k=3&k=4",
        "/similar?item=10",
        "/similar?item=7",
        "/nowhere",
    ],
)
def test_head_is_get_without_the_body(url: str) -> None:
    client = Client(APPS["dot"])
    whole, head = client("GET", url), client("HEAD", url)
    assert (head.status_code, head.headers) == (whole.status_code, whole.headers)
    assert int(head.headers["content-length"]) == len(whole.content) > 0
    assert head.content == b""


def test_a_failure_reveals_nothing_and_the_service_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from drm_triton.kernels import get_backend

    client = Client(APPS["dot"])
    with monkeypatch.context() as patch:
        patch.setattr(get_backend(), "top_k", lambda *_: 1 / 0)
        answer = client("GET", "/recommendations?user=ann")
    assert (answer.status_code, answer.json()["error"]) == (500, "internal error")
    assert "division" not in answer.text
    assert client("GET", "/recommendations?user=ann").status_code == 200


# -- the description ---------------------------------------------------------------------------------------------------


def described() -> FastAPI:
    """Create an application whose description lists all ids: it would know almost no id drawn at random."""
    app = create_app(MODELS["l2"], max_k=MAX_K, max_liked=20)
    schema = json.loads(json.dumps(app.openapi()))
    data = MODELS["l2"].interactions
    for path, ids in (("/recommendations", data.user_ids), ("/similar", data.item_ids)):
        given = schema["paths"][path]["get"]["parameters"][0]["schema"]
        given["enum"] = ["nobody", *ids.cast(pl.String)]
    app.openapi_schema = schema
    return app


openapi = schemathesis.openapi.from_asgi("/openapi.json", described())


@openapi.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_responses_match_the_description(case: schemathesis.Case[Any]) -> None:
    # An id outside the list that `described` added is refused only as an unknown id, which unknown=popular accepts.
    popular = (case.query or {}).get("unknown") == "popular"
    # Conditions and limits name attributes of the items, which no description can list.
    body = case.body if isinstance(case.body, dict) else {}
    ruled = any((case.query or {}).get(name) or body.get(name) for name in ("where", "at_most"))
    excluded = [negative_data_rejection] * popular + [positive_data_acceptance] * ruled
    case.call_and_validate(excluded_checks=excluded)


def test_every_response_is_described() -> None:
    paths = APPS["dot"].openapi()["paths"]
    operations = {f"{method} {path}": set(o["responses"]) for path, of in paths.items() for method, o in of.items()}
    assert operations == {
        "get /health": {"200", "400", "500"},
        "get /items": {"200", "400", "422", "500"},
        "get /metrics": {"200", "400", "500"},
        "get /ready": {"200", "400", "500", "503"},
        "get /recommendations": {"200", "400", "404", "422", "500"},
        "post /recommendations": {"200", "400", "404", "413", "422", "500"},
        "get /similar": {"200", "400", "404", "422", "500"},
    }
    responses = [item for of in paths.values() for o in of.values() for item in o["responses"].items()]
    errors = [r["content"]["application/json"]["schema"]["$ref"] for status, r in responses if status != "200"]
    kinds = {schema.rsplit("/", 1)[1] for schema in errors}
    assert kinds == {"Error"}
