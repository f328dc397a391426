"""Refusals, readiness, the log and reloads of the application, in process."""

import asyncio
import gc
import logging
import weakref
from typing import Any

import httpx
import numpy as np
import polars as pl
import pytest
from starlette.responses import Response

from drm_triton import DRM, Dataset
from drm_triton.data.csr import CSR
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import InputError
from drm_triton.serving.app import Direct, create_app
from drm_triton.serving.engine import Engine, UnknownIdError
from drm_triton.serving.metrics import Metrics
from drm_triton.serving.middleware import is_this_host
from drm_triton.serving.rounds import Member, Rounds
from drm_triton.serving.server import set_aside
from drm_triton.serving.service import Service

TOKEN = "a-token-of-the-tests"


def fitted(seed: int = 0) -> DRM:
    users, items = generate(Shape(users=40, items=30, interactions=500), 5)
    frame = pl.DataFrame({"user": users, "item": items})
    return DRM(factors=4, epochs=1, seed=seed).fit(Dataset.from_frame(frame, ratios=(1, 0, 0)))


MODEL, OTHER = fitted(), fitted(1)


def ask(app: Any, method: str, url: str, **sent: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as client:
            return await client.request(method, url, **sent)

    return asyncio.run(run())


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["liked", "exclude"])
@pytest.mark.parametrize("element", ["{}", "1", '"x"'])
def test_a_long_list_is_one_error_whatever_it_holds(field: str, element: str) -> None:
    app = create_app(MODEL, max_liked=100, max_exclude=100)
    many = "[" + ",".join([element] * (1_000_000 // (len(element) + 1))) + "]"
    body = f'{{"liked": {many}}}' if field == "liked" else f'{{"liked": [1], "exclude": {many}}}'
    answer = ask(app, "POST", "/recommendations", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(f"{field}: List should have at most 100 items, not ")
    assert ";" not in answer.json()["detail"]


def test_validation_ends_at_the_first_bad_id() -> None:
    body = {"liked": [1], "exclude": [{}] * 5000}
    answer = ask(create_app(MODEL), "POST", "/recommendations", json=body)
    assert answer.status_code == 422
    assert answer.json()["detail"].count("exclude.") == 2  # neither a number nor text


# -- hosts and tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["rebound.example", "rebound.example:8000", "localhost.rebound.example", "", "[x]", "127.0.0.1.x"]
)
def test_other_hosts_are_refused(host: str) -> None:
    app = create_app(MODEL, host_names=["localhost"])
    answer = ask(app, "GET", "/health", headers={"Host": host})
    assert (answer.status_code, answer.json()["error"]) == (400, "bad request")


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]", "192.0.2.7", "songs.example"]
)
def test_names_and_addresses_of_this_host(host: str) -> None:
    app = create_app(MODEL, host_names=["localhost", "Songs.example"])
    assert ask(app, "GET", "/health", headers={"Host": host}).status_code == 200
    assert is_this_host(host, {"localhost", "songs.example"})


def test_any_host_where_that_is_asked_for() -> None:
    for names in (None, ["*"]):
        assert (
            ask(create_app(MODEL, host_names=names), "GET", "/health", headers={"Host": "x.example"}).status_code == 200
        )


def test_a_token_protects_all_but_health_readiness_and_pages() -> None:
    app = create_app(MODEL, token=TOKEN)
    for path in ("/health", "/ready", "/", "/docs"):
        assert ask(app, "GET", path).status_code == 200
    for path in ("/recommendations?user=1", "/items", "/similar?item=1", "/metrics", "/openapi.json", "/nowhere"):
        for given in (
            {},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": TOKEN},
        ):
            answer = ask(app, "GET", path, headers=given)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert TOKEN not in answer.text
    assert ask(app, "GET", "/recommendations?user=1", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


# -- the log and the counts --------------------------------------------------------------------------------------------


def test_the_log_names_no_users_and_cannot_be_forged(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(MODEL, log="all")
    with caplog.at_level(logging.INFO, "drm_triton.serving"):
        ask(app, "GET", "/recommendations?user=secret")
        ask(app, "GET", "/x%0aforged")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.rsplit(" ", 2)[0] for line in lines] == [
        "127.0.0.1 GET /recommendations 404",
        "127.0.0.1 GET /x%0aforged 404",
    ]


@pytest.mark.parametrize(("level", "lines"), [("none", 0), ("errors", 1)])
def test_errors_are_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, level: Any, lines: int
) -> None:
    app = create_app(MODEL, log=level)
    monkeypatch.setattr(Engine, "find", lambda *_: 1 / 0)
    with caplog.at_level(logging.INFO, "drm_triton.serving"):
        assert ask(app, "GET", "/items").status_code == 500
        assert ask(app, "GET", "/similar?item=x").status_code == 404
    assert len(caplog.records) == lines


