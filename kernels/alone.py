"""`sample_users` for backends that have no kernel for it: one call of `sample_lists` for each user."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from drm_triton.kernels.checks import check_sample_users
from drm_triton.kernels.protocol import ListBatch, ListPlan


def sample_users(
    sample_lists: Callable[[ListPlan, int, int, int], ListBatch], plan: ListPlan, seeds: Tensor, epoch: int, most: int
) -> ListBatch:
    """Draw the lists of each user as if the user were alone; see `Backend.sample_users`."""
    check_sample_users(plan, seeds, epoch, most)
    users, items = [plan.indices[:0]], [plan.indices.new_empty(0, plan.n)]
    for user, seed in enumerate(seeds.tolist()):
        row = plan.indices[plan.indptr[user] : plan.indptr[user + 1]]
        if 0 < len(row) < plan.n_items:
            alone = dataclasses.replace(plan, indptr=plan.indptr.new_tensor([0, len(row)]), indices=row, seed=seed)
            items.append(sample_lists(alone, epoch, 0, min(alone.n_lists, most)).items)
            users.append(row.new_full((len(items[-1]),), user))
    return ListBatch(torch.cat(users), torch.cat(items))
