"""The model that is served, and its replacement by a new one while requests are answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from drm_triton._version import __version__
from drm_triton.errors import DrmError
from drm_triton.recommender import FactorRecommender, Recommender
from drm_triton.serving.engine import Engine
from drm_triton.serving.metrics import Metrics
from drm_triton.serving.schema import Health

log = logging.getLogger("drm_triton.serving")


class Service:
    """One process of the service.

    Requests use `engine` as it is when they arrive. A reload replaces it, and those under way finish with the old one.

    Parameters
    ----------
    model : a fitted model
    name : its name in `/health`
    metrics : the counts of this process; they also carry requests for a reload between the processes
    load : loads the model anew; None if it cannot be replaced
    """

    def __init__(
        self, model: Recommender[Any], name: str, metrics: Metrics, load: Callable[[], Recommender[Any]] | None = None
    ) -> None:
        self.name, self.metrics, self.load = name, metrics, load
        self.draining = False  # soon to stop: `/ready` says so
        self.after_load: Callable[[], None] = lambda: None  # called after each reload
        self._seen = metrics.total("reload_requested")
        self._one_at_a_time = asyncio.Lock()
        self._use(Engine(model, metrics), model)

    async def reload(self) -> None:
        """Load the model again and serve it. If it cannot be loaded, the old one stays and a DrmError is raised."""
        assert self.load is not None
        load = self.load

        def prepare() -> tuple[Engine, Recommender[Any]]:
            model = load()
            return Engine(model, self.metrics), model

        async with self._one_at_a_time:
            try:
                engine, model = await asyncio.to_thread(prepare)
            except Exception as error:
                self.metrics.count("reload_failed")
                known = isinstance(error, DrmError)
                log.error("reload failed, the old model stays: %s", error, exc_info=None if known else error)
                raise error if known else DrmError(f"{type(error).__name__}: see the log") from error
            self._use(engine, model)
            del engine, model
            self.after_load()
            self.metrics.count("reloaded")
            log.warning("reloaded %s: %s users, %s items", self.name, self.health["users"], self.health["items"])

    async def reload_all(self) -> None:
        """Reload here and, if that succeeds, have all other processes reload too."""
        await self.reload()
        self._seen += 1
        self.metrics.count("reload_requested")

    async def follow(self) -> None:
        """Reload if another process, or a signal, has requested it."""
        requested = self.metrics.total("reload_requested")
        if requested != self._seen and not self._one_at_a_time.locked():
            self._seen = requested
            with contextlib.suppress(DrmError):  # it is in the log
                await self.reload()

    def _use(self, engine: Engine, model: Recommender[Any]) -> None:
        health = Health(
            status="ok",
            model=self.name,
            kind=model.config.model,
            score=model.score_name if isinstance(model, FactorRecommender) else None,
            users=model.interactions.n_users,
            items=model.interactions.n_items,
            factors=model.item_factors.shape[1] if isinstance(model, FactorRecommender) else None,
            loaded=datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            version=__version__,
        )
        self.engine, self.health = engine, health.model_dump()