def test_metrics_count_requests_and_batches() -> None:
    app = create_app(MODEL, "songs")
    ask(app, "GET", "/recommendations?user=1")
    ask(app, "GET", "/nowhere")
    answer = ask(app, "GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for line in (
        'drm_triton_requests_total{method="GET",path="/recommendations",status="200"} 1',
        'drm_triton_requests_total{method="other",path="other",status="404"} 1',
        'drm_triton_batch_size_count{kind="search"} 1',
        "drm_triton_model_items 30",
    ):
        assert line in answer.text.splitlines()


def test_a_service_that_is_about_to_stop_is_not_ready_but_answers() -> None:
    app = create_app(MODEL)
    assert ask(app, "GET", "/ready").json() == {"status": "ready"}
    app.state.service.draining = True
    answer = ask(app, "GET", "/ready")
    assert (answer.status_code, answer.json()["error"]) == (503, "not available")
    assert ask(app, "GET", "/recommendations?user=1").status_code == 200


# -- reload ------------------------------------------------------------------------------------------------------------


def test_reload_serves_the_new_model_and_a_failure_keeps_the_old(caplog: pytest.LogCaptureFixture) -> None:
    models: list[Any] = []
    app = create_app(MODEL, token=TOKEN, load=lambda: models.pop())
    right = {"Authorization": f"Bearer {TOKEN}"}
    old, new = (model.recommend([1], k=5).select("item", "score").rows() for model in (MODEL, OTHER))
    assert old != new
    assert ask(app, "POST", "/reload").status_code == 401
    loaded = ask(app, "GET", "/health").json()["loaded"]

    with caplog.at_level(logging.INFO, "drm_triton.serving"):  # `models` is empty: an error nobody expected
        answer = ask(app, "POST", "/reload", headers=right)
    assert answer.status_code == 500
    assert "the old model is still served" in answer.json()["detail"]
    assert "reload failed, the old model stays" in caplog.text
    assert ask(app, "GET", "/recommendations?user=1&k=5", headers=right).status_code == 200
    assert ask(app, "GET", "/health").json()["loaded"] == loaded

    models.append(OTHER)
    assert ask(app, "POST", "/reload", headers=right).status_code == 200
    rows = ask(app, "GET", "/recommendations?user=1&k=5", headers=right).json()["items"]
    assert [(row["item"], row["score"]) for row in rows] == new
    counts = ask(app, "GET", "/metrics", headers=right).text.splitlines()
    assert 'drm_triton_reloads_total{result="ok"} 1' in counts
    assert 'drm_triton_reloads_total{result="error"} 1' in counts


def workers(*loads: Any) -> tuple[Rounds, list[Service]]:
    """Return the services of workers, which load new models with these functions, and their rounds."""
    rounds = Rounds(np.zeros(len(loads) + 2, dtype=np.int64))
    cells = np.zeros((len(loads) + 1, len(Metrics()._cells[0])))
    return rounds, [
        Service(MODEL, "songs", Metrics(cells, row), load, Member(rounds, row)) for row, load in enumerate(loads)
    ]


async def lead(rounds: Rounds, services: list[Service]) -> None:
    """Lead a round as the supervisor does, while the workers look for one."""
    rounds.begin()
    tasks = [asyncio.create_task(service.follow()) for service in services]
    while rounds.is_open:
        await asyncio.sleep(0)
        rounds.decide()
    await asyncio.gather(*tasks)


def test_all_workers_take_a_new_model_or_all_keep_the_old() -> None:
    models: list[Any] = [InputError("damaged"), OTHER]

    def load() -> Any:
        model = models.pop(0)
        if isinstance(model, Exception):
            raise model
        return model

    rounds, services = workers(lambda: OTHER, load)
    asyncio.run(lead(rounds, services))  # the second worker cannot load it
    assert [service.engine.model for service in services] == [MODEL, MODEL]
    assert services[0].metrics.total("reload_failed") == 2
    asyncio.run(lead(rounds, services))
    assert [service.engine.model for service in services] == [OTHER, OTHER]
    assert services[0].metrics.total("reloaded") == 2
    asyncio.run(services[0].follow())  # no new round
    assert services[0].metrics.total("reloaded") == 2


def test_a_request_to_reload_is_answered_when_all_workers_have_decided() -> None:
    def damaged() -> Any:
        raise InputError("damaged")

    for load, taken in ((lambda: OTHER, True), (damaged, False)):
        rounds, services = workers(lambda: OTHER, load)

        async def run(rounds: Rounds = rounds, services: list[Service] = services) -> Any:
            request = asyncio.create_task(services[0].reload_all())
            await asyncio.sleep(0)
            assert services[0].metrics.total("reload_requested") == 1
            await lead(rounds, services)
            return (await asyncio.gather(request, return_exceptions=True))[0]

        outcome = asyncio.run(run())
        assert (outcome is None) == taken
        assert taken or "a worker could not load it" in str(outcome)


def test_a_worker_that_ends_in_a_round_does_not_hold_it_up() -> None:
    rounds = Rounds(np.zeros(4, dtype=np.int64))
    rounds.give_up()  # no round is open
    assert rounds.decision == 0
    rounds.begin()
    rounds.answer(0, 1, True)
    Service(OTHER, "songs", Metrics(), None, Member(rounds, 1))  # started again: it has the new model
    rounds.decide()
    assert rounds.decision == 1
    rounds.begin()
    rounds.answer(0, 2, True)
    rounds.give_up()
    assert (rounds.decision, rounds.is_open) == (-2, False)


