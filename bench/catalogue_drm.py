"""A relaxed top K over the whole catalogue: NeuralSort (DRM) and LapSum, alone and added to the softmax.

    python -m bench.catalogue_drm --data PATH [--sets ml-100k,lastfm,amazon,epinion] [--seeds 1] [--workers 2]

The trainer has DRM on sampled lists only. Here the list of a user is the catalogue of N items, its positives are the n
items of the user, and its loss is ||y - Q||^2 / sqrt(n), with the same factor as the softmax of the trainer. Q is the
soft top K of NeuralSort or LapSum. The setting `log` has another loss, -sum_i y_i log Q_i / sqrt(n). A step of B users
costs three products of 2 B N d operations, for the scores and the two gradients, as that of the softmax does, and one
soft top K of B lists, which passes over the B N scores a few times. With the softmax, scores and gradients are computed
for both parts.

The loop, the update, the batches and the validation are those of the trainer. Only the operation that computes
gradients is replaced, for sampled lists too, where LapSum takes the place of NeuralSort. Options that are not named are
the defaults. On epinion, the softmax of the trainer is measured with pools and with the whole catalogue.

Each finished training is a line of results/catalogue_drm.jsonl; a restarted command skips these trainings. Seconds are
processor time of the training loop on one thread, so that other load on the machine does not count. The tables are
results/catalogue_drm.md.
"""

import argparse
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from drm_triton import Dataset, TrainConfig, drm_loss, soft_topk
from drm_triton.bench import quality
from drm_triton.kernels import get_backend
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.catalogue import CataloguePlan
from drm_triton.kernels.protocol import (
    Backend,
    CatalogueBatch,
    CatalogueGradients,
    ListTerms,
    Objective,
)
from drm_triton.machine import processor
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import initial_state, train
from drm_triton.training.preflight import warm_up

TRIALS = quality.RESULTS / "catalogue_drm.jsonl"
SETS = ("ml-100k", "lastfm", "amazon")  # and epinion, for the pool
METRICS = ("ndcg@10", "recall@50")
REACHED = 1e-3  # a positive is reached by a gradient of more than this part of the user's largest one

Options = dict[str, Any]
SOFTMAX: Options = {"objective": "softmax", "negatives": "all"}
SAMPLED: Options = {"objective": "drm", "negatives": "sampled", "score": "dot", "eta": 45}


def top(relaxation: str, k: int | None, tau: float, weight: float | None = None, **more: Any) -> Options:
    """Return a soft top K that is added to the objective with a weight, or replaces it with None."""
    return {"top": {"relaxation": relaxation, "k": k, "tau": tau, "weight": weight, **more}}


# The options of `TrainConfig`, and perhaps a soft top K.
COSINE: Options = {**SOFTMAX, "score": "cosine"}
SETTINGS: dict[str, list[Options]] = {
    "Softmax over the catalogue": [COSINE, {**SOFTMAX, "score": "dot"}],
    "NeuralSort over the catalogue": [
        *({**COSINE, **top("neuralsort", k, tau)} for k in (1, 5, 20) for tau in (0.5, 5.0)),
        *({**COSINE, **top("neuralsort", 5, tau)} for tau in (0.2, 20.0)),
        {**COSINE, **top("neuralsort", None, 5.0)},
        *({**SOFTMAX, "score": "dot", **top("neuralsort", 5, tau)} for tau in (0.5, 5.0)),
    ],
    "Softmax and NeuralSort over the catalogue": [
        {**COSINE, **top("neuralsort", 5, 0.5, 0.1)},
        *({**COSINE, **top("neuralsort", 5, 5.0, weight)} for weight in (0.1, 1.0)),
    ],
    "LapSum over the catalogue": [{**COSINE, **top("lapsum", k, tau)} for k in (5, 20) for tau in (0.1, 0.2)],
    "LapSum with the loss `log` over the catalogue": [{**COSINE, **top("lapsum", k, 0.2, log=True)} for k in (5, 20)],
    "Softmax and LapSum over the catalogue": [{**COSINE, **top("lapsum", 20, 0.2, weight)} for weight in (0.1, 1.0)],
    "Lists of one positive and 45 negatives": [
        {**SAMPLED, **top("neuralsort", 1, 0.5)},
        *({**SAMPLED, **top("lapsum", 1, tau)} for tau in (0.2, 0.5)),
    ],
}
SHORT: Options = {"epochs": 10, "lr": 0.4}
EPINION: list[Options] = [{**COSINE, **SHORT, "pool": pool} for pool in (8192, 16384, TrainConfig.pool)]


# -- gradients ---------------------------------------------------------------------------------------------------------


