"""The same operations in plain torch, as fast as we can write them, and with implicit if it is installed.

`bench.kernels` counts operations and bytes, and times these functions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drm_triton.kernels.protocol import Backend, GradientTerms, ListPlan, Objective


def published_neuralsort(s: Tensor, y: Tensor, k: int, tau: float) -> tuple[Tensor, Tensor]:
    """Compute DRM loss and gradient by autograd through NeuralSort, as in the code of its authors.

    It multiplies the n x n matrix of differences by a matrix of ones and computes the whole n x n relaxed permutation,
    of which it uses the first k rows.
    """
    s = s.detach().requires_grad_()
    n = s.shape[1]
    column = s[:, :, None]
    differences = (column - column.transpose(1, 2)).abs()
    b = differences @ torch.ones(n, n, dtype=s.dtype, device=s.device)
    scaling = n + 1 - 2 * torch.arange(1, n + 1, dtype=s.dtype, device=s.device)
    P = ((column * scaling - b).transpose(1, 2) / tau).softmax(-1)
    loss = (y - P[:, :k].sum(1)).square().sum(-1)
    (gradient,) = torch.autograd.grad(loss.sum(), s)
    return loss.detach(), gradient


def torch_list_loss(s: Tensor, n_items: int, rho: int) -> Tensor:
    """Compute hinge + DRM (K = rho, tau = 1) of each list with torch operations, and only K rows of P."""
    n = s.shape[1]
    positive, negatives = s[:, :rho].min(1).values, s[:, rho:]
    with torch.no_grad():
        phi = torch.log1p(n_items / (n - rho) * (1 - positive[:, None] + negatives >= 0).sum(1))
    hinge = phi * (1 - positive + negatives.max(1).values).clamp(min=0)
    b = (s[:, :, None] - s[:, None, :]).abs().sum(2)
    c = n + 1 - 2 * torch.arange(1, rho + 1, dtype=s.dtype, device=s.device)
    Q = (c[:, None] * s[:, None, :] - b[:, None, :]).softmax(2).sum(1)
    y = (torch.arange(n, device=s.device) < rho).to(s.dtype)
    return hinge + (y - Q).square().sum(1)


def torch_softmax(s: Tensor, y: Tensor) -> Tensor:
    """Compute the mean softmax loss of lists, with the terms of the positives only."""
    positive = y > 0
    place = positive.flatten().nonzero().squeeze(1)
    negatives = s.masked_fill(positive, -torch.inf).logsumexp(1)
    return nn.functional.softplus(negatives[place // s.shape[1]] - s.flatten()[place]).sum() / len(s)


def torch_step(U: Tensor, V: Tensor, users: Tensor, items: Tensor, rho: int, sparse: bool) -> Callable[[], None]:
    """Return a training step: embeddings, batched autograd, torch's Adagrad, projection."""
    user_table = nn.Embedding.from_pretrained(U.clone(), freeze=False, sparse=sparse)
    item_table = nn.Embedding.from_pretrained(V.clone(), freeze=False, sparse=sparse)
    tables = ((user_table.weight, users.long()), (item_table.weight, items.long()))
    # fused is the fastest in torch; it supports dense gradients only
    optimizer = torch.optim.Adagrad([weight for weight, _ in tables], lr=0.05, fused=not sparse)
    users, items = users.long(), items.long()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        s = torch.bmm(item_table(items), user_table(users)[:, :, None]).squeeze(2)
        torch_list_loss(s, len(V), rho).sum().backward()
        optimizer.step()
        with torch.no_grad():
            for weight, rows in tables:
                if sparse:
                    touched = torch.unique(rows)
                    row = weight[touched]
                    weight[touched] = row / row.norm(dim=1, keepdim=True).clamp(min=1)
                else:
                    weight /= weight.norm(dim=1, keepdim=True).clamp(min=1)

    return step


def backend_step(
    backend: Backend, plan: ListPlan, U: Tensor, V: Tensor, objective: Objective, B: int
) -> Callable[[], None]:
    """Return a training step of a backend, with sampling. Each call uses the next batch."""
    U, V = U.clone(), V.clone()
    user_state, item_state = torch.zeros_like(U), torch.zeros_like(V)
    number = 0

    def step() -> None:
        nonlocal number
        start = number * B % (plan.n_lists // B * B)
        number += 1
        batch = backend.sample_lists(plan, 0, start, start + B)
        lists = backend.list_terms(U, V, batch, objective)
        # items first: their gradient uses the user rows from before the update
        backend.update_rows(V, item_state, lists.items, 0.05, objective.score)
        backend.update_rows(U, user_state, GradientTerms.of_rows(batch.users, lists.user_grad), 0.05, "dot")

    return step


def matrix_product(queries: Tensor, V: Tensor, block: int = 512) -> Callable[[], None]:
    """Compute every score in blocks of queries, into one buffer: a lower bound for rankings by dense products."""
    out = torch.empty(block, len(V), device=V.device)

    def run() -> None:
        for i in range(0, len(queries), block):
            rows = queries[i : i + block]
            torch.mm(rows, V.T, out=out[: len(rows)])

    return run


def blocked_topk(
    queries: Tensor, V: Tensor, k: int, seen: tuple[Tensor, Tensor], block: int = 512
) -> Callable[[], None]:
    """Rank with a matrix product, a mask and torch.topk in blocks of queries."""
    indptr, indices = seen[0], seen[1].long()

    def run() -> None:
        for i in range(0, len(queries), block):
            s = queries[i : i + block] @ V.T
            count = indptr[i : i + len(s) + 1].diff()
            row = torch.repeat_interleave(torch.arange(len(s), device=s.device), count)
            s[row, indices[indptr[i] : indptr[i + len(s)]]] = -torch.inf
            s.topk(k, dim=1)

    return run


def implicit_model(queries: Tensor, V: Tensor) -> Any:
    """Return a model of implicit with these factors, with one BLAS thread as it advises; None if not installed."""
    try:
        from implicit.als import AlternatingLeastSquares
        from threadpoolctl import threadpool_limits
    except ImportError:
        return None
    with threadpool_limits(1, "blas"):
        model = AlternatingLeastSquares(factors=queries.shape[1])
    model.user_factors, model.item_factors = queries.numpy(), V.numpy()
    return model


def implicit_recommend(queries: Tensor, V: Tensor, k: int, seen: tuple[Tensor, Tensor]) -> Callable[[], None] | None:
    """Return a run of implicit's recommend with these factors; None if implicit is not installed."""
    model = implicit_model(queries, V)
    if model is None:
        return None
    from scipy.sparse import csr_matrix
    from threadpoolctl import threadpool_limits

    data = np.ones(len(seen[1]), np.float32)
    seen_items = csr_matrix((data, seen[1].numpy(), seen[0].numpy()), shape=(len(queries), len(V)))

    def run() -> None:
        with threadpool_limits(1, "blas"):
            model.recommend(np.arange(len(queries)), seen_items, N=k)

    return run


def implicit_evaluate(queries: Tensor, V: Tensor, k: int, train: Any, test: Any, threads: int) -> Callable[[], None]:
    """Return a run of implicit's evaluation with these factors and scipy matrices, on this number of threads."""
    model = implicit_model(queries, V)
    from implicit.evaluation import ranking_metrics_at_k
    from threadpoolctl import threadpool_limits

    def run() -> None:
        with threadpool_limits(1, "blas"):
            ranking_metrics_at_k(model, train, test, K=k, show_progress=False, num_threads=threads)

    return run
