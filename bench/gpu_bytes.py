"""Bytes a Triton kernel has to move to and from HBM, and those it asks for: counted from its code, not measured.

The least is every input read once and every output written once, as if nothing were in a cache before and all of it
stayed there. What is asked for beyond that (a second pass over a list, a tile read by many programs) mostly comes from
the caches. Sizes that a case does not name are SketchFab's: 15.5K users with 36 items each, 28.8K items, n = 48, K = 3;
where lists share their negatives, SHARE do, and each keeps its K positives.
"""

from typing import Any

USERS, ITEMS, DEGREE, LONG, SHARE = 15_500, 28_800, 36, 1024, 32


def traffic(operation: str, kernel: str, labels: dict[str, Any], constants: dict[str, Any]) -> tuple[int, int] | None:
    """Least and asked bytes of one list (of one query for top-k), in float32; None for a float64 variant."""
    if "fp64" in str(labels.get("variant", "")):
        return None
    long = operation.startswith("long")
    n, d, K = labels.get("n") or (LONG if long else 48), labels.get("d") or 64, 3
    if operation == "sample":  # binary searches: the user among all, each of 45 negatives among the user's items
        out, probes = 4 * (n + 1), 8 * USERS.bit_length() + 4 * 45 * DEGREE.bit_length()
        return out + 16 + 4 * DEGREE, out + 16 + 4 * K + probes
    if operation == "gradients":
        least = 4 * (n * d + d + n + 1) + 4 * (2 * n + d + 4)
        return least, least + (0 if constants["RESIDENT"] else 4 * (n * d + d))
    if kernel == "_sums_kernel":
        entries, out = 8 * n, 4 * n + n * (4 * d + 8) // SHARE
        tiles, parts = -(-n // constants["BLOCK_N"]), -(-d // constants["BLOCK_D"])
        return entries + 4 + 4 * d + out, entries * parts + tiles * (4 * parts + 4 * d) + out
    if operation == "update" and constants["SHARED"]:  # of all keys, those of merged entries are only passed over
        keys, added = n * (SHARE + 1), n + K * SHARE  # of a group
        least = (4 * keys + added * (8 + 4 * d + 16 * d)) // SHARE
        return least, least + added * (4 + 8) // SHARE
    if operation == "update":  # per entry row, coefficient, source, x; per row, of which none repeats, table and state
        entries, rows = n * (12 + 4 * d), 16 * n * d
        return entries + rows, entries + rows + n * (4 + 8)  # rows read twice, and where the sort put them
    if operation == "top-k":  # every item once for all queries, against once per block of them; the query per tile
        tiles, blocks = -(-ITEMS // constants["BLOCK_N"]), constants["BLOCK_M"]
        return 4 * d + 4 * d * ITEMS // USERS, 4 * d * tiles + 4 * d * ITEMS // blocks
    if operation == "soft top-k":  # s, mask, w, out, and relevance with the loss, or the upstream gradient
        mode = str(labels["variant"]).split()[0]
        least = 4 * n + n + 4 * K + 4 * n + {"forward": 0, "backward": 4 * n, "drm": 4 * n + 4}[mode]
        return least, least
    if kernel == "_pairs_kernel":
        read = n * (9 if constants["GRADIENT"] else 5)
        write = n * (8 if constants["GRADIENT"] else 4)
        return read + write, read + write + read * -(-n // constants["BLOCK_J"])
    if kernel == "_ranks_kernel":
        read, q = 9 * n, 4 * n * constants["DOT"]
        return read + q + 8 * K, 2 * read + q + 8 * K
    if kernel == "_items_kernel":
        least = 9 * n + 12 * K + (12 if constants["GRADIENT"] else 4) * n
        return least, least
    if kernel == "_finish_kernel":
        least = 12 * n + 20
        return least, least
    if kernel == "_scores_kernel":
        tiles = -(-n // constants["BLOCK_N"])
        least = 4 * (n * d + d + 2 * n + 1)
        return least, least + 4 * (tiles - 1) * (d + 1)
    parts = -(-d // constants["BLOCK_D"])  # _user_gradient_kernel
    least = 4 * (n * d + 2 * d + 2 * n + 1)
    return least, least + 4 * (parts - 1) * (2 * n + 1)
