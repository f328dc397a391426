"""Correlation of training loss and ranking metrics over epochs: Table 5 of the paper.

    python -m bench.alignment --data PATH [--set lastfm] [--epochs 20] [--seeds 3]

Each of four objectives is trained in one run per seed. metrics.jsonl of the run contains the loss and the validation
metrics. The metrics on the training part are measured after each epoch, with all items ranked and none excluded. The
result is Pearson's correlation over all epochs except the first two, as in the paper, with a constant learning rate and
random initial factors, averaged over the seeds; -1 is best. The learning rate is small enough that training does not
converge before the last epoch. With a rate of .05 the metrics on the training part are constant after five epochs, so
that a correlation with them is meaningless.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from drm_triton import DRM, Dataset
from drm_triton.bench.quality import RESULTS, prepared
from drm_triton.data.dataset import CSR
from drm_triton.kernels import get_backend
from drm_triton.machine import processor
from drm_triton.names import ObjectiveName
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.run import read_metrics
from drm_triton.training.state import EpochEnd

OBJECTIVES: tuple[ObjectiveName, ...] = ("mse", "hinge", "mse+drm", "hinge+drm")
METRICS = ("map@10", "ndcg@10")
PUBLISHED = {  # on ML-20M: training MAP@10 and NDCG@10, then validation
    "mse": (-0.957, -0.946, -0.943, -0.745),
    "hinge": (-0.983, -0.983, -0.978, -0.915),
    "mse+drm": (-0.984, -0.972, -0.976, -0.946),
    "hinge+drm": (-0.985, -0.984, -0.936, -0.970),
}
SKIPPED = 2  # first epochs, which the correlation leaves out


def correlations(data: Dataset, objective: ObjectiveName, epochs: int, seed: int, run: Path) -> list[float]:
    """Train once; return the correlations of the loss with the training and the validation metrics."""
    model = DRM(objective=objective, epochs=epochs, seed=seed, schedule="constant", init="normal", lr=0.02, rho=3)
    no_items = CSR.empty(data.train.shape)
    on_train: list[list[float]] = []

    def measure(end: EpochEnd) -> None:
        U, V = model.factors(end.state.tensors())
        ranker = factor_ranker(get_backend("cpu"), U, V, model.score)
        means = evaluate(ranker, no_items, data.train, (10,), min_train=0).means
        on_train.append([means[name] for name in METRICS])

    model.fit(data, [measure], run=run)
    records = read_metrics(run)[SKIPPED:]
    loss = [record["loss"] for record in records]
    on_valid = [[record[f"valid/{name}"] for name in METRICS] for record in records]
    values = np.hstack([on_train[SKIPPED:], on_valid])
    return [float(np.corrcoef(loss, column)[0, 1]) for column in values.T]


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
        "| objective | train map@10 | train ndcg@10 | valid map@10 | valid ndcg@10 |",
        "|---|---|---|---|---|",
    ]
    for objective in OBJECTIVES:
        with tempfile.TemporaryDirectory() as folder:
            values = [
                correlations(data, objective, args.epochs, seed, Path(folder) / str(seed)) for seed in range(args.seeds)
            ]
        cells = [
            f"{ours:.3f} ({theirs:.3f})"
            for ours, theirs in zip(np.mean(values, axis=0), PUBLISHED[objective], strict=True)
        ]
        lines.append(f"| {objective} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    (RESULTS / "alignment.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
