"""Speed of the models besides DRM, raced against the libraries that are known for them.

    python -m bench.models --data PATH [--sets lastfm,ml-1m-m1] [--rounds 3] [--races als,slim,pairs,ease]
        [--factors 64,128]

All programs have the same threads, data and settings, and take turns; a result is the ratio of medians over the rounds,
of seconds and of the processor's seconds in all threads. On a busy machine, only the latter compare, and only with one
thread (NUMBA_NUM_THREADS=1 in the environment): threads of BLAS and OpenMP spin while they wait for each other.

- als: wmf, and ials with the same objective (ridge_power 0), against ALS of implicit with its fastest solver (CG) and
  BLAS threads off, as it advises. Each of ours runs until its loss is at most that of implicit after 15 iterations.
- slim: against ElasticNet of scikit-learn, one column after the other, on a sample of the columns (its time is that of
  the sample times N / sample), and against SLIM of irspack.
- pairs: warp against LightFM, and bpr against implicit, for the same number of epochs.
- ease: against the Cholesky inverse of the same matrix alone, on sets with at least half as many users as items.

Each result is a line of results/models.jsonl, in place of an earlier one of the same race. The table is
results/models.md.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from drm_triton import Dataset
from drm_triton.bench.quality import SETS
from drm_triton.bench.record import RESULTS, environment
from drm_triton.data.csr import CSR
from drm_triton.kernels.cpu.runtime.threads import n_threads
from drm_triton.models import BPR, EASE, IALS, SLIM, WARP, WMF
from drm_triton.recommender import Recommender

GOALS = {"wmf": 1.0, "ials": 1.0, "slim": 5.0, "slim, irspack": 1.0, "warp": 2.0, "bpr": 1.0, "ease": 1 / 1.2}
ALPHA, RIDGE = 10.0, 0.03
L1, L2 = 1.0, 10.0
ROWS = RESULTS / "models.jsonl"
CELLS = 8192  # whose scores are computed at once
COLUMNS = 60  # of the sample for scikit-learn
EPOCHS = 3  # of warp and bpr in a turn

Times = NDArray[np.float64]  # [2]: seconds, and those of the processor


def nothing(done: int, total: int) -> None:
    """Show no progress."""


def seconds(run: Callable[[], Any]) -> Times:
    """Return the seconds that a function takes, and those of the processor."""
    began = np.array([time.perf_counter(), time.process_time()])
    run()
    passed: Times = np.array([time.perf_counter(), time.process_time()]) - began
    return passed


def medians(runs: dict[str, Callable[[], Times]], rounds: int) -> dict[str, Times]:
    """Return the medians of what the functions measure, in turns."""
    times: dict[str, list[Times]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return {name: np.median(values, axis=0) for name, values in times.items()}


def wmf_loss(U: torch.Tensor, V: torch.Tensor, train: CSR) -> float:
    """Return sum c (x - s)^2 + RIDGE (||U||^2 + ||V||^2): c = ALPHA, x = 1 on interactions, c = 1, x = 0 elsewhere."""
    U, V = U.double(), V.double()
    users = torch.from_numpy(np.repeat(np.arange(train.shape[0]), train.degrees())).split(CELLS)
    items = torch.from_numpy(train.indices.astype(np.int64)).split(CELLS)
    s = torch.cat([(U[u] * V[i]).sum(1) for u, i in zip(users, items, strict=True)])
    everywhere = ((U.T @ U) * (V.T @ V)).sum()
    ridge = RIDGE * (U.square().sum() + V.square().sum())
    return float(everywhere + (ALPHA * (1 - s).square() - s.square()).sum() + ridge)


def until(model: Recommender[Any], train: CSR, goal: float, scale: float = 1.0) -> tuple[Times, int]:
    """Return the seconds, and the number of epochs, that a model needs to reach a loss."""
    learner: Any = model
    tensors, spent = learner.start(train), np.zeros(2)
    for epoch in range(50):
        spent += seconds(lambda: learner.epoch(tensors, train, epoch, nothing))  # noqa: B023  (called at once)
        U, V = learner.factors(tensors)
        if wmf_loss(U * scale, V * scale, train) <= goal:
            return spent, epoch + 1
    raise RuntimeError(f"{model} does not reach the loss {goal}")


def race_als(train: CSR, rounds: int, d: int) -> dict[str, tuple[Times, Times]]:
    """Return our seconds and those of implicit to the same loss, for wmf and ials."""
    from implicit.cpu.als import AlternatingLeastSquares

    matrix, threads = train.to_scipy().copy(), n_threads()

    def implicit() -> Times:
        rival = AlternatingLeastSquares(
            factors=d, regularization=RIDGE, alpha=ALPHA, iterations=15, random_state=0, num_threads=threads
        )
        with threadpool_limits(1, "blas"):
            spent = seconds(lambda: rival.fit(matrix, show_progress=False))
        U, V = (torch.from_numpy(x) for x in (rival.user_factors, rival.item_factors))
        loss.append(wmf_loss(U, V, train))
        return spent

    loss: list[float] = []
    implicit()
    a = 1 / (ALPHA - 1)
    wmf = WMF(factors=d, regularization=RIDGE, confidence=ALPHA)
    ials = IALS(factors=d, unobserved_weight=a, regularization=RIDGE * a / (1 + a), ridge_power=0.0)
    found = medians(
        {
            "implicit": implicit,
            "wmf": lambda: until(wmf, train, loss[0])[0],
            "ials": lambda: until(ials, train, loss[0], (1 + a) ** 0.5)[0],
        },
        rounds,
    )
    return {name: (found[name], found["implicit"]) for name in ("wmf", "ials")}


def race_slim(train: CSR, rounds: int) -> dict[str, tuple[Times, Times]]:
    """Return our seconds and those of scikit-learn and irspack."""
    from irspack.recommenders import SLIMRecommender
    from sklearn.linear_model import ElasticNet

    M, N = train.shape
    X = train.to_scipy(np.float64).tocsc()
    sample = np.random.default_rng(0).choice(N, min(COLUMNS, N), replace=False)

    def scikit() -> None:
        for j in sample:
            y, Z = X[:, [j]].toarray().ravel(), X.copy()
            Z.data[Z.indptr[j] : Z.indptr[j + 1]] = 0
            net = ElasticNet(
                alpha=(L1 + L2) / M, l1_ratio=L1 / (L1 + L2), positive=True, fit_intercept=False, max_iter=1000
            )
            net.fit(Z, y)

    def irspack() -> None:
        SLIMRecommender(
            train.to_scipy(np.float64), alpha=(L1 + L2) / M, l1_ratio=L1 / (L1 + L2), n_threads=n_threads()
        ).learn()

    found = medians(
        {
            "slim": lambda: seconds(lambda: SLIM(l1=L1, l2=L2).fit_weights(train, nothing)),
            "scikit-learn": lambda: seconds(scikit) * N / len(sample),
            "irspack": lambda: seconds(irspack),
        },
        rounds,
    )
    return {"slim": (found["slim"], found["scikit-learn"]), "slim, irspack": (found["slim"], found["irspack"])}


def race_pairs(train: CSR, rounds: int, d: int) -> dict[str, tuple[Times, Times]]:
    """Return our seconds and those of LightFM and implicit for the same number of epochs of WARP and BPR."""
    from implicit.cpu.bpr import BayesianPersonalizedRanking
    from lightfm import LightFM

    matrix, threads = train.to_scipy().copy(), n_threads()
    coordinates = matrix.tocoo()

    def ours(model: Any) -> Times:
        tensors = model.start(train)
        return seconds(lambda: [model.epoch(tensors, train, epoch, nothing) for epoch in range(EPOCHS)])

    def lightfm() -> Times:
        model = LightFM(no_components=d, loss="warp", max_sampled=10, learning_rate=0.05, random_state=0)
        return seconds(lambda: model.fit(coordinates, epochs=EPOCHS, num_threads=threads))

    def implicit() -> Times:
        model = BayesianPersonalizedRanking(factors=d - 1, iterations=EPOCHS, random_state=0, num_threads=threads)
        return seconds(lambda: model.fit(matrix, show_progress=False))

    found = medians(
        {
            "warp": lambda: ours(WARP(factors=d, max_sampled=10, lr=0.05)),
            "lightfm": lightfm,
            "bpr": lambda: ours(BPR(factors=d, negative_sampling="popularity")),
            "implicit": implicit,
        },
        rounds,
    )
    return {"warp": (found["warp"], found["lightfm"]), "bpr": (found["bpr"], found["implicit"])}


def race_ease(train: CSR, rounds: int) -> dict[str, tuple[Times, Times]]:
    """Return our seconds and those of the Cholesky inverse alone, of X^T X + 100 I, in LAPACK."""
    from scipy.linalg import lapack

    X = train.to_scipy()
    gram = np.asfortranarray((X.T @ X).toarray() + 100 * np.eye(X.shape[1], dtype=np.float32))

    def inverse() -> Times:
        matrix = gram.copy(order="F")
        with threadpool_limits(n_threads(), "blas"):
            return seconds(lambda: lapack.spotri(lapack.spotrf(matrix, overwrite_a=True)[0], overwrite_c=True))

    found = medians(
        {
            "ease": lambda: seconds(lambda: EASE(regularization=100.0).fit_weights(train, nothing)),
            "LAPACK": inverse,
        },
        rounds,
    )
    return {"ease": (found["ease"], found["LAPACK"])}


def prepared(name: str, data: Path) -> CSR:
    """Return the training part of a set."""
    from drm_triton.bench import quality

    if name not in SETS:  # a public split
        from drm_triton.bench.public_splits import load

        return load(data / name, "test").train
    return Dataset.load(quality.prepared(name, data)).train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the real data sets")
    parser.add_argument("--sets", default="lastfm,ml-1m-m1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--races", default="als,slim,pairs,ease")
    parser.add_argument("--factors", default="64,128")
    args = parser.parse_args()
    unknown = set(args.races.split(",")) - {"als", "slim", "pairs", "ease"}
    if unknown:
        parser.error(f"unknown races: {', '.join(sorted(unknown))}")
    races: dict[str, Callable[[CSR], dict[str, tuple[Times, Times]]]] = {
        "slim": lambda train: race_slim(train, args.rounds),
        "ease": lambda train: race_ease(train, args.rounds),
    }
    for d in map(int, args.factors.split(",")):
        races[f"als, d = {d}"] = lambda train, d=d: race_als(train, args.rounds, d)  # type: ignore[misc]
        races[f"pairs, d = {d}"] = lambda train, d=d: race_pairs(train, args.rounds, d)  # type: ignore[misc]
    for name in args.sets.split(","):
        train = prepared(name, args.data)
        for title, race in races.items():
            if title.partition(",")[0] not in args.races.split(","):
                continue
            if title == "ease" and 2 * train.shape[0] < train.shape[1]:
                continue  # EASE then inverts a smaller matrix than that of the items
            for model, (mine, theirs) in race(train).items():
                record(model, name, title.partition(", ")[2], mine, theirs, args.rounds)


def record(model: str, name: str, setting: str, mine: Times, theirs: Times, rounds: int) -> None:
    """Store a result in place of an earlier one of the same race, and write the table."""
    found = environment()
    row = {"model": model, "set": name, "setting": setting, "ours": mine[0], "rival": theirs[0], "rounds": rounds}
    row |= {"ours_cpu": mine[1], "rival_cpu": theirs[1]}
    row |= {"processor": found["processor"], "threads": found["threads"], "date": found["date"][:10]}
    print(json.dumps(row), flush=True)
    before = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    rows = {(one["model"], one["set"], one["setting"]): one for one in [*before, row]}
    ROWS.write_text("".join(json.dumps(one) + "\n" for one in rows.values()))
    (RESULTS / "models.md").write_text(table(list(rows.values())))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    lines = [
        "# Speed of the models",
        "",
        "Times as fast as the rival, by medians of seconds, and of the processor's seconds in all threads. On a busy",
        "machine, only the latter compare, and only with one thread. `python -m bench.models` says what is compared.",
        "",
        "| model | set | setting | ours, s | rival, s | times as fast | by processor | wanted | rounds | machine |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [f"{row['ours']:.2f}", f"{row['rival']:.2f}", f"{row['rival'] / row['ours']:.2f}"]
        figures.append(f"{row['rival_cpu'] / row['ours_cpu']:.2f}" if "ours_cpu" in row else "")
        machine = f"{row['processor']}, {row['threads']} threads, {row['date']}"
        cells = [row["model"], row["set"], row["setting"], *figures, f"{GOALS[row['model']]:.2f}", f"{row['rounds']}"]
        lines.append(f"| {' | '.join([*cells, machine])} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
