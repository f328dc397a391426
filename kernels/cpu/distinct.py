"""The distinct rows among those that a step needs, and the place of each among them.

A step of B lists has B n ids, many of them equal. To sort them would take longer than the gradients. Instead, an array
with an entry for each row of the table is kept between the steps; only the entries of the rows found are reset.
"""

import numpy as np
import torch
from torch import Tensor

from drm_triton.kernels.checks import INT32
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.arrays import view
from drm_triton.kernels.cpu.runtime.jit import kernel

GRAIN = 1 << 14  # ids of a task, at least


@kernel
def collect(ids, places, found):
    """Write each distinct id to `found` and mark it in `places`, which are -1; return their number."""
    count = 0
    for e in range(ids.size):
        if places[ids[e]] < 0:
            places[ids[e]] = 0
            found[count] = ids[e]
            count += 1
    return count


@kernel
def number_found(found, places):
    """Write the place of each id of `found` to `places`."""
    for e in range(found.size):
        places[found[e]] = e


@kernel
def look_up(start, stop, ids, places, out):
    """Write the places of ids start .. stop - 1."""
    for e in range(start, stop):
        out[e] = places[ids[e]]


@kernel
def reset(found, places):
    """Mark the ids of `found` as not found."""
    for e in range(found.size):
        places[found[e]] = -1


class Distinct:
    """Finds the distinct numbers among ids in 0 .. n - 1. For one thread at a time.

    Examples
    --------
    >>> Distinct(9)(torch.tensor([7, 2, 7, 5], dtype=torch.int32))
    (tensor([2, 5, 7], dtype=torch.int32), tensor([2, 0, 2, 1], dtype=torch.int32))
    """

    def __init__(self, n: int) -> None:
        self.places = np.full(n, -1, np.int32)

    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct numbers among ids, int32 [E], ascending, and the place of each id among them."""
        array = view("distinct", "ids", ids, (None,), INT32)
        found = np.empty(min(len(array), len(self.places)), np.int32)
        found = np.sort(found[: collect(array, self.places, found)])
        number_found(found, self.places)
        out = np.empty(len(array), np.int32)
        threads.split(look_up, len(array), GRAIN, array, self.places, out)
        reset(found, self.places)
        return torch.from_numpy(found), torch.from_numpy(out)
