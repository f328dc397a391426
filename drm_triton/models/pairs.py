"""Epochs of BPR and WARP: gradient descent on pairs of items, on several threads, with the same bits as on one.

Libraries run such models lock-free ("Hogwild"): threads overwrite each other's rows, and no two runs are equal. The
gradients of whole batches would be deterministic, but they are taken at old values, and a popular item gets the sum of
hundreds of them. Here every step is taken at the current values. As in distributed gradient descent for matrix
factorisation (Gemulla et al., KDD 2011), the epoch is divided so that threads never share a row:

- Users are divided into P blocks with about equal numbers of interactions, and items into P random blocks of equal
  size, anew in each epoch. The interactions of a user block with an item block are shuffled and cut into SLICES.
- In round r, task k trains on a slice of user block k and item block k + r mod P, and draws negatives from that item
  block too. The tasks of a round have no user and no item in common. After P rounds, the next slice begins.

A task starts as soon as the two tasks of the round before that have its users or its items are done. What is computed
is then the same as if all tasks ran one after the other, whatever the number of threads: P depends on the data alone.
With P = 1, in small data, this is the sequential method. With more blocks, a negative still has the distribution that
it has in the whole catalogue, because the blocks are random, but a user meets the blocks in turn. Without slices, WARP
fits each block at the expense of the others and ranks worse. With 8 slices, P from 2 to 16 ranked as well as P = 1.

Besides the steps, an epoch costs 8 bytes and three passes for each interaction. The rows of a task fit in the cache
more often than those of the whole tables.

A new user is fitted in the same way, to fixed items: as many passes over the user's items as training had epochs, with
negatives that the items determine.
"""

import math
import threading
import zlib
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.pairs import Tables, Task, count_pairs, divide_items, group_pairs
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.models.base import FactorModel, ModelState, Progress
from drm_triton.models.configs import BPRConfig, WARPConfig
from drm_triton.ranking.topk import with_bias
from drm_triton.recommender import Tensors
from drm_triton.training.warm_start import Known, carry, in_old_codes, unknown_rows

SLICES = 8
MIN_PAIRS = 1024  # of a task, on average: its time is then a multiple of what it takes to start it
MIN_ITEMS = 256  # of a block: there must be something to draw from
MAX_BLOCKS = 32

Kernel = Callable[..., None]  # `bpr_task` or `warp_task`
C = TypeVar("C", BPRConfig, WARPConfig)


