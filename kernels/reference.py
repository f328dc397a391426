"""The operations in plain torch: slow, readable, any device, any float type. The other backends are tested against it.

Symbols follow the mathematics: U [M, d] user factors, V [N, d] item factors, s [B, n] scores of B lists, the first
rho entries of a list being positives (y = 1).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from drm_triton.kernels.interface import (
    ADAGRAD_EPS,
    ListGradients,
    ListPlan,
    Objective,
    Score,
    Weight,
    check_lists,
    check_sample,
    check_softsort,
    check_top_k,
    check_update,
)

# ---------------------------------------------------------------------------------------------------------------
# Sampling: Philox 4x32-10 (Salmon et al., SC 2011), key = seed, counter = (block, 4 * epoch + stream, id, id >> 32).
# Unsigned 32-bit words are held in int64 tensors: torch has no uint32 arithmetic.

MASK32 = 0xFFFFFFFF
ORDER, USER, POSITIVES, NEGATIVES = range(4)  # streams
SHARED = 1 << 31  # number of the first block of draws that several lists share
ROUNDS = 8  # of `permute`: with 4, triples out of 5 to 7 elements are visibly not uniform (chi-square)


def philox(seed: int, epoch: int, stream: int, ident: Tensor, block: Tensor | int = 0) -> list[Tensor]:
    """Four uniform 32-bit words for each element of `ident` (broadcast against `block`)."""
    ident, c0 = torch.broadcast_tensors(ident, torch.as_tensor(block, device=ident.device))
    c2, c3 = ident & MASK32, (ident >> 32) & MASK32
    c1 = torch.full_like(c0, (4 * epoch + stream) & MASK32)
    key0, key1 = seed & MASK32, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64-bit products; the sign bit is masked away below
        c0, c1, c2, c3 = (
            ((product1 >> 32) & MASK32) ^ c1 ^ key0,
            product1 & MASK32,
            ((product0 >> 32) & MASK32) ^ c3 ^ key1,
            product0 & MASK32,
        )
        key0, key1 = (key0 + 0x9E3779B9) & MASK32, (key1 + 0xBB67AE85) & MASK32
    return [c0, c1, c2, c3]


def below(word: Tensor, size: Tensor | int) -> Tensor:
    """Map a uniform 32-bit word to 0 .. size - 1 by multiply and shift (bias below size / 2^32)."""
    # word * size may pass 2^63, so the product is formed from the two halves of the word.
    return (((word & 0xFFFF) * size >> 16) + (word >> 16) * size) >> 16


def mix(x: Tensor, key: Tensor) -> Tensor:
    """Hash 32-bit x under a 32-bit key (the finaliser of MurmurHash3)."""
    x = (x ^ key) & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def permute(index: Tensor, size: Tensor, keys: list[Tensor]) -> Tensor:
    """Image of `index` under a keyed pseudo-random permutation of 0 .. size - 1; all arguments [*] int64.

    A Feistel network on a grid of 2^h columns and ceil(size / 2^h) rows, walked on until the image is below `size`:
    any element of a shuffle in constant time and no memory.
    """
    h = half_bits(size)
    columns = torch.ones_like(size) << h
    rows = (size + columns - 1) >> h
    image = index
    outside = torch.ones_like(index, dtype=torch.bool)
    while outside.any():
        column, row = image & (columns - 1), image >> h
        for i in range(ROUNDS):
            even, odd = (0, 1) if i % 2 == 0 else (2, 3)
            column = (column + below(mix(row, keys[even] + i), columns)) & (columns - 1)
            row = row + below(mix(column, keys[odd] + i), rows)
            row = torch.where(row >= rows, row - rows, row)
        image = torch.where(outside, (row << h) | column, image)
        outside = image >= size
    return image


def half_bits(size: Tensor) -> Tensor:
    """Half the bit length of size - 1, rounded down."""
    bits = torch.zeros_like(size)
    for shift in range(63):
        bits += ((size - 1) >> shift) > 0
    return bits >> 1


def sample_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Draw lists number start .. stop - 1 of an epoch.

    Returns
    -------
    users : int32 [B]
    items : int32 [B, n], the rho positives and then the eta negatives
    """
    check_sample(plan, epoch, start, stop)
    device = plan.indptr.device
    number = torch.arange(start, stop, device=device)
    if plan.user_sampling == "proportional":
        order = philox(plan.seed, epoch, ORDER, torch.zeros_like(number))
        slot = permute(number, torch.full_like(number, plan.n_lists), order)
        user = torch.searchsorted(plan.first, slot, right=True) - 1
        offset, keys = (slot - plan.first[user]) * plan.rho, philox(plan.seed, epoch, POSITIVES, user)
    else:
        draw = philox(plan.seed, epoch, USER, number)[0]
        user = plan.eligible[below(draw, len(plan.eligible))].long()
        offset, keys = torch.zeros_like(user), philox(plan.seed, epoch, POSITIVES, number)

    begin, degree = plan.indptr[user], plan.indptr[user + 1] - plan.indptr[user]
    positives = []
    for t in range(plan.rho):
        position = permute((offset + t) % degree, degree, keys)
        positives.append(plan.indices[begin + position])

    block = torch.arange((plan.eta + 3) // 4, device=device)
    words = torch.stack(philox(plan.seed, epoch, NEGATIVES, number[:, None], block), dim=-1).flatten(1)
    rank = below(words[:, : plan.eta], (plan.n_items - degree)[:, None])  # among the items that are not positives
    negatives = torch.empty_like(rank)
    for b in range(len(number)):
        row = plan.indices[begin[b] : begin[b] + degree[b]].long()
        gaps = row - torch.arange(len(row), device=device)  # non-positives below each positive
        negatives[b] = rank[b] + torch.searchsorted(gaps, rank[b], right=True)
        if plan.share > 1:
            words = torch.stack(philox(plan.seed, epoch, NEGATIVES, number[b] // plan.share, SHARED + block), dim=-1)
            shared = below(words.flatten()[: plan.eta], plan.n_items)
            negatives[b] = torch.where(torch.isin(shared, row), negatives[b], shared)
    items = torch.cat([torch.stack(positives, dim=1), negatives.to(torch.int32)], dim=1)
    return user.to(torch.int32), items


# ---------------------------------------------------------------------------------------------------------------
# The relaxed top-K and its gradient


def rank_weights(s: Tensor, y: Tensor, k: int | None, weight: Weight, mask: Tensor) -> Tensor:
    """w_k for k = 1 .. K: [B, K]; constants for the gradient, zero beyond a list's length.

    uniform 1, precision 1/K, recall 1/#positives, ndcg 1/(log2(k + 1) IDCG@K), ap P@k/min(K, #positives) with P@k of
    the hard ranking, ties to the lower position. Positives are the entries with y > 0; a list without any has weight 0
    under recall, ndcg and ap. With k = None each list has its own K, the number of its positives: [B, n], zero beyond.
    """
    y = torch.where(mask, y, 0).to(s.dtype)
    positives = (y > 0).sum(-1, keepdim=True)
    K = positives if k is None else torch.full_like(positives, k)
    rank = torch.arange(1, (s.shape[1] if k is None else k) + 1, device=s.device)
    used = rank <= torch.minimum(K, mask.sum(-1, keepdim=True))
    if weight == "uniform":
        w = torch.ones_like(used, dtype=s.dtype)
    elif weight == "precision":
        w = (1 / K.to(s.dtype)).expand_as(used)
    elif weight == "recall":
        w = (1 / positives.to(s.dtype)).expand_as(used)
    elif weight == "ndcg":
        discount = 1 / torch.log2(1 + rank.to(s.dtype))
        ideal = y.sort(dim=-1, descending=True).values[:, : len(rank)]
        w = discount / (ideal * discount).sum(-1, keepdim=True)
    else:
        ranking = torch.where(mask, s, -math.inf).sort(dim=-1, descending=True, stable=True).indices[:, : len(rank)]
        hits = (y.gather(-1, ranking) > 0).to(s.dtype)
        w = hits.cumsum(-1) / rank / torch.minimum(K, positives).to(s.dtype)
    if weight in ("recall", "ndcg", "ap"):
        used = used & (positives > 0)
    return torch.where(used, w, 0)


def neural_sort(s: Tensor, k: int, tau: float, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows k = 1 .. K of the relaxed permutation matrix: (c_k [B, 1], P_k [B, n]); masked entries are 0."""
    length = mask.sum(-1, keepdim=True)
    top = torch.where(mask, s.detach(), -math.inf).amax(-1, keepdim=True)
    s = torch.where(mask, s - top, 0)  # P does not feel a constant, but rounding does
    b = ((s[:, :, None] - s[:, None, :]).abs() * mask[:, None, :]).sum(-1)
    for rank in range(1, k + 1):
        c = (length + 1 - 2 * rank).to(s.dtype)
        z = torch.where(mask, (c * s - b) / tau, -math.inf)
        yield c, torch.where(mask, z.softmax(-1), 0)


def soft_topk_forward(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    """Q = sum_k w_k P_k: [B, n]."""
    check_softsort("soft_topk_forward", s, w, tau, mask)
    Q = torch.zeros_like(s)
    for rank, (_, P) in enumerate(neural_sort(s, w.shape[1], tau, mask)):
        Q = Q + w[:, rank, None] * P
    return Q


def soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    """Gradient ds for an upstream gradient q = dL/dQ, in closed form.

    dz_k = w_k P_k (q - <P_k, q>) / tau,   G = sum_k dz_k,   ds_j = sum_k c_k dz_kj - sum_l sign(s_j - s_l)(G_j + G_l)
    """
    check_softsort("soft_topk_backward", s, w, tau, mask, q=q)
    ds, G = torch.zeros_like(s), torch.zeros_like(s)
    q = torch.where(mask, q, 0)
    for rank, (c, P) in enumerate(neural_sort(s, w.shape[1], tau, mask)):
        dz = w[:, rank, None] * P * (q - (P * q).sum(-1, keepdim=True)) / tau
        ds, G = ds + c * dz, G + dz
    sign = (s[:, :, None] - s[:, None, :]).sign() * (mask[:, :, None] & mask[:, None, :])
    return torch.where(mask, ds - (sign * (G[:, :, None] + G[:, None, :])).sum(-1), 0)


def drm_lists(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    """DRM loss ||y - Q||^2 of each list and its gradient to the scores: [B], [B, n]."""
    check_softsort("drm_lists", s, w, tau, mask, y=y)
    r = torch.where(mask, y - soft_topk_forward(s, w, tau, mask), 0)
    return (r * r).sum(-1), soft_topk_backward(s, w, tau, mask, -2 * r)


# ---------------------------------------------------------------------------------------------------------------
# One training step


def list_scores(U: Tensor, V: Tensor, users: Tensor, items: Tensor, score: Score) -> Tensor:
    """Scores of lists: dot u.v, l2 -||u - v||^2: [B, n]."""
    u, v = U[users.long()][:, None, :], V[items.long()]
    return (u * v).sum(-1) if score == "dot" else -(u - v).square().sum(-1)


def list_losses(s: Tensor, n_items: int, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
    """Hinge, DRM and MSE of each list, differentiable by autograd: the printed formulas. [B] each."""
    rho, n = objective.rho, s.shape[1]
    y = (torch.arange(n, device=s.device) < rho).to(s.dtype).expand_as(s)
    mask = torch.ones_like(s, dtype=torch.bool)
    zero = s.new_zeros(len(s))
    hinge, drm, mse = zero, zero, zero
    if objective.hinge:
        positive = s[:, :rho].min(-1, keepdim=True).values
        violations = (objective.margin - positive + s[:, rho:] >= 0).sum(-1)
        phi = torch.log1p(n_items / (n - rho) * violations.to(s.dtype))
        hinge = phi * (objective.margin - positive[:, 0] + s[:, rho:].max(-1).values).clamp(min=0)
    if objective.drm:
        w = rank_weights(s.detach(), y, objective.K, objective.weight, mask)
        drm = (y - soft_topk_forward(s, w, objective.tau, mask)).square().sum(-1)
    if objective.mse:
        mse = (s - y).square().mean(-1)
    return hinge, drm, mse


def list_gradients(
    U: Tensor, V: Tensor, users: Tensor, items: Tensor, objective: Objective, share: int = 1
) -> ListGradients:
    """Losses of B lists, their gradient to the scores (closed form) and to the user's row.

    Where several positives share the smallest score, or negatives the largest, the first of them bears the hinge
    gradient. A list with a score that is not finite has loss and gradient NaN.
    """
    check_lists(U, V, users, items, objective, share)
    rho, n = objective.rho, items.shape[1]
    scores = list_scores(U, V, users, items, objective.score)
    finite = scores.abs().sum(-1, keepdim=True) < math.inf
    s = torch.where(finite, scores, math.nan)
    hinge, drm, mse = list_losses(s, len(V), objective)
    y = (torch.arange(n, device=s.device) < rho).to(s.dtype).expand_as(s)
    g = torch.zeros_like(s)
    if objective.hinge:
        i, j = s[:, :rho].argmin(-1, keepdim=True), rho + s[:, rho:].argmax(-1, keepdim=True)
        gap = objective.margin - s.gather(1, i) + s.gather(1, j)
        violations = (objective.margin - s.gather(1, i) + s[:, rho:] >= 0).sum(-1, keepdim=True)
        phi = torch.where(gap > 0, torch.log1p(len(V) / (n - rho) * violations.to(s.dtype)), 0)
        g.scatter_add_(1, i, -phi).scatter_add_(1, j, phi)
    if objective.drm:
        mask = torch.ones_like(s, dtype=torch.bool)
        w = rank_weights(s, y, objective.K, objective.weight, mask)
        g += objective.lam * drm_lists(s, y, w, objective.tau, mask)[1]
    if objective.mse:
        g += 2 / n * (s - y)
    g = torch.where(finite, g, math.nan)
    u, v = U[users.long()][:, None, :], V[items.long()]
    user_grad = (g[:, :, None] * (v if objective.score == "dot" else -2 * (u - v))).sum(1)
    return ListGradients(scores, hinge, drm, mse, hinge + objective.lam * drm + mse, g, user_grad)


@torch.no_grad()
def update_rows(
    table: Tensor,
    state: Tensor,
    rows: Tensor,
    coef: Tensor,
    X: Tensor,
    source: Tensor,
    lr: float,
    score: Score,
    share: int = 1,
) -> None:
    """One Adagrad step and projection onto the unit ball for each row of `table` named in `rows`, in place.

    Entry e (of E) adds coef[e] * x to the gradient of row rows[e] under `dot` and 2 coef[e] * (x - row) under `l2`,
    where x = X[source[e // (E / len(source))]]: entries come in equal groups, one per source row.

    Parameters
    ----------
    table, state : [R, d] factors and Adagrad's sum of squares
    rows : int32 [E]; coef : [E]; X : [*, d]; source : int32 [B], B dividing E
    """
    check_update(table, state, rows, coef, X, source, lr, score, share)
    unique, slot = rows.long().unique(return_inverse=True)
    x = X[source.long()].repeat_interleave(len(rows) // len(source), dim=0)
    if score == "l2":
        x = 2 * (x - table[rows.long()])
    grad = torch.zeros(len(unique), table.shape[1], dtype=table.dtype, device=table.device)
    grad.index_add_(0, slot, coef[:, None] * x)
    state[unique] += grad.square()
    row = table[unique] - lr * grad / (state[unique].sqrt() + ADAGRAD_EPS)
    table[unique] = row / row.norm(dim=1, keepdim=True).clamp(min=1)


# ---------------------------------------------------------------------------------------------------------------
# Ranking all items


def pack_items(V: Tensor, score: Score) -> Tensor:
    """Items that `top_k` takes in place of V, made once for many calls: here V itself."""
    return V


def top_k(
    queries: Tensor, V: Tensor, k: int, score: Score, seen: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The k best items of each query row, best first, ties to the lower item index.

    Parameters
    ----------
    queries : [m, d]
    seen : (indptr int64 [m + 1], indices int32, ascending within a row): items of each query row that are left out;
        row i of the mask is indices[indptr[i] : indptr[i + 1]], so a slice of a larger indptr serves as it is.

    Returns
    -------
    items : int32 [m, k], scores : [m, k]; where fewer than k items remain, item -1 with score -inf.
    """
    check_top_k(queries, V, k, score, seen)
    s = queries @ V.T if score == "dot" else -(queries[:, None, :] - V[None, :, :]).square().sum(-1)
    if seen is not None:
        indptr, indices = seen
        row = torch.repeat_interleave(torch.arange(len(queries), device=s.device), indptr.diff())
        s[row, indices[indptr[0] : indptr[-1]].long()] = -math.inf
    scores, items = s.sort(dim=1, descending=True, stable=True)
    scores, items = scores[:, :k], torch.where(scores == -math.inf, -1, items)[:, :k].to(torch.int32)
    short = k - scores.shape[1]
    if short > 0:
        scores = torch.nn.functional.pad(scores, (0, short), value=-math.inf)
        items = torch.nn.functional.pad(items, (0, short), value=-1)
    return items, scores
