"""Training and evaluation throughput against the peers, raced in one run on all cores, interleaved, medians.

    python -m bench.throughput [--users 15500 --items 28800 --interactions 558000 --factors 64 --rounds 5]
                               [--buffalo PYTHON]   an interpreter that has buffalo (it pins an old NumPy)

Work of one list (n = 1 + negatives, d factors): two gathers of n d floats (scores and user gradient share one; the item
update gathers the users' rows), about 6 n d multiply-adds, n^2 differences. Peers do less per positive: WARP stops at
the first violating negative, so its samples per positive shrink as training goes on; the race therefore gives every
peer as many sampled negatives per positive as ours draws (eta), and reports positives per second over whole epochs.

Raced: ours (default setting, eta negatives); LightFM WARP (max_sampled = eta); buffalo WARP where it is installed;
plain PyTorch (autograd, Adagrad, sparse and dense embeddings; its sampling is not counted). Evaluation of all users at
K = 50: ours against implicit's recommend.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from drm_triton import Dataset, TrainConfig
from drm_triton.data.dataset import CSR
from drm_triton.data.synthetic import Shape, generate
from drm_triton.evaluate import csr_tensors
from drm_triton.kernels import get_backend
from drm_triton.kernels.interface import ListPlan
from drm_triton.run import environment
from drm_triton.trainer import initial_state, objective_of, one_step

RESULTS = Path(__file__).parent / "results"
LISTS = 200_000  # of ours, in a round
PLAIN_BATCHES = 4  # of plain PyTorch, in a round


def ours(train: CSR, config: TrainConfig) -> Callable[[], int]:
    """Our training over LISTS lists; returns the positives it handled."""
    ops, device = get_backend("cpu"), torch.device("cpu")
    state, objective = initial_state(config, train, device), objective_of(config)
    plan = ListPlan(*csr_tensors(train, device), train.shape[1], config.rho, config.eta_in_force)

    def run() -> int:
        for start in range(0, min(LISTS, plan.n_lists), config.batch_size):
            users, items = ops.sample_lists(plan, 0, start, min(start + config.batch_size, plan.n_lists))
            one_step(state, users, items, config, objective, ops, config.lr)
        return min(LISTS, plan.n_lists) * config.rho

    return run


def plain_torch(train: CSR, config: TrainConfig, sparse: bool) -> Callable[[], int]:
    """The objective as one would write it in PyTorch: embeddings, autograd, Adagrad, projection of the touched rows."""
    ops, device = get_backend("cpu"), torch.device("cpu")
    reference = get_backend("reference")
    state, objective = initial_state(config, train, device), objective_of(config)
    U = torch.nn.Embedding.from_pretrained(state.U, freeze=False, sparse=sparse)
    V = torch.nn.Embedding.from_pretrained(state.V, freeze=False, sparse=sparse)
    optimizer = torch.optim.Adagrad([*U.parameters(), *V.parameters()], lr=config.lr)
    plan = ListPlan(*csr_tensors(train, device), train.shape[1], config.rho, config.eta_in_force)
    batches = [
        ops.sample_lists(plan, 0, i * config.batch_size, (i + 1) * config.batch_size) for i in range(PLAIN_BATCHES)
    ]

    def run() -> int:
        for users, items in batches:
            optimizer.zero_grad()
            s = (U(users)[:, None, :] * V(items)).sum(-1)
            hinge, drm, mse = reference.list_losses(s, train.shape[1], objective)
            (hinge + config.lam * drm + mse).sum().backward()
            optimizer.step()
            with torch.no_grad():
                for table, rows in ((U.weight, users.unique()), (V.weight, items.unique())):
                    table[rows] /= table[rows].norm(dim=1, keepdim=True).clamp(min=1)
        return PLAIN_BATCHES * config.batch_size * config.rho

    return run


def lightfm(train: CSR, config: TrainConfig, threads: int) -> Callable[[], int]:
    from lightfm import LightFM

    model = LightFM(loss="warp", no_components=config.factors, max_sampled=config.eta_in_force, random_state=0)
    interactions = train.to_scipy().copy().tocoo()

    def run() -> int:
        model.fit_partial(interactions, epochs=1, num_threads=threads)
        return train.nnz

    return run


BUFFALO = """
import json, logging, sys, time
from buffalo import WARP, WARPOption, MatrixMarketOptions, aux
logging.disable(logging.CRITICAL)
opt = WARPOption().get_default_option()
opt.update(d={factors}, num_iters={epochs}, num_workers={threads}, max_trials={eta}, evaluation_on_learning=False,
           compute_loss_on_training=False)
