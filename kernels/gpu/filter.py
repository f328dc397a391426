"""Filter of `top_k`: which groups of GROUP items may hold one of the best items of a query.

Factors are rounded to bytes, which tensor cores multiply. Their sums are integers, and exact. On sm_75, bytes are
multiplied as floats, whose sums are exact for up to 1,040 factors; the slack covers more. Each query u has its own
scale, and the items of a group share one: u' = scale codes, v' = scale codes. The score of an item is estimated as
c u'.v' + b, where c = 1 and b = 0 for `dot` and `cosine`, and c = 2 and b = -|u|^2 - |v|^2 for `l2`. The estimate of a
group is that of its best item. No score differs from its estimate by more than

    slack = c (|u| |v - v'| + |u - u'| |v'|) + (d + 16) (2^-21 size + TINY),

where size = |u| (|v'| + |v - v'|) for `dot`, (|u| + |v'| + |v - v'|)^2 for `l2`. docs/kernels.md has the proof.
|v - v'| and |v'| are the largest of the group.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drm_triton.kernels.gpu.launch import launch
from drm_triton.names import Score

GROUP = 4  # items of a group: of larger ones, more items are scored, and of smaller ones, more estimates are compared
PANEL = 4 * GROUP  # items whose order is changed so that a thread holds all estimates of a group, see `by_thread`
MAX_FACTORS = 2**16  # with more, sums of products of bytes would not fit into an int32
LARGEST = 2.0**120  # of (|u| + |v|)^2: beyond, estimates might overflow
PACK_CHUNK = 2**16  # rows rounded at a time, in float64

# One warp keeps the products of 64 queries and 32 items in 64 registers of a thread. Several warps would divide the
# items of a group among them.
FILTER_SIZES = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 1}
BLOCK_M = FILTER_SIZES["BLOCK_M"]
RESIDENT = 128  # factors up to which a block of queries stays in registers
PADDING = 16 * GROUP  # N' is a multiple of this: Triton compiles other code for strides that 16 does not divide
TILES = 16  # tiles of BLOCK_N items for which a program keeps its queries


class ByteRows(NamedTuple):
    """Rows of factors rounded to bytes: groups of rows with one scale each."""

    codes: Tensor  # int8 [n, D], D >= d
    scale: Tensor  # float32 [groups]
    error: Tensor  # float32 [groups], largest |x - scale codes|
    norm: Tensor  # float32 [groups], largest |scale codes|


class ItemLayout(NamedTuple):
    """Items for the kernels. N' is N rounded up to a multiple of PADDING."""

    rows: Tensor  # float32 [N, d], for exact scores
    bytes: ByteRows  # of N' rows in the order of `by_thread`, and N' / GROUP groups
    bias: Tensor  # float32 [N'], in the same order: -|v|^2 for `l2`, else 0


