"""The lists of a tile, WIDTH of them at a time: scores, losses, gradients of users, and sums of gradients of items.

Column t of an array belongs to list t, from the scores, which leave the product of matrices in this form, to the
gradients. The operations on columns are in `active_columns` and `columns`.
"""

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from drm_triton.kernels.cpu.active_columns import (
    TOGETHER,
    ActiveBuffers,
    Extremes,
    active_buffers,
    find_active,
    find_extremes,
    word_of_lane,
)
from drm_triton.kernels.cpu.columns import Columns, column_buffers, copy_scores, drm_of_columns, pad_columns
from drm_triton.kernels.cpu.losses import NAN, add_one, average_precision_weights, score_item
from drm_triton.kernels.cpu.runtime.bits import BITS, trailing_zeros
from drm_triton.kernels.cpu.runtime.entries import add_entries, not_zero
from drm_triton.kernels.cpu.runtime.jit import allocating, inline, intrinsic, prefetch_row
from drm_triton.kernels.cpu.runtime.numba_private import nothing
from drm_triton.kernels.cpu.runtime.products import ITEMS, multiply, score_columns, transpose
from drm_triton.kernels.cpu.runtime.simd import LANES, ROWS, WIDTH, VectorBuilder, padded
from drm_triton.kernels.cpu.softsort import all_finite
from drm_triton.kernels.cpu.tiles import tile_bounds

f32 = np.float32
LISTS_AHEAD = 32  # lists between the prefetch of their rows and their use
UNUSED = -1  # row of a term without a gradient


class TermBuffers(NamedTuple):
    """Buffers for up to WIDTH lists that are scored at once. Column t of an array belongs to list t of them."""

    user_columns: NDArray[np.float32]  # [d, WIDTH] factors of the users
    scores: NDArray[np.float32]  # [padded n, WIDTH]; if lists are long, -inf in the padding
    extremes: Extremes
    hinge: NDArray[np.float32]  # [2, WIDTH], hinge loss and Phi
    finite: NDArray[np.bool_]  # [WIDTH], whether there is such a list, and all its scores are
    weights: NDArray[np.float32]  # [WIDTH], of the lists
    columns: Columns  # what takes part in the relaxed top K
    active: ActiveBuffers
    hits: NDArray[np.float32]  # [n], for `average_precision_weights`
    w: NDArray[np.float32]  # [K]
    g: NDArray[np.float32]  # [rho + padded eta + 1, WIDTH] gradients to the scores; of long lists, in their place
    totals: NDArray[np.float32]  # [WIDTH], their sums
    users: NDArray[np.float32]  # [WIDTH, padded d] factors of the users
    user_grad: NDArray[np.float32]  # [WIDTH, padded d]
    rows: NDArray[np.float32]  # [eta, padded d] factors of the shared negatives; only if lists are short
    sums: NDArray[np.float32]  # [padded eta, padded d]; only if lists are short


@allocating
def term_buffers(rho, eta, d, weights, short):
    """Allocate the buffers for the lists that are scored at once."""
    width, height, n = padded(d, LANES), padded(eta, ROWS), rho + eta
    columns = column_buffers(n + TOGETHER, weights.size)
    scores = np.zeros((max(padded(rho + padded(eta, ITEMS), BITS), n + 1), WIDTH), np.float32)
    for k in range(weights.size):
        for t in range(WIDTH):
            columns.w[k, t] = weights[k]
    return TermBuffers(
        np.zeros((d, WIDTH), np.float32),
        scores,
        Extremes(np.empty((5, WIDTH), np.float32), np.empty((2, WIDTH), np.int32)),
        np.empty((2, WIDTH), np.float32),
        np.empty(WIDTH, np.bool_),
        np.zeros(WIDTH, np.float32),
        columns,
        active_buffers(n, weights.size),
        np.empty(n, np.float32),
        np.empty(weights.size, np.float32),
        np.empty((rho + height + 1, WIDTH), np.float32) if short else scores,
        np.empty(WIDTH, np.float32),
        np.zeros((WIDTH, width), np.float32),
        np.empty((WIDTH, width), np.float32),
        np.zeros((eta if short else 0, width), np.float32),
        np.empty((height if short else 0, width), np.float32),
    )


