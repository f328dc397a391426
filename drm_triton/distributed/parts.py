"""How the lists of a step are divided among the ranks.

Consecutive lists make a unit, and a rank takes consecutive units. The units depend on the options alone, not on the
number of ranks. Groups of lists that share negatives are never divided. What a step sums over lists, it sums over the
lists of a unit first. So every sum has the same order, and the same rounding, with any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from drm_triton.config import TrainConfig

LEAST_UNIT, MOST_UNIT = 64, 1024  # lists; products of matrices with fewer users take longer
UNITS = 16  # of a batch, unless its units would be smaller or larger than these


def unit_of(config: TrainConfig) -> int:
    """Return the number of lists in a unit.

    Over the whole catalogue, a unit of users is one product of matrices for the gradient of the items. More users make
    it faster, more units keep more ranks busy.

    Examples
    --------
    >>> unit_of(TrainConfig()), unit_of(TrainConfig(batch_size=4096)), unit_of(TrainConfig(objective="hinge", share=64))
    (64, 256, 64)
    """
    if config.negatives_in_force == "sampled":
        return -(-LEAST_UNIT // config.share) * config.share
    wanted = config.batch_in_force // UNITS
    return min(MOST_UNIT, max(LEAST_UNIT, 1 << wanted.bit_length() - 1 if wanted else 0))


@dataclass(frozen=True)
class Part:
    """The units of a batch that a rank takes: lists start .. stop - 1 of the epoch."""

    first_unit: int
    last_unit: int  # and one
    start: int
    stop: int


def parts_of(start: int, stop: int, unit: int, size: int) -> list[Part]:
    """Divide lists start .. stop - 1, a batch, among `size` ranks.

    Examples
    --------
    >>> [(part.start, part.stop) for part in parts_of(100, 180, 32, 2)]
    [(100, 132), (132, 180)]
    """
    n_units = -(-(stop - start) // unit)
    edges = [n_units * rank // size for rank in range(size + 1)]
    return [
        Part(first, last, min(start + first * unit, stop), min(start + last * unit, stop))
        for first, last in pairwise(edges)
    ]