def padded_factors(d: int) -> int:
    """Return D: tensor cores multiply 32 bytes at a time, and blocks have a power of two."""
    return max(32, int(triton.next_power_of_2(d))) if d <= RESIDENT else -(-d // RESIDENT) * RESIDENT


def to_bytes(rows: Tensor, group: int) -> ByteRows:
    """Round float32 rows [n, d] to bytes; n is a multiple of `group`. The error is that of the codes as they are."""
    n, d = rows.shape
    codes = torch.zeros(n, padded_factors(d), dtype=torch.int8, device=rows.device)
    scale, error, norm = (torch.empty(n // group, device=rows.device) for _ in range(3))
    for start in range(0, n, PACK_CHUNK):
        chunk = rows[start : start + PACK_CHUNK]
        groups = slice(start // group, (start + len(chunk)) // group)
        largest = chunk.abs().view(-1, group * d).amax(1) / 127
        scale[groups] = torch.where(largest > 0, largest, 1)
        unit = scale[groups].repeat_interleave(group, output_size=len(chunk))[:, None]
        rounded = (chunk / unit).round_().clamp_(-127, 127)
        codes[start : start + PACK_CHUNK, :d] = rounded
        exact = rounded.double() * unit
        error[groups] = (chunk - exact).norm(dim=1).view(-1, group).amax(1).float()
        norm[groups] = exact.norm(dim=1).view(-1, group).amax(1).float()
    return ByteRows(codes, scale, error, norm)


def by_thread(x: Tensor) -> Tensor:
    """Change the order of the items within each panel.

    Of the products of a tensor core, a thread holds columns 2 c and 2 c + 1 of each 8: they become items of group c.
    """
    panels = x.view(-1, PANEL // GROUP, GROUP // 2, 2, *x.shape[1:])
    return panels.transpose(1, 2).reshape(x.shape)


def pack(V: Tensor, score: Score) -> ItemLayout:
    """Pack items [N, d], N > 0, for many queries. The last item stands in for those that are missing in N'."""
    rows = V.float().contiguous()
    padded = torch.cat([rows, rows[-1:].expand(-len(V) % PADDING, -1)])
    square = -padded.double().square().sum(1).float() if score == "l2" else padded.new_zeros(len(padded))
    rounded = to_bytes(padded, GROUP)
    return ItemLayout(rows, rounded._replace(codes=by_thread(rounded.codes)), by_thread(square))


def pack_queries(queries: Tensor, largest_item: float) -> ByteRows:
    """Pack queries [m, d] for items of at most this norm. The error of a query that cannot be filtered is infinite."""
    rounded = to_bytes(queries, 1)
    norm = queries.double().norm(dim=1)
    can_filter = ((norm + largest_item).square() < LARGEST) & (queries.shape[1] <= MAX_FACTORS)
    return rounded._replace(error=torch.where(can_filter, rounded.error, torch.inf), norm=norm.float())


@triton.jit
def _add_products(query, item, total, FLOATS: tl.constexpr):
    """Add the products of bytes [m, n] and [k, n] to total [m, k]."""
    if FLOATS:
        total = tl.dot(query.to(tl.float32), tl.trans(item).to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(query, tl.trans(item), total, out_dtype=tl.int32)
    return total


@triton.jit
def _best_of_groups(x, GROUP: tl.constexpr, PANEL: tl.constexpr):
    """Return the largest of each group: [m, n] -> [m, n / GROUP]. Columns of a panel are items 2 t + b of group c."""
    m: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    columns = tl.reshape(x, (m, n // PANEL, GROUP // 2, PANEL // GROUP, 2))  # (t, c, b)
    return tl.reshape(tl.max(tl.max(columns, axis=4), axis=2), (m, n // GROUP))


# Not specialised: what depends on the data, and the place of the queries in it.
@triton.jit(do_not_specialize=["m", "n_items"], do_not_specialize_on_alignment=["query_codes_ptr", "query_scale_ptr"])
def _filter_kernel(
    query_codes_ptr,  # int8 [m, D]
    query_scale_ptr,  # [m]
    query_norm_ptr,  # [m]
    codes_ptr,  # int8 [n_items, D]
    scale_ptr,  # [n_items / GROUP]
    bias_ptr,  # [n_items]
    estimates_ptr,  # [m, n_items / GROUP], out
    m: tl.int64,
    n_items: tl.int64,  # a multiple of BLOCK_N
    L2: tl.constexpr,
    FLOATS: tl.constexpr,  # multiply bytes as floats: a GPU whose tensor cores Triton does not use for bytes
    D: tl.constexpr,
    GROUP: tl.constexpr,
    PANEL: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Estimate the best score of each group."""
    GROUPS: tl.constexpr = BLOCK_N // GROUP
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(offs_m, m - 1)  # rows past the end repeat the last query, unstored
    offs_d = tl.arange(0, BLOCK_D)
    query_scale = tl.load(query_scale_ptr + row)
    if D == BLOCK_D:  # a block of queries stays in registers
        query = tl.load(query_codes_ptr + row[:, None] * D + offs_d[None, :])
    if L2:
        query_norm = tl.load(query_norm_ptr + row)
    first = tl.program_id(1).to(tl.int64) * (TILES * BLOCK_N)
    for start in range(first, tl.minimum(first + TILES * BLOCK_N, n_items), BLOCK_N):
        item = start + tl.arange(0, BLOCK_N)
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if FLOATS else tl.int32)
        for block in range(0, D, BLOCK_D):
            if D > BLOCK_D:
                query = tl.load(query_codes_ptr + row[:, None] * D + (block + offs_d)[None, :])
            code = tl.load(codes_ptr + item[:, None] * D + (block + offs_d)[None, :])
            product = _add_products(query, code, product, FLOATS)
        group = start // GROUP + tl.arange(0, GROUPS)
        if L2:
            column = tl.arange(0, BLOCK_N)
            scale_of_column = tl.load(scale_ptr + start // GROUP + column // PANEL * (PANEL // GROUP) + column % 8 // 2)
            unit = (2 * query_scale)[:, None] * scale_of_column[None, :]
            bias = tl.load(bias_ptr + item)[None, :] + tl.zeros_like(unit)
            best = _best_of_groups(tl.fma(product.to(tl.float32), unit, bias), GROUP, PANEL)
            best = best - (query_norm * query_norm)[:, None]
        else:  # the scale is positive, so the largest product is that of the best item
            scale = tl.load(scale_ptr + group)
            best = _best_of_groups(product, GROUP, PANEL).to(tl.float32) * (query_scale[:, None] * scale[None, :])
        place = offs_m[:, None] * (n_items // GROUP) + group[None, :]
        tl.store(estimates_ptr + place, best, mask=(offs_m < m)[:, None])


def multiplies_bytes(device: torch.device) -> bool:
    """Return whether Triton multiplies bytes on tensor cores: on AMD GPUs, and on NVIDIA GPUs from sm_80 on."""
    return device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def filter_sizes(d: int, floats: bool = False) -> dict[str, int]:
    """Return the compile-time arguments of `_filter_kernel` and its number of warps."""
    D = padded_factors(d)
    sizes = {"BLOCK_D": D, **FILTER_SIZES}
    if floats:  # a product without tensor cores holds its factors in registers
        sizes |= {"BLOCK_D": 16, "num_warps": 8}
    elif D > RESIDENT:  # a thread would spill the addresses of the factors of 64 queries
        sizes |= {"BLOCK_D": 64, "BLOCK_M": 32}
    return {"FLOATS": floats, "D": D, "GROUP": GROUP, "PANEL": PANEL, "TILES": TILES, **sizes}


def estimate_groups(queries: ByteRows, items: ItemLayout, score: Score, estimates: Tensor) -> None:
    """Write the estimates of all groups to `estimates` [m, N' / GROUP]."""
    m, n_items = len(queries.codes), len(items.bias)
    sizes = filter_sizes(items.rows.shape[1], floats=not multiplies_bytes(estimates.device))
    launch(
        _filter_kernel,
        (triton.cdiv(m, sizes["BLOCK_M"]), triton.cdiv(n_items, TILES * sizes["BLOCK_N"])),
        queries.codes,
        queries.scale,
        queries.norm,
        items.bytes.codes,
        items.bytes.scale,
        items.bias,
        estimates,
        m=m,
        n_items=n_items,
        L2=score == "l2",
        **sizes,
    )