# ---------------------------------------------------------------------------------------------------------------
# Scores


@inline
def begin_tile(tile, inputs, groups, rho, out):
    """Prepare the terms of a tile; prefetch the rows that its lists need."""
    _, start, stop = tile_bounds(tile, groups.tiles)
    eta, first = groups.items.shape[1], out.starts[tile]
    sums, shared = inputs.U.shape[0] + tile * eta, out.starts[tile + 1] - eta
    for j in range(eta):
        out.rows[shared + j], out.sources[shared + j] = UNUSED, sums + j
        out.coefficients[shared + j], out.totals[shared + j] = f32(1), f32(0)
    last = inputs.users.size - 1
    for b in range(start, stop):
        ahead = min(b + LISTS_AHEAD, last)
        prefetch_row(inputs.U, inputs.users[ahead])
        for i in range(rho):
            prefetch_row(inputs.V, inputs.positives[ahead, i])
            term = first + (b - start) * rho + i
            out.rows[term], out.sources[term] = inputs.positives[b, i], inputs.users[b]


@inline
def score_block(begin, end, group, inputs, groups, rho, buffers):
    """Compute the scores of lists begin .. end - 1 of one group; prefetch the rows of the next group."""
    V, l2, scores, items = inputs.V, inputs.l2, buffers.scores, groups.items[group]
    following = groups.items[min(group + 1, groups.items.shape[0] - 1)]
    for b in range(begin, end):
        u, user = inputs.U[inputs.users[b]], buffers.users[b - begin]
        for c in range(u.size):
            user[c] = u[c]
    transpose(buffers.users, buffers.user_columns)
    score_columns(V, items, following, buffers.user_columns, l2, scores[rho:].reshape(-1), WIDTH)
    scores[rho + items.size :] = f32(-np.inf)
    for b in range(begin, end):
        t, u = b - begin, buffers.users[b - begin][: V.shape[1]]
        for i in range(rho):
            scores[i, t] = score_item(u, V[inputs.positives[b, i]], l2)
        for i in range(groups.first[b], groups.first[b] + groups.counts[b]):
            scores[rho + groups.places[i], t] = score_item(u, V[groups.own_items[i]], l2)


# ---------------------------------------------------------------------------------------------------------------
# Losses


@inline
def find_hinge(begin, end, n, inputs, loss, buffers):
    """Find hinge loss and Phi of lists begin .. end - 1, and whether all scores are finite. Returns whether all are."""
    (values, positions), finite, every = buffers.extremes, buffers.finite, True
    find_extremes(buffers.scores, values, positions, n, loss.rho, loss.margin)
    finite[:] = False
    for t in range(end - begin):
        gap, phi = loss.margin - values[0, t] + values[1, t], f32(0)
        finite[t] = values[3, t] < np.inf  # false for NaN too
        if finite[t] and loss.hinge and gap > 0:
            phi = loss.phi[np.int64(values[2, t])]
        buffers.hinge[0, t], buffers.hinge[1, t] = phi * gap if phi > 0 else f32(0), phi
        buffers.weights[t] = inputs.weights[begin + t]
        every &= finite[t]
    return every


@inline
def fill_columns(lists, n, short, loss, buffers):
    """Write the items that take part in the relaxed top K to `columns`; return the number of its rows.

    What is computed for a list with a score that is not finite is not used.
    """
    scores, columns, finite = buffers.scores, buffers.columns, buffers.finite
    if loss.ap:
        for t in range(lists):
            average_precision_weights(scores[:n, t], loss.rho, loss.weights, buffers.hits, buffers.w)
            for k in range(buffers.w.size):
                columns.w[k, t] = buffers.w[k]
    if not short:
        return find_active(scores, n, buffers.extremes.values[4], finite, loss.tau, buffers.active, columns)
    for t in range(WIDTH):
        columns.size[t] = n if finite[t] else f32(0)
    copy_scores(scores, columns.s, columns.order, n)
    pad_columns(columns.size, columns.s, columns.order, n, n)
    return n


