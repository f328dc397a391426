"""Helpers of the tests of the CPU kernels and of the Triton kernels.

Import them with ``from tests.kernels.conftest import share_negatives``.
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


def adversarial(n: int, dtype: torch.dtype) -> Tensor:
    """Return lists on which a wrong threshold would show."""
    g = torch.Generator().manual_seed(n)
    normal = torch.randn(n, generator=g, dtype=torch.float64)
    position = torch.arange(n, dtype=torch.float64)
    lists = {
        "normal": normal,
        "a narrow range": normal / 100,
        "ties": normal.round().clamp(-2, 2),
        "all equal": torch.full_like(normal, 0.25),
        "two values": (normal > 1).double(),
        "huge gaps": torch.where(position % 97 == 0, 4096 * normal.round(), normal),
        "two clusters": normal / 64 + torch.where(position % 3 == 0, 8, -8),
        "two close clusters": normal / 1024 + torch.where(position % 3 == 0, 0.5, 0.0),
        "one high outlier": torch.where(position == n // 2, 1024, normal),
        "one low outlier": torch.where(position == n // 2, -1024, normal),
        "ascending": position / n,
        "descending, wider and wider": -((position / 16) ** 2),
    }
    return torch.stack(list(lists.values())).to(dtype)
