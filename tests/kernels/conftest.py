"""A helper of the tests of the CPU kernels and of the Triton kernels.

Import it with ``from tests.kernels.conftest import share_negatives``.
"""

import torch
from torch import Tensor

from drm_triton.kernels.protocol import SharedNegatives


def share_negatives(
    own: Tensor, shared_items: Tensor, size: int, replaced: float, draw: torch.Generator
) -> tuple[Tensor, SharedNegatives]:
    """Put the shared items [groups, eta] into the last columns of lists in groups of `size`.

    A fraction `replaced` of these entries stays as it is in `own` [B, at least eta].
    """
    B, eta = len(own), shared_items.shape[1]
    kept = torch.rand(B, eta, generator=draw) < replaced
    items = own.clone()
    items[:, -eta:] = torch.where(kept, own[:, -eta:], shared_items[torch.arange(B) // size])
    return items, SharedNegatives(size, shared_items.contiguous(), kept)
