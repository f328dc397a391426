"""The spectral start (see `training.initialize`) with rows on several ranks.

A rank holds rows of the tables X [M, r] of users and Y [N, r] of items. Users never travel: a rank multiplies with the
interactions of its own users, and what they add to Y is summed where the items are held, leaf by leaf of users and in a
tree, so that the rounding does not depend on the number of ranks. To multiply by A, every rank has the whole Y.

Memory of a rank, besides its rows: the whole Y, a few tables like it for the sums, and its interactions by item.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from drm_triton.data.csr import CSR
from drm_triton.distributed.rows import Division, whole_table
from drm_triton.distributed.sums import Subtree, TreeSum, total_of_ranks
from drm_triton.distributed.world import World
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.training.initialize import (
    OVERSAMPLING,
    POWER_ITERATIONS,
    halves,
    inner_products,
    inverse_sqrt,
    on_sphere,
    row_sums,
    rows_of,
    times,
    whitening,
)


def spectral_rows(
    world: World, train: CSR, users: Division, items: Division, d: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the rows of U and V that this rank holds. Of `train`, only the rows of its users are read."""
    with one_torch_thread():
        return _Spectral(world, train, users, items).rows(d, seed)


class _Spectral:
    def __init__(self, world: World, train: CSR, users: Division, items: Division) -> None:
        self.world, self.users, self.items = world, users, items
        held = users.rows(world.rank)
        own = train.between(held.start, held.stop)
        self.leaves = users.leaves(world.rank)
        parts = [own.between(leaf.start, leaf.stop).to_scipy(np.bool_) for leaf in self.leaves]
        self.by_user = [rows_of(part, world.device) for part in parts]
        self.by_item = [rows_of(part.T.tocsr(), world.device) for part in parts]
        popularity = torch.stack(world.gather(torch.from_numpy(own.popularity()).to(world.device))).sum(0)
        self.user_weight = inverse_sqrt(own.degrees(), world.device)
        self.item_weight = inverse_sqrt(popularity.cpu().numpy(), world.device)

    def rows(self, d: int, seed: int) -> tuple[Tensor, Tensor]:
        n_users, n_items = self.users.n_rows, self.items.n_rows
        rank = min(d + OVERSAMPLING, n_users, n_items)
        rng = np.random.Generator(np.random.Philox(seed))
        Y = torch.from_numpy(rng.standard_normal((n_items, rank), dtype=np.float32)).to(self.world.device)
        for _ in range(POWER_ITERATIONS):
            X = self._of_users(Y)
            self._orthonormalise(X, self.users)
            own = self._of_items(X)
            self._orthonormalise(own, self.items)
            Y = whole_table(self.world, own)
        B = self._of_users(Y)
        squares, W = self._eigenvectors(B, self.users)
        of_users, of_items = halves(squares.flip(0).clamp(min=0).sqrt(), W.flip(1))  # largest first
        self._times(B, self.users, of_users)
        self._times(own, self.items, of_items)
        return on_sphere(B, d), on_sphere(own, d)

    def _of_users(self, Y: Tensor) -> Tensor:
        """Return the rows of A Y of this rank, for the whole Y."""
        Y = Y * self.item_weight[:, None]
        parts = [row_sums(R, self.user_weight[leaf], Y) for R, leaf in zip(self.by_user, self.leaves, strict=True)]
        return torch.cat([Y[:0], *parts])

    def _of_items(self, X: Tensor) -> Tensor:
        """Return the rows of A^T X of this rank, from its rows of X."""
        X = X * self.user_weight[:, None]
        total, first = TreeSum(), self._first_leaf(self.world.rank)
        ones = torch.ones_like(self.item_weight)
        for number, (R, leaf) in enumerate(zip(self.by_item, self.leaves, strict=True), first):
            total.add(Subtree(0, number, row_sums(R, ones, X[leaf])))
        bounds = [self.items.rows(q) for q in range(self.world.size)]
        leaving = [[torch.cat([X[:0], *(one.sum[rows] for one in total.subtrees)])] for rows in bounds]
        arrived = self.world.exchange(leaving)
        held = bounds[self.world.rank]
        leaves = [(self._first_leaf(q), self._first_leaf(q + 1)) for q in range(self.world.size)]
        sums = total_of_ranks([tensor for (tensor,) in arrived], leaves, held.stop - held.start)
        return sums * self.item_weight[held, None]

    def _first_leaf(self, rank: int) -> int:
        return sum(len(self.users.leaves(q)) for q in range(rank))

    def _orthonormalise(self, X: Tensor, division: Division) -> None:
        """Replace the columns of a table by an orthonormal basis of their span, in place."""
        for _ in range(2):  # the second pass corrects the rounding errors of the first
            self._times(X, division, whitening(*self._eigenvectors(X, division)))

    def _times(self, X: Tensor, division: Division, W: Tensor) -> None:
        for leaf in division.leaves(self.world.rank):
            times(X[leaf], W)

    def _eigenvectors(self, X: Tensor, division: Division) -> tuple[Tensor, Tensor]:
        """Return eigenvalues, ascending, and eigenvectors of X^T X, of a table with rows on all ranks."""
        products = [inner_products(X[leaf]) for leaf in division.leaves(self.world.rank)]
        squares, W = torch.linalg.eigh(self.world.ordered_sum(products, inner_products(X[:0])).cpu())
        # Those of rank 0: on another processor, an eigenvector may have another sign.
        both = self.world.gather(torch.cat([squares[None], W]).to(X.device))[0]
        return both[0], both[1:]