@inline
def store_losses(begin, end, loss, buffers, out):
    """Store the losses of the lists. One bad score makes them NaN."""
    for t in range(end - begin):
        drm = buffers.columns.of_lists[0, t] if loss.drm else f32(0)
        hinge = buffers.hinge[0, t]
        if not buffers.finite[t]:
            hinge, drm = NAN if loss.hinge else f32(0), NAN if loss.drm else f32(0)
        out.losses[0, begin + t], out.losses[1, begin + t] = buffers.weights[t] * hinge, buffers.weights[t] * drm


# ---------------------------------------------------------------------------------------------------------------
# Gradients


@inline
def copy_rows(V, items, rows):
    """Copy the rows of the shared negatives; return whether all are finite."""
    finite = True
    for j in range(items.size):
        row, v = rows[j], V[items[j]]
        for c in range(v.size):
            row[c] = v[c]
        finite &= all_finite(v)
    return finite


@inline
def scatter_gradients(lists, n, rows, loss, buffers):
    """Multiply the gradients to the scores by the weights of the lists, and write them to `g`.

    rows : of the columns. Those after the last item of a list are at position n, which no list has.
    In `g`, only the entries in `masks` have a meaning, and those of the positives, which are 0 if there is no gradient.
    If lists are short, all entries have a meaning, and `masks` has none.
    """
    columns, g, weights, short = buffers.columns, buffers.g, buffers.weights, buffers.rows.shape[0] > 0
    if short:
        g[:] = f32(0)
    g[: loss.rho] = f32(0)
    for i in range(rows):
        for t in range(WIDTH):
            columns.ds[i, t] *= weights[t]
            g[np.uint64(columns.order[i, t]), t] = columns.ds[i, t]
    for t in range(lists):
        if not buffers.finite[t]:  # one bad score makes the whole list NaN, so that it is noticed
            for j in range(n):
                set_gradient(j, t, f32(NAN), buffers)
        elif buffers.hinge[1, t] > 0:
            step = weights[t] * buffers.hinge[1, t]
            for positive in range(2):
                j = buffers.extremes.positions[positive, t]
                before = g[j, t] if short or j < loss.rho or has_gradient(j, t, buffers) else f32(0)
                set_gradient(j, t, before + step if positive == 1 else before - step, buffers)


@inline
def has_gradient(j, t, buffers):
    """Return whether `masks` has entry j of list t."""
    return (np.int64(buffers.active.masks[j]) >> t) & 1


@inline
def set_gradient(j, t, value, buffers):
    """Write a gradient to `g` and its entry to `masks`."""
    buffers.g[j, t] = value
    buffers.active.masks[j] = np.int64(buffers.active.masks[j]) | (np.int64(1) << t)


@inline
def sum_lists(lists, n, short, loss, buffers):
    """Write the sum of the gradients of each list to `totals`. The pair of the hinge adds nothing to it."""
    g, columns, totals = buffers.g, buffers.columns, buffers.totals
    totals[:] = f32(0)
    for j in range(n if short else 0):
        for t in range(lists):
            totals[t] += g[j, t]
    for t in range(0 if short or not loss.drm else lists):
        for i in range(np.int64(columns.size[t])):
            totals[t] += columns.ds[i, t]


@inline
def take_own(begin, end, own, inputs, groups, rho, buffers, out):
    """Write the terms of the negatives that the lists have in place of shared ones, from `own` on; return their end.

    They are no longer in `masks`. Of short lists, they become 0 in `g`.
    """
    g, masks, short = buffers.g, buffers.active.masks, buffers.rows.shape[0] > 0
    for b in range(begin, end):
        t = b - begin
        for i in range(groups.first[b], groups.first[b] + groups.counts[b]):
            j = rho + groups.places[i]
            exists = short or has_gradient(j, t, buffers)
            # Terms without a gradient are taken out later. Those of short lists are too few to be worth a copy.
            out.rows[own] = groups.own_items[i] if exists else UNUSED
            out.coefficients[own] = out.totals[own] = g[j, t] if exists else f32(0)
            out.sources[own] = inputs.users[b]
            if short:
                g[j, t] = f32(0)
            else:
                masks[j] = np.int64(masks[j]) & ~(np.int64(1) << t)
            own += 1
    return own


