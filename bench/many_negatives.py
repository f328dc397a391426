"""How the ranking depends on the number of negatives in a list, eta, on catalogues of 1,400 to 36,000 items.

    python -m bench.many_negatives --data PATH [--sets ml-100k,lastfm] [--seeds 1] [--workers 2]

Among more negatives, the hardest is harder: among eta of the N items, it is at about rank N / eta of the catalogue. The
hinge of hinge+drm takes only the hardest. Other objectives tell its part from that of the others: each loss alone, DRM
with the sampled softmax, and a hinge that meets only the first 45 negatives of each list, beside DRM over all. The
trainer does not have the last one, so it is made here from two calls of the CPU backend. Nor does it have a sampled
softmax whose sum is scaled to the catalogue.

All other options are the defaults; softmax+drm has cosine scores. On the public splits, which have no validation part,
a tenth of the training part is held out, as in `bench.public_splits`. Each finished training is a line of
results/many_negatives.jsonl; a restarted command skips these trainings. A second seed is trained on the small sets, if
asked for. The table is results/many_negatives.md.
"""

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from drm_triton import Dataset, TrainConfig
from drm_triton.bench import public_splits, quality
from drm_triton.data.leaderboards import LEAST_TRAIN
from drm_triton.kernels import get_backend
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.cpu.runtime.threads import set_threads
from drm_triton.kernels.protocol import Backend, ListTerms, Objective
from drm_triton.machine import processor
from drm_triton.names import MIN_TRAIN
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import initial_state, train
from drm_triton.training.preflight import warm_up

TRIALS = quality.RESULTS / "many_negatives.jsonl"
METRICS = ("ndcg@10", "recall@50")
FEW = 45  # negatives that the hinge of the third objective meets

Options = dict[str, Any]
HINGE: Options = {"objective": "hinge+drm"}
FEW_HINGE: Options = {**HINGE, "variant": f"{FEW} for the hinge"}
DRM: Options = {"objective": "drm"}
SOFTMAX: Options = {"objective": "softmax+drm", "score": "cosine"}
SAMPLED: Options = {"objective": "softmax", "negatives": "sampled"}
SCALED: Options = {**SAMPLED, "variant": "sum scaled"}
OTHERS: list[Options] = [{"objective": name} for name in ("hinge", "psl", "bpr")]
SMALL = ("ml-100k", "lastfm")  # cheap: all rows and further seeds
MOST = (*SMALL, "amazon", "citeulike")
ALL = (*MOST, "ml-1m-m1", "amazon-cds-m1")


def with_etas(part: Options, *etas: int) -> list[Options]:
    """Return the options of an objective with each number of negatives."""
    return [{**part, "eta": eta} for eta in etas]


ROWS: list[tuple[Options, tuple[str, ...]]] = [  # and the sets on which they are trained
    *((options, ALL) for options in with_etas(HINGE, 15, 45, 200)),
    *((options, MOST) for options in with_etas(DRM, 15, 45)),
    *((options, ALL) for options in with_etas(DRM, 200)),
    *((options, MOST) for options in with_etas(FEW_HINGE, 200)),
    *((options, (*MOST, "amazon-cds-m1")) for options in with_etas(HINGE, 90)),
    *((options, MOST) for options in with_etas(SAMPLED, 15, 45, 200)),
    *(({**HINGE, "eta": 200, "tau": tau}, MOST) for tau in (0.25, 1.0)),
    *((options, SMALL) for options in with_etas(SCALED, 15, 45, 200)),
    *((options, SMALL) for part in OTHERS for options in with_etas(part, 15, 45, 200)),
    *((options, MOST) for options in with_etas(SOFTMAX, 15, 45, 200)),
    *(({**part, "tau": tau}, SMALL) for part in with_etas(DRM, 200) + with_etas(HINGE, 15, 45) for tau in (0.25, 1.0)),
    ({**HINGE, "eta": 1000, "share": 256}, MOST),
    *((options, SMALL) for part in (HINGE, DRM, FEW_HINGE) for options in with_etas(part, 1000)),
]


def hinge_of_few(backend: Backend) -> Backend:
    """Return a backend whose hinge meets only the first FEW negatives of a list. DRM has all of them."""

    def list_terms(U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, weights: None = None) -> ListTerms:
        few = ListBatch(batch.users, batch.items[:, : objective.rho + FEW].contiguous())
        hinge = backend.list_gradients(U, V, few, dataclasses.replace(objective, drm=False))
        every = backend.list_gradients(U, V, batch, dataclasses.replace(objective, hinge=False))
        every.g[:, : objective.rho + FEW] += hinge.g
        both = every._replace(
            hinge=hinge.hinge, loss=hinge.loss + every.loss, user_grad=hinge.user_grad + every.user_grad
        )
        return both.terms(U, batch, weights)

    return with_terms(backend, list_terms)


def scaled_softmax(backend: Backend) -> Backend:
    """Return a backend whose sampled softmax, for one positive, multiplies the sum over the negatives by N / eta."""

    def list_terms(U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, weights: None = None) -> ListTerms:
        lists = backend.list_gradients(U, V, batch, objective)
        z = lists.scores / objective.temperature
        scale = math.log(len(V) / (z.shape[1] - 1))
        gap = z[:, 1:].logsumexp(1) + scale - z[:, 0]
        loss, wrong = torch.nn.functional.softplus(gap), gap.sigmoid()[:, None]
        g = torch.cat([-wrong, wrong * z[:, 1:].softmax(1)], 1) / objective.temperature
        user_grad = torch.einsum("bn,bnd->bd", g, V[batch.items.long()])
        return lists._replace(softmax=loss, loss=loss, g=g, user_grad=user_grad).terms(U, batch, weights)

    return with_terms(backend, list_terms)


