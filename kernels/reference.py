"""The operations in plain torch, for any device and float type. Slow and readable: the others are tested against it.

See `protocol` for the contract and the symbols.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from drm_triton.kernels.batches import ListBatch, SharedNegatives
from drm_triton.kernels.catalogue import catalogue_gradients as catalogue_gradients
from drm_triton.kernels.checks import (
    check_items,
    check_lists,
    check_sample,
    check_sample_users,
    check_softsort,
    check_top_k,
    check_update,
)
from drm_triton.kernels.precision import widened
from drm_triton.kernels.protocol import (
    ADAGRAD_EPS,
    GradientTerms,
    ListGradients,
    ListPlan,
    ListTerms,
    Objective,
    PackedItems,
    Rounding,
    SeenItems,
)
from drm_triton.kernels.streams import FEISTEL_ROUNDS, NEGATIVES, ORDER, POSITIVES, ROUNDING_BLOCK, SHARED_BLOCK, USER
from drm_triton.kernels.weights import rank_weights
from drm_triton.names import LOSSES, BackendName, Score

name: BackendName = "reference"

# ---------------------------------------------------------------------------------------------------------------
# Sampling. Unsigned 32-bit words are held in int64 tensors: torch has no uint32 arithmetic.

MASK32 = 0xFFFFFFFF


def philox(seed: int, epoch: int, stream: int, ident: Tensor, block: Tensor | int = 0) -> list[Tensor]:
    """Return four uniform 32-bit words for each element of `ident`, broadcast against `block`."""
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
    # word * size may overflow int64, so the product is formed from the two halves of the word.
    return (((word & 0xFFFF) * size >> 16) + (word >> 16) * size) >> 16


def mix(x: Tensor, key: Tensor) -> Tensor:
    """Hash 32-bit x under a 32-bit key (the finaliser of MurmurHash3)."""
    x = (x ^ key) & MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)


def permute(index: Tensor, size: Tensor, keys: list[Tensor]) -> Tensor:
    """Return the image of `index` under a keyed pseudo-random permutation of 0 .. size - 1. All arguments are int64.

    A Feistel network permutes a grid of 2^h columns and ceil(size / 2^h) rows. It is applied again until the image is
    below `size` (cycle walking). Any element of a shuffle costs constant time and no memory.
    """
    h = half_bits(size)
    columns = torch.ones_like(size) << h
    rows = (size + columns - 1) >> h
    image = index
    outside = torch.ones_like(index, dtype=torch.bool)
    while outside.any():
        column, row = image & (columns - 1), image >> h
        for i in range(FEISTEL_ROUNDS):
            even, odd = (0, 1) if i % 2 == 0 else (2, 3)
            column = (column + below(mix(row, keys[even] + i), columns)) & (columns - 1)
            row = row + below(mix(column, keys[odd] + i), rows)
            row = torch.where(row >= rows, row - rows, row)
        image = torch.where(outside, (row << h) | column, image)
        outside = image >= size
    return image


def half_bits(size: Tensor) -> Tensor:
    """Return half the bit length of size - 1, rounded down."""
    bits = torch.zeros_like(size)
    for shift in range(63):
        bits += ((size - 1) >> shift) > 0
    return bits >> 1


def sample_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
    """Draw lists number start .. stop - 1 of an epoch."""
    check_sample(plan, epoch, start, stop)
    device = plan.indptr.device
    number = torch.arange(start, stop, device=device)
    if plan.user_sampling == "proportional":
        order = philox(plan.seed, epoch, ORDER, torch.zeros_like(number))
        slot = permute(number, torch.full_like(number, plan.n_lists), order)
        user = torch.searchsorted(plan.first_list, slot, right=True) - 1
        offset, keys = (slot - plan.first_list[user]) * plan.rho, philox(plan.seed, epoch, POSITIVES, user)
    else:
        draw = philox(plan.seed, epoch, USER, number)[0]
        user = plan.eligible_users[below(draw, len(plan.eligible_users))].long()
        offset, keys = torch.zeros_like(user), philox(plan.seed, epoch, POSITIVES, number)

    begin, degree = plan.indptr[user], plan.indptr[user + 1] - plan.indptr[user]
    positives = []
    for t in range(plan.rho):
        position = permute((offset + t) % degree, degree, keys)
        positives.append(plan.indices[begin + position])

    own = [
        plan.indices[begin[b] : begin[b] + degree[b]].long() for b in range(len(number))
    ]  # items of each list's user
    rank = below(negative_words(plan, epoch, number, 0), (plan.n_items - degree)[:, None])  # among the other items
    negatives = torch.empty_like(rank)
    for b, row in enumerate(own):
        gaps = row - torch.arange(len(row), device=device)  # non-positives below each positive
        negatives[b] = rank[b] + torch.searchsorted(gaps, rank[b], right=True)

    shared = None
    if plan.share > 1:
        group = torch.arange(start // plan.share, -(-stop // plan.share), device=device)
        drawn = below(negative_words(plan, epoch, group, SHARED_BLOCK), plan.n_items)
        replaced = torch.zeros_like(negatives, dtype=torch.bool)
        for b, row in enumerate(own):
            replaced[b] = torch.isin(drawn[b // plan.share], row)
            negatives[b] = torch.where(replaced[b], negatives[b], drawn[b // plan.share])
        shared = SharedNegatives(plan.share, drawn.to(torch.int32), replaced)
    items = torch.cat([torch.stack(positives, dim=1), negatives.to(torch.int32)], dim=1)
    return ListBatch(user.to(torch.int32), items, shared)


def sample_users(plan: ListPlan, seeds: Tensor, epoch: int, most: int) -> ListBatch:
    """Draw the lists of each user as if the user were alone, at most `most` of a user."""
    check_sample_users(plan, seeds, epoch, most)
    users, items = [plan.indices[:0]], [plan.indices.new_empty(0, plan.n)]
    for user, seed in enumerate(seeds.tolist()):
        row = plan.indices[plan.indptr[user] : plan.indptr[user + 1]]
        if 0 < len(row) < plan.n_items:
            alone = dataclasses.replace(plan, indptr=plan.indptr.new_tensor([0, len(row)]), indices=row, seed=seed)
            items.append(sample_lists(alone, epoch, 0, min(alone.n_lists, most)).items)
            users.append(row.new_full((len(items[-1]),), user))
    return ListBatch(torch.cat(users), torch.cat(items))


def negative_words(plan: ListPlan, epoch: int, ident: Tensor, first_block: int) -> Tensor:
    """Return eta uniform words of the stream of negatives for each `ident` [m]: [m, eta]."""
    block = first_block + torch.arange((plan.eta + 3) // 4, device=ident.device)
    words = torch.stack(philox(plan.seed, epoch, NEGATIVES, ident[:, None], block), dim=-1)
    return words.flatten(1)[:, : plan.eta]


# ---------------------------------------------------------------------------------------------------------------
# The relaxed top-K and its gradient


def neural_sort(s: Tensor, k: int, tau: float, mask: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (c_k [B, 1], P_k [B, n]) for rows k = 1 .. K of the relaxed permutation matrix. Masked entries are 0."""
    length = mask.sum(-1, keepdim=True)
    top = torch.where(mask, s.detach(), -math.inf).amax(-1, keepdim=True)
    s = torch.where(mask, s - top, 0)  # P is invariant to a shift of the scores, and rounding errors are smaller near 0
    b = ((s[:, :, None] - s[:, None, :]).abs() * mask[:, None, :]).sum(-1)
    for rank in range(1, k + 1):
        c = (length + 1 - 2 * rank).to(s.dtype)
        z = torch.where(mask, (c * s - b) / tau, -math.inf)
        yield c, torch.where(mask, z.softmax(-1), 0)