def test_requests_under_way_finish_with_the_model_they_began_with() -> None:
    service = Service(MODEL, "songs", Metrics(), lambda: OTHER)

    async def run() -> tuple[Any, Any]:
        began = asyncio.create_task(service.engine.recommend_from([3, 4], 5, [], "error"))
        await asyncio.sleep(0)
        await service.reload()
        return await began, await service.engine.recommend_from([3, 4], 5, [], "error")

    for model, answer in zip((MODEL, OTHER), asyncio.run(run()), strict=True):
        want = model.recommend_from([[3, 4]], k=5).select("item", "score").rows()
        assert [(row["item"], row["score"]) for row in answer["items"]] == want


def test_a_reload_frees_the_old_model_and_sets_the_new_one_aside() -> None:
    service = Service(fitted(), "songs", Metrics(), fitted)
    old = weakref.ref(service.engine)
    frozen = gc.get_freeze_count()
    service.after_load = set_aside
    try:
        asyncio.run(service.reload())
        assert old() is None
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


# -- what a user has ---------------------------------------------------------------------------------------------------


def test_good_queries_are_answered_directly_and_others_by_the_application() -> None:
    bodies: list[bytes] = []

    async def answer(query: bytes) -> Response:
        if query == b"bad":
            raise InputError("bad")
        return Response(query)

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    direct = Direct(Response(b"application"), {"/items": answer})
    for method, path, query in (
        ("GET", "/items", b"good"),
        ("GET", "/items", b"bad"),
        ("POST", "/items", b"good"),
        ("GET", "/items/", b"good"),
    ):
        scope = {"type": "http", "method": method, "path": path, "query_string": query}
        asyncio.run(direct(scope, lambda: asyncio.sleep(0, {}), send))
    assert [body for body in bodies if body] == [b"good", b"application", b"application", b"application"]


def test_dropped_items_are_left_out_and_say_nothing_about_taste() -> None:
    frame = pl.DataFrame(
        {"user": [7, 7, 7, 9, 9, 8], "item": [0, 1, 2, 1, 3, 1], "rating": [5, 5, 1, 5, 5, 1]}
    )  # 8 has a low rating only, and comes back with the table of users
    data = Dataset.from_frame(frame, min_rating=3, ratios=(1, 0, 0))
    items = pl.DataFrame({"item": [2], "title": ["two"]})
    model = DRM(factors=2, epochs=1).fit(data.with_attributes(items, pl.DataFrame({"user": [8]})))
    engine = Engine(model)

    async def items_of(user: str, **options: Any) -> list[int]:
        given = {"k": 9, "exclude_seen": True, "unknown": "popular", **options}
        return sorted(row["item"] for row in (await engine.recommend(user, **given))["items"])

    assert asyncio.run(items_of("7")) == [3]
    assert asyncio.run(items_of("7", exclude_seen=False)) == [0, 1, 2, 3]
    assert asyncio.run(items_of("8")) == [0, 2, 3]
    with pytest.raises(UnknownIdError, match="has no interactions"):
        asyncio.run(items_of("8", unknown="error"))


def test_a_user_whose_rows_were_all_dropped_is_not_offered_them() -> None:
    frame = pl.DataFrame({"user": [7, 7, 9, 8, 8], "item": [0, 1, 2, 1, 5], "rating": [5, 5, 5, 1, 1]})
    engine = Engine(DRM(factors=2, epochs=1).fit(Dataset.from_frame(frame, min_rating=3, ratios=(1, 0, 0))))

    async def items_of(user: str, **options: Any) -> list[int]:
        given = {"k": 9, "exclude_seen": True, "unknown": "popular", **options}
        return sorted(row["item"] for row in (await engine.recommend(user, **given))["items"])

    assert asyncio.run(items_of("8")) == [0, 2]
    assert asyncio.run(items_of("8", exclude_seen=False)) == asyncio.run(items_of("6")) == [0, 1, 2]
    with pytest.raises(UnknownIdError, match="unknown user id"):
        asyncio.run(items_of("8", unknown="error"))


def test_a_user_whose_items_were_all_held_out_is_folded_in() -> None:
    data = Dataset.from_csr((np.array([0, 3, 3, 6]), np.array([0, 1, 2, 1, 2, 3])), user_ids=[7, 8, 9], n_items=6)
    model = DRM(factors=2, epochs=1).fit(data)
    engine = Engine(model)
    engine.liked = engine.seen = CSR(np.array([0, 3, 5, 8]), np.array([0, 1, 2, 0, 3, 1, 2, 3], dtype=np.int32), (3, 6))
    answer = asyncio.run(engine.recommend("8", 3, True, "error"))
    want = model.recommend_from([[0, 3]], k=3).select("item", "score").rows()
    assert [(row["item"], row["score"]) for row in answer["items"]] == want
