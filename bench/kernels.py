"""Time of the kernels compared with plain torch, and for different sizes. The default sizes are those of SketchFab.

Operations and bytes of one list of n items, K ranks and d factors, with r rows updated per list in a batch. Numbers are
float32 and int32. Each row counts once, as if no cache contained it.

    sample      n / 4 Philox blocks and a binary search per negative         writes 4 (n + 1)
    gradients   4 n d  +  8 n^2  +  40 n K flops     reads 4 (n d + d + n)    writes 4 (2 n + d + 4)
    update      2 n d  +  8 d r flops                reads 4 (n d + 3 n) + 8 d r    writes 8 d r
    drm alone   8 n^2  +  40 n K flops               reads 8 n                writes 4 n
    top-K       2 N d flops per query                reads 4 (N d / m + d)   writes 8 K

m queries share one read of the items. The pairs take 8 n^2 operations, or about 4 n log2 n on the CPU for lists longer
than PAIRWISE_MAX items, which are sorted. The counts are those of lists that process all items. On the CPU, lists of
ACTIVE_MIN items or more process fewer; section `long` compares them, and the other list losses, with a sort.

At n = 48, K = 3, d = 64: 12 + 18 + 6 kflop for gradients, 6 kflop for the update, 25 kB read in total. The percentages
are these counts divided by the measured time, relative to the peaks of the machine: fused multiply-adds and copies on a
CPU, a float32 matrix product and copies on a GPU. The peaks are measured in the same run with all threads.

    python -m bench.kernels [--only drm,step] [--quick]      prints the tables, writes bench/results/kernels.*
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from drm_triton.bench import baselines
from drm_triton.bench.kernels_report import plot, show
from drm_triton.bench.record import RESULTS, Row, environment, save, time_in_turns
from drm_triton.config import TrainConfig
from drm_triton.errors import InputError
from drm_triton.exercises import Case
from drm_triton.functional import drm_loss, soft_topk
from drm_triton.issue_file import NAME, add_section
from drm_triton.kernels import cpu, reference, why_no_gpu
from drm_triton.kernels.cpu.filter import QUERIES, QUERY_BLOCK, WIDTH, filter_panel
from drm_triton.kernels.cpu.runtime import threads
from drm_triton.kernels.cpu.runtime.jit import allocating
from drm_triton.kernels.cpu.runtime.threads import n_threads, set_threads
from drm_triton.kernels.cpu.softsort import PAIRWISE_MAX
from drm_triton.kernels.protocol import Backend, GradientTerms, ListPlan, Objective
from drm_triton.losses import bpr_loss, psl_loss, softmax_at_k_loss, softmax_loss
from drm_triton.names import CUT_OFFS, SoftTopK

INTERACTIONS_PER_USER = 36  # as in SketchFab
DEPTH = 64  # factors of the tile that measures the peak
LONG_LISTS = [(512, 1024), (128, 4096), (32, 16_384)]  # lists and items


@dataclass(frozen=True)
class Sizes:
    """Sizes of the comparisons. The defaults are those of SketchFab, with the lists of the paper."""

    users: int = 15_500
    items: int = 28_800
    rho: int = 3
    eta: int = 45
    factors: int = 64
    batch: int = 4096

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise InputError(f"bench kernels: `{name}` must be at least 1, got {value}")
        if self.batch % TrainConfig.share:
            raise InputError(
                f"bench kernels: `batch` must be a multiple of {TrainConfig.share}, the number of lists that share "
                f"negatives, got {self.batch}"
            )

    @property
    def n(self) -> int:
        """Items in a list."""
        return self.rho + self.eta


DEFAULT_SIZES = Sizes()


def backend_and_device() -> tuple[Backend, str]:
    """Return the backend to time and its device: the GPU if there is one."""
    if torch.cuda.is_available():
        from drm_triton.kernels import gpu

        return gpu, "cuda"
    return cpu, "cpu"


def factors(rows: int, d: int, device: str, seed: int) -> Tensor:
    """Return random factors."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, d, generator=generator).div(4 * d**0.5).to(device)


def make_plan(
    n_items: int, rho: int, eta: int, device: str, users: int = Sizes.users, share: int = TrainConfig.share
) -> ListPlan:
    """Return a plan of lists for random interactions.

    The mean number of interactions of a user is that of SketchFab, and its distribution is log-normal. Some items are
    far more popular than others.
    """
    rng = np.random.default_rng(0)
    degree = np.clip(rng.lognormal(np.log(INTERACTIONS_PER_USER) - 0.5, 1, users), 1, 2000).astype(int)
    order = rng.permutation(n_items).astype(np.int32)
    rows = [np.unique(order[(n_items * rng.random(size) ** 2).astype(int)]) for size in degree]
    indptr = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    indices = np.concatenate(rows)
    csr = torch.from_numpy(indptr).to(device), torch.from_numpy(indices).to(device)
    return ListPlan(*csr, n_items, rho, eta, share=share)


