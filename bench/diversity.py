"""The price of diversity: NDCG@10 and the diversity of lists that are re-ranked by maximal marginal relevance (MMR).

    python -m bench.diversity --data PATH [--sets lastfm,ml-100k] [--seeds 3]

For each data set and seed, the default model is trained on train + validation, and `diversity` from 0 to 0.9 re-ranks
the lists of the same model. Measured on test: ndcg@10; diversity@10 (1 minus the mean cosine of the interactions of
pairs of items, see docs/metrics.md, which MMR does not know: it compares factors); and coverage@10, the share of all
items in at least one list. Work for a list of k items: a search for 10 k items, and 10 k^2 d operations for cosines.

Each finished training is a line of results/diversity.jsonl for each value of `diversity`. The command can be stopped;
when restarted, it skips what is finished. The table is results/diversity.md.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drm_triton import DRM, Dataset
from drm_triton.bench.quality import prepared
from drm_triton.bench.record import RESULTS, save_table
from drm_triton.data.csr import CSR
from drm_triton.ranking.evaluate import evaluate
from drm_triton.ranking.rules import Rules

LINES = RESULTS / "diversity.jsonl"
DIVERSITIES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
METRICS = ("ndcg@10", "diversity@10", "coverage@10")


def measure(model: DRM, data: Dataset, diversity: float) -> dict[str, float]:
    """Return the metrics of the re-ranked lists."""
    index: Any = model.ruled_index(Rules.of(diversity=diversity))

    def rank(users: NDArray[np.int64], seen: CSR, k: int) -> NDArray[np.int32]:
        items: NDArray[np.int32] = index.search(model.queries(users), k, seen)[0]
        return items

    seen, held_out = model.held_out(data)
    means = evaluate(rank, seen, held_out, (10,), beyond_accuracy=True).means
    return {name: means[name] for name in METRICS}


def finished() -> list[dict[str, Any]]:
    """Return what is measured."""
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def run(name: str, data: Dataset, seed: int) -> None:
    """Train once and measure each value of `diversity`, unless it is finished."""
    done = {row["diversity"] for row in finished() if (row["set"], row["seed"]) == (name, seed)}
    if done >= set(DIVERSITIES):
        return
    model = DRM(seed=seed, fit_on="train+valid", eval_every=0).fit(data)
    for diversity in sorted(set(DIVERSITIES) - done):
        row = {"set": name, "seed": seed, "diversity": diversity, **measure(model, data, diversity)}
        with open(LINES, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


def table(rows: list[dict[str, Any]]) -> str:
    """Return means over seeds, and NDCG@10 relative to that without diversity."""
    header = ["set", "diversity", *METRICS, "ndcg@10, relative", "seeds"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for name in dict.fromkeys(row["set"] for row in rows):
        means = {}
        for value in DIVERSITIES:
            found = [row for row in rows if (row["set"], row["diversity"]) == (name, value)]
            if found:
                means[value] = {metric: statistics.mean(row[metric] for row in found) for metric in METRICS}
                cells = [f"{means[value][metric]:.4f}" for metric in METRICS]
                relative = f"{means[value]['ndcg@10'] / means[0.0]['ndcg@10']:.3f}"
                lines.append(f"| {name} | {value} | {' | '.join(cells)} | {relative} | {len(found)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Run what is not finished, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="lastfm,ml-100k")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    for name in arguments.sets.split(","):
        data = Dataset.load(prepared(name, arguments.data))
        for seed in range(arguments.seeds):
            run(name, data, seed)
    note = (
        "Test part, default model, lists re-ranked with `diversity`. Means over the seeds. `diversity@10` is measured "
        "with the interactions of items; MMR itself compares their factors."
    )
    save_table("diversity", "The price of diversity", note, table(finished()))


if __name__ == "__main__":
    main()
