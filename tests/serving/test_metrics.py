"""Counts in the text format of Prometheus, summed over processes."""

import numpy as np

from drm_triton.serving.metrics import CELLS, OPERATIONS, Metrics


def values(text: str) -> dict[str, float]:
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}


def test_processes_add_up() -> None:
    cells = np.zeros((3, CELLS))
    workers = [Metrics(cells, 0), Metrics(cells, 1)]
    for worker in workers:
        worker.request("GET", "/similar", 200, 0.003)
        worker.request("HEAD", "/similar", 404, 9.0)
        worker.request("BREW", "/a path of an attacker", 999, 0.1)
        worker.batch("search", 5)
        worker.count("opened")
    workers[0].count("closed")
    workers[0].count("reloaded")
    found = values(workers[1].text())
    assert found['drm_triton_requests_total{method="GET",path="/similar",status="200"}'] == 2
    assert found['drm_triton_requests_total{method="GET",path="/similar",status="404"}'] == 2
    assert found['drm_triton_requests_total{method="other",path="other",status="other"}'] == 2
    buckets = 'drm_triton_request_seconds_bucket{method="GET",path="/similar",le="%s"}'
    assert [found[buckets % bound] for bound in ("0.0025", "0.005", "5.0", "+Inf")] == [0, 2, 2, 4]
    assert found['drm_triton_request_seconds_sum{method="GET",path="/similar"}'] == 18.006
    assert found['drm_triton_batch_size_bucket{kind="search",le="8"}'] == 2
    assert found["drm_triton_connections"] == 1
    assert found['drm_triton_reloads_total{result="ok"}'] == 1
    assert Metrics(cells, 2).total("opened") == 2


def test_a_worker_that_ended_has_no_connections() -> None:
    cells = np.zeros((2, CELLS))
    Metrics(cells, 0).count("opened")
    again = Metrics(cells, 0)
    again.forget_connections()
    assert values(again.text())["drm_triton_connections"] == 0


def test_names_of_models_are_escaped() -> None:
    model = {"model": 'a"b\\c\nd', "kind": "drm", "version": "1", "users": 2, "items": 3}
    (line,) = (line for line in Metrics().text(model).splitlines() if line.startswith("drm_triton_model_info"))
    assert line == 'drm_triton_model_info{model="a\\"b\\\\c\\nd",kind="drm",version="1"} 1'


def test_operations_are_those_of_the_application() -> None:
    from drm_triton import DRM, Dataset
    from drm_triton.serving.app import create_app

    model = DRM(factors=2, epochs=1).fit(Dataset.from_csr(([0, 2, 3], [1, 0, 1]), n_items=3))
    app = create_app(model, token="x" * 16, load=lambda: model)
    routes = [(method, route.path) for route in app.routes for method in route.methods]  # type: ignore[attr-defined]
    assert {pair for pair in routes if pair[0] != "HEAD"} | {("other", "other")} == set(OPERATIONS)
