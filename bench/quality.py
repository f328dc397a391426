"""Ranking quality of DRM and other models, with the protocol of the paper.

    python -m bench.quality --data PATH [--sets lastfm,amazon,...] [--budget 12] [--seeds 5] [--workers 2]

For each data set and model, `budget` random settings from the search space of the model are trained on the training
part. The setting with the best validation Recall@50 is trained `seeds` times on train + validation and evaluated on
test. Every model has the same number of trials. Each finished training is a line of results/quality.jsonl. The command
can be stopped at any time; when restarted, it skips these trainings. The table, with Welch's t-test of DRM against each
other model, is results/quality.md.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
TRIALS = RESULTS / "quality.jsonl"
METRICS = ("ndcg@10", "map@10", "recall@50", "ndcg@50")

# Arguments of `drm-triton prepare` for each set; {} is the folder of real data.
SETS = {
    "lastfm": "table --raw {}/lastfm-hetrec/user_artists.dat",
    "amazon": "table --raw {}/amazon-hin/user_item.dat --columns user,item,rating,timestamp",
    "citeulike": "lists --raw {}/citeulike-a/users.dat --leading count",
    "ml-100k": "ml-100k --raw {}/ml-100k --min-rating 4",
    "movietweetings": "table --raw {}/movietweetings-100k/ratings.dat --separator :: "
    "--columns user,item,rating,timestamp --min-user 5 --min-item 3",
    "ciao": "ciao --raw {}/ciao/ciao_rating_with_timestamp.mat --min-user 5 --min-item 3",
    "epinion": "epinion --raw {}/epinions/epinions_rating_with_timestamp.mat",
}

Space = dict[str, list[Any]]
FACTORS = [32, 64, 128]
OWN: Space = {
    "factors": FACTORS,
    "eta": [15, 45, 90],
    "lr": [0.05, 0.1, 0.2],
    "margin": [0.5, 1.0],
    "epochs": [10, 20, 30],
}
DRM: Space = {"tau": [0.5, 1.0], "lambda": [3.0, 10.0, 30.0]}
HINGE: Space = {"objective": ["hinge"], "rho": [1, 2, 3]}
SPACES: dict[str, Space] = {
    "DRM dot": {"score": ["dot"], **OWN, **DRM},
    "DRM L2": {"score": ["l2"], **OWN, **DRM},
    "hinge dot": {"score": ["dot"], **OWN, **HINGE},
    "hinge L2": {"score": ["l2"], **OWN, **HINGE},
    "ALS": {
        "factors": FACTORS,
        "regularization": [0.003, 0.01, 0.03, 0.3, 3.0, 10.0],
        "alpha": [1.0, 3.0, 5.0, 10.0, 20.0],
        "iterations": [15, 30],
    },
    "BPR": {
        "factors": FACTORS,
        "learning_rate": [0.01, 0.03, 0.05, 0.1],
        "regularization": [1e-4, 1e-3, 3e-3, 0.01, 0.03],
        "iterations": [50, 100, 200],
    },
    "WARP": {
        "no_components": FACTORS,
        "learning_rate": [0.01, 0.03, 0.05, 0.1],
        "user_alpha": [0.0, 1e-6, 1e-5],
        "item_alpha": [0.0, 1e-6, 1e-5],
        "max_sampled": [10, 20, 30, 50],
        "epochs": [10, 20, 40],
    },
}
OURS = ("DRM dot", "DRM L2")


def draws(model: str, budget: int) -> Iterator[dict[str, Any]]:
    """Yield the first `budget` settings of a model, the same for every data set and every run."""
    rng = np.random.default_rng(list(SPACES).index(model))
    for _ in range(budget):
        yield {name: values[rng.integers(len(values))] for name, values in SPACES[model].items()}


def train_and_measure(task: dict[str, Any]) -> dict[str, Any]:
    """Train and evaluate once, with one thread."""
    import torch

    import drm_triton
    from drm_triton import Dataset, TrainConfig
    from drm_triton.bench import peers
    from drm_triton.kernels import get_backend
    from drm_triton.names import Score
    from drm_triton.ranking.evaluate import evaluate, factor_ranker

    torch.set_num_threads(1)
    data = Dataset.load(task["data"])
    on, options, seed = task["on"], dict(task["options"]), task["seed"]
    seen = data.train if on == "valid" else data.train.union(data.valid)
    began = time.perf_counter()
    score: Score = "dot"
    if task["model"].startswith(("DRM", "hinge")):
        fit_on = "train" if on == "valid" else "train+valid"
        fixed = {"seed": seed, "fit_on": fit_on, "eval_every": 0, "threads": 1}
        config = TrainConfig.from_mapping({**options, **fixed})
        model = drm_triton.DRM(config).fit(data)
        factors, score = (model.user_factors, model.item_factors), config.score_in_force
    else:
        factors = getattr(peers, task["model"].lower())(seen, seed, 1, **options)
    seconds = time.perf_counter() - began
    means = evaluate(factor_ranker(get_backend("cpu"), *factors, score), seen, getattr(data, on)).means
    return {
        **task,
        "seconds": round(seconds, 2),
        **{name: means[name] for name in means if name.endswith(("@10", "@50"))},
    }


def finished(trials: Path = TRIALS) -> list[dict[str, Any]]:
    """Return the results of the finished trainings."""
    return [json.loads(line) for line in trials.read_text().splitlines()] if trials.exists() else []


def key(task: dict[str, Any]) -> str:
    """Return a text that identifies a training."""
    return json.dumps([task[name] for name in ("set", "model", "on", "options", "seed")])


def run_all(tasks: list[dict[str, Any]], workers: int, trials: Path = TRIALS) -> None:
    """Run the trainings that are not finished yet, and store each result at once."""
    done = {key(result) for result in finished(trials)}
    tasks = [task for task in tasks if key(task) not in done]
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=20) as pool:
        for number, result in enumerate(pool.imap_unordered(train_and_measure, tasks), 1):
            with open(trials, "a") as file:
                file.write(json.dumps({k: v for k, v in result.items() if k != "data"}) + "\n")
            line = " ".join(f"{name} {result[name]:.4f}" for name in METRICS)
            print(f"{number}/{len(tasks)} {result['set']} {result['model']} {line} {result['options']}", flush=True)


def chosen(name: str, model: str, budget: int) -> dict[str, Any]:
    """Return the trial with the best validation Recall@50."""
    options = list(draws(model, budget))
    trials = [
        r for r in finished() if (r["set"], r["model"], r["on"]) == (name, model, "valid") and r["options"] in options
    ]
    return max(trials, key=lambda trial: trial["recall@50"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--sets", default="lastfm,amazon,citeulike,ml-100k")
    parser.add_argument("--models", default=",".join(SPACES))
    parser.add_argument("--budget", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--report-only", action="store_true")
    args = parser.parse_args()
    sets, models = args.sets.split(","), args.models.split(",")
    RESULTS.mkdir(exist_ok=True)
    if not args.report_only:
        os.environ.update(NUMBA_NUM_THREADS="1", OMP_NUM_THREADS="1")  # one core for each worker
        places = {name: prepared(name, args.data) for name in sets}
        search = [
            {"set": name, "data": places[name], "model": model, "on": "valid", "options": options, "seed": 0}
            for name in sets for model in models for options in draws(model, args.budget)
        ]  # fmt: skip
        run_all(search, args.workers)
        final = [
            {"set": name, "data": places[name], "model": model, "on": "test", "seed": seed,
             "options": chosen(name, model, args.budget)["options"]}
            for name in sets for model in models for seed in range(1, args.seeds + 1)
        ]  # fmt: skip
        run_all(final, args.workers)
    text = report(sets, models, args.budget, args.seeds)
    (RESULTS / "quality.md").write_text(text)
    print(text)


def prepared(name: str, data: Path) -> str:
    """Prepare a data set with the split of the paper, unless it exists; return its path."""
    out = Path("data") / "quality" / name
    if not out.exists():
        arguments = SETS[name].format(data).split()
        subprocess.run([sys.executable, "-m", "drm_triton", "prepare", *arguments, "--out", str(out), "-q"], check=True)
    return str(out)


def report(sets: list[str], models: list[str], budget: int, seeds: int) -> str:
    """Format test means over seeds, and Welch's t-test of the better DRM against each other model."""
    from scipy.stats import ttest_ind

    from drm_triton.machine import processor

    lines = [
        f"Test means over {seeds} seeds of the best of {budget} trials; {processor()}, "
        f"{time.strftime('%Y-%m-%d')}; made by `python -m bench.quality`.",
        "Bold: best. Star: significantly below the DRM with the better validation Recall@50 (Welch, p < 0.01).",
        "",
        "| set | metric | " + " | ".join(models) + " |",
        "|---|---|" + "---|" * len(models),
    ]
    results = [result for result in finished() if result["on"] == "test"]
    for name in sets:
        settings = {model: chosen(name, model, budget)["options"] for model in models}
        ours = max((m for m in OURS if m in models), key=lambda m: chosen(name, m, budget)["recall@50"])
        for metric in METRICS:
            values = {
                model: [
                    r[metric]
                    for r in results
                    if (r["set"], r["model"], r["options"]) == (name, model, settings[model]) and r["seed"] <= seeds
                ]
                for model in models
            }
            means = {model: float(np.mean(v)) if v else float("nan") for model, v in values.items()}
            best = max(means, key=lambda model: means[model])
            cells = []
            for model in models:
                cell = f"{means[model]:.4f}"
                if model not in OURS and means[model] < means[ours]:
                    cell += "*" if ttest_ind(values[ours], values[model], equal_var=False).pvalue < 0.01 else ""
                cells.append(f"**{cell}**" if model == best else cell)
            lines.append(f"| {name} | {metric} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