data = MatrixMarketOptions().get_default_option()
data.input.main = {main!r}
data.data.path = {path!r}
data.data.validation = {{}}
model = WARP(aux.Option(opt), data_opt=data)
model.initialize()
began = time.perf_counter()
model.train()
print(json.dumps(time.perf_counter() - began))
"""


def buffalo_seconds(python: str, train: CSR, config: TrainConfig, threads: int, epochs: int) -> float:
    """Seconds of buffalo's WARP for so many epochs, in its own interpreter."""
    import scipy.io

    with tempfile.TemporaryDirectory() as folder:
        main = f"{folder}/train.mtx"
        scipy.io.mmwrite(main, train.to_scipy())
        code = BUFFALO.format(
            factors=config.factors, epochs=epochs, threads=threads, eta=config.eta_in_force, main=main,
            path=f"{folder}/train.h5py",
        )  # fmt: skip
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise SystemExit(f"buffalo failed: {done.stderr[-2000:]}")
        return float(json.loads(done.stdout.strip().splitlines()[-1]))


def rank_ours(train: CSR, config: TrainConfig) -> Callable[[], int]:
    ops, state = get_backend("cpu"), initial_state(config, train, torch.device("cpu"))
    seen = csr_tensors(train, torch.device("cpu"))

    def run() -> int:
        ops.top_k(state.U, state.V, 50, config.score, seen)
        return train.shape[0]

    return run


def rank_implicit(train: CSR, config: TrainConfig, threads: int) -> Callable[[], int]:
    from implicit.cpu.matrix_factorization_base import MatrixFactorizationBase

    class Fitted(MatrixFactorizationBase):
        def fit(self, *args: Any, **options: Any) -> None: ...
        def save(self, *args: Any) -> None: ...

    state = initial_state(config, train, torch.device("cpu"))
    model = Fitted(num_threads=threads)
    model.user_factors, model.item_factors = state.U.numpy(), state.V.numpy()
    matrix = train.to_scipy()

    def run() -> int:
        for start in range(0, train.shape[0], 1000):  # the batch size of the library's own evaluation
            users = np.arange(start, min(start + 1000, train.shape[0]))
            model.recommend(users, matrix[users], N=50, filter_already_liked_items=True)
        return train.shape[0]

    return run


def race(runners: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """Median units per second of each runner, taken in turns after one warm-up."""
    rates: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(rounds + 1):
        for name, run in runners.items():
            began = time.perf_counter()
            units = run()
            if turn:
                rates[name].append(units / (time.perf_counter() - began))
    return {name: statistics.median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=15_500)
    parser.add_argument("--items", type=int, default=28_800)
    parser.add_argument("--interactions", type=int, default=558_000)
    parser.add_argument("--factors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--buffalo", help="interpreter that has buffalo")
    args = parser.parse_args()
    users, items = generate(Shape(args.users, args.items, args.interactions), 0)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}), ratios=(1, 0, 0))
    train, config = data.train, TrainConfig(factors=args.factors, init="normal", threads=args.threads)
    runners = {"ours": ours(train, config)}
    runners["LightFM WARP"] = lightfm(train, config, args.threads)
    runners["plain PyTorch, dense"] = plain_torch(train, config, sparse=False)
    runners["plain PyTorch, sparse"] = plain_torch(train, config, sparse=True)
    training = race(runners, args.rounds)
    if args.buffalo:
        times = [buffalo_seconds(args.buffalo, train, config, args.threads, epochs=5) for _ in range(args.rounds)]
        training["buffalo WARP"] = 5 * train.nnz / statistics.median(times)
    ranking = race(
        {"ours": rank_ours(train, config), "implicit": rank_implicit(train, config, args.threads)}, args.rounds
    )
    result = {
        "command": "python -m bench.throughput",
        "environment": environment(config, data),
        "shape": [args.users, args.items, args.interactions],
        "factors": args.factors,
        "negatives": config.eta_in_force,
        "threads": args.threads,
        "positives_per_second": training,
        "users_ranked_per_second": ranking,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "throughput.json").write_text(json.dumps(result, indent=2) + "\n")
    for title, rates in (("positives trained per second", training), ("users ranked per second", ranking)):
        print(title)
        for name, rate in rates.items():
            print(f"  {name:<24}{rate:>12,.0f}   ours is {rates['ours'] / rate:.1f} times")


if __name__ == "__main__":
    main()