def counted(name: str, sizes: Row, rows_per_list: float = 0.0) -> tuple[float, float]:
    """Return the operations and bytes of one list, or of one query of top-K, as counted at the top of this file."""
    n, d, K, N, r = sizes.get("n", 0), sizes.get("d", 0), sizes["K"], sizes.get("items", 0), rows_per_list
    by_pairs = torch.cuda.is_available() or n <= PAIRWISE_MAX
    pairs = 8 * n * n if by_pairs else 4 * n * math.log2(n)
    return {
        "sample": (0, 4 * (n + 1)),
        "gradients": (4 * n * d + pairs + 40 * n * K, 4 * (n * d + 3 * n + 2 * d + 4)),
        "update": (2 * n * d + 8 * d * r, 4 * (n * d + 3 * n) + 16 * d * r),
        "drm": (pairs + 40 * n * K, 12 * n),
        "top-k": (2 * N * d, 4 * (N * d / query_block(d) + d) + 8 * K),
    }[name]


def query_block(d: int) -> int:
    """Return the number of queries that share one read of an item with d factors."""
    if not torch.cuda.is_available():
        return QUERY_BLOCK
    from drm_triton.kernels.gpu.filter import filter_sizes

    return filter_sizes(d)["BLOCK_M"]


# ------------------------------------------------------------------------------------------------------- machine


def peaks(size: Sizes, quick: bool) -> list[Row]:
    """Measure copy bandwidth and multiply-add rate.

    The multiply-add rate is that of the top-K micro-kernel on data in the first-level cache or, on a GPU, that of
    torch's product of float32 matrices.
    """
    _, device = backend_and_device()
    bandwidth_bytes = 2**28 if quick else 2**30
    source = torch.ones(bandwidth_bytes // 4, device=device)
    target = torch.empty_like(source)
    if device != "cpu":
        side = 8192
        square = torch.ones(side, side, device=device)
        flops = 2 * side**3 / time_in_turns({"product": lambda: square @ square})["product"]
    else:
        rounds, count = 20_000, threads.n_threads()
        sizes = (QUERIES * DEPTH, DEPTH * WIDTH, WIDTH, QUERIES)
        tables = [
            [*(torch.ones(size).numpy() for size in sizes), np.zeros(WIDTH, np.int32), np.zeros(QUERIES, np.int64)]
            for _ in range(count)
        ]
        on_all_threads = {"fma": lambda: threads.run(partial(fma_rounds, rounds, *table) for table in tables)}
        seconds = time_in_turns(on_all_threads)["fma"]
        flops = 2 * QUERIES * WIDTH * DEPTH * rounds * count / seconds
    seconds = time_in_turns({"copy": lambda: target.copy_(source)})["copy"]
    return [
        {"section": "peaks", "name": "fma", "gflops": flops / 1e9},
        {"section": "peaks", "name": "copy", "gbytes": 2 * bandwidth_bytes / seconds / 1e9},
    ]


@allocating
def fma_rounds(rounds, queries, panel, per_item, per_query, offset, hits):  # type: ignore[no-untyped-def]
    """Run the micro-kernel of top-K `rounds` times on the same tile."""
    for _ in range(rounds):
        filter_panel(queries, 0, DEPTH, panel, 0, per_item, per_item, offset, per_query, per_query, hits)


# --------------------------------------------------------------------------------------------------- comparisons


def drm(size: Sizes, quick: bool) -> list[Row]:
    """Compare the DRM loss and gradient alone."""
    ours, device = backend_and_device()
    B, n, K = size.batch, size.n, size.rho
    s = torch.randn(B, n, generator=torch.Generator().manual_seed(0)).to(device)
    y = (torch.arange(n, device=device) < size.rho).float().expand(B, n).contiguous()
    w, mask = torch.ones(B, K, device=device), torch.ones(B, n, dtype=torch.bool, device=device)
    runners: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.drm_lists(s, y, w, 1.0, mask),
        "torch closed form": lambda: reference.drm_lists(s, y, w, 1.0, mask),
        "torch autograd (published NeuralSort)": lambda: baselines.published_neuralsort(s, y, K, 1.0),
    }
    compiled = torch.compile(reference.drm_lists)
    try:
        compiled(s, y, w, 1.0, mask)
        runners["torch.compile of the closed form"] = lambda: compiled(s, y, w, 1.0, mask)
    except Exception as error:  # usually a missing C++ compiler
        print(f"torch.compile is not measured: {str(error).splitlines()[0]}")
    times = time_in_turns(runners, seconds=10, least=3 if quick else 7)
    sizes = {"B": B, "n": n, "K": K}
    flops, moved = counted("drm", sizes)
    return rows_of("drm", times, sizes, B * flops, B * moved)


