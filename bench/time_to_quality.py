"""Validation NDCG@10 over seconds of training: when does each model reach the final quality of the others?

    python -m bench.time_to_quality --data PATH [--sets citeulike,amazon]

Each model trains with the options that `bench.quality` chose for it, on all cores, one after the other in one run.
Softmax is also trained with the defaults, and with a pool of 4,096 items for each step. The time of validation is not
counted. The curve of LightFM is one training. The other models are trained again for each number of epochs. The results
are results/time_to_quality.json and .png; they keep the curves of the sets that are not run.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from drm_triton import DRM, Dataset, TrainConfig
from drm_triton.bench import peers
from drm_triton.bench.quality import OURS, RESULTS, chosen, prepared
from drm_triton.bench.record import environment
from drm_triton.kernels import get_backend
from drm_triton.names import Score
from drm_triton.ranking.evaluate import evaluate, factor_ranker

Curve = list[tuple[float, float]]  # seconds, validation NDCG@10
EPOCHS = (1, 2, 3, 4, 8, 16)


class Clock:
    """Measures seconds of training. It stops during an evaluation."""

    def __init__(self, data: Dataset) -> None:
        self.data, self.curve, self.backend = data, Curve(), get_backend("cpu")
        self.evaluating, self.began = 0.0, time.perf_counter()

    def measure(self, factors: peers.Factors, score: Score = "dot") -> None:
        now = time.perf_counter()
        means = evaluate(factor_ranker(self.backend, *factors, score), self.data.train, self.data.valid, (10,)).means
        self.curve.append((now - self.began - self.evaluating, means["ndcg@10"]))
        self.evaluating += time.perf_counter() - now


def ours(data: Dataset, options: dict[str, Any], threads: int) -> Curve:
    """Train once for each number of epochs, because the learning rate falls to 0 over the epochs of a training."""
    curve, last = Curve(), TrainConfig.from_mapping(options).epochs
    for epochs in [*(e for e in EPOCHS if e < last), last]:
        clock = Clock(data)
        model = DRM(TrainConfig.from_mapping({**options, "epochs": epochs, "eval_every": 0})).fit(data)
        clock.measure((model.user_factors, model.item_factors), model.config.score_in_force)
        curve += clock.curve
    return curve


def lightfm(data: Dataset, options: dict[str, Any], threads: int) -> Curve:
    clock = Clock(data)
    peers.warp(data.train, 0, threads, after_epoch=clock.measure, **options)
    return clock.curve


def implicit(fit: Callable[..., peers.Factors], steps: list[int]) -> Callable[..., Curve]:
    """Train a model of implicit once for each number of iterations; it has no callback during training."""

    def run(data: Dataset, options: dict[str, Any], threads: int) -> Curve:
        curve = Curve()
        for iterations in [*(n for n in steps if n < options["iterations"]), options["iterations"]]:
            clock = Clock(data)
            clock.measure(fit(data.train, 0, threads, **{**options, "iterations": iterations}))
            curve += clock.curve
        return curve

    return run


FIXED: dict[str, dict[str, Any]] = {"softmax, defaults": {}, "softmax, pool 4096": {"pool": 4096}}
MODELS: dict[str, Callable[..., Curve]] = {
    **dict.fromkeys(FIXED, ours),
    "softmax": ours,
    "DRM dot": ours,
    "DRM L2": ours,
    "ALS": implicit(peers.als, [1, 2, 4, 8, 15, 30]),
    "BPR": implicit(peers.bpr, [10, 30, 100, 200]),
    "WARP": lightfm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="citeulike,amazon")
    parser.add_argument("--budget", type=int, default=12)
    args = parser.parse_args()
    threads, file = torch.get_num_threads(), RESULTS / "time_to_quality.json"
    curves: dict[str, dict[str, Curve]] = json.loads(file.read_text())["curves"] if file.exists() else {}
    for name in args.sets.split(","):
        data = Dataset.load(prepared(name, args.data))
        for first in ({}, {"objective": "hinge+drm"}):  # compile; bench.kernels measures the compilation
            ours(data, {**first, "epochs": 1}, threads)
        curves[name] = {model: run(data, options(name, model, args.budget), threads) for model, run in MODELS.items()}
        summary(name, curves[name])
        result = {"command": "python -m bench.time_to_quality", "environment": environment(), "curves": curves}
        file.write_text(json.dumps(result, indent=2) + "\n")
        draw(curves, RESULTS / "time_to_quality.png")


def options(name: str, model: str, budget: int) -> dict[str, Any]:
    """Return the options of a model on a set."""
    if model in FIXED:
        return FIXED[model]
    found: dict[str, Any] = chosen(name, model, budget)["options"]
    return {"objective": "hinge+drm", **found} if model in OURS else found


def summary(name: str, curves: dict[str, Curve]) -> None:
    """Print the final quality of each model, and when our models reach it."""
    for peer, curve in curves.items():
        seconds, final = curve[-1]
        if MODELS[peer] is ours:
            print(f"{name}: {peer} reaches NDCG@10 {final:.4f} after {seconds:.1f} s")
            continue
        print(f"{name}: {peer} reaches NDCG@10 {final:.4f} after {seconds:.1f} s", end="")
        for model in (model for model in curves if MODELS[model] is ours):
            reached = [when for when, value in curves[model] if value >= final]
            print(f"; {model} after {reached[0]:.1f} s" if reached else f"; {model} does not reach it", end="")
        print()


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    figure = Figure(figsize=(6 * len(curves) + 1, 4), layout="constrained")
    axes = figure.subplots(1, len(curves), squeeze=False)[0]
    for ax, (name, models) in zip(axes, curves.items(), strict=True):
        for model, curve in models.items():
            ax.plot(*zip(*curve, strict=True), label=model, marker=".")
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("seconds of training")
        ax.set_ylabel("validation NDCG@10")
        ax.set_title(name)
        ax.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
