"""What the service counts, in the text format of Prometheus.

All counts are cells of one array [workers + 1, cells], which the processes of a service share. Each process writes to
its own row only, so that no lock is needed; the last row belongs to the process that started the workers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

OTHER = "other"
# Label values are fixed, so that requests for paths that do not exist cannot add any.
OPERATIONS = (
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/health"),
    ("GET", "/items"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/ready"),
    ("GET", "/recommendations"),
    ("POST", "/recommendations"),
    ("POST", "/reload"),
    ("GET", "/similar"),
    (OTHER, OTHER),
)
STATUSES = (200, 400, 401, 404, 405, 413, 422, 500, 503, OTHER)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
BATCHES = ("search", "similar", "fold_in")
SIZES = (1, 2, 4, 8, 16, 32, 64)
Event = Literal["reloaded", "reload_failed", "reload_requested", "opened", "closed", "timed_out", "evicted", "refused"]
EVENTS: tuple[Event, ...] = (
    "reloaded", "reload_failed", "reload_requested", "opened", "closed", "timed_out", "evicted", "refused",
)  # fmt: skip
PREFIX = "drm_triton"

_OPERATION = {operation: number for number, operation in enumerate(OPERATIONS)}
_STATUS = {status: number for number, status in enumerate(STATUSES)}
_SHAPES = {
    "requests": (len(OPERATIONS), len(STATUSES)),
    "seconds": (len(OPERATIONS), len(SECONDS) + 2),  # the last two: above all bounds, and the sum
    "batches": (len(BATCHES), len(SIZES) + 2),
    "events": (len(EVENTS),),
}
CELLS = sum(int(np.prod(shape)) for shape in _SHAPES.values())


class Metrics:
    """The counts of one process of the service, and their sum over all.

    Parameters
    ----------
    cells : float64 [workers + 1, CELLS], shared by the processes; one of its own by default
    row : the row of this process

    Examples
    --------
    >>> metrics = Metrics()
    >>> metrics.request("GET", "/health", 200, 0.002)
    >>> [line for line in metrics.text().splitlines() if "requests_total{" in line]
    ['drm_triton_requests_total{method="GET",path="/health",status="200"} 1']
    """

    def __init__(self, cells: NDArray[np.float64] | None = None, row: int = 0) -> None:
        self._cells = np.zeros((1, CELLS)) if cells is None else cells
        self._mine = self._parts(self._cells[row])

    @staticmethod
    def _parts(row: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
        """Return views of the parts of a row, by their names in `_SHAPES`."""
        ends = np.cumsum([np.prod(shape) for shape in _SHAPES.values()])
        pieces = np.split(row, ends[:-1])
        return {name: piece.reshape(shape) for (name, shape), piece in zip(_SHAPES.items(), pieces, strict=True)}

    def request(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        operation = _OPERATION.get(("GET" if method == "HEAD" else method, path), len(OPERATIONS) - 1)
        self._mine["requests"][operation, _STATUS.get(status, len(STATUSES) - 1)] += 1
        _observe(self._mine["seconds"][operation], SECONDS, seconds)

    def batch(self, kind: str, size: int) -> None:
        """Count requests that were computed together."""
        _observe(self._mine["batches"][BATCHES.index(kind)], SIZES, size)

    def count(self, event: Event) -> None:
        """Count an event."""
        self._mine["events"][EVENTS.index(event)] += 1

    def total(self, event: Event) -> int:
        """Return how often all processes counted an event."""
        return int(self._parts(self._cells.sum(axis=0))["events"][EVENTS.index(event)])

    def forget_connections(self) -> None:
        """Set the connections of this process to none: it takes the row of one that ended, with all its connections."""
        events = self._mine["events"]
        events[EVENTS.index("closed")] = events[EVENTS.index("opened")]

    def text(self, model: dict[str, Any] | None = None) -> str:
        """Return the sums over all processes in the text format of Prometheus.

        Parameters
        ----------
        model : what `/health` says about the model
        """
        return "".join(f"{line}\n" for line in self._lines(self._parts(self._cells.sum(axis=0)), model or {}))

    def _lines(self, sums: dict[str, NDArray[np.float64]], model: dict[str, Any]) -> Iterator[str]:
        yield from _head("requests_total", "counter", "Requests by method, path and status.")
        for number, (method, path) in enumerate(OPERATIONS):
            for status, count in zip(STATUSES, sums["requests"][number], strict=True):
                if count:
                    labels = f'method="{method}",path="{path}",status="{status}"'
                    yield f"{PREFIX}_requests_total{{{labels}}} {count:.0f}"
        yield from _head("request_seconds", "histogram", "Seconds from a request to its response.")
        for (method, path), cells in zip(OPERATIONS, sums["seconds"], strict=True):
            yield from _histogram("request_seconds", f'method="{method}",path="{path}"', SECONDS, cells)
        yield from _head("batch_size", "histogram", "Requests that were computed together.")
        for kind, cells in zip(BATCHES, sums["batches"], strict=True):
            yield from _histogram("batch_size", f'kind="{kind}"', SIZES, cells)
        events = dict(zip(EVENTS, sums["events"], strict=True))
        yield from _head("reloads_total", "counter", "Models loaded in place of another, by result, over all workers.")
        yield f'{PREFIX}_reloads_total{{result="ok"}} {events["reloaded"]:.0f}'
        yield f'{PREFIX}_reloads_total{{result="error"}} {events["reload_failed"]:.0f}'
        yield from _head("connections", "gauge", "Open connections.")
        yield f"{PREFIX}_connections {events['opened'] - events['closed']:.0f}"
        yield from _head("connections_ended_total", "counter", "Connections that the service ended, by reason.")
        for reason in ("timed_out", "evicted", "refused"):
            yield f'{PREFIX}_connections_ended_total{{reason="{reason}"}} {events[reason]:.0f}'
        if model:
            yield from _head("model_info", "gauge", "The model that this worker serves.")
            labels = ",".join(f'{name}="{_escaped(str(model[name]))}"' for name in ("model", "kind", "version"))
            yield f"{PREFIX}_model_info{{{labels}}} 1"
            for name in ("users", "items"):
                yield from _head(f"model_{name}", "gauge", f"Number of {name} of the model.")
                yield f"{PREFIX}_model_{name} {model[name]}"


def _observe(cells: NDArray[np.float64], bounds: tuple[float, ...], value: float) -> None:
    cells[bisect_left(bounds, value)] += 1
    cells[-1] += value


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {PREFIX}_{name} {text}", f"# TYPE {PREFIX}_{name} {kind}"


def _histogram(name: str, labels: str, bounds: tuple[float, ...], cells: NDArray[np.float64]) -> Iterator[str]:
    """Yield the lines of one histogram, or none if it is empty."""
    counts = np.cumsum(cells[:-1])
    if counts[-1]:
        for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
            yield f'{PREFIX}_{name}_bucket{{{labels},le="{bound}"}} {count:.0f}'
        yield f"{PREFIX}_{name}_sum{{{labels}}} {cells[-1]:.12g}"
        yield f"{PREFIX}_{name}_count{{{labels}}} {counts[-1]:.0f}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
