"""Quality with less memory: one Adagrad sum for each row, and factors in bfloat16.

    python -m bench.precision --data PATH [--sets ml-100k,lastfm] [--seeds 4]

The trainer keeps two float32 numbers for each factor: the factor, and Adagrad's sum of its squared gradients. Two
common savings are measured here:

- row: a row has one sum, of the mean square of its gradient, as in the embedding tables of recommenders on GPUs.
- bfloat16: the factors of the tables are bfloat16, and the sums float32. A row is read as float32, takes its step in
  float32, and is rounded: up or down at random, with probabilities that make the mean exact (stochastic), or to the
  nearest bfloat16.

The variants are an update in plain torch, with the gradients of the CPU backend. Of the savings, the trainer has
stochastic bfloat16 (`precision`). The variants called trainer are its own kernels, whose rounding differs, and their
ratio is to each other.

With d factors, a row takes 8 d bytes in float32, 4 d + 4 with row, 6 d with bfloat16, and 2 d + 4 with both.

Options are the defaults of each objective, with 45 negatives if they are sampled. Training is on train + validation,
and the metrics are those on test; there is nothing to choose. Each finished training is a line of
results/precision.jsonl. The command can be stopped at any time; when restarted, it skips these trainings. The tables
are results/precision.md.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from drm_triton import Dataset, TrainConfig
from drm_triton.bench.quality import prepared
from drm_triton.bench.record import RESULTS, environment
from drm_triton.kernels import cpu
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.protocol import ADAGRAD_EPS, GradientTerms, Rounding
from drm_triton.kernels.reference import round_bfloat16, rounding_bits
from drm_triton.names import Precision, Score
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import initial_state, interactions_to_fit, train

TRIALS = RESULTS / "precision.jsonl"
METRICS = ("ndcg@10", "recall@50")
OBJECTIVES = ("softmax", "hinge+drm")
ALLOWED = 0.99  # of the quality of float32 factors with a sum for each factor

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "row": {"by_row": True},
    "bfloat16, stochastic": {"precision": "bfloat16"},
    "bfloat16, nearest": {"precision": "bfloat16", "nearest": True},
    "row, bfloat16, stochastic": {"by_row": True, "precision": "bfloat16"},
    "trainer, float32": {"trainer": True},
    "trainer, bfloat16": {"trainer": True, "precision": "bfloat16"},
}


def gradient_sums(table: Tensor, terms: GradientTerms, dense: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the rows that take a step [T], and their gradients [T, d] under `dot` and `cosine`."""
    rows, m = terms.rows.flatten().numpy(), terms.rows.shape[1]
    entries = terms.coefficients.flatten().numpy(), (rows, terms.sources.repeat_interleave(m).numpy())
    matrix = scipy.sparse.csr_matrix(entries, shape=(len(table), len(terms.vectors)))
    if dense is not None:
        return torch.arange(len(table)), dense + torch.from_numpy(matrix @ terms.vectors.numpy())
    touched = np.unique(rows)
    return torch.from_numpy(touched).long(), torch.from_numpy(matrix[touched] @ terms.vectors.numpy())


def update_rows(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float,
    score: Score,
    dense: Tensor | None = None,
    rounding: Rounding | None = None,
    nearest: bool = False,
) -> None:
    """Take a step like `protocol.Backend.update_rows`; `state` is [R, d], or [R, 1] with one sum for each row.

    With `nearest`, rows that are to be rounded are rounded to the nearest bfloat16.
    """
    rows, grad = gradient_sums(table, terms, dense)
    row = table[rows]
    if score == "cosine":
        grad -= (grad * row).sum(1, keepdim=True) * row
    square = grad.square()
    state[rows] += square if state.shape == table.shape else square.mean(1, keepdim=True)
    row -= lr * grad / (state[rows].sqrt() + ADAGRAD_EPS)
    norm = row.norm(dim=1, keepdim=True)
    row /= torch.where(norm > 0, norm, 1) if score == "cosine" else norm.clamp(min=1)
    if rounding is not None:
        row = row.bfloat16().float() if nearest else round_bfloat16(row, rounding_bits(rounding, rows, row.shape[1]))
    table[rows] = row


