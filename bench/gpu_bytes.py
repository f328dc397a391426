"""Bytes that a Triton kernel must move to and from HBM, and bytes that it requests: counted from the code.

The least is every input read once and every output written once: the caches are empty at first and hold everything
after. Requests beyond that (a second pass over a list, a tile read by many programs) are mostly served by the caches.
Nothing is measured. Sizes that a case does not give are those of SketchFab: 15.5K users with 36 items each, 28.8K
items, n = 48, K = rho = 3. Lists that share negatives come in groups of SHARE.
"""

from typing import Any

USERS, ITEMS, DEGREE, LONG, SHARE = 15_500, 28_800, 36, 1024, 32


def traffic(operation: str, kernel: str, labels: dict[str, Any], constants: dict[str, Any]) -> tuple[int, int] | None:
    """Return least and requested bytes of one list (one query for top-k) in float32; None for a float64 variant."""
    if "fp64" in str(labels.get("variant", "")):
        return None
    long = operation.startswith("long")
    n, d, K = labels.get("n") or (LONG if long else 48), labels.get("d") or 64, 3
    eta = n - K
    if kernel == "_shared_kernel":
        return 4 * eta // SHARE, 4 * eta // SHARE
    if operation == "sample":  # binary searches: the user among all users, each negative among the user's items
        least = requested = 4 * (n + 1) + 16
        searches = 1
        if constants["SHARED"]:  # the shared draws are read and searched too, and `replaced` is written
            least, requested, searches = least + eta + 4 * eta // SHARE, requested + 5 * eta, 2
        probes = 8 * USERS.bit_length() + 4 * searches * eta * DEGREE.bit_length()
        return least + 4 * DEGREE, requested + 4 * K + probes
    if operation == "gradients":
        least = 4 * (n * d + d + n + 1) + 4 * (2 * n + d + 4)
        return least, least + (0 if constants["RESIDENT"] else 4 * (n * d + d))
    if kernel == "_merge_kernel":  # rows are read at the positives, coefficients at the negatives
        terms, out = 4 * n + eta, 4 * n + eta * (4 * d + 12) // SHARE
        tiles_of_n, tiles_of_d = -(-n // constants["BLOCK_N"]), -(-d // constants["BLOCK_D"])
        requested = 4 * K + 5 * eta * tiles_of_d + tiles_of_n * (4 * tiles_of_d + 4 * d) + out
        return terms + 4 + 4 * d + out, requested
    # Not counted: the keys and rows of a dense gradient. Their number depends on the table, not on the lists.
    if operation == "update" and constants["MERGED"]:  # the keys of merged terms are read and skipped
        keys, added = eta + n * SHARE, eta + K * SHARE  # of a group
        least = (4 * keys + added * (8 + 4 * d + 16 * d)) // SHARE
        return least, least + added * (4 + 8) // SHARE
    if operation == "update":  # per term row, coefficient, source, x; per row (none repeats) table and state
        terms, rows = n * (12 + 4 * d), 16 * n * d
        return terms + rows, terms + rows + n * (4 + 8)  # rows are read twice, and the order of the sorted keys
    if operation == "top-k":  # least: every item once for all queries; requested: once per block of queries
        tiles, blocks = -(-ITEMS // constants["BLOCK_N"]), constants["BLOCK_M"]
        return 4 * d + 4 * d * ITEMS // USERS, 4 * d * tiles + 4 * d * ITEMS // blocks
    if operation == "soft top-k":  # s, mask, w, out; relevance and loss, or the upstream gradient
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
    tiles_of_d = -(-d // constants["BLOCK_D"])  # _user_gradient_kernel
    least = 4 * (n * d + 2 * d + 2 * n + 1)
    return least, least + 4 * (tiles_of_d - 1) * (2 * n + 1)
