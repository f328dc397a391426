"""Count what the compiled kernels execute in a training step and in top-K, and estimate times from the counts.

The emulator of `ptx` runs the kernels as compiled for sm_90 and counts, per list or query,

    instructions   PTX instructions that warps execute
    requested      bytes of the 32-byte sectors that their loads and stores touch, counted for each instruction
    touched        bytes of memory that a launch reads or writes at least once

An estimate for a GPU with the published figures in `gpus` is the larger of two times: that to issue the instructions at
the peak rate, and that to move the touched bytes at the peak bandwidth. A real kernel takes longer: loads wait, a PTX
instruction may become several of the machine, launches have gaps, and caches do not hold everything (the time of
`requested` bytes is that without any cache). It may also take less, where the assembler removes instructions. The sums
and other operations of torch in a step are not counted. Nothing was measured on a GPU.

    python -m bench.gpu_counts        prints tables, writes bench/results/gpu_counts.{json,md}
"""

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drm_triton.bench.gpus import GPUS
from drm_triton.bench.ptx import Statistics, emulated
from drm_triton.bench.record import RESULTS, environment
from drm_triton.exercises import Case, Inputs
from drm_triton.kernels import gpu
from drm_triton.kernels.gpu.filter import GROUP
from drm_triton.kernels.protocol import GradientTerms, Objective, row_score

LISTS, N, D, SHARE = 64, 46, 64, 32  # the paper's n with one positive, in groups as by default
SHORT = Case(N, D, "dot", SHARE, B=LISTS, n_users=1000, n_items=2000)
LONG = Case(1001, D, "dot", SHARE, B=LISTS, n_users=1000, n_items=20_000, rho=1)
LONG_OBJECTIVES = {  # with a gradient at fewer and fewer items of a list
    "hinge + DRM, tau 0.5": Objective(1, "dot", tau=0.5),
    "hinge + DRM, tau 0.1": Objective(1, "dot", tau=0.1),
    "hinge": Objective(1, "dot", drm=False),
}
ITEMS = "update_rows of items"
QUERIES, K = 64, 50  # of top-K
SKETCHFAB = (15_500, 28_800)  # queries and items of the estimate for top-K


def count(function: Callable[[], object], per: int) -> dict[str, float]:
    """Return the counts of a function, divided by `per`."""
    with emulated() as emulation:
        function()
    total: dict[str, float] = {"instructions": 0, "requested": 0, "touched": 0}
    for statistics in emulation.statistics.values():
        for name, value in counted(statistics).items():
            total[name] += value / per
    return total


def counted(statistics: Statistics) -> dict[str, int]:
    """Return the counts of a kernel."""
    return {
        "instructions": statistics.total,
        "requested": 32 * (statistics.sectors_read + statistics.sectors_written),
        "touched": statistics.bytes_touched,
    }


def step(case: Case, objective: Objective) -> tuple[dict[str, dict[str, float]], float]:
    """Count the operations of one training step, per list; also return the number of a list's items with a gradient."""
    x, found = Inputs.of(case), {}
    found["sample_lists"] = count(lambda: gpu.sample_lists(x.plan, 1, 0, LISTS), LISTS)
    lists: list[Any] = []
    found["list_gradients"] = count(lambda: lists.append(gpu.list_gradients(x.U, x.V, x.batch, objective)), LISTS)
    items = GradientTerms.of_items(x.batch, lists[0].g, x.U)
    users = GradientTerms.of_rows(x.batch.users, lists[0].user_grad)
    found[ITEMS] = count(lambda: gpu.update_rows(x.V, x.V_state, items, 0.1, "dot"), LISTS)
    update_users = count(lambda: gpu.update_rows(x.U, x.U_state, users, 0.1, row_score("dot")), LISTS)
    return {**found, "update_rows of users": update_users}, (lists[0].g != 0).sum().item() / LISTS


def long_lists() -> dict[str, dict[str, Any]]:
    """Count the operations of a training step on long lists, with each of LONG_OBJECTIVES."""
    found = {}
    for name, objective in LONG_OBJECTIVES.items():
        counts, items = step(LONG, objective)
        found[name] = {"items with a gradient": items, **counts}
    return found