def soft_topk_forward(s: Tensor, w: Tensor, tau: float, mask: Tensor) -> Tensor:
    """Compute Q = sum_k w_k P_k: [B, n]."""
    check_softsort("soft_topk_forward", s, w, tau, mask)
    Q = torch.zeros_like(s)
    for rank, (_, P) in enumerate(neural_sort(s, w.shape[1], tau, mask)):
        Q = Q + w[:, rank, None] * P
    return Q


def soft_topk_backward(s: Tensor, w: Tensor, tau: float, mask: Tensor, q: Tensor) -> Tensor:
    """Compute the gradient ds for an upstream gradient q = dL/dQ, in closed form.

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
    """Compute the DRM loss ||y - Q||^2 of each list [B] and its gradient to the scores [B, n]."""
    check_softsort("drm_lists", s, w, tau, mask, y=y)
    r = torch.where(mask, y - soft_topk_forward(s, w, tau, mask), 0)
    return (r * r).sum(-1), soft_topk_backward(s, w, tau, mask, -2 * r)


# ---------------------------------------------------------------------------------------------------------------
# One training step


def list_scores(U: Tensor, V: Tensor, users: Tensor, items: Tensor, score: Score) -> Tensor:
    """Compute the scores of lists, -||u - v||^2 under `l2` and u.v otherwise: [B, n]."""
    u, v = widened(U[users.long()])[:, None, :], widened(V[items.long()])
    return -(u - v).square().sum(-1) if score == "l2" else (u * v).sum(-1)


def list_losses(s: Tensor, n_items: int, objective: Objective) -> tuple[Tensor, ...]:
    """Compute the parts of the loss of each list, in the order of LOSSES, each [B], by their definitions.

    Autograd can differentiate them.
    """
    rho, n = objective.rho, s.shape[1]
    y = (torch.arange(n, device=s.device) < rho).to(s.dtype).expand_as(s)
    mask = torch.ones_like(s, dtype=torch.bool)
    losses = dict.fromkeys(LOSSES, s.new_zeros(len(s)))
    if objective.hinge:
        positive = s[:, :rho].min(-1, keepdim=True).values
        violations = (objective.margin - positive + s[:, rho:] >= 0).sum(-1)
        phi = torch.log1p(n_items / (n - rho) * violations.to(s.dtype))
        losses["hinge"] = phi * (objective.margin - positive[:, 0] + s[:, rho:].max(-1).values).clamp(min=0)
    if objective.drm:
        w = rank_weights(s.detach(), y, objective.K, objective.weight, mask)
        losses["drm"] = (y - soft_topk_forward(s, w, objective.tau, mask)).square().sum(-1)
    if objective.mse:
        losses["mse"] = (s - y).square().mean(-1)
    if objective.softmax:
        z = s / objective.temperature
        x = z[:, rho:].logsumexp(-1, keepdim=True) - z[:, :rho]
        losses["softmax"] = torch.nn.functional.softplus(x).sum(-1)
    if objective.psl:
        r = (1 + objective.psl_scale * (s[:, None, rho:] - s[:, :rho, None])).clamp(min=0)  # [B, rho, eta]
        losses["psl"] = torch.log1p(r.pow(1 / objective.temperature).sum(-1)).sum(-1)
    if objective.bpr:
        x = (s[:, None, rho:] - s[:, :rho, None]) / objective.temperature
        losses["bpr"] = torch.nn.functional.softplus(x).mean(-1).sum(-1)
    return tuple(losses.values())


def list_gradients(
    U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, n_items: int | None = None
) -> ListGradients:
    """Compute losses of lists, and their gradients (in closed form) to the scores and to the user's row.

    Where several positives tie for the smallest score, or negatives for the largest, the first receives the gradient of
    the hinge. A list with a score that is not finite has loss and gradient NaN.
    """
    check_lists(U, V, batch, objective)
    users, items = batch.users, batch.items
    rho, n, n_items = objective.rho, items.shape[1], len(V) if n_items is None else n_items
    scores = list_scores(U, V, users, items, objective.score)
    finite = scores.abs().sum(-1, keepdim=True) < math.inf
    s = torch.where(finite, scores, math.nan)
    losses = list_losses(s, n_items, objective)
    y = (torch.arange(n, device=s.device) < rho).to(s.dtype).expand_as(s)
    g = torch.zeros_like(s)
    if objective.hinge:
        i, j = s[:, :rho].argmin(-1, keepdim=True), rho + s[:, rho:].argmax(-1, keepdim=True)
        gap = objective.margin - s.gather(1, i) + s.gather(1, j)
        violations = (objective.margin - s.gather(1, i) + s[:, rho:] >= 0).sum(-1, keepdim=True)
        phi = torch.where(gap > 0, torch.log1p(n_items / (n - rho) * violations.to(s.dtype)), 0)
        g.scatter_add_(1, i, -phi).scatter_add_(1, j, phi)
    if objective.drm:
        mask = torch.ones_like(s, dtype=torch.bool)
        w = rank_weights(s, y, objective.K, objective.weight, mask)
        g += objective.lam * drm_lists(s, y, w, objective.tau, mask)[1]
    if objective.mse:
        g += 2 / n * (s - y)
    if objective.softmax:
        z = s / objective.temperature
        wrong = torch.sigmoid(z[:, rho:].logsumexp(-1, keepdim=True) - z[:, :rho])  # weight of the negatives, [B, rho]
        negatives = wrong.sum(-1, keepdim=True) * torch.softmax(z[:, rho:], -1)
        g += torch.cat([-wrong, negatives], -1) / objective.temperature
    if objective.psl:
        r = (1 + objective.psl_scale * (s[:, None, rho:] - s[:, :rho, None])).clamp(min=0)
        power = r.pow(1 / objective.temperature)
        fraction = power / (1 + power.sum(-1, keepdim=True))
        g_pairs = objective.psl_scale / objective.temperature * torch.where(r > 0, fraction / r, 0)
        g += torch.cat([-g_pairs.sum(2), g_pairs.sum(1)], -1)
    if objective.bpr:
        x = (s[:, None, rho:] - s[:, :rho, None]) / objective.temperature
        g_pairs = torch.sigmoid(x) / ((n - rho) * objective.temperature)
        g += torch.cat([-g_pairs.sum(2), g_pairs.sum(1)], -1)
    g = torch.where(finite, g, math.nan)
    u, v = widened(U[users.long()])[:, None, :], widened(V[items.long()])
    user_grad = (g[:, :, None] * (-2 * (u - v) if objective.score == "l2" else v)).sum(1)
    return ListGradients._make([scores, *losses, objective.total(*losses), g, user_grad])


def list_terms(
    U: Tensor,
    V: Tensor,
    batch: ListBatch,
    objective: Objective,
    weights: Tensor | None = None,
    n_items: int | None = None,
) -> ListTerms:
    """Compute losses of lists, and the gradients of users and items: see `protocol.Backend.list_terms`."""
    return list_gradients(U, V, batch, objective, n_items).terms(U, batch, weights)


def round_bfloat16(x: Tensor, random: Tensor) -> Tensor:
    """Round float32 to numbers of bfloat16 at random, with 16 uniform bits in int64 for each.

    With the random bits added, the lower half of a float32 carries into the upper one with a probability that is the
    part of the step between two bfloat16 at which x lies. Numbers that carry to infinity are cut off instead, infinity
    stays as it is, and NaN becomes one whose upper half says so.
    """
    bits = x.contiguous().view(torch.int32).long()
    size = bits & 0x7FFFFFFF
    bits = torch.where(size < 0x7F7F0000, bits + random, bits)  # the largest number of bfloat16
    bits = torch.where(size > 0x7F800000, bits | 0x400000, bits)
    return (bits & ~0xFFFF).to(torch.int32).view(torch.float32)


def rounding_bits(rounding: Rounding, rows: Tensor, d: int) -> Tensor:
    """Return the 16 uniform bits of each factor of some rows, in int64: [T, d]."""
    group = ROUNDING_BLOCK + torch.arange(-(-d // 8), device=rows.device)
    words = torch.stack(philox(rounding.seed, int(rounding.step), rounding.table, rows[:, None], group), dim=-1)
    return torch.stack([words & 0xFFFF, words >> 16], dim=-1).flatten(1)[:, :d]  # 4 words, each of two halves


def merge_shared(terms: GradientTerms) -> GradientTerms:
    """Return the terms one by one."""
    return terms.one_by_one()


@torch.no_grad()
def update_rows(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float | Tensor,
    score: Score,
    dense: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Take one Adagrad step and project onto the unit ball, in place: rows of `terms`, or all with `dense` [R, d]."""
    check_update(table, state, terms, lr, score, dense, rounding)
    if math.isnan(lr):
        return
    terms = terms.joined()
    rows = terms.rows.flatten().long()
    x = widened(terms.vectors[terms.sources.long()]).repeat_interleave(terms.rows.shape[1], dim=0)
    x = terms.coefficients.flatten()[:, None] * x
    if score == "l2":
        totals = terms.coefficients if terms.totals is None else terms.totals
        x = 2 * (x - totals.flatten()[:, None] * widened(table[rows]))
    grad = torch.zeros_like(state) if dense is None else dense.clone()
    grad.index_add_(0, rows, x)
    touched = rows.unique() if dense is None else torch.arange(len(table), device=table.device)
    grad, before = grad[touched], widened(table[touched])
    if score == "cosine":
        grad = grad - (grad * before).sum(1, keepdim=True) * before
    state[touched] += grad.square()
    row = before - lr * grad / (state[touched].sqrt() + ADAGRAD_EPS)
    norm = row.norm(dim=1, keepdim=True)
    row = row / (torch.where(norm > 0, norm, 1) if score == "cosine" else norm.clamp(min=1))
    if rounding is not None:
        row = round_bfloat16(row.float(), rounding_bits(rounding, rounding.first_row + touched, row.shape[1]))
    table[touched] = row.to(table.dtype)


# ---------------------------------------------------------------------------------------------------------------
# Ranking all items


def pack_items(V: Tensor, score: Score) -> PackedItems:
    """Prepare items for `top_k`."""
    return PackedItems(V, score, norm=check_items(V, score))


def top_k(queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    """Find the k best items of each query, best first: items int32 [m, k], scores [m, k]."""
    check_top_k(queries, items, k, seen)
    queries, V = widened(queries), widened(items.V)
    s = -(queries[:, None, :] - V[None, :, :]).square().sum(-1) if items.score == "l2" else queries @ V.T
    if seen is not None:
        indptr, indices = seen
        row = torch.repeat_interleave(torch.arange(len(queries), device=s.device), indptr.diff())
        s[row, indices[indptr[0] : indptr[-1]].long()] = -math.inf
    scores, ranking = s.sort(dim=1, descending=True, stable=True)
    scores, ranking = scores[:, :k], torch.where(scores == -math.inf, -1, ranking)[:, :k].to(torch.int32)
    short = k - scores.shape[1]
    if short > 0:
        scores = torch.nn.functional.pad(scores, (0, short), value=-math.inf)
        ranking = torch.nn.functional.pad(ranking, (0, short), value=-1)
    return ranking, scores