def train_and_measure(
    data: Dataset,
    objective: str,
    seed: int,
    by_row: bool = False,
    precision: Precision = "float32",
    nearest: bool = False,
    trainer: bool = False,
) -> dict[str, float]:
    """Train once; return the metrics on test."""
    config = TrainConfig.from_mapping(
        {
            "objective": objective,
            "eta": 45,
            "seed": seed,
            "precision": precision,
            "fit_on": "train+valid",
            "eval_every": 0,
            "backend": "cpu",
        }
    )
    fit = interactions_to_fit(data, config)
    state = initial_state(config, fit, torch.device("cpu"))
    backend: Any = cpu
    if by_row:
        state.U_state, state.V_state = state.U_state[:, :1].clone(), state.V_state[:, :1].clone()
    if not trainer:
        backend = SimpleNamespace(**{**vars(cpu), "update_rows": partial(update_rows, nearest=nearest)})
    train(state, config, data, SingleProcess(state, config, data, fit, backend))
    means = evaluate(factor_ranker(cpu, state.U, state.V, config.score_in_force), fit, data.test).means
    return {name: means[name] for name in METRICS}


def finished() -> list[dict[str, Any]]:
    """Return the finished trainings."""
    return [json.loads(line) for line in TRIALS.read_text().splitlines()] if TRIALS.exists() else []


def measure(data: Dataset, name: str, objective: str, variant: str, seed: int) -> None:
    """Train and record the result, unless it is finished."""
    task = {"set": name, "objective": objective, "variant": variant, "seed": seed}
    if any({key: row[key] for key in task} == task for row in finished()):
        return
    results = train_and_measure(data, objective, seed, **VARIANTS[variant])
    row = {**task, **results, "processor": environment()["processor"]}
    with open(TRIALS, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table for each set and objective: means over the seeds, and their ratios to float32."""
    processors = {
        name: dict.fromkeys(row["variant"] for row in rows if row["processor"] == name)
        for name in dict.fromkeys(row["processor"] for row in rows)
    }
    lines = [
        "# Less memory for factors and Adagrad's sums",
        "",
        "Means on test over the seeds, with the defaults of each objective, and in brackets the mean over the seeds of",
        "the ratio to float32 with the same seed ± its standard error.",
        f"Written on {environment()['date'][:10]} by `python -m bench.precision`. Processors:",
        "",
        *(f"- {name}: {'; '.join(variants)}" for name, variants in processors.items()),
    ]
    measured = [variant for variant in VARIANTS if any(row["variant"] == variant for row in rows)]
    least = dict.fromkeys(measured, 1.0)
    for name, objective in dict.fromkeys((row["set"], row["objective"]) for row in rows):
        lines += [
            "",
            f"## {name}, {objective}",
            "",
            f"| variant | {' | '.join(METRICS)} | seeds |",
            "|---|---|---|---|",
        ]
        results = {
            variant: {
                row["seed"]: row
                for row in rows
                if (row["set"], row["objective"], row["variant"]) == (name, objective, variant)
            }
            for variant in measured
        }
        for variant, of_seed in results.items():
            whole = results["trainer, float32" if variant.startswith("trainer") else "float32"]
            seeds = sorted(set(of_seed) & set(whole))
            cells = []
            for metric in METRICS:
                values = np.array([of_seed[seed][metric] for seed in seeds])
                ratios = values / [whole[seed][metric] for seed in seeds]
                error = ratios.std(ddof=1) / len(seeds) ** 0.5 if len(seeds) > 1 else float("nan")
                least[variant] = min(least[variant], ratios.mean())
                cells.append(f"{values.mean():.4f} ({ratios.mean():.3f} ± {error:.3f})")
            lines.append(f"| {variant} | {' | '.join(cells)} | {len(seeds)} |")
    lines += [
        "",
        f"The least ratio of each variant; the limit is {ALLOWED}:",
        "",
        "| variant | least ratio | |",
    ]
    lines += ["|---|---|---|"]
    for variant, ratio in least.items():
        lines.append(f"| {variant} | {ratio:.4f} | {'' if ratio >= ALLOWED else 'not '}within |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="ml-100k,lastfm")
    parser.add_argument("--seeds", type=int, default=4)
    args = parser.parse_args()
    set_threads(1)  # the tables are small, and threads that wait for each other slow the update down
    torch.set_num_threads(1)
    for seed in range(args.seeds):
        for name in args.sets.split(","):
            data = Dataset.load(prepared(name, args.data))
            for objective in OBJECTIVES:
                for variant in VARIANTS:
                    measure(data, name, objective, variant, seed)
    (RESULTS / "precision.md").write_text(report(finished()))


if __name__ == "__main__":
    main()
