"""From your own file to recommendations in ten lines.

    python examples/own_csv.py ratings.csv

The CSV needs a column of users and a column of items (userId, movie_id, track, ... are recognised). Without an argument
the script writes a tiny file and uses it.
"""

import random
import sys
from pathlib import Path

import polars as pl

from drm_triton import DRM, Dataset

FRUIT = ["apple", "pear", "plum", "fig", "kiwi", "lime", "peach", "mango", "grape", "melon", "cherry", "lemon"]
GREENS = ["leek", "bean", "beet", "kale", "chard", "okra", "onion", "pea", "carrot", "radish", "spinach", "squash"]


def main(path: str | Path) -> pl.DataFrame:
    """Train on a CSV file, save the model, and return the three best items for every user."""
    frame = pl.read_csv(path)
    data = Dataset.from_frame(frame, ratios=(1, 0, 0))  # hold nothing out, train on all of it
    model = DRM(epochs=20).fit(data)
    folder = Path(path).with_suffix(".model")
    model.save(folder, overwrite=True)
    best = DRM.load(folder).recommend(k=3)  # columns user, rank, item, score; `users=["ann"]` for some users
    best.write_csv(Path(path).with_suffix(".recommendations.csv"))
    return best


def write_tiny_csv(path: Path) -> Path:
    """Write a file with sixty users. Half of them eat fruit, the other half vegetables."""
    draw = random.Random(0)
    pairs = [(f"p{user}", item) for user in range(60) for item in draw.sample((FRUIT, GREENS)[user % 2], 6)]
    path.write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in pairs))
    return path


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else write_tiny_csv(Path("ratings.csv"))))
