"""The paper's Epinion row: DRM with both scores, and the hinge alone, by its protocol.

    python -m bench.epinion --data PATH [--seeds 5]

PATH is the folder that holds epinions/epinions_rating_with_timestamp.mat. Prepared by `prepare epinion` (70/10/20),
trained on train + validation with the settings below, measured on test: means over the seeds, beside the published.
The published MAP@10 divides by K: it is to be compared with map_k@10.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from drm_triton import DRM, Dataset
from drm_triton.bench.quality import RESULTS, prepared
from drm_triton.run import environment

METRICS = ("map_k@10", "ndcg@10", "recall@50", "ndcg@50", "map@10")
PUBLISHED = {
    "DRM dot": (0.0144, 0.0532, 0.1361, 0.0766),
    "DRM L2": (0.0137, 0.0523, 0.1308, 0.0746),
    "hinge dot": (0.0100, 0.0387, 0.1158, 0.0610),  # its WARP and CML rows
    "hinge L2": (0.0130, 0.0493, 0.1347, 0.0736),
}
COMMON: dict[str, Any] = {"factors": 128, "lr": 0.2, "epochs": 30, "batch_size": 4096}
SETTINGS: dict[str, dict[str, Any]] = {
    "DRM dot": {**COMMON, "score": "dot", "lambda": 10.0, "tau": 1.0},
    "DRM L2": {**COMMON, "score": "l2", "lambda": 10.0, "tau": 1.0},
    "hinge dot": {**COMMON, "score": "dot", "objective": "hinge"},
    "hinge L2": {**COMMON, "score": "l2", "objective": "hinge"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--models", default=",".join(SETTINGS))
    args = parser.parse_args()
    data = Dataset.load(prepared("epinion", args.data))
    rows = {}
    for name in args.models.split(","):
        values, seconds = [], []
        for seed in range(1, args.seeds + 1):
            began = time.perf_counter()
            model = DRM(**SETTINGS[name], seed=seed, fit_on="train+valid")
            means = model.fit(data).evaluate(data.test).means
            seconds.append(time.perf_counter() - began)
            values.append([means[metric] for metric in METRICS])
            print(name, seed, " ".join(f"{m} {v:.4f}" for m, v in zip(METRICS, values[-1], strict=True)), flush=True)
        mean = np.mean(values, axis=0)
        rows[name] = {"options": SETTINGS[name], "seconds": seconds, "values": values, "published": PUBLISHED[name]}
        for metric, ours, theirs in zip(METRICS, mean, PUBLISHED[name], strict=False):
            print(f"{name:<10} {metric:<10} {ours:.4f}  published {theirs:.4f}")
    result = {
        "command": "python -m bench.epinion",
        "metrics": METRICS,
        "rows": rows,
        "environment": environment(model.config, data),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "epinion.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
