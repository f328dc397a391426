"""Print the items of users beside the recommendations of a run.

    python examples/side_by_side.py runs/demo --user 12 --user 99 --k 8

Without --user the script shows three users of median activity. A tick marks a hit: a recommended item that is in the
test part, which the model has not seen.
"""

import argparse

import numpy as np
from numpy.typing import NDArray

from drm_triton import DRM
from drm_triton.training.run import dataset_of


def main(run: str, users: list[str] | None, k: int) -> list[str]:
    """Return lines with two columns: training items of a user, and the k best recommendations."""
    model = DRM.load(run)
    data, known = dataset_of(run), model.interactions
    names = known.item_ids if known.item_titles is None else known.item_titles.fill_null("(no title)")
    if users is None:
        users = known.user_ids[_median_users(known.train.degrees())].to_list()
    rank, lines = model.ranker(), []
    for user, code in zip(users, known.encode_users(users), strict=True):
        history, held_out = known.train.row(code), set(data.test.row(code).tolist())
        row = np.array([code])
        best = rank(row, known.train.take(row), k)[0]  # `recommend` would leave out the test items
        left = [str(names[int(item)]) for item in _evenly_spaced(history, k)]
        right = [("✓ " if int(item) in held_out else "  ") + str(names[int(item)]) for item in best if item >= 0]
        width = max(map(len, left), default=0) + 4
        lines += ["", f"user {user}", f"  {f'has {len(history)} items, for example':<{width}}recommended"]
        left += [""] * (len(right) - len(left))
        lines += [f"  {old:<{width}}{new}" for old, new in zip(left, right, strict=False)]
    return lines


def _median_users(activity: NDArray[np.int64], count: int = 3) -> NDArray[np.int64]:
    """Return the rows of some users of median activity."""
    order = np.argsort(activity, kind="stable")
    return np.sort(order[len(order) // 2 :][:count])


def _evenly_spaced(items: NDArray[np.int32], k: int) -> NDArray[np.int32]:
    """Return at most k of the items, evenly spaced."""
    return items[np.linspace(0, len(items) - 1, min(k, len(items))).astype(int)] if len(items) else items


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--user", action="append")
    parser.add_argument("--k", type=int, default=8)
    options = parser.parse_args()
    print("\n".join(main(options.run, options.user, options.k)))