def long(size: Sizes, quick: bool) -> list[Row]:
    """Compare losses of long lists, forward and backward, with a sort of the same scores and with softmax in torch.

    "ours" is `drm_loss`. The scores of `psl_loss` are scaled so that their differences are in [-1, 1].
    """
    _, device = backend_and_device()
    rows: list[Row] = []
    for B, n in LONG_LISTS[:1] if quick else LONG_LISTS:
        g, K = torch.Generator().manual_seed(0), 20
        s = torch.randn(B, n, generator=g).to(device).requires_grad_()
        y = (torch.rand(B, n, generator=g) < K / n).float().to(device)
        within_one = (s.detach() / (2 * s.detach().abs().max())).requires_grad_()
        runners: dict[str, Callable[[], object]] = {
            "ours": partial(gradient, drm_loss, s, y, K),
            "torch.sort": partial(torch.sort, s.detach()),
            "softmax, torch": partial(gradient, baselines.torch_softmax, s, y),
            "softmax_loss": partial(gradient, softmax_loss, s, y),
            "softmax_at_k_loss": partial(gradient, softmax_at_k_loss, s, y, K),
            "psl_loss": partial(gradient, psl_loss, within_one, y),
            "bpr_loss": partial(gradient, bpr_loss, s, y),
        }
        for k in (K, min(10 * K, n)):
            for method in get_args(SoftTopK):
                runners[f"soft_topk, {method}, k = {k}"] = partial(gradient, membership, s, y, k, method)
        times = time_in_turns(runners, seconds=5, least=3 if quick else 7)
        rows += [
            {"section": "long", "name": name, "B": B, "n": n, "K": K, "seconds": t, "times_ours": t / times["ours"]}
            | {"times_sort": t / times["torch.sort"], "times_softmax": t / times["softmax, torch"]}
            for name, t in times.items()
        ]
    return rows


def gradient(loss: Callable[..., Tensor], s: Tensor, *args: Any) -> Tensor:
    """Return the gradient of a loss to the scores."""
    (ds,) = torch.autograd.grad(loss(s, *args), s)
    return ds


def membership(s: Tensor, y: Tensor, k: int, method: SoftTopK) -> Tensor:
    """Return how much the positives belong to the top k."""
    return (soft_topk(s, k, method=method) * y).sum()


def step(size: Sizes, quick: bool) -> list[Row]:
    """Compare one training step. Our time includes sampling, that of torch does not.

    A larger batch contains more lists with the same row, which is updated once.
    """
    ours, device = backend_and_device()
    n, d, rho = size.n, size.factors, size.rho
    plan, unshared_plan = (
        make_plan(size.items, size.rho, size.eta, device, size.users, share) for share in (TrainConfig.share, 1)
    )
    U, V = factors(size.users, d, device, 1), factors(size.items, d, device, 2)
    rows = []
    for B in (size.batch,) if quick else (size.batch, 2 * size.batch, 4 * size.batch):
        lists = ours.sample_lists(unshared_plan, 1, 0, B)
        users, items = lists.users, lists.items
        runners: dict[str, Callable[[], object]] = {
            "ours": baselines.backend_step(ours, plan, U, V, Objective(rho), B),
            "ours, share 1": baselines.backend_step(ours, unshared_plan, U, V, Objective(rho), B),
            "torch, dense gradients": baselines.torch_step(U, V, users, items, rho, sparse=False),
            "torch, sparse gradients": baselines.torch_step(U, V, users, items, rho, sparse=True),
        }
        times = time_in_turns(runners, seconds=10, least=3 if quick else 7)
        sizes = {"B": B, "n": n, "d": d, "K": rho}
        r = (len(torch.unique(items)) + len(torch.unique(users))) / B
        counts = [counted(name, sizes, r) for name in ("sample", "gradients", "update")]
        flops, moved = (B * sum(values) for values in zip(*counts, strict=True))
        rows += rows_of("step", times, sizes, flops, moved)
    return rows


