"""What keeps the factors of the paper's objective small: the unit ball, weight decay in its place, and an item bias.

    python -m bench.constraints --data PATH [--sets ml-100k,lastfm]

The paper projects each row onto the unit ball. After training, nearly all users lie on its surface, so that scores are
in [-1, 1] beside a margin of 1. Two alternatives, which the trainer does not have, are measured here with the gradients
of the CPU backend and an update in plain torch:

- decay: no projection; decay times the row is added to the gradient of each row that takes a step. The margin may
  change with it.
- bias: the last factor of every user is the constant c and takes no step, so that the last factor of an item, times c,
  is its bias. The ball is kept.

Validation NDCG@10 and Recall@50 with 45 negatives and otherwise the defaults of hinge+drm, one seed. The table is
results/constraints.md.
"""

import argparse
import dataclasses
import time
from pathlib import Path

import torch
from torch import Tensor

from drm_triton import Dataset, TrainConfig
from drm_triton.bench.peers import Factors
from drm_triton.bench.quality import RESULTS, prepared
from drm_triton.kernels import get_backend
from drm_triton.kernels.protocol import ADAGRAD_EPS
from drm_triton.machine import processor
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.loop import initial_state
from drm_triton.training.step import learning_rate, list_plan, objective_of

SETTINGS: list[dict[str, float]] = [
    {},
    *({"decay": decay} for decay in (0.01, 0.1, 1.0, 3.0, 10.0, 20.0, 30.0, 100.0)),
    *({"decay": decay, "margin": margin} for decay in (3.0, 10.0, 20.0) for margin in (0.5, 2.0)),
    *({"bias": constant} for constant in (0.1, 0.3, 0.5)),
]


def step(table: Tensor, state: Tensor, rows: Tensor, terms: Tensor, lr: float, decay: float | None) -> None:
    """Take an Adagrad step of the rows that appear in `rows` [E], whose gradients are sums of `terms` [E, d]."""
    touched, place = rows.long().unique(return_inverse=True)
    gradient = torch.zeros(len(touched), table.shape[1]).index_add_(0, place, terms)
    row = table[touched]
    if decay is not None:
        gradient += decay * row
    state[touched] += gradient.square()
    row -= lr * gradient / (state[touched].sqrt() + ADAGRAD_EPS)
    table[touched] = row if decay is not None else row / row.norm(dim=1, keepdim=True).clamp(min=1)


def train(data: Dataset, config: TrainConfig, decay: float | None = None, bias: float | None = None) -> Factors:
    """Return the factors of users and items after a training."""
    backend, device, fit = get_backend("cpu"), torch.device("cpu"), data.train
    state, plan, objective = (
        initial_state(config, fit, device),
        list_plan(config, fit, device),
        objective_of(config, fit.shape[1]),
    )
    U, V = state.U, state.V
    for state.epoch in range(config.epochs):
        for state.position in range(0, plan.n_lists, config.batch_in_force):
            if bias is not None:
                U[:, -1] = bias
            stop = min(state.position + config.batch_in_force, plan.n_lists)
            batch = backend.sample_lists(plan, state.epoch, state.position, stop)
            gradients, lr = backend.list_gradients(U, V, batch, objective), learning_rate(state, config, plan.n_lists)
            of_items = (gradients.g[:, :, None] * U[batch.users.long()][:, None]).flatten(0, 1)
            step(V, state.V_state, batch.items.flatten(), of_items, lr, decay)
            step(U, state.U_state, batch.users, gradients.user_grad, lr, decay)
    if bias is not None:
        U[:, -1] = bias
    return U, V


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="ml-100k,lastfm")
    args = parser.parse_args()
    config, sets = TrainConfig(objective="hinge+drm", eta=45), args.sets.split(",")
    lines = [
        "# The ball, weight decay, item bias",
        "",
        f"Validation NDCG@10 / Recall@50. {processor()}, {time.strftime('%Y-%m-%d')}; `python -m bench.constraints`.",
        "",
        "| setting | " + " | ".join(sets) + " |",
        "|---|" + "---|" * len(sets),
    ]
    for setting in SETTINGS:
        cells = []
        for name in sets:
            data = Dataset.load(prepared(name, args.data))
            changed = dataclasses.replace(config, margin=setting.get("margin", config.margin))
            factors = train(data, changed, setting.get("decay"), setting.get("bias"))
            ranker = factor_ranker(get_backend("cpu"), *factors, "dot")
            means = evaluate(ranker, data.train, data.valid).means
            cells.append(f"{means['ndcg@10']:.4f} / {means['recall@50']:.4f}")
        title = ", ".join(f"{key} {value:g}" for key, value in setting.items()) or "unit ball (default)"
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    (RESULTS / "constraints.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
