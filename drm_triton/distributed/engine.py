"""Steps that several ranks take together. The state of a rank has the rows that it holds of U, V and Adagrad's sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.config import TrainConfig
from drm_triton.data.csr import CSR
from drm_triton.data.dataset import Dataset
from drm_triton.distributed.covariance import shard_gradients
from drm_triton.distributed.measure import gather_measured
from drm_triton.distributed.parts import Part, parts_of, unit_of
from drm_triton.distributed.rows import (
    Division,
    Wanted,
    arrived_rows,
    arrived_terms,
    distinct,
    fetch,
    leaving_rows,
    leaving_terms,
    whole_table,
)
from drm_triton.distributed.sums import Subtree, TreeSum, subtrees_of, total_of_ranks
from drm_triton.distributed.world import Chosen, World
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.catalogue import CataloguePlan
from drm_triton.kernels.protocol import Backend, CatalogueBatch, GradientTerms, ListPlan, Rounding, row_score
from drm_triton.kernels.streams import ITEM_TABLE, USER_TABLE
from drm_triton.names import Score
from drm_triton.ranking.evaluate import average, evaluate_users
from drm_triton.ranking.known_first import known_first
from drm_triton.ranking.topk import TopKIndex
from drm_triton.training.preflight import backend_name, count_interactions, memory_estimate
from drm_triton.training.prior import popularity_prior, ranking_factors
from drm_triton.training.state import LOSS_SUMS, State
from drm_triton.training.step import check_losses, list_plan, objective_of, rounding, training_plan

WHOLE_INTERACTIONS = 1 << 30  # bytes of interactions that every rank reads as a whole


class Distributed:
    """Trains with other ranks. See `drm_triton.training.engine.Engine`.

    Parameters
    ----------
    state : the rows that this rank holds
    users, items : which rank holds which rows
    """

    def __init__(
        self,
        world: World,
        state: State,
        users: Division,
        items: Division,
        config: TrainConfig,
        dataset: Dataset,
        fit: CSR,
        backend: Backend,
    ) -> None:
        self.world, self.state, self.users, self.items = world, state, users, items
        self.config, self.dataset, self.fit, self.backend = config, dataset, fit, backend
        self._popularity: NDArray[np.int64] | None = None
        self.plan, self.sample_lists = self._plan()
        self.objective = objective_of(config, fit.shape[1])
        self.unit = unit_of(config)
        self._wish = self._granted = False  # to stop

    def _plan(self) -> tuple[ListPlan | CataloguePlan, Callable[[ListPlan, int, int, int], ListBatch]]:
        """Return the plan of the training, and the function that draws lists.

        Small data is read by every rank. Of large data, a rank reads the rows of its users, if it has no weights.
        """
        config, fit = self.config, self.fit
        if not divides_interactions(config, self.backend.name, fit.nnz):
            return training_plan(config, fit, self.world.device), self.backend.sample_lists
        from drm_triton.distributed.interactions import DividedCatalogue, Interactions, ListSampler

        interactions = Interactions(self.world, fit, self.users)
        sampler = ListSampler(interactions)
        if config.negatives_in_force == "all":
            prior = popularity_prior(config, self.popularity())
            return DividedCatalogue(interactions, fit.shape[1], config.seed, config.pool, prior), sampler
        return list_plan(config, fit, self.world.device, begin=sampler.begin), sampler

    def popularity(self) -> NDArray[np.int64]:
        """Return the number of interactions of each item [N]. A rank counts those of its users, once."""
        if self._popularity is None:
            own = self.users.rows(self.world.rank)
            counted = torch.from_numpy(self.fit.between(own.start, own.stop).popularity()).to(self.world.device)
            self._popularity = torch.stack(self.world.gather(counted)).sum(0).cpu().numpy()
        return self._popularity

    @property
    def n_lists(self) -> int:
        """Lists in an epoch."""
        return self.plan.n_lists

    def step(self, stop: int, lr: float) -> None:
        """Train on the lists of the current epoch from `state.position` to `stop` - 1, a part of them on each rank."""
        state = self.state
        parts = parts_of(state.position, stop, self.unit, self.world.size)
        if isinstance(self.plan, CataloguePlan):
            self._catalogue_step(self.plan, stop, parts, lr)
        else:
            self._list_step(self.plan, parts, lr)
        state.position = stop
        state.step += 1

    def agreed(self, stop: bool, now: bool = False) -> bool:
        """Return whether any rank wants to stop. Without `now`, they tell each other in the next step."""
        if now:
            return self.world.any(stop or self._wish)
        self._wish |= stop
        return self._granted

    def measure(self, ks: Sequence[int]) -> dict[str, float]:
        """Rank all items for the users of this rank; average over the users of all ranks."""
        state, first = self.state, self._first(self.users)
        own = range(first, first + len(state.U))
        U, V = ranking_factors(state.U, whole_table(self.world, state.V), self.config, self.popularity())
        score = self.config.score_in_force
        index = known_first(partial(TopKIndex, self.backend, V, score), self.popularity() > 0)

        def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
            return index.search(U[torch.from_numpy(users - first).to(U.device)], k, seen)[0]

        measured = evaluate_users(rank, self.fit, self.dataset.valid, own, ks)
        return average(gather_measured(self.world, measured)).means

    # -- lists with sampled negatives --------------------------------------------------------------------------------

    def _list_step(self, plan: ListPlan, parts: Sequence[Part], lr: float) -> None:
        state, part = self.state, parts[self.world.rank]
        batch = self.sample_lists(plan, state.epoch, part.start, part.stop)
        users, own_users = distinct(batch.users)
        items, places = self._distinct_items(batch.ids())
        rank = self.world.rank
        U, V = fetch(
            self.world,
            [
                Wanted.ascending(users, self.users, state.U, rank),
                Wanted.ascending(items, self.items, state.V, rank),
            ],
        )
        if len(batch.users):
            local, weights = batch.renumbered(own_users, places), plan.list_weights(batch)
            lists = self.backend.list_terms(U, V, local, self.objective, weights, plan.n_items)
            losses = torch.stack([lists.losses[name] for name in LOSS_SUMS])
            terms = self.backend.merge_shared(lists.items)
            terms = terms._replace(rows=items[terms.rows.long()])
            user_grad = lists.user_grad
        else:  # fewer units than ranks
            losses = U.new_empty(len(LOSS_SUMS), 0)
            terms, user_grad = GradientTerms.none(state.V)._replace(vectors=U), U
        message = self._message(losses, parts)
        leaving = [
            [message, *of_users, *of_items]
            for of_users, of_items in zip(
                leaving_rows(batch.users, user_grad, self.users), leaving_terms(terms, self.items), strict=True
            )
        ]
        arrived = self.world.exchange(leaving)
        self._hear([tensors[0] for tensors in arrived], parts)
        user_terms = arrived_rows([tensors[1:3] for tensors in arrived], self._first(self.users))
        item_terms = arrived_terms([tensors[3:] for tensors in arrived], self._first(self.items))
        self._update(item_terms, user_terms, None, lr, self.config.score_in_force)

    @cached_property
    def _distinct_items(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """The function that finds the distinct items of a batch."""
        if self.backend.name == "cpu":
            from drm_triton.kernels.cpu.distinct import Distinct

            return Distinct(self.items.n_rows)
        return distinct

    # -- the whole catalogue -----------------------------------------------------------------------------------------

    def _catalogue_step(self, plan: CataloguePlan, stop: int, parts: Sequence[Part], lr: float) -> None:
        state, rank = self.state, self.world.rank
        # The batch of all ranks. They share the items of its pool, and each knows which rows the others need.
        batch = plan.batch(state.epoch, state.position, stop)
        users = [batch.users[part.start - state.position : part.stop - state.position] for part in parts]
        user_places = [self.users.positions(of_rank) for of_rank in users]
        held = [of_rank[places[rank]] for of_rank, places in zip(users, user_places, strict=True)]
        items = (
            torch.arange(self.items.n_rows, dtype=torch.int32, device=self.world.device)
            if batch.pool is None
            else batch.pool.items
        )
        item_places = self.items.positions(items)
        mine = items[item_places[rank]]
        U, V = fetch(
            self.world,
            [
                Wanted(
                    state.U,
                    self._first(self.users),
                    [users[rank][places] for places in user_places[rank]],
                    user_places[rank],
                ),
                Wanted(state.V, self._first(self.items), [items[places] for places in item_places], item_places),
            ],
            [[of_rank, mine] for of_rank in held],
        )
        losses, user_grad, sums = self._unit_gradients(batch, parts[rank], U, V)
        message = self._message(losses, parts)
        begins = len(items) * torch.arange(len(sums), device=items.device)[:, None]
        all_sums = sums[0] if len(sums) == 1 else torch.cat([U[:0], *sums])
        leaving: list[list[Tensor | Chosen]] = [
            [message, Chosen(user_grad, of_users), Chosen(all_sums, (begins + of_items).flatten())]
            for of_users, of_items in zip(user_places[rank], item_places, strict=True)
        ]
        units = [(part.first_unit, part.last_unit) for part in parts]
        sizes = [
            [len(message), len(of_rank), len(subtrees_of(*own)) * len(mine)]
            for of_rank, own in zip(held, units, strict=True)
        ]
        arrived = self.world.exchange(leaving, sizes)
        self._hear([tensors[0] for tensors in arrived], parts)
        user_terms = arrived_rows(
            [(of_rank, tensors[1]) for of_rank, tensors in zip(held, arrived, strict=True)], self._first(self.users)
        )
        gradient = total_of_ranks([tensors[2] for tensors in arrived], units, len(mine))
        score = row_score(self.config.score_in_force)
        if batch.pool is None:
            self._update(GradientTerms.none(state.V), user_terms, gradient, lr, score)
        else:
            item_terms = GradientTerms.of_rows(mine - self._first(self.items), gradient)
            self._update(item_terms, user_terms, None, lr, score)

    def _unit_gradients(
        self, batch: CatalogueBatch, part: Part, U: Tensor, V: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return what the lists of this rank add: losses [LOSS_SUMS, lists], user_grad [lists, d], sums for the items.

        The sums [items, d] are those of the subtrees that the units of this rank make.

        Parameters
        ----------
        U : [lists, d], the users of this rank's lists
        V : [items, d]
        """
        losses, user_grad, item_grad = [U.new_empty(0)], [U[:0]], TreeSum()
        first = part.start - self.state.position
        for number, start in enumerate(range(0, len(U), self.unit)):
            stop = min(start + self.unit, len(U))
            lists = _lists(batch, slice(first + start, first + stop))
            gradients = self.backend.catalogue_gradients(U[start:stop], V, lists, self.objective)
            losses.append(gradients.softmax)
            user_grad.append(gradients.user_grad)
            item_grad.add(Subtree(0, part.first_unit + number, gradients.item_grad))
        softmax = torch.cat(losses)
        of_loss = {"loss": softmax, "softmax": softmax}
        zeros = torch.zeros_like(softmax)
        sums = [subtree.sum for subtree in item_grad.subtrees]
        return torch.stack([of_loss.get(name, zeros) for name in LOSS_SUMS]), torch.cat(user_grad), sums

    # -- both --------------------------------------------------------------------------------------------------------

    def _first(self, division: Division) -> int:
        return division.bounds[self.world.rank]

    def _update(
        self, item_terms: GradientTerms, user_terms: GradientTerms, dV: Tensor | None, lr: float, score: Score
    ) -> None:
        """Take the step of the rows that this rank holds."""
        state = self.state
        dU, cov_dV = shard_gradients(self.world, state, (self.users, self.items), self.config)
        if cov_dV is not None:
            dV = cov_dV if dV is None else dV + cov_dV
        for table, sums, terms, dense, division, number, kind in (
            (state.V, state.V_state, item_terms, dV, self.items, ITEM_TABLE, score),
            (state.U, state.U_state, user_terms, dU, self.users, USER_TABLE, row_score(self.config.score_in_force)),
        ):
            if len(table):
                self.backend.update_rows(table, sums, terms, lr, kind, dense, self._rounding(number, division))

    def _rounding(self, table: int, division: Division) -> Rounding | None:
        how = rounding(self.config, self.state.step, table)
        return None if how is None else how._replace(first_row=self._first(division))

    def _message(self, losses: Tensor, parts: Sequence[Part]) -> Tensor:
        """Return what every rank hears from this one: whether it wants to stop, and the losses of its lists.

        Parameters
        ----------
        losses : [LOSS_SUMS, lists]; summed over the lists of a unit
        """
        part = parts[self.world.rank]
        n_units = part.last_unit - part.first_unit
        padded = torch.nn.functional.pad(losses.double(), (0, n_units * self.unit - losses.shape[1]))
        sums = padded.reshape(len(LOSS_SUMS), n_units, self.unit).sum(2)
        same_length = torch.nn.functional.pad(sums, (0, _most_units(parts) - n_units))
        return torch.cat([sums.new_tensor([self._wish]), same_length.flatten()]).view(torch.int32)

    def _hear(self, messages: Sequence[Tensor], parts: Sequence[Part]) -> None:
        """Add the losses of all ranks to the sums of the epoch. Every rank raises if they are not finite."""
        state, most = self.state, _most_units(parts)
        heard = [message.clone().view(torch.float64) for message in messages]  # at an address for numbers of 8 bytes
        self._granted = any(bool(one[0]) for one in heard)
        units = [
            one[1:].reshape(len(LOSS_SUMS), most)[:, : theirs.last_unit - theirs.first_unit]
            for one, theirs in zip(heard, parts, strict=True)
        ]
        total = torch.cat(units, 1).cumsum(1)[:, -1]
        state.unread = total if state.unread is None else state.unread + total
        check_losses(state, self.config)


