"""From your own file to recommendations in ten lines.

    python examples/own_csv.py ratings.csv

Any CSV with a column of users and one of items will do (userId, movie_id, track, ... are recognised); without an
argument the script writes a tiny one and uses that.
"""

import random
import sys
from pathlib import Path

import polars as pl

from drm_triton import DRM, Dataset

FRUIT = ["apple", "pear", "plum", "fig", "kiwi", "lime", "peach", "mango", "grape", "melon", "cherry", "lemon"]
GREENS = ["leek", "bean", "beet", "kale", "chard", "okra", "onion", "pea", "carrot", "radish", "spinach", "squash"]


def main(path: str | Path) -> pl.DataFrame:
    """Train on a CSV, save the model, and return the three best items of every user."""
    frame = pl.read_csv(path)
    data = Dataset.from_frame(frame, ratios=(1, 0, 0))  # nothing is held out: all of it is to learn from
    model = DRM(epochs=20).fit(data)
    folder = Path(path).with_suffix(".model")
    model.save(folder, overwrite=True)
    best = DRM.load(folder).recommend(k=3)  # a frame: user, rank, item, score; DRM.recommend(["ann"]) for some users
    best.write_csv(Path(path).with_suffix(".recommendations.csv"))
    return best


def write_tiny_csv(path: Path) -> Path:
    """Write ratings.csv: sixty people, half of whom eat fruit and half vegetables."""
    draw = random.Random(0)
    pairs = [(f"p{person}", item) for person in range(60) for item in draw.sample((FRUIT, GREENS)[person % 2], 6)]
    path.write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in pairs))
    return path


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else write_tiny_csv(Path("ratings.csv"))))