@inline
def take_positives(lists, positive, rho, buffers, out):
    """Write the gradients of the positives to their terms, from `positive` on. They are no longer in `masks`."""
    for t in range(lists):
        for i in range(rho):
            out.coefficients[positive] = out.totals[positive] = buffers.g[i, t]
            positive += 1
    buffers.active.masks[:rho] = 0


# ---------------------------------------------------------------------------------------------------------------
# Gradients of short lists: products of matrices


@inline
def add_products(lists, first, negatives, rho, sums, used, totals, l2, buffers):
    """Compute the gradients of users, and `sums` of the gradients of shared negatives, as products.

    If these lists are the `first` ones of the tile, there are no sums before. used[j] becomes negatives[j] if any list
    has a gradient to it.
    """
    g, eta = buffers.g, negatives.size
    of_shared = g[rho:].reshape(-1)
    multiply(of_shared, 1, WIDTH, buffers.rows, eta, buffers.user_grad)
    multiply(of_shared, WIDTH, 1, buffers.users, lists, buffers.sums)
    for j in range(eta):
        total, product = sums[j], buffers.sums[j]
        for c in range(total.size):
            total[c] = product[c] + (f32(0) if first else total[c])
        if not_zero(of_shared, j * WIDTH) != 0:
            used[j] = negatives[j]
        for t in range(lists if l2 else 0):
            totals[j] += g[rho + j, t]


def _user_tile(vectors: int):
    """Return an intrinsic for `vectors` vectors of columns of a user's gradient, from column c on.

    It adds the terms of the positives, items[first] .. items[first + rho - 1], to row t of `user_grad`.
    """

    @intrinsic
    def tile(context, out, start, user_grad, t, width, g, V, items, first, rho, d, c):
        names = ("out", "start", "user_grad", "t", "width", "g", "V", "items", "first", "rho", "d", "c")

        def build(context, builder, signature, args):
            at = VectorBuilder(context, builder, signature, args, names)
            begin, V = builder.add(builder.mul(at["t"], at["width"]), at["c"]), at.pointer("V", at["c"])

            def entry(i):
                item = builder.sext(at.load("items", builder.add(at["first"], i), ir.IntType(32)), at.i64)
                weight = at.load("g", builder.add(builder.mul(i, at.i64(WIDTH)), at["t"]))
                return weight, builder.gep(V, [builder.mul(item, at["d"])])

            places = [at.i64(v * at.lanes) for v in range(vectors)]
            starts = [at.load("user_grad", builder.add(begin, place), at.vector) for place in places]
            end = builder.add(at["start"], at["c"])
            for place, total in zip(places, at.sum_rows(at["rho"], starts, entry), strict=True):
                at.store(total, "out", builder.add(end, place))
            return nothing(context)

        i64 = types.int64
        return types.none(out, i64, user_grad, i64, i64, g, V, items, i64, i64, i64, i64), build

    return tile


_user_four, _user_one = _user_tile(4), _user_tile(1)


@inline
def add_positives(b, t, rho, inputs, buffers, out):
    """Write the gradient of the user of list b: row t of `user_grad`, and the terms of the positives."""
    g, V, items, rows, grad = buffers.g, inputs.V, inputs.positives, buffers.user_grad, out.user_grad
    d, width, first = V.shape[1], rows.shape[1], b * rho
    four, one = d // (4 * LANES) * (4 * LANES), d // LANES * LANES
    for c in range(0, four, 4 * LANES):
        _user_four(grad, b * d, rows, t, width, g, V, items, first, rho, d, c)
    for c in range(four, one, LANES):
        _user_one(grad, b * d, rows, t, width, g, V, items, first, rho, d, c)
    for c in range(one, d):
        grad[b, c] = rows[t, c]
        for i in range(rho):
            grad[b, c] += g[i, t] * V[items[b, i], c]


@inline
def finish_users(begin, end, own, inputs, groups, rho, buffers, out):
    """Complete the gradients of the users with positives and own negatives, whose terms begin at `own`."""
    V = inputs.V
    for b in range(begin, end):
        t, user_grad = b - begin, out.user_grad[b]
        add_positives(b, t, rho, inputs, buffers, out)
        for term in range(own, own + groups.counts[b]):
            if out.coefficients[term] != 0:  # 0 times a row that is not finite is NaN
                add_one(out.coefficients[term], V[out.rows[term]], user_grad)
        own += groups.counts[b]
        if inputs.l2:
            differences(user_grad, buffers.totals[t], buffers.users[t])


