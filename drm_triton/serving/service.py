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
from drm_triton.serving.rounds import Member
from drm_triton.serving.schema import Health

POLL_SECONDS = 0.05  # between looks at what other processes have done

log = logging.getLogger("drm_triton.serving")


class Service:
    """One process of the service.

    Requests use `engine` as it is when they arrive. A reload replaces it, and those under way finish with the old one.

    Parameters
    ----------
    model : a fitted model
    name : its name in `/health`
    metrics : the counts of this process; they also carry requests for a reload to the supervisor
    load : loads the model anew; None if it cannot be replaced
    member : the part of this process in the rounds of the workers of a service; None if it is alone
    """

    def __init__(
        self,
        model: Recommender[Any],
        name: str,
        metrics: Metrics,
        load: Callable[[], Recommender[Any]] | None = None,
        member: Member | None = None,
    ) -> None:
        self.name, self.metrics, self.load, self.member = name, metrics, load, member
        self.draining = False  # soon to stop: `/ready` says so
        self.after_load: Callable[[], None] = lambda: None  # called after each reload
        self._seen = metrics.total("reload_requested")
        self._one_at_a_time = asyncio.Lock()
        self._use(Engine(model, metrics), model)
        if member is not None:  # a worker that starts during a round has the new model
            member.answer(member.last, True)

    async def reload(self) -> None:
        """Load the model again and serve it. If it cannot be loaded, the old one stays and a DrmError is raised."""
        async with self._one_at_a_time:
            self._take(*await self._load())

    async def reload_all(self) -> None:
        """Reload in all processes. If one of them cannot, the old model stays in all, and a DrmError is raised."""
        if self.member is None:
            await self.reload()
            return
        rounds = self.member.rounds
        number = rounds.number + 1
        self.metrics.count("reload_requested")
        while abs(rounds.decision) < number or self.member.last < number or self._one_at_a_time.locked():
            await asyncio.sleep(POLL_SECONDS)
        if rounds.decision < 0:
            raise DrmError("a worker could not load it; the log says why")

    async def follow(self) -> None:
        """Reload if a signal or another process has requested it."""
        if self._one_at_a_time.locked():
            return
        with contextlib.suppress(DrmError):  # it is in the log
            if self.member is not None:
                await self._take_part(self.member)
            elif (requested := self.metrics.total("reload_requested")) != self._seen:
                self._seen = requested
                await self.reload()

    async def _take_part(self, member: Member) -> None:
        """Load the model if a round has begun, and serve it if all workers could load it."""
        number = member.rounds.number
        if number == member.last:
            return
        async with self._one_at_a_time:
            try:
                loaded = await self._load()
            except DrmError:
                member.answer(number, False)
                raise
            member.answer(number, True)
            while abs(member.rounds.decision) < number:
                await asyncio.sleep(POLL_SECONDS)
            if member.rounds.decision == number:
                self._take(*loaded)
            else:
                self.metrics.count("reload_failed")
                log.error("reload failed, the old model stays: another worker could not load the new one")

    async def _load(self) -> tuple[Engine, Recommender[Any]]:
        """Load the model again; the old one is still served."""
        assert self.load is not None
        load = self.load

        def prepare() -> tuple[Engine, Recommender[Any]]:
            model = load()
            return Engine(model, self.metrics), model

        try:
            return await asyncio.to_thread(prepare)
        except Exception as error:
            self.metrics.count("reload_failed")
            known = isinstance(error, DrmError)
            log.error("reload failed, the old model stays: %s", error, exc_info=None if known else error)
            raise error if known else DrmError(f"{type(error).__name__}: see the log") from error

    def _take(self, engine: Engine, model: Recommender[Any]) -> None:
        """Serve a new model."""
        self._use(engine, model)
        del engine, model
        self.after_load()
        self.metrics.count("reloaded")
        log.warning("reloaded %s: %s users, %s items", self.name, self.health["users"], self.health["items"])

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