def topk(size: Sizes, quick: bool) -> list[Row]:
    """Compare finding the 50 best unseen items of all users."""
    ours, device = backend_and_device()
    k, d = min(50, size.items), size.factors
    plan = make_plan(size.items, size.rho, size.eta, device, size.users)
    queries, V, seen = factors(size.users, d, device, 3), factors(size.items, d, device, 4), (plan.indptr, plan.indices)
    runners: dict[str, Callable[[], object]] = {
        "ours": lambda: ours.top_k(queries, ours.pack_items(V, "dot"), k, seen),
        "matrix product alone": baselines.matrix_product(queries, V),
        "torch, blocks and topk": baselines.blocked_topk(queries, V, k, seen),
    }
    other = baselines.implicit_recommend(queries, V, k, seen) if device == "cpu" else None
    if other is not None:
        runners["implicit, recommend"] = other
    elif device == "cpu":
        print("implicit is not measured: it is not installed (pip install 'drm-triton[bench]')")
    else:
        print("implicit is not measured: the comparison is with its recommend on the CPU")
    times = time_in_turns(runners, seconds=15, least=3 if quick else 5)
    sizes = {"m": size.users, "items": size.items, "d": d, "K": k}
    flops, moved = counted("top-k", sizes)
    return rows_of("topk", times, sizes, size.users * flops, size.users * moved)


def rows_of(section: str, times: dict[str, float], sizes: Row, flops: float, moved: float) -> list[Row]:
    """Return one row for each runner. `times_ours` is its time divided by ours.

    The rates of all runners are for the operations that our kernels need, even if a runner does more.
    """
    return [
        {"section": section, "name": name, **sizes, "seconds": t, "times_ours": t / times["ours"]}
        | {"gflops": flops / t / 1e9, "gbytes": moved / t / 1e9}
        for name, t in times.items()
    ]


# -------------------------------------------------------------------------------------------------------- scaling


def scaling(size: Sizes, quick: bool) -> list[Row]:
    """Measure the time of each operation per list or query, with one size varied at a time."""
    rows: list[Row] = []
    grid: dict[str, list[int]] = {
        "n": [16, 32, 48, 64, 80, 128, 256, 512, 1024],
        "d": [16, 32, 64, 128, 256],
        "K": [1, 3, 5, 10, 48],
        "B": [1, 16, 256, 1024, 4096, 16384],
        "items": [28_800, 1_000_000] if quick else [28_800, 1_000_000, 10_000_000],
        "threads": [] if torch.cuda.is_available() else list(range(1, n_threads() + 1)),
    }
    usual = {"n": size.n, "d": size.factors, "K": size.rho, "B": size.batch, "items": size.items}
    rows += along(grid, usual, partial(operations, size), quick)
    grid |= {"n": [], "K": [1, 10, 50, 200, 1000], "B": [16, 256, 1024, 4096]}
    grid["items"] = [28_800, 100_000] if quick else [28_800, 100_000, 1_000_000]
    usual = {"d": size.factors, "K": 50, "B": 1024, "items": size.items}
    return rows + along(grid, usual, rank, quick)


def along(
    grid: dict[str, list[int]], usual: Row, measure: Callable[[Row, float], dict[str, Any]], quick: bool
) -> list[Row]:
    """Return one row for each operation and size, with the time per list or query and the rates."""
    rows = []
    for axis, values in grid.items():
        for value in values[::2] if quick else values:
            sizes = usual | {"threads": n_threads()} | {axis: value}
            for name, (t, r) in measure(sizes, 0.3 if quick else 0.8).items():
                flops, moved = (sizes["B"] * each / t / 1e9 for each in counted(name, sizes, r))
                row = {"section": "scaling", "axis": axis, "name": name, **sizes, "seconds": t}
                rows.append(row | {"us_per_list": t / sizes["B"] * 1e6, "gflops": flops, "gbytes": moved})
    return rows


def with_threads(measure: Callable[[], dict[str, Any]], count: int) -> dict[str, Any]:
    """Call `measure` with `count` threads."""
    before = n_threads()
    set_threads(count)
    try:
        return measure()
    finally:
        set_threads(before)


def rank(sizes: Row, seconds: float) -> dict[str, tuple[float, float]]:
    """Return the median time of top-K for B queries, in the form of `operations`."""
    ours, device = backend_and_device()
    queries, V = factors(sizes["B"], sizes["d"], device, 3), factors(sizes["items"], sizes["d"], device, 4)
    runners = {"top-k": lambda: ours.top_k(queries, ours.pack_items(V, "dot"), sizes["K"])}
    times = with_threads(lambda: time_in_turns(runners, seconds, least=3), sizes["threads"])
    return {name: (t, 0.0) for name, t in times.items()}