def n_blocks(nnz: int, n_items: int) -> int:
    """Return P, a power of 2, so that usual numbers of threads have equally many tasks in a round.

    Examples
    --------
    >>> n_blocks(90_000, 17_000), n_blocks(1_000_000, 3_000), n_blocks(90_000, 500)
    (2, 8, 1)
    """
    most = min(math.isqrt(nnz // (SLICES * MIN_PAIRS)), n_items // MIN_ITEMS, MAX_BLOCKS)
    return 1 << (max(most, 1).bit_length() - 1)


class Division(NamedTuple):
    """The interactions of an epoch in P * P cells: cell k, l has user block k and item block l."""

    pairs: NDArray[np.int64]  # [nnz] user << 32 | item
    begin: NDArray[np.int64]  # [P, P] position of the first pair of each cell
    counts: NDArray[np.int64]  # [P, P] number of pairs of each cell
    items: NDArray[np.int64]  # [N] the items of block 0, then those of block 1, ...
    item_bounds: NDArray[np.int64]  # [P + 1]


def divide(fit: CSR, seed: int, epoch: int, blocks: int) -> Division:
    """Divide the interactions of an epoch. The cells of an item block follow each other."""
    (M, N), (indptr, indices) = fit.shape, _arrays(fit)
    key = np.uint64(seed), np.uint64(4 * epoch)
    user_bounds = np.searchsorted(indptr, np.arange(blocks + 1) * fit.nnz // blocks)
    user_bounds[0], user_bounds[-1] = 0, M
    item_bounds = np.arange(blocks + 1) * N // blocks
    items, block_of = np.arange(N), np.empty(N, np.int64)
    divide_items(*key, item_bounds, items, block_of)
    counts, pairs = np.zeros((blocks, blocks), np.int64), np.empty(fit.nnz, np.int64)
    threads.split(count_pairs, blocks, 1, user_bounds, indptr, indices, block_of, counts)
    begin = (counts.T.cumsum().reshape(blocks, blocks) - counts.T).T.copy()
    threads.split(group_pairs, blocks, 1, *key, user_bounds, indptr, indices, block_of, begin, pairs)
    return Division(pairs, begin, counts, items, item_bounds)


def _arrays(matrix: CSR) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return `indptr` and `indices` for compiled functions, which would be compiled anew for memory-mapped arrays."""
    indptr, indices = matrix.tensors("cpu")
    return indptr.numpy(), indices.numpy()


def pair_epoch(
    kernel: Kernel,
    fit: CSR,
    seed: int,
    epoch: int,
    popularity: bool,
    tables: Tables,
    *options: Any,
    blocks: int | None = None,
) -> tuple[float, int]:
    """Run an epoch in place. Return the sum of the losses and the number of pairs that had one.

    Parameters
    ----------
    kernel : function that trains on a task; it gets the tables and `options`
    popularity : draw negatives in proportion to their number of interactions, not uniformly
    blocks : P, by default that of `n_blocks`
    """
    P = n_blocks(fit.nnz, fit.shape[1]) if blocks is None else blocks
    pairs, begin, counts, items, item_bounds = divide(fit, seed, epoch, P)
    indptr, indices = _arrays(fit)
    results, done = np.zeros((P * SLICES, P, 2)), [[threading.Event() for _ in range(P)] for _ in range(P * SLICES)]

    def run(number: int, k: int) -> None:
        if number > 0:
            done[number - 1][k].wait()
            done[number - 1][(k + 1) % P].wait()
        block, part = (k + number) % P, number // P
        first, size = begin[k, block], counts[k, block]
        start, stop = first + size * part // SLICES, first + size * (part + 1) // SLICES
        if popularity:
            candidates = pairs[begin[0, block] : begin[-1, block] + counts[-1, block]]
        else:
            candidates = items[item_bounds[block] : item_bounds[block + 1]]
        key = np.uint64(seed), np.uint64(4 * epoch), start
        try:
            kernel(
                Task(*key, pairs[start:stop], candidates, indptr, indices),
                tables, *options, 1, False, results[number, k],
            )  # fmt: skip
        finally:
            done[number][k].set()

    # Threads take the tasks in this order, so a task that one waits for is always under way.
    threads.run(partial(run, number, k) for number in range(P * SLICES) for k in range(P))
    loss, trained = results.sum((0, 1))
    return float(loss), int(trained)


def fold_in(
    kernel: Kernel,
    histories: CSR,
    seed: int,
    candidates: NDArray[np.int64],
    tables: Tables,
    passes: int,
    *options: Any,
) -> None:
    """Fit the users of `tables` to fixed items, in place, with `passes` over the items of each user.

    The negatives are a function of the user's items and the seed alone, so the same items give the same vector, in any
    batch and order.
    """
    if not len(candidates):  # of a model that was fitted to nothing
        return
    indptr, indices = _arrays(histories)

    def run(user: int) -> None:
        row = histories.row(user)
        own_seed = np.uint64(seed ^ zlib.crc32(row.astype("<i4").tobytes()))
        task = Task(own_seed, np.uint64(0), 0, (user << 32) | row.astype(np.int64), candidates, indptr, indices)
        kernel(task, tables, *options, passes, True, np.zeros(2))

    threads.run(partial(run, user) for user in np.flatnonzero(histories.degrees()).tolist())


class PairModel(FactorModel[C]):
    """Vectors of users and items, and a bias of each item, fitted to pairs of items. The score is u . v_i + b_i."""

    kernel: ClassVar[Kernel]
    biased = True

    @abstractmethod
    def kernel_options(self, n_items: int) -> tuple[Any, ...]:
        """Return the arguments of the kernel between the tables and the number of passes."""

    @property
    def popularity(self) -> bool:
        """Whether popular items are drawn more often as negatives."""
        return False

    def memory(self, n_users: int, n_items: int, nnz: int, pairs: int) -> dict[str, int]:
        """Return the bytes that training needs by purpose, besides the interactions."""
        tables = 4 * ((n_users + n_items) * self.config.factors + n_items)
        state = {"adagrad state": tables} if self.optimiser_state else {}
        return {"factors": tables, **state, "order of an epoch": 8 * nnz + 16 * n_items}

    def start(self, fit: CSR) -> Tensors:
        """Return vectors that are uniform in (-1/2, 1/2) / d, and biases of 0. Users without interactions have 0."""
        d, rng = self.config.factors, np.random.Generator(np.random.Philox(self.config.seed))
        U, V = (torch.from_numpy((rng.random((n, d), np.float32) - np.float32(0.5)) / d) for n in fit.shape)
        U[torch.from_numpy(fit.degrees() == 0)] = 0
        tensors = {"user_factors": U, "item_factors": V, "item_bias": torch.zeros(len(V))}
        if self.optimiser_state:
            tensors |= {f"{name}_state": torch.ones_like(tensor) for name, tensor in tensors.items()}
        return tensors

    def updated_state(self, old: Tensors, known: Known, fit: CSR) -> ModelState:
        """Return the state before the first epoch of an update. New users are folded in, new items start as usual."""
        tensors = self.start(fit)
        for name, table in tensors.items():
            if name in old:
                carry(table, old[name].cpu(), known.users if name.startswith("user") else known.items)
        users = unknown_rows(known.users, fit.degrees())
        histories = in_old_codes(fit.take(users), known.items, len(old["item_factors"]))
        found = histories.degrees() > 0
        folded_in = self.fold_in_items(histories.take(np.flatnonzero(found)))
        tensors["user_factors"][users[found]] = folded_in[:, : self.config.factors].cpu()
        return ModelState(tensors)

    def epoch(self, tensors: Tensors, fit: CSR, number: int, progress: Progress) -> dict[str, float]:
        """Run an epoch in place; return the mean loss."""
        options = self.kernel_options(fit.shape[1])
        loss, trained = pair_epoch(
            type(self).kernel, fit, self.config.seed, number, self.popularity, _tables(tensors), *options
        )
        return {"loss": loss / max(trained, 1)}

    def layout(self, n_users: int, n_items: int) -> Tensors:
        """Return factors, biases and Adagrad's sums without content."""
        tables = super().layout(n_users, n_items) | {"item_bias": torch.empty(n_items, device="meta")}
        return tables | ({f"{name}_state": table for name, table in tables.items()} if self.optimiser_state else {})

    def learned(self, tensors: Tensors) -> Tensors:
        """Return the tensors without Adagrad's sums."""
        return {name: tensor for name, tensor in tensors.items() if not name.endswith("_state")}

    def factors(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return user vectors with a column of ones, and item vectors with the column of biases."""
        return with_bias(tensors["user_factors"], tensors["item_factors"], tensors["item_bias"])

    def fold_in_items(self, liked: CSR) -> Tensor:
        """Return the vectors of new users from the codes of the items they liked, CSR [B, N]: float32 [B, d + 1]."""
        self.backend()  # sets the number of threads
        items = {name: self.tensors[name].cpu() for name in ("item_factors", "item_bias")}
        U = torch.zeros(liked.shape[0], self.config.factors)
        state = {"user_factors_state": torch.ones_like(U)} if self.optimiser_state else {}
        drawn = self.interactions.train.indices if self.popularity else np.arange(liked.shape[1])
        fold_in(
            type(self).kernel,
            liked,
            self.config.seed,
            drawn.astype(np.int64),
            _tables({"user_factors": U, **items, **state}),
            self.config.epochs,
            *self.kernel_options(liked.shape[1]),
        )
        return self.factors({"user_factors": U, **items})[0].to(self.item_factors.device)

    def remedy(self) -> str:
        """Return what to change if the training diverges."""
        return "a lower `lr`"


def _tables(tensors: Tensors) -> Tables:
    """Return tensors as the arrays that a kernel changes."""
    values = [tensors[name] for name in ("user_factors", "item_factors", "item_bias")]
    names = ("user_factors_state", "item_factors_state", "item_bias_state")
    states = [tensors.get(name, value.new_empty((0,) * value.ndim)) for name, value in zip(names, values, strict=True)]
    return Tables(*(tensor.numpy() for tensor in [*values, *states]))
