"""Throughput of training and evaluation compared with other libraries: interleaved in one run, all cores, medians.

    python -m bench.throughput [--users 15500 --items 28800 --interactions 558000 --factors 64]
                               [--buffalo PYTHON]   a Python with buffalo (it needs an old NumPy)

Work of one list (n = rho + eta items, d factors): two gathers of n d floats (scores and user gradient use one; the
update of the items gathers user rows), about 6 n d multiply-adds and 8 n^2 operations for the pairs. Every sampled
negative is scored and ranked, and its row is updated. By default groups of lists share their negatives and read these
rows once for all lists of a group. With "share 1" each list samples its own negatives.

WARP does less: it samples negatives until one violates the margin, scores them, and updates only that one. It samples
at most as many negatives as ours has for each positive (max_sampled = eta / rho). Their actual number is computed from
the trained model. The output contains both positives per second and sampled negatives per second. The printed limit is
the time of the two gathers alone with share 1, for the same rows and with the same prefetching.

Every rival runs with its own best setting, which a shorter race in the same run finds: plain PyTorch with the batch of
BATCHES that gives it the most positives per second, in each of two versions, and the others with the number of threads
that suits them best. Ours has batches of 16,384 lists, and also those of its default.

Long lists: lists per second with 1,000 negatives, compared with 45, on a model that one epoch has trained. Hinge and
DRM have a gradient at a few dozen items of a list, so the work is that of the scores, 2 n d operations, a few passes
over them, and the update of the rows with a gradient. For comparison, torch computes the product of the scores alone,
group by group. It is not a limit: where its library does not use the whole width of the processor, ours is faster.

The default objective compares each positive with the whole catalogue. A step on B users is three products of
2 B N d operations, which torch computes for comparison, and some passes over the scores.

Evaluation: find the 50 best unseen items of all users and compute the metrics, compared with ranking_metrics_at_k of
implicit. `bench.kernels` measures the ranking alone.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from drm_triton import Dataset, TrainConfig
from drm_triton.bench import baselines
from drm_triton.bench.record import RESULTS, Row, Setting, environment, fastest, save, time_in_turns
from drm_triton.data.dataset import CSR
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.kernels import get_backend
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.catalogue import CataloguePlan
from drm_triton.kernels.cpu.losses import score_items
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import allocating
from drm_triton.kernels.protocol import ListPlan
from drm_triton.kernels.torch_threads import one_torch_thread
from drm_triton.ranking.evaluate import evaluate, factor_ranker
from drm_triton.training.loop import initial_state
from drm_triton.training.step import catalogue_step, list_plan, objective_of, take_step, training_plan

SETTINGS = {"3 positives, 45 negatives": (3, 45), "1 positive, 45 negatives": (1, 45)}
BATCH = 16384
BATCHES = (512, 1024, 2048, 4096, 8192, BATCH)  # that plain PyTorch chooses from
LONG_ETA, LONG_BATCH, LONG_SHARE = 1000, 4096, 256
EPOCHS_BEFORE = 10  # of WARP before the timing: it samples more negatives as it learns
BUFFALO_EPOCHS = 5  # timed epochs


def thread_counts() -> list[int]:
    """Return the numbers of threads that a rival chooses from."""
    return sorted({1, max(1, threads.n_threads() // 2), threads.n_threads()})


def lightfm(train: CSR, factors: int, draws: int) -> tuple[Any, Setting]:
    """Return a trained model, and how it is trained for one more epoch, with the best number of threads."""
    from lightfm import LightFM

    model = LightFM(loss="warp", no_components=factors, max_sampled=draws, random_state=0)
    interactions = train.to_scipy().copy().tocoo()

    def epoch(number: int, epochs: int = 1) -> None:
        model.fit_partial(interactions, epochs=epochs, num_threads=number)

    epoch(threads.n_threads(), EPOCHS_BEFORE)
    return model, fastest({f"threads {n}": (train.nnz, partial(epoch, n)) for n in thread_counts()})


def plain_torch(U: Tensor, V: Tensor, lists: ListBatch, rho: int, sparse: bool) -> Setting:
    """Return a training step of plain PyTorch with its best batch of these lists."""
    users, items = lists.users, lists.items
    return fastest(
        {f"batch {B}": (rho * B, baselines.torch_step(U, V, users[:B], items[:B], rho, sparse)) for B in BATCHES}
    )


def mean_draws(model: Any, train: CSR, draws: int, sample: int = 3000) -> float:
    """Return the mean number of negatives that WARP samples for a positive, at most `draws`.

    A sampled negative violates the margin with probability p, which is computed for `sample` positives.
    """
    interactions = train.to_scipy().tocoo()
    pick = np.random.default_rng(0).integers(0, train.nnz, sample)
    scores = model.user_embeddings[interactions.row[pick]] @ model.item_embeddings.T + model.item_biases
    positive = scores[np.arange(sample), interactions.col[pick]]
    p = np.maximum((scores > positive[:, None] - 1).mean(1), 1e-12)
    return float(((1 - (1 - p) ** draws) / p).mean())


@allocating
def gather_lists(start, stop, U, V, users, items, scores):  # type: ignore[no-untyped-def]
    """Read the rows of the lists once. The scores are written so that the compiler cannot remove the reads."""
    for b in range(start, stop):
        score_items(U[users[b]], V, items[b], items[min(b + 1, stop - 1)], False, scores[b])


def gather(U: Tensor, V: Tensor, lists: ListBatch) -> Callable[[], None]:
    """Return a function that reads the rows of a batch once, on all threads."""
    arrays = [x.numpy() for x in (U, V, lists.users, lists.items, torch.empty(lists.items.shape))]
    return lambda: threads.split(gather_lists, len(lists.users), 16, *arrays)


BUFFALO = """
import json, logging, time
from buffalo import WARP, WARPOption, MatrixMarketOptions, aux
logging.disable(logging.CRITICAL)
opt = WARPOption().get_default_option()
opt.update(d={factors}, num_iters={epochs}, num_workers={threads}, max_trials={draws}, evaluation_on_learning=False,
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


def buffalo_rate(python: str, train: CSR, factors: int, draws: int, runs: int = 3) -> tuple[str, float]:
    """Return the best number of threads of buffalo's WARP, and its positives per second.

    They are those of a long training minus a short one, in another interpreter.
    """
    import scipy.io

    def seconds(code: str) -> float:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise SystemExit(f"buffalo failed: {done.stderr[-2000:]}")
        return float(json.loads(done.stdout.strip().splitlines()[-1]))

    with tempfile.TemporaryDirectory() as folder:
        main = f"{folder}/train.mtx"
        scipy.io.mmwrite(main, train.to_scipy())
        rates = {}
        for number in thread_counts():
            shorter, longer = (
                BUFFALO.format(
                    factors=factors, epochs=epochs, threads=number, draws=draws, main=main, path=f"{folder}/train.h5py"
                )
                for epochs in (EPOCHS_BEFORE, EPOCHS_BEFORE + BUFFALO_EPOCHS)
            )
            times = [seconds(longer) - seconds(shorter) for _ in range(runs)]
            rates[f"threads {number}"] = BUFFALO_EPOCHS * train.nnz / statistics.median(times)
    return max(rates.items(), key=lambda setting: setting[1])


def training(train: CSR, factors: int, rho: int, eta: int, buffalo: str | None) -> list[Row]:
    """Measure positives and sampled negatives per second of each trainer."""
    backend, device = get_backend("cpu"), torch.device("cpu")
    config = TrainConfig(factors=factors, objective="hinge+drm", rho=rho, eta=eta, init="normal")
    plan, unshared_plan = (
        list_plan(dataclasses.replace(config, share=share), train, device) for share in (config.share, 1)
    )
    state, per_positive = initial_state(config, train, device), eta // rho
    lists = backend.sample_lists(unshared_plan, 0, 0, BATCH)
    objective, usual = objective_of(config, train.shape[1]), config.batch_in_force
    warp, of_lightfm = lightfm(train, factors, per_positive)

    def ours(plan: ListPlan, B: int) -> Setting:
        return Setting(f"batch {B}", rho * B, baselines.backend_step(backend, plan, state.U, state.V, objective, B))

    settings = {
        "ours": ours(plan, BATCH),
        "ours, default batch": ours(plan, usual),
        "ours, share 1": ours(unshared_plan, BATCH),
        "plain PyTorch, dense": plain_torch(state.U, state.V, lists, rho, sparse=False),
        "plain PyTorch, sparse": plain_torch(state.U, state.V, lists, rho, sparse=True),
        "LightFM WARP": of_lightfm,
        "limit: the two gathers alone": Setting(f"batch {BATCH}", rho * BATCH / 2, gather(state.U, state.V, lists)),
    }
    times = time_in_turns({name: setting.run for name, setting in settings.items()}, seconds=20)
    rates = {name: setting.work / times[name] for name, setting in settings.items()}
    labels = {name: setting.label for name, setting in settings.items()}
    negatives = dict.fromkeys(rates, float(per_positive))
    negatives["LightFM WARP"] = mean_draws(warp, train, per_positive)
    if buffalo:
        labels["buffalo WARP"], rates["buffalo WARP"] = buffalo_rate(buffalo, train, factors, per_positive)
    return [
        {
            "trainer": name,
            "setting": labels[name],
            "rho": rho,
            "eta": eta,
            "positives_per_second": rate,
            "ours_times": rates["ours"] / rate,
            "negatives_per_positive": negatives.get(name),
            "negatives_per_second": rate * negatives[name] if name in negatives else None,
        }
        for name, rate in rates.items()
    ]


def long_lists(train: CSR, factors: int) -> list[Row]:
    """Measure lists per second with 45 and with LONG_ETA negatives, and of the product of the scores alone."""
    backend, device = get_backend("cpu"), torch.device("cpu")
    config = TrainConfig(factors=factors, objective="hinge+drm", eta=45)
    long_config = dataclasses.replace(config, eta=LONG_ETA, batch_size=LONG_BATCH)
    wide_config = dataclasses.replace(long_config, share=LONG_SHARE)
    plan, long_plan, wide_plan = (list_plan(c, train, device) for c in (config, long_config, wide_config))
    state, objective = initial_state(config, train, device), objective_of(config, train.shape[1])
    while state.position < plan.n_lists:
        stop = min(state.position + config.batch_in_force, plan.n_lists)
        take_step(state, plan, stop, config, objective, backend, config.lr)
    groups, rows = LONG_BATCH // config.share, state.V[:LONG_ETA].T.contiguous()
    users, scores = state.U[: config.share], torch.empty(groups, config.share, LONG_ETA)

    def product() -> None:
        with one_torch_thread():
            threads.run(partial(torch.mm, users, rows, out=scores[group]) for group in range(groups))

    times = time_in_turns(
        {
            "45": baselines.backend_step(backend, plan, state.U, state.V, objective, BATCH),
            "long": baselines.backend_step(backend, long_plan, state.U, state.V, objective, LONG_BATCH),
            "wide": baselines.backend_step(backend, wide_plan, state.U, state.V, objective, LONG_BATCH),
            "floor": product,
        },
        seconds=15,
    )
    rates = {
        f"{config.eta} negatives": BATCH / times["45"],
        f"{LONG_ETA} negatives": LONG_BATCH / times["long"],
        f"{LONG_ETA} negatives, share {LONG_SHARE}": LONG_BATCH / times["wide"],
        f"{LONG_ETA} negatives: only the product of the scores, by torch": LONG_BATCH / times["floor"],
    }
    first = next(iter(rates.values()))
    return [{"lists": name, "lists_per_second": rate, "of_45_negatives": rate / first} for name, rate in rates.items()]


def whole_catalogue(train: CSR, factors: int) -> list[Row]:
    """Measure positives per second of the default objective, and of the three products of its step alone."""
    backend, device = get_backend("cpu"), torch.device("cpu")
    config = TrainConfig(factors=factors)
    state, objective = initial_state(config, train, device), objective_of(config, train.shape[1])
    plan = training_plan(config, train, device)
    assert isinstance(plan, CataloguePlan)
    batch = plan.batch(0, 0, config.batch_in_force)
    u, V = state.U[batch.users.long()].clone(), state.V.clone()

    def products() -> None:
        S = u @ V.T
        torch.mm(S, V)
        torch.mm(S.T, u)

    times = time_in_turns(
        {
            "softmax over the whole catalogue (default)": lambda: catalogue_step(
                state, batch, config, objective, backend, config.lr
            ),
            "only its three products, by torch": products,
        },
        seconds=10,
    )
    positives, first = len(batch.indices), next(iter(times.values()))
    return [
        {"trainer": name, "positives_per_second": positives / seconds, "ours_times": seconds / first}
        for name, seconds in times.items()
    ]


def evaluation(data: Dataset, factors: int) -> list[Row]:
    """Measure the users per second for whom the 50 best unseen items are found and evaluated."""
    state = initial_state(TrainConfig(factors=factors, init="normal"), data.train, torch.device("cpu"))
    ranker = factor_ranker(get_backend("cpu"), state.U, state.V, "dot")
    train, test = (x.to_scipy().copy() for x in (data.train, data.test))  # memory-mapped arrays are read-only
    runners: dict[str, Callable[[], object]] = {
        "ours": lambda: evaluate(ranker, data.train, data.test, (50,), min_train=0)
    }
    if baselines.implicit_model(state.U, state.V) is not None:
        candidates = {
            f"threads {n}": (1, baselines.implicit_evaluate(state.U, state.V, 50, train, test, n))
            for n in thread_counts()
        }
        runners["implicit, ranking_metrics_at_k"] = fastest(candidates).run
    times = time_in_turns(runners, seconds=15)
    users = int((data.test.degrees() > 0).sum())
    return [
        {"evaluation": name, "users_per_second": users / seconds, "ours_times": seconds / times["ours"]}
        for name, seconds in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=15_500)
    parser.add_argument("--items", type=int, default=28_800)
    parser.add_argument("--interactions", type=int, default=558_000)
    parser.add_argument("--factors", type=int, default=64)
    parser.add_argument("--buffalo", help="Python interpreter with buffalo")
    args = parser.parse_args()
    users, items = generate(Shape(args.users, args.items, args.interactions), 0)
    data = Dataset.from_frame(pl.DataFrame({"user": users, "item": items}), ratios=(80, 0, 20))
    train = data.train
    rows: list[Row] = []
    for title, (rho, eta) in SETTINGS.items():
        print(f"lists of {title}, d = {args.factors}")
        for row in training(train, args.factors, rho, eta, args.buffalo):
            rows.append(row)
            line = f"{row['trainer']:<30}{row['setting']:<12}{row['positives_per_second']:>12,.0f} positives/s"
            line += f", ours {row['ours_times']:.2f} times"
            if row["negatives_per_second"]:
                line += f"; {row['negatives_per_second']:,.0f} negatives/s"
                line += f" ({row['negatives_per_positive']:.1f} per positive)"
            print("  " + line, flush=True)
    print(f"long lists, 1 positive, d = {args.factors}")
    for row in long_lists(train, args.factors):
        rows.append(row)
        line = f"{row['lists']:<60}{row['lists_per_second']:>12,.0f} lists/s"
        print(f"  {line}, {row['of_45_negatives']:.2f} of those with 45 negatives", flush=True)
    for row in whole_catalogue(train, args.factors):
        rows.append(row)
        line = f"{row['trainer']:<45}{row['positives_per_second']:>12,.0f} positives/s"
        print(f"  {line}, ours {row['ours_times']:.2f} times", flush=True)
    for row in evaluation(data, args.factors):
        rows.append(row)
        print(f"  {row['evaluation']:<30}{row['users_per_second']:>12,.0f} users/s, ours {row['ours_times']:.2f} times")
    header = {**environment(), "command": "python -m bench.throughput", "shape": [*train.shape, train.nnz]}
    save("throughput", {**header, "factors": args.factors, "batch": BATCH}, rows)
    print(f"written to {RESULTS}/throughput.json and .csv")


if __name__ == "__main__":
    main()