def operations(size: Sizes, sizes: Row, seconds: float) -> dict[str, tuple[float, float]]:
    """Return, for each operation of a step, its median time at these sizes and the rows updated per list."""
    ours, device = backend_and_device()
    B, n, N, d, K = (sizes[key] for key in ("B", "n", "items", "d", "K"))
    plan = make_plan(N, size.rho, n - size.rho, device, size.users, share=1)
    U, V = factors(size.users, d, device, 5), torch.empty(N, d, device=device).uniform_(-0.1, 0.1)
    state = torch.ones_like(V)
    batch = ours.sample_lists(plan, 0, 0, B)
    objective = Objective(size.rho, k=K)
    lists = ours.list_gradients(U, V, batch, objective)
    y = (torch.arange(n, device=device) < size.rho).float().expand(B, n).contiguous()
    w, mask = torch.ones(B, K, device=device), torch.ones(B, n, dtype=torch.bool, device=device)
    runners: dict[str, Callable[[], object]] = {
        "sample": lambda: ours.sample_lists(plan, 0, 0, B),
        "gradients": lambda: ours.list_gradients(U, V, batch, objective),
        "update": lambda: ours.update_rows(V, state, GradientTerms.of_items(batch, lists.g, U), 0.01, "dot"),
        "drm": lambda: ours.drm_lists(lists.scores, y, w, 1.0, mask),
    }
    times = with_threads(lambda: time_in_turns(runners, seconds), sizes["threads"])
    return {name: (t, len(torch.unique(batch.items)) / B) for name, t in times.items()}


def compilation(size: Sizes, quick: bool) -> list[Row]:
    """Measure the seconds of a first training step and top-K in a new process, without and with cached kernels."""
    program = (
        "import time, torch; from drm_triton.bench import baselines, kernels as b;"
        "ours, device = b.backend_and_device();"
        "plan = b.make_plan(500, 3, 45, device); U, V = b.factors(15500, 64, device, 1), b.factors(500, 64, device, 2);"
        "start = time.time(); baselines.backend_step(ours, plan, U, V, b.Objective(3), 64)();"
        "items, _ = ours.top_k(U[:64], ours.pack_items(V, 'dot'), 5); items.cpu(); print(time.time() - start)"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "cached"):
            done = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "NUMBA_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder}, cwd=RESULTS.parents[1],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            rows.append({"section": "compilation", "name": name, "seconds": float(done.stdout)})
    return rows


SECTIONS = {
    "peaks": peaks, "drm": drm, "long": long, "step": step, "topk": topk, "scaling": scaling,
    "compilation": compilation,
}  # fmt: skip


def run(
    only: list[str] | None = None,
    quick: bool = False,
    folder: Path = RESULTS,
    size: Sizes = DEFAULT_SIZES,
) -> list[Row]:
    """Run sections of the benchmark, and print and save the results."""
    unknown = sorted(set(only or ()) - set(SECTIONS))
    if unknown:
        raise InputError(f"bench kernels: unknown section {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    rows: list[Row] = []
    for name, section in SECTIONS.items():
        if only is None or name in only:
            rows += section(size, quick)
    show(rows)
    header = environment()
    save("kernels", header, rows, folder)
    pictures = plot(rows, folder)
    print(f"written to {folder}: kernels.csv, kernels.json" + "".join(f", {name}" for name in pictures))
    if backend_and_device()[1] != "cpu":
        add_section(Path(NAME), "bench", {"environment": header, "rows": rows})
        print(f"The results are also in {NAME}. Please attach it to an issue about this GPU.")
    return rows


def run_tuning(size: Sizes) -> None:
    """Choose launch options of the GPU kernels for these sizes, and store them."""
    reason = why_no_gpu()
    if reason is not None:
        raise InputError(f"bench kernels: `tune` needs a GPU: {reason}")
    from drm_triton.bench.tuning import tune

    backend, device = backend_and_device()
    users, items = min(size.users, 4096), min(size.items, 8192)
    sizes = (size.batch, users, items, size.rho, max(CUT_OFFS))  # validation ranks that many items
    case = Case(size.n, size.factors, "dot", TrainConfig.share, torch.float32, *sizes)
    tune(backend, torch.device(device), case)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), help=f"comma-separated sections: {', '.join(SECTIONS)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    for field in fields(Sizes):
        parser.add_argument(
            f"--{field.name}", type=int, default=field.default, help="size of the comparisons [%(default)s]"
        )
    options = parser.parse_args()
    chosen = Sizes(**{field.name: getattr(options, field.name) for field in fields(Sizes)})
    run(options.only, options.quick, options.out, chosen)