def top_gradient(s: Tensor, y: Tensor, top: Options) -> tuple[Tensor, Tensor]:
    """Return the loss [B] of the soft top K of scores s [B, n] against relevance y [B, n], and its gradient to s."""
    s = s.detach().requires_grad_()
    if top["relaxation"] == "neuralsort":
        loss = drm_loss(s, y, top["k"], top["tau"], reduction="none", validate=False)
    else:
        Q = soft_topk(s, top["k"], top["tau"], method="lapsum", validate=False)
        distance = (y - Q).square()
        loss = (-y * Q.clamp(min=torch.finfo(Q.dtype).tiny).log() if top.get("log") else distance).sum(1)
    return loss.detach(), torch.autograd.grad(loss.sum(), s)[0]


def catalogue_lists(U: Tensor, V: Tensor, batch: CatalogueBatch) -> tuple[Tensor, Tensor]:
    """Return scores and relevance [B, N] of lists that are the whole catalogue."""
    s = U[batch.users.long()] @ V.T
    y = torch.zeros_like(s)
    y[torch.arange(len(y)).repeat_interleave(batch.indptr.diff()), batch.indices.long()] = 1
    return s, y


def relevance_of_lists(s: Tensor, rho: int) -> Tensor:
    """Return the relevance [B, n] of sampled lists: their first rho items are the positives."""
    return (torch.arange(s.shape[1]) < rho).to(s.dtype).expand_as(s)


def with_top(backend: Backend, top: Options) -> Backend:
    """Return a backend whose gradients are those of a soft top K, or have them added."""
    weight = 1.0 if top["weight"] is None else top["weight"]

    def catalogue_gradients(U: Tensor, V: Tensor, batch: CatalogueBatch, objective: Objective) -> CatalogueGradients:
        loss, g = top_gradient(*catalogue_lists(U, V, batch), top)
        scale = weight * batch.indptr.diff().rsqrt()
        g *= scale[:, None]
        part = CatalogueGradients(scale * loss, g @ V, g.T @ U[batch.users.long()])
        if top["weight"] is None:
            return part
        softmax = backend.catalogue_gradients(U, V, batch, objective)
        return CatalogueGradients(*(a + b for a, b in zip(softmax, part, strict=True)))

    def list_terms(
        U: Tensor, V: Tensor, batch: ListBatch, objective: Objective, weights: Tensor | None = None
    ) -> ListTerms:
        lists = backend.list_gradients(U, V, batch, objective)
        loss, g = top_gradient(lists.scores, relevance_of_lists(lists.scores, objective.rho), top)
        part = {"loss": loss, "g": g, "user_grad": (g[:, None] @ V[batch.items.long()])[:, 0]}
        kept = 0.0 if top["weight"] is None else 1.0
        lists = lists._replace(**{name: kept * getattr(lists, name) + weight * x for name, x in part.items()})
        return lists.terms(U, batch, weights)

    operations = {name: getattr(backend, name) for name in ("name", "sample_lists", "update_rows")}
    own = {"catalogue_gradients": catalogue_gradients, "list_terms": list_terms}
    return cast(Backend, SimpleNamespace(**operations, **own))


def share_reached(s: Tensor, y: Tensor, top: Options) -> float:
    """Return the share of all positives that have a gradient."""
    size = top_gradient(s, y, top)[1].abs()
    reached = (size > REACHED * size.amax(1, keepdim=True)) & (y > 0)
    return float(reached.sum() / y.sum())


# -- trainings ---------------------------------------------------------------------------------------------------------


def train_and_measure(task: Options) -> Options:
    """Train and evaluate once, with one thread. Also measure which positives have a gradient in the first step."""
    torch.set_num_threads(1)
    data, device, backend = Dataset.load(task["data"]), torch.device("cpu"), get_backend("cpu")
    options = dict(task["options"])
    top = options.pop("top", None)
    config = TrainConfig(**options, seed=task["seed"], eval_every=0)
    warm_up(config, backend, device)
    state = initial_state(config, data.train, device)
    engine = SingleProcess(state, config, data, data.train, backend if top is None else with_top(backend, top))
    reached = None
    if top is not None:
        stop = min(config.batch_in_force, engine.n_lists)
        if isinstance(engine.plan, CataloguePlan):
            s, y = catalogue_lists(state.U, state.V, engine.plan.batch(0, 0, stop))
        else:
            batch = backend.sample_lists(engine.plan, 0, 0, stop)
            s = backend.list_gradients(state.U, state.V, batch, engine.objective).scores
            y = relevance_of_lists(s, config.rho)
        reached = share_reached(s, y, top)
    began = time.process_time()
    train(state, config, data, engine)
    seconds = time.process_time() - began
    means = evaluate(factor_ranker(backend, state.U, state.V, config.score_in_force), data.train, data.valid).means
    return {**task, "seconds": round(seconds, 2), "reached": reached, **{name: means[name] for name in quality.METRICS}}


