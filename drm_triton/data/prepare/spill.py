"""Interactions of many rows: distinct pairs of codes in files, and a split of them.

Rows are put into files of consecutive users, each small enough to be sorted in memory. From then on every step goes
through the files one after the other, and memory holds arrays by user or by item and one file. The result is the same
as that in memory, bit for bit.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from drm_triton.data.csr import CSR
from drm_triton.data.prepare.codes import lazy_codes
from drm_triton.data.split import check_ratios, held_out_ranks, labels_above, random_keys, split
from drm_triton.names import SPLIT_PARTS, SplitName

ROWS = 1 << 24  # read at a time, and about as many in a file
LEADING = 16  # leading bits of random numbers that are counted

Codes = NDArray[np.int64]


class StoredCodes(NamedTuple):
    """Codes of all rows in a file."""

    scratch: tempfile.TemporaryDirectory[str]
    n_rows: int
    n_users: int
    n_items: int

    @property
    def file(self) -> Path:
        """The file, with columns user and item."""
        return Path(self.scratch.name) / "codes.arrow"

    def blocks(self) -> Iterator[tuple[Codes, Codes]]:
        """Yield the codes of users and items, ROWS at a time."""
        for start in range(0, self.n_rows, ROWS):
            block = pl.scan_ipc(self.file).slice(start, ROWS).collect()
            yield block["user"].to_numpy().astype(np.int64), block["item"].to_numpy().astype(np.int64)


def stored_codes(frame: pl.DataFrame, user_ids: pl.Series, item_ids: pl.Series) -> StoredCodes:
    """Write the codes of rows with external ids to a file, as a stream. The ids are sorted."""
    scratch = tempfile.TemporaryDirectory(prefix="drm-triton-")
    stored = StoredCodes(scratch, len(frame), len(user_ids), len(item_ids))
    lazy_codes(frame, user_ids, item_ids).sink_ipc(stored.file, maintain_order=False)
    return stored


class Pairs:
    """Distinct pairs of a user and an item, sorted, in files of consecutive users. `build.Interactions` is in memory.

    A file has int64 pairs, with the user code in the upper half and the item code in the lower half.

    Parameters
    ----------
    codes : codes of the rows; their file is removed

    Attributes
    ----------
    rows : (rows, users, items) before repeated rows were removed
    """

    def __init__(self, codes: StoredCodes) -> None:
        self._scratch, self._folder = codes.scratch, codes.file.parent
        self._n_users, self._n_items = np.zeros(codes.n_users, np.int64), np.zeros(codes.n_items, np.int64)
        for users, items in codes.blocks():
            self._count(users, items, 1)
        self.rows = self.sizes()
        # Each file has about ROWS rows, and all rows of its users.
        file_of = ((np.cumsum(self._n_users) - self._n_users) // ROWS).astype(np.uint16)
        self._files = [self._folder / f"{number}.pairs" for number in range(int(file_of[-1]) + 1)]
        with ExitStack() as stack:
            handles = [stack.enter_context(file.open("wb")) for file in self._files]
            for users, items in codes.blocks():
                place = file_of[users]
                pairs = ((users << 32) | items)[np.argsort(place, kind="stable")]  # a radix sort
                ends = np.cumsum(np.bincount(place, minlength=len(handles)))
                for handle, part in zip(handles, np.split(pairs, ends[:-1]), strict=True):
                    handle.write(part.data)
        codes.file.unlink()
        for file in self._files:
            pairs = np.fromfile(file, np.int64)
            pairs.sort()
            repeated = np.diff(pairs, prepend=-1) == 0
            self._count(*_halves(pairs[repeated]), -1)
            pairs[~repeated].tofile(file)

    def _count(self, users: Codes, items: Codes, sign: int) -> None:
        for counts, codes in ((self._n_users, users), (self._n_items, items)):
            if len(codes):
                first = int(codes.min())
                own = np.bincount(codes - first)
                counts[first : first + len(own)] += sign * own

    def sizes(self) -> tuple[int, int, int]:
        """Return the numbers of pairs, users and items."""
        n_users, n_items = (int(np.count_nonzero(counts)) for counts in (self._n_users, self._n_items))
        return int(self._n_users.sum()), n_users, n_items

    def keep_core(self, min_user: int, min_item: int) -> tuple[Codes, Codes]:
        """Remove users and items with too few pairs, until there are none. Return the removed pairs."""
        all_removed = [np.zeros(0, np.int64)]
        while True:
            few_users, few_items = (n < least for n, least in ((self._n_users, min_user), (self._n_items, min_item)))
            if not self._n_users[few_users].any() and not self._n_items[few_items].any():
                return _halves(np.concatenate(all_removed))
            for file in self._files:
                pairs = np.fromfile(file, np.int64)
                users, items = _halves(pairs)
                removed = few_users[users] | few_items[items]
                self._count(users[removed], items[removed], -1)
                all_removed.append(pairs[removed])
                pairs[~removed].tofile(file)

    def used_ids(self, user_ids: pl.Series, item_ids: pl.Series) -> tuple[pl.Series, pl.Series]:
        """Return the ids that are in use."""
        return user_ids.filter(pl.Series(self._n_users > 0)), item_ids.filter(pl.Series(self._n_items > 0))

    def split(self, method: SplitName, ratios: tuple[float, float, float], seed: int) -> list[CSR]:
        """Number the users and items that are in use anew, and split the pairs. See `drm_triton.data.split.split`."""
        new_user, new_item = (np.cumsum(counts > 0) - 1 for counts in (self._n_users, self._n_items))
        shape = (int(new_user[-1]) + 1, int(new_item[-1]) + 1)

        def blocks() -> Iterator[tuple[Codes, Codes]]:
            for file in self._files:
                users, items = _halves(np.fromfile(file, np.int64))
                yield new_user[users], new_item[items]

        label = self._labels(blocks, method, ratios, seed, shape[0])
        degrees = np.zeros((len(SPLIT_PARTS), shape[0] + 1), np.int64)
        files = [self._folder / f"{name}.indices" for name in SPLIT_PARTS]
        with ExitStack() as stack:
            handles = [stack.enter_context(file.open("wb")) for file in files]
            for users, items in blocks():
                labels = label(users, items)
                for number, handle in enumerate(handles):
                    chosen = labels == number
                    handle.write(items[chosen].astype(np.int32).data)
                    degrees[number, 1:] += np.bincount(users[chosen], minlength=shape[0])
        return [CSR(np.cumsum(row), self._mapped(file), shape) for row, file in zip(degrees, files, strict=True)]

    def _labels(
        self,
        blocks: Callable[[], Iterator[tuple[Codes, Codes]]],
        method: SplitName,
        ratios: tuple[float, float, float],
        seed: int,
        n_users: int,
    ) -> Callable[[Codes, Codes], NDArray[np.uint8]]:
        """Return the function that labels the pairs of a block."""
        if method == "random":
            _, valid, test = check_ratios(ratios)
            n = self.sizes()[0]
            ranks = [rank for rank in held_out_ranks(n, valid, test) if rank < n]
            least = _keys_at(ranks, lambda: (random_keys(seed, *block) for block in blocks()))
            return lambda users, items: labels_above(random_keys(seed, users, items), least)
        if method == "users":
            everyone = split(np.arange(n_users), np.zeros(n_users, np.int64), None, method, ratios, seed)
            return lambda users, items: everyone[users]
        # within users: a block has all pairs of its users
        return lambda users, items: split(users, items, None, method, ratios, seed)

    def _mapped(self, file: Path) -> NDArray[np.int32]:
        """Return the numbers in a file as mapped memory. The files are removed when nothing refers to it."""
        if not file.stat().st_size:
            return np.zeros(0, np.int32)
        array = np.memmap(file, np.int32, "r")
        weakref.finalize(array, lambda scratch: None, self._scratch)
        return array


def _halves(pairs: Codes) -> tuple[Codes, Codes]:
    return pairs >> 32, pairs & 0xFFFFFFFF


def _keys_at(ranks: Sequence[int], blocks: Callable[[], Iterator[NDArray[np.uint64]]]) -> list[np.uint64]:
    """Return the keys of the given ranks among the keys of all blocks.

    The leading bits of all keys are counted. Then only the keys with the leading bits of a rank are sorted.
    """
    shift = np.uint64(64 - LEADING)
    counts = np.zeros(1 << LEADING, np.int64)
    for keys in blocks():
        counts += np.bincount((keys >> shift).astype(np.int64), minlength=len(counts))
    ends = np.cumsum(counts)
    bins = np.searchsorted(ends, ranks, side="right")
    inside: list[list[NDArray[np.uint64]]] = [[] for _ in ranks]
    for keys in blocks():
        leading = keys >> shift
        for found, number in zip(inside, bins, strict=True):
            found.append(keys[leading == np.uint64(number)])
    places = (rank - (ends[number] - counts[number]) for rank, number in zip(ranks, bins, strict=True))
    return [np.sort(np.concatenate(found))[place] for found, place in zip(inside, places, strict=True)]