def divides_interactions(config: TrainConfig, backend: str, n: int) -> bool:
    """Return whether a rank reads only the interactions of its users, of n in all."""
    return backend == "cpu" and not config.weighted and 4 * n > WHOLE_INTERACTIONS


def memory_of_rank(dataset: Dataset, config: TrainConfig, size: int) -> dict[str, int]:
    """Return the bytes that each of `size` ranks holds. For validation, it has a copy of all items."""
    n = count_interactions(dataset, config)
    whole = () if divides_interactions(config, backend_name(config), n) else ("interactions",)
    memory = memory_estimate(dataset, config)
    parts = {name: n_bytes if name in whole else -(-n_bytes // size) for name, n_bytes in memory.items()}
    return parts | {"items for validation": 4 * dataset.n_items * config.factors}


def _most_units(parts: Sequence[Part]) -> int:
    return max(part.last_unit - part.first_unit for part in parts)


def _lists(batch: CatalogueBatch, lists: slice) -> CatalogueBatch:
    """Return some lists of a batch, with users counted from 0."""
    begin, end = (int(batch.indptr[place]) for place in (lists.start, lists.stop))
    return batch._replace(
        users=torch.arange(lists.stop - lists.start, dtype=torch.int32, device=batch.users.device),
        indptr=batch.indptr[lists.start : lists.stop + 1] - begin,
        indices=batch.indices[begin:end],
        weights=None if batch.weights is None else batch.weights[begin:end],
    )