def task(name: str, options: Options, seed: int) -> Options:
    """Return a training, described as those of `bench.quality`."""
    return {"set": name, "model": "DRM", "on": "valid", "options": options, "seed": seed}


def tasks_of(name: str, seed: int) -> list[Options]:
    """Return the trainings on a set."""
    settings = EPINION if name == "epinion" else [options for group in SETTINGS.values() for options in group]
    return [task(name, options, seed) for options in settings]


# -- tables ------------------------------------------------------------------------------------------------------------


def report(results: list[Options], seeds: int) -> str:
    """Format what is finished. A cell is the mean over the seeds that are finished, and empty without any."""
    found = {quality.key(result): result for result in results}

    def mean(name: str, options: Options, value: str) -> float | None:
        keys = [quality.key(task(name, options, seed)) for seed in range(seeds)]
        values = [found[key][value] for key in keys if key in found and found[key][value] is not None]
        return float(np.mean(values)) if values else None

    def cell(name: str, options: Options) -> str:
        means = (mean(name, options, value) for value in (*METRICS, "seconds"))
        values = [x for x in means if x is not None]  # all of them, or none
        return "{:.4f} / {:.4f} ({:.1f})".format(*values) if values else ""

    def ratio(options: Options) -> str:
        """Return the mean ratio to the default over all sets, and nothing if one of them is not finished."""
        pairs = [(mean(name, options, METRICS[0]), mean(name, COSINE, METRICS[0])) for name in SETS]
        ratios = [a / b for a, b in pairs if a is not None and b is not None]
        return f"{np.mean(ratios):.3f}" if len(ratios) == len(SETS) else ""

    def reached(options: Options) -> str:
        """Return the shares of positives with a gradient, one for each set."""
        shares = [mean(name, options, "reached") for name in SETS]
        return " / ".join("" if share is None else f"{share:.0%}" for share in shares).strip(" /")

    lines = [
        "# A relaxed top K over the whole catalogue",
        "",
        f"Validation NDCG@10 / Recall@50 (seconds), seeds: {seeds}. Seconds are processor time of the training loop on",
        "one thread. The ratio is that of NDCG@10 to the first row, the default of the trainer. Reached: share of the",
        f"positives with a gradient above {REACHED} of the user's largest one in the first step, that is, after the",
        "spectral initialisation, on each set. An empty cell is not finished.",
        f"{processor()}, {time.strftime('%Y-%m-%d')}; made by `python -m bench.catalogue_drm`.",
    ]
    for title, settings in SETTINGS.items():
        columns = [*SETS, "mean ratio", "reached"]
        lines += ["", f"## {title}", "", "| setting | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for options in settings:
            cells = [*(cell(name, options) for name in SETS), ratio(options), reached(options)]
            lines.append(f"| {describe(options)} | " + " | ".join(cells) + " |")
    short = ", ".join(f"`{name}` {value}" for name, value in SHORT.items())
    lines += [
        "",
        "## Epinion: pool or whole catalogue",
        "",
        f"Softmax with {short}. A pool is drawn in a catalogue of more than twice its size. Epinion has",
        f"59,214 items, so the default `pool` of {TrainConfig.pool:,} draws none.",
        "",
        "| negatives of a step | NDCG@10 / Recall@50 (seconds) |",
        "|---|---|",
    ]
    for options in EPINION:
        negatives = "the whole catalogue" if options["pool"] == TrainConfig.pool else f"a pool of {options['pool']:,}"
        lines.append(f"| {negatives} | {cell('epinion', options)} |")
    return "\n".join(lines) + "\n"


def describe(options: Options) -> str:
    """Return the options of a setting that differ within its table."""
    top = options.get("top", {})
    words = [f"{name} {top[key]}" for name, key in (("tau", "tau"), ("weight", "weight")) if top.get(key) is not None]
    relaxation = [{"neuralsort": "NeuralSort", "lapsum": "LapSum"}[top["relaxation"]]] if top else []
    cut_off = [f"K {'n' if top['k'] is None else top['k']}"] if top else []
    return ", ".join([options["score"], *relaxation, *cut_off, *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="ml-100k,lastfm,epinion,amazon")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    sets = args.sets.split(",")
    if not args.report_only:
        os.environ.update(NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1")  # one core for each worker
        places = {name: quality.prepared(name, args.data) for name in sets}
        tasks = [
            {**task, "data": places[name]}
            for seed in range(args.seeds) for name in sets for task in tasks_of(name, seed)
        ]  # fmt: skip
        quality.run_all(tasks, args.workers, TRIALS, train_and_measure)
    text = report(quality.finished(TRIALS), args.seeds)
    (quality.RESULTS / "catalogue_drm.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
