"""Correlation of training loss and ranking metrics over epochs: Table 5 of the paper, on a data set of `bench.quality`.

    python -m bench.alignment --data PATH [--set lastfm] [--epochs 20] [--seeds 3]

`drm_triton/experiments/alignment.py` describes the measurement. `drm-triton reproduce table5` makes it on any data.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from drm_triton import Dataset
from drm_triton.bench.quality import RESULTS, prepared
from drm_triton.experiments.alignment import SKIPPED, correlations
from drm_triton.experiments.published import CORRELATIONS
from drm_triton.machine import processor

COLUMNS = ("train map@10", "train ndcg@10", "valid map@10", "valid ndcg@10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", default="lastfm")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    data = Dataset.load(prepared(args.set, args.data))
    lines = [
        f"Correlation of training loss and metric on {args.set}, epochs {SKIPPED + 1} to {args.epochs}, mean of "
        f"{args.seeds} seeds; in brackets the results of the paper on ML-20M.",
        f"{processor()}, {time.strftime('%Y-%m-%d')}; made by `python -m bench.alignment`.",
        "",
        f"| objective | {' | '.join(COLUMNS)} |",
        "|---|---|---|---|---|",
    ]
    for objective, published in CORRELATIONS.items():
        found = [correlations(data, objective, args.epochs, seed) for seed in range(args.seeds)]
        cells = [
            f"{np.mean([one[name] for one in found]):.3f} ({theirs:.3f})"
            for name, theirs in zip(COLUMNS, published, strict=True)
        ]
        lines.append(f"| {objective} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    (RESULTS / "alignment.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
