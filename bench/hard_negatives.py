"""Effect of hard negatives: 45 uniform ones, the hardest 45 of 180, and all 180, with `hinge+drm`.

    python -m bench.hard_negatives --data PATH [--sets lastfm,amazon,citeulike]

The hardest negatives are those with the highest scores when the list is sampled. This costs another gather and a
selection for each list. The table of validation NDCG@10 and seconds of training is results/hard_negatives.md.
"""

import argparse
import dataclasses
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from drm_triton import Dataset, TrainConfig
from drm_triton.bench.quality import RESULTS, prepared
from drm_triton.kernels import get_backend
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.protocol import Backend, ListPlan, Objective
from drm_triton.machine import processor
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import initial_state, train
from drm_triton.training.preflight import warm_up
from drm_triton.training.state import State

CANDIDATES = 180


def with_hard_negatives(backend: Backend, state: State) -> Backend:
    """Return a backend whose lists keep the highest-scored of CANDIDATES negatives."""
    wide_plans: list[ListPlan] = []  # the plan with CANDIDATES negatives, created once

    def sample_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
        if not wide_plans:
            wide_plans.append(dataclasses.replace(plan, eta=CANDIDATES))
        batch = backend.sample_lists(wide_plans[0], epoch, start, stop)
        positives, negatives = batch.positives(plan.rho), batch.items[:, plan.rho :]
        scores = backend.list_gradients(state.U, state.V, batch, Objective(plan.rho, drm=False)).scores
        hardest = scores[:, plan.rho :].topk(plan.eta, dim=1).indices
        return ListBatch(batch.users, torch.cat([positives, negatives.gather(1, hardest)], dim=1))

    return cast(
        Backend,
        SimpleNamespace(sample_lists=sample_lists, list_terms=backend.list_terms, update_rows=backend.update_rows),
    )


def trained(data: Dataset, hard: bool, **options: Any) -> tuple[float, float]:
    """Train; return validation NDCG@10 and seconds."""
    config, backend = TrainConfig(eval_every=0, **{"objective": "hinge+drm", **options}), get_backend("cpu")
    warm_up(config, backend, torch.device("cpu"))
    state = initial_state(config, data.train, torch.device("cpu"))
    began = time.perf_counter()
    backend = with_hard_negatives(backend, state) if hard else backend
    train(state, config, data, SingleProcess(state, config, data, data.train, backend))
    seconds = time.perf_counter() - began
    ranker = factor_ranker(backend, state.U, state.V, config.score_in_force)
    return evaluate(ranker, data.train, data.valid, (10,)).means["ndcg@10"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="lastfm,amazon,citeulike")
    args = parser.parse_args()
    sets = args.sets.split(",")
    lines = [
        f"Validation NDCG@10 (seconds of training); {processor()}, {time.strftime('%Y-%m-%d')}; made by "
        "`python -m bench.hard_negatives`.",
        "",
        "| negatives | " + " | ".join(sets) + " |",
        "|---|" + "---|" * len(sets),
    ]
    data = {name: Dataset.load(prepared(name, args.data)) for name in sets}
    variants: dict[str, tuple[bool, dict[str, Any]]] = {
        "45 uniform": (False, {"eta": 45}),
        f"hardest 45 of {CANDIDATES}": (True, {"eta": 45, "share": 1}),  # each user has other hard negatives
        f"{CANDIDATES} uniform": (False, {"eta": CANDIDATES}),
    }
    for label, (hard, options) in variants.items():
        cells = [trained(data[name], hard, **options) for name in sets]
        lines.append(f"| {label} | " + " | ".join(f"{value:.4f} ({seconds:.0f})" for value, seconds in cells) + " |")
        print(lines[-1], flush=True)
    (RESULTS / "hard_negatives.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