@inline
def differences(user_grad, total, user):
    """Turn sum_j g_j v_j into 2 sum_j g_j (v_j - u), the gradient under l2."""
    for c in range(user_grad.size):
        user_grad[c] = f32(2) * (user_grad[c] - total * user[c])


# ---------------------------------------------------------------------------------------------------------------
# Gradients of long lists, or with numbers that are not finite: only the entries of `masks`


@inline
def find_entries(negatives, rho, buffers):
    """Write which gradients of shared negatives in `g` are not 0 to `masks`."""
    flat, masks = buffers.g.reshape(-1), buffers.active.masks
    masks[:] = 0
    for j in range(rho, rho + negatives.size):
        masks[j] = not_zero(flat, j * WIDTH)


@inline
def add_sparse(lists, first, negatives, rho, sums, used, totals, inputs, buffers):
    """Compute the gradients of users, and `sums` of the gradients of shared negatives, as `add_products` does."""
    g, masks, user_grad, eta = buffers.g, buffers.active.masks, buffers.user_grad, negatives.size
    flat = g.reshape(-1)
    user_grad[:] = f32(0)
    if first:
        sums[:] = f32(0)
    for begin in range(0, rho + eta, BITS):
        for t in range(lists):
            word = word_of_lane(masks, begin, t)
            if word != 0:
                add_entries(
                    flat, begin * WIDTH, word, t, inputs.V, negatives, begin - rho, buffers.users, user_grad, sums
                )
    for j in range(eta):
        word = np.int64(masks[rho + j])
        if word != 0:
            used[j] = negatives[j]
        while inputs.l2 and word != 0:
            totals[j] += g[rho + j, trailing_zeros(word)]
            word &= word - 1


# ---------------------------------------------------------------------------------------------------------------


@inline
def tile_terms(tile, inputs, groups, loss, buffers, out):
    """Compute losses, users' gradients and terms of the lists of a tile."""
    group, start, stop = tile_bounds(tile, groups.tiles)
    rho, eta = loss.rho, groups.items.shape[1]
    n = rho + eta
    if start == stop:
        return
    begin_tile(tile, inputs, groups, rho, out)
    positive, own, shared = out.starts[tile], out.starts[tile] + (stop - start) * rho, out.starts[tile + 1] - eta
    negatives, used, totals = groups.items[group], out.rows[shared:][:eta], out.totals[shared:][:eta]
    sums = out.sums[tile * eta :][:eta]
    short = buffers.rows.shape[0] > 0
    rows_finite = short and copy_rows(inputs.V, negatives, buffers.rows)
    for begin in range(start, stop, WIDTH):
        end = min(begin + WIDTH, stop)
        lists, first = end - begin, begin == start
        score_block(begin, end, group, inputs, groups, rho, buffers)
        finite, rows = find_hinge(begin, end, n, inputs, loss, buffers), 0
        if loss.drm:
            rows = fill_columns(lists, n, short, loss, buffers)
            if rows > 0:
                drm_of_columns(buffers.columns, rows, rho, loss.lam, loss.tau)
        else:
            buffers.active.masks[:] = 0
        store_losses(begin, end, loss, buffers, out)
        scatter_gradients(lists, n, rows, loss, buffers)
        take_positives(lists, positive, rho, buffers, out)
        if inputs.l2:
            sum_lists(lists, n, short, loss, buffers)
        own_end = take_own(begin, end, own, inputs, groups, rho, buffers, out)
        if finite and rows_finite:
            add_products(lists, first, negatives, rho, sums, used, totals, inputs.l2, buffers)
        else:
            if short:
                find_entries(negatives, rho, buffers)
            add_sparse(lists, first, negatives, rho, sums, used, totals, inputs, buffers)
        finish_users(begin, end, own, inputs, groups, rho, buffers, out)
        positive, own = positive + lists * rho, own_end
