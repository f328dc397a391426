"""Sums whose rounding does not depend on how their summands are spread over the ranks.

Summands are the leaves of a binary tree, and the tree is the same for any number of ranks:

    sum of leaves 0 .. 6  =  (((0 + 1) + (2 + 3)) + ((4 + 5) + 6))

A rank has consecutive leaves. It adds up the whole subtrees that it has, and whoever needs the sum goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Subtree(NamedTuple):
    """The sum of leaves number place 2^level .. (place + 1) 2^level - 1."""

    level: int
    place: int
    sum: Tensor


class TreeSum:
    """The sum of consecutive leaves. Tensors that are given to it are changed.

    Examples
    --------
    >>> import torch
    >>> total = TreeSum()
    >>> for number in range(3):
    ...     total.add(Subtree(0, number, torch.tensor([2.0**number])))
    >>> [(one.level, one.place) for one in total.subtrees], total.total()
    ([(1, 0), (0, 2)], tensor([7.]))
    """

    def __init__(self) -> None:
        self.subtrees: list[Subtree] = []

    def add(self, subtree: Subtree) -> None:
        """Add the subtree that follows those so far."""
        while self.subtrees:
            left = self.subtrees[-1]
            if left.level != subtree.level or left.place + 1 != subtree.place or left.place % 2:
                break
            self.subtrees.pop()
            subtree = Subtree(left.level + 1, left.place // 2, left.sum.add_(subtree.sum))
        self.subtrees.append(subtree)

    def total(self) -> Tensor:
        """Return the sum of all leaves, if the first of them is leaf 0."""
        result = self.subtrees.pop().sum
        while self.subtrees:
            result = self.subtrees.pop().sum.add_(result)
        return result


def subtrees_of(start: int, stop: int) -> list[tuple[int, int]]:
    """Return level and place of the subtrees that leaves start .. stop - 1 are added up to.

    Examples
    --------
    >>> subtrees_of(0, 3), subtrees_of(3, 8)
    ([(1, 0), (0, 2)], [(0, 3), (2, 1)])
    """
    found = []
    while start < stop:
        level = (start & -start).bit_length() - 1 if start else (stop - start).bit_length() - 1
        while start + (1 << level) > stop:
            level -= 1
        found.append((level, start >> level))
        start += 1 << level
    return found


def total_of_ranks(arrived: Sequence[Tensor], leaves: Sequence[tuple[int, int]], n_rows: int) -> Tensor:
    """Return the sum of the leaves of all ranks, [n_rows, d].

    Parameters
    ----------
    arrived : from each rank, its `subtrees` of rows [n_rows, d], one after the other
    leaves : the leaves first .. last - 1 that each rank has
    """
    total = TreeSum()
    for tensor, (first, last) in zip(arrived, leaves, strict=True):
        for number, (level, place) in enumerate(subtrees_of(first, last)):
            total.add(Subtree(level, place, tensor[number * n_rows : (number + 1) * n_rows]))
    return total.total()
