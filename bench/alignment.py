"""Does a falling loss mean a better ranking? The paper's Table 5: correlation of training loss and metrics over epochs.

    python -m bench.alignment --data PATH [--set lastfm] [--epochs 20] [--seeds 3]

Four objectives, each a run of its own whose metrics.jsonl gives the loss and the validation metrics; the metrics on the
training part are measured after each epoch (every item ranked, none excluded). Pearson's correlation over the epochs
less the first two, as in the paper: constant learning rate, factors started at random. Means over the seeds;
-1 is best. The rate is small enough for training to go on through all epochs: once the metrics on the training part
have settled, as they do within five at a rate of .05, a correlation with them says nothing.
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
from drm_triton.names import ObjectiveName
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.run import processor, read_metrics
from drm_triton.training.state import EpochEnd

OBJECTIVES: tuple[ObjectiveName, ...] = ("mse", "hinge", "mse+drm", "hinge+drm")
METRICS = ("map@10", "ndcg@10")
PUBLISHED = {  # on ML-20M: training MAP@10 and NDCG@10, then validation
    "mse": (-0.957, -0.946, -0.943, -0.745),
    "hinge": (-0.983, -0.983, -0.978, -0.915),
    "mse+drm": (-0.984, -0.972, -0.976, -0.946),
    "hinge+drm": (-0.985, -0.984, -0.936, -0.970),
}
SKIPPED = 2  # epochs in which everything changes


def correlations(data: Dataset, objective: ObjectiveName, epochs: int, seed: int, run: Path) -> list[float]:
    """Of the loss with the training and the validation metrics of one training."""
    model = DRM(objective=objective, epochs=epochs, seed=seed, schedule="constant", init="normal", lr=0.02, rho=3)
    nothing = CSR.empty(data.train.shape)
    on_train: list[list[float]] = []

    def measure(end: EpochEnd) -> None:
        ranker = factor_ranker(get_backend("cpu"), end.state.U, end.state.V, model.config.score)
        means = evaluate(ranker, nothing, data.train, (10,), min_train=0).means
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
        f"{args.seeds} seeds; in brackets the paper's on ML-20M.",
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