def top_k() -> dict[str, float]:
    """Count top-K, per query of SketchFab."""
    draw = torch.Generator().manual_seed(0)
    queries, V = torch.randn(QUERIES, D, generator=draw), torch.randn(SKETCHFAB[1], D, generator=draw)
    found = count(partial(gpu.top_k, queries, gpu.pack_items(V, "dot"), K), QUERIES)
    # All queries of a launch share the items, as floats and as bytes. Estimates are written and read.
    shared, estimates = 5 * D * SKETCHFAB[1] / SKETCHFAB[0], 2 * 4 * SKETCHFAB[1] / GROUP
    return found | {"touched": shared + 5 * D + estimates + 8 * K}


def nanoseconds(counts: dict[str, float], bandwidth: float, issue: float) -> float:
    """Return the estimated time of one list or query: of its instructions or its bytes, whichever is longer."""
    return 1e9 * max(counts["instructions"] / issue, counts["touched"] / bandwidth)


def table(counts: dict[str, dict[str, float]], versions: str) -> str:
    """Return counts and estimates in Markdown."""
    total = {
        key: sum(row[key] for name, row in counts.items() if name != "top_k")
        for key in ("instructions", "requested", "touched")
    }
    rows = {**counts, "all of a step": total}
    lines = [
        f"Counts by the emulator for sm_90 ({versions}), per list or per query of `top_k`. Lists have n = {N},",
        f"d = {D}, in groups of {SHARE}; {LISTS} lists were run. `top_k` finds the best {K} of {SKETCHFAB[1]:,} items.",
        "Its bytes touched are computed from the sizes, because few of its queries are run. Command: `python -m",
        "bench.gpu_counts`.",
        "",
        "| operation | warp instructions | bytes requested | bytes touched |",
        "|---|---|---|---|",
        *(
            f"| {name} | {row['instructions']:,.0f} | {row['requested']:,.0f} | {row['touched']:,.0f} |"
            for name, row in rows.items()
        ),
        "",
        "Estimates, not measurements: the longer of the times to issue these instructions and to move the bytes",
        "touched, at the published peaks. Sums and other operations of torch, waiting and launches are left out.",
        "On a T4, Triton multiplies bytes without tensor cores, so that top-K takes longer than estimated here.",
        "",
        f"| GPU | ns a list of a step | ms for top-{K} of {SKETCHFAB[0]:,} queries |",
        "|---|---|---|",
    ]
    for each in GPUS:
        if each.backend == "cuda":
            ns = nanoseconds(total, each.bandwidth, each.issue)
            ms = nanoseconds(counts["top_k"], each.bandwidth, each.issue) * SKETCHFAB[0] / 1e6
            lines.append(f"| {each.name} | {ns:.1f} | {ms:.1f} |")
    return "\n".join(lines) + "\n"


def long_table(counts: dict[str, dict[str, Any]]) -> str:
    """Return counts of long lists in Markdown."""
    lines = [
        f"Counts for lists with n = {LONG.n:,}, also in groups of {SHARE}, of {LONG.n_items:,} items with random "
        "factors.",
        "Hinge and DRM have a gradient at some of the items of a list, and `update_rows` leaves out the others.",
        "",
        "| loss | items of a list with a gradient | instructions of list_gradients | of update_rows of items | bytes "
        "requested by it | bytes touched by it |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {row['items with a gradient']:,.0f} | {row['list_gradients']['instructions']:,.0f} | "
            f"{row[ITEMS]['instructions']:,.0f} | {row[ITEMS]['requested']:,.0f} | {row[ITEMS]['touched']:,.0f} |"
            for name, row in counts.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def rounded(counts: Any) -> Any:
    """Return nested counts with one decimal."""
    if isinstance(counts, dict):
        return {name: rounded(value) for name, value in counts.items()}
    return round(counts, 1)


def main(arguments: list[str] | None = None) -> int:
    """Print and save counts and estimates."""
    import triton

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_counts", help="path without suffix")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    counts, long = {**step(SHORT, Objective(1, "dot"))[0], "top_k": top_k()}, long_lists()
    text = table(counts, f"Triton {triton.__version__}") + "\n" + long_table(long)
    print(text)
    options.out.with_suffix(".md").write_text(text)
    made = {key: value for key, value in environment().items() if key in ("date", "commit", "torch")}
    sizes = {"n": N, "d": D, "share": SHARE, "n of long lists": LONG.n}
    found = {"per list or query": rounded(counts), "per long list": rounded(long)}
    report = {**made, "triton": triton.__version__, **sizes, **found}
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