def with_terms(backend: Backend, list_terms: Callable[..., ListTerms]) -> Backend:
    """Return a backend for training that has other gradients."""
    replaced = SimpleNamespace(name=backend.name, sample_lists=backend.sample_lists, list_terms=list_terms)
    replaced.update_rows = backend.update_rows
    return cast(Backend, replaced)


VARIANTS = {"": lambda backend: backend, f"{FEW} for the hinge": hinge_of_few, "sum scaled": scaled_softmax}


def train_and_measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate once, with one thread."""
    torch.set_num_threads(1)
    set_threads(1)
    data, options = Dataset.load(task["data"]), dict(task["options"])
    variant = VARIANTS[options.pop("variant", "")]
    config, backend = TrainConfig.from_mapping({**options, "seed": task["seed"], "eval_every": 0}), get_backend("cpu")
    warm_up(config, backend, torch.device("cpu"))
    state = initial_state(config, data.train, torch.device("cpu"))
    began = time.perf_counter()
    train(state, config, data, SingleProcess(state, config, data, data.train, variant(backend)))
    seconds = time.perf_counter() - began
    ranker = factor_ranker(backend, state.U, state.V, config.score_in_force)
    least = LEAST_TRAIN if task["set"] in public_splits.SETS else MIN_TRAIN
    means = evaluate(ranker, data.train, data.valid, min_train=least).means
    return {**task, "seconds": round(seconds, 2), **{name: means[name] for name in quality.METRICS}}


def prepared(name: str, data: Path) -> str:
    """Prepare a data set unless it exists; return its path."""
    if name not in public_splits.SETS:
        return quality.prepared(name, data)
    out = Path("data") / "quality" / name
    if not out.exists():
        split = public_splits.load(data / name, "valid")
        Dataset.from_csr(split.train.to_scipy(), valid=split.test.to_scipy()).save(out)
    return str(out)


def task(name: str, options: Options, seed: int) -> dict[str, Any]:
    """Return a training."""
    return {"set": name, "model": "DRM", "on": "valid", "options": options, "seed": seed}


def cell(name: str, options: Options, seeds: int, found: dict[str, dict[str, Any]]) -> str:
    """Return the means of the finished seeds."""
    keys = [quality.key(task(name, options, seed)) for seed in range(seeds)]
    results = [found[key] for key in keys if key in found]
    return " / ".join(f"{np.mean([result[metric] for result in results]):.4f}" for metric in METRICS if results)


def order(row: tuple[Options, tuple[str, ...]]) -> tuple[Any, ...]:
    """Return what the rows of the table are sorted by."""
    options = row[0]
    kinds = [part["objective"] for part in (HINGE, DRM, SOFTMAX, SAMPLED, *OTHERS)]
    return (
        kinds.index(options["objective"]),
        options.get("variant", ""),
        options.get("tau", 0.5) != 0.5,
        options["eta"],
    )


def rows(found: dict[str, dict[str, Any]], seeds: int, items: dict[str, int]) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| objective | eta | tau | share | " + " | ".join(f"{name} ({items[name]:,})" for name in items) + " |"
    yield "|---" * (4 + len(items)) + "|"
    for options, _ in sorted(ROWS, key=order):
        title = ", ".join(filter(None, (options["objective"], options.get("variant"))))
        values = [title, options["eta"], *(options.get(key, getattr(TrainConfig, key)) for key in ("tau", "share"))]
        cells = [cell(name, options, seeds, found) for name in items]
        if any(cells):
            yield "| " + " | ".join(map(str, [*values, *cells])) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(ALL))
    parser.add_argument("--seeds", type=int, default=1, help=f"on {' and '.join(SMALL)}; the others have one")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    os.environ.update(NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1")  # one core for each worker
    places = {name: prepared(name, args.data) for name in ALL}
    tasks = [
        {**task(name, options, seed), "data": places[name]}
        for seed in range(args.seeds) for options, sets in ROWS for name in sets
        if name in args.sets.split(",") and (seed == 0 or name in SMALL)
    ]  # fmt: skip
    if not args.report_only:
        quality.run_all(tasks, args.workers, TRIALS, train_and_measure)
    found = {quality.key(result): result for result in quality.finished(TRIALS)}
    items = {name: Dataset.load(place).n_items for name, place in places.items()}
    seeds = "one seed" if args.seeds == 1 else f"{args.seeds} seeds on {' and '.join(SMALL)}, else one"
    lines = [
        "# Number of negatives",
        "",
        f"Validation NDCG@10 / Recall@50, {seeds}. Items of the catalogue in brackets.",
        f"{processor()}, {time.strftime('%Y-%m-%d')}; made by `python -m bench.many_negatives`.",
        "",
        *rows(found, args.seeds, items),
    ]
    text = "\n".join(lines) + "\n"
    (quality.RESULTS / "many_negatives.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
