"""What users have beside what a run recommends them, for people to judge.

    python examples/side_by_side.py runs/demo --user 12 --user 99 --k 8

Without --user some users of middling activity are shown. A tick marks a recommended item that the user does have in
the test part, which the model has not seen.
"""

import argparse

import numpy as np

from drm_triton import DRM
from drm_triton.training.run import dataset_of


def main(run: str, users: list[str] | None, k: int) -> list[str]:
    """Lines of two columns, the items a user was trained with and the k best of the others."""
    model = DRM.load(run)
    data, known = dataset_of(run), model.interactions
    names = known.item_ids if known.item_titles is None else known.item_titles.fill_null("(no title)")
    if users is None:
        users = known.user_ids[_middling(known.train.degrees())].to_list()
    lines = []
    for user, code in zip(users, known.encode_users(users), strict=True):
        has, kept_aside = known.train.row(code), set(data.test.row(code).tolist())
        best = known.encode_items(model.recommend([user], k)["item"])
        left = [str(names[int(item)]) for item in _spread(has, k)]
        right = [("✓ " if int(item) in kept_aside else "  ") + str(names[int(item)]) for item in best]
        width = max(map(len, left), default=0) + 4
        lines += ["", f"user {user}", f"  {f'has {len(has)} items, such as':<{width}}gets"]
        left += [""] * (len(right) - len(left))
        lines += [f"  {mine:<{width}}{new}" for mine, new in zip(left, right, strict=False)]
    return lines


def _middling(activity: np.ndarray, count: int = 3) -> np.ndarray:
    """Rows of some users around the median activity."""
    order = np.argsort(activity, kind="stable")
    return np.sort(order[len(order) // 2 :][:count])


def _spread(items: np.ndarray, k: int) -> np.ndarray:
    """At most k of some items, evenly from all."""
    return items[np.linspace(0, len(items) - 1, min(k, len(items))).astype(int)] if len(items) else items


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--user", action="append")
    parser.add_argument("--k", type=int, default=8)
    options = parser.parse_args()
    print("\n".join(main(options.run, options.user, options.k)))
