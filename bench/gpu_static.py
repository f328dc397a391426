"""Compile the Triton kernels for real GPUs, without one: registers, spills, memory, instructions, estimated times.

Every kernel is compiled to machine code for A100 (sm_80), H100 (sm_90), B200 (sm_100) and MI300X (gfx942) over the
paper's grid: rho 1..5 (n = 16 rho items), d 16..128, both scores, with the tile sizes that the launchers choose.
results/gpu_static_triton37.* holds an earlier survey under Triton 3.7, which some GPU builds of torch depend on.

Bytes per list of n items and d factors (float32 and int32), each counted once, as if nothing were cached:
    sample      writes 4 (n + 1), with shared negatives eta more
    gradients   reads  4 (n d + d + n + 1)          writes 4 (2 n + d + 4)
    update      reads  4 (5 n + n d) + 8 d r        writes 8 d r       r = rows touched per list, n without repeats
    merge       reads  4 (n + d + 1) + eta          writes 4 n + 4 eta (d + 2) / share; the update then has
                                                    eta / share + rho terms per list instead of n
    top-k       reads  4 d N / BLOCK_M per query, from the L2 cache unless V is larger
Operations: gradients 4 n d (dot) or 7 n d (l2) + 12 n^2 + 20 n K.

    python -m drm_triton.bench.gpu_static [--quick]        prints a table, writes bench/results/gpu_static.{csv,json}

Nothing here was measured on a GPU. Facts about the code are exact. Times are lower bounds (roofline).
"""

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drm_triton.bench.gpu_bytes import SHARE, traffic

RESULTS = Path(__file__).resolve().parent / "results"

# Types of the pointer arguments that are not float32, by name. A name means the same in every kernel.
POINTERS = {
    **dict.fromkeys(["users_ptr", "items_ptr", "indices_ptr", "eligible_ptr", "seen_ptr", "shared_ptr"], "*i32"),
    **dict.fromkeys(["sorted_keys_ptr", "sources_ptr", "rows_ptr", "keys_ptr"], "*i32"),
    **dict.fromkeys(["first_list_ptr", "indptr_ptr", "order_ptr", "buffer_ptr"], "*i64"),
    **dict.fromkeys(["mask_ptr", "inside_ptr", "replaced_ptr"], "*i1"),
}


@dataclass(frozen=True)
class Gpu:
    """Published peaks of a GPU, and the limits on the warps that a multiprocessor holds."""

    name: str
    backend: str
    arch: int | str
    warp: int
    bandwidth: float  # bytes/s of HBM
    flops: float  # float32, no tensor cores
    processors: int  # multiprocessors or compute units, each issuing 4 warp instructions per cycle
    clock: float  # Hz
    shared: int  # bytes per multiprocessor
    shared_block: int  # bytes one block may use
    max_warps: int  # per multiprocessor
    max_blocks: int


GPUS = [
    Gpu("A100 SXM 80GB", "cuda", 80, 32, 2.039e12, 19.5e12, 108, 1.41e9, 164 << 10, 163 << 10, 64, 32),
    Gpu("H100 SXM", "cuda", 90, 32, 3.35e12, 66.9e12, 132, 1.83e9, 228 << 10, 227 << 10, 64, 32),
    Gpu("B200", "cuda", 100, 32, 8.0e12, 75e12, 148, 1.85e9, 228 << 10, 227 << 10, 64, 32),
    Gpu("MI300X", "hip", "gfx942", 64, 5.3e12, 163.4e12, 304, 2.1e9, 64 << 10, 64 << 10, 32, 32),
]


@dataclass(frozen=True)
class Case:
    """One kernel with one choice of compile-time values."""

    operation: str
    kernel: Any
    constants: dict[str, Any]  # constexpr values, num_warps and maxnreg, as the launcher passes them
    multiples: tuple[str, ...] = ()  # integer arguments that are divisible by 16
    labels: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"


@dataclass
class Code:
    """Facts about the machine code of a case on a GPU."""

    registers: int
    spilled: int  # bytes per thread in memory: stack and spilled registers
    parked: int  # AMD scalar registers kept in lanes of a vector register: a move, no memory
    shared: int  # bytes per program
    warps: int  # warps resident per multiprocessor
    occupancy: float  # fraction of the most it can hold
    instructions: int
    mix: dict[str, int]
    ttir: str = field(repr=False, default="")


def compile_case(case: Case, gpu: Gpu) -> Code:
    """Compile a case to machine code and read it. The process must not have TRITON_INTERPRET set."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(case.constants)
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    limit = constants.pop("maxnreg", None)
    if limit is not None and gpu.backend == "cuda":
        options["maxnreg"] = limit
    signature, attributes = {}, {}
    for i, parameter in enumerate(case.kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{case.dtype}")
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation_type
            if name in case.multiples:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(case.kernel, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget(gpu.backend, gpu.arch, gpu.warp), options=options)
    read = read_nvidia if gpu.backend == "cuda" else read_amd
    registers, spilled, parked, mix = read(compiled.asm)
    shared, block_warps = compiled.metadata.shared, compiled.metadata.num_warps
    warps = resident_warps(gpu, registers, shared, block_warps)
    total = sum(mix.values())
    return Code(registers, spilled, parked, shared, warps, warps / gpu.max_warps, total, mix, compiled.asm["ttir"])


def read_nvidia(asm: dict[str, Any]) -> tuple[int, int, int, dict[str, int]]:
    """Return registers, bytes of stack and local memory, 0, and the instruction mix of a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True)
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage.stdout)}
    names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass.stdout, flags=re.M)
    return used["REG"], used["STACK"] + used["LOCAL"], 0, group(names, NVIDIA_GROUPS)


def read_amd(asm: dict[str, Any]) -> tuple[int, int, int, dict[str, int]]:
    """Return vector registers, bytes spilled, scalars parked, and the instruction mix, from notes in the assembly."""
    text = asm["amdgcn"]

    def note(key: str) -> int:
        return max((int(value) for value in re.findall(rf"\.{key}:\s+(\d+)", text)), default=0)

    spilled = note("private_segment_fixed_size") + 4 * note("vgpr_spill_count")
    names = re.findall(r"^\t([sv]_\w+|ds_\w+|global_\w+|buffer_\w+|flat_\w+|scratch_\w+)", text, flags=re.M)
    return note("vgpr_count"), spilled, note("sgpr_spill_count"), group(names, AMD_GROUPS)


NVIDIA_GROUPS = {
    "float": r"F(ADD|MUL|FMA|MNMX|SETP|SEL|CHK|SET)|D(ADD|MUL|FMA|SETP)|[HD]?MMA|F2F",
    "special": r"MUFU",
    "load": r"LDG|LDGSTS",
    "store": r"STG",
    "shared": r"LDS|STS|LDSM|STSM|ATOMS",
    "shuffle": r"SHFL|REDUX|VOTE|MATCH",
    "barrier": r"BAR|WARPSYNC|SYNCS|MEMBAR|DEPBAR|LDGDEPBAR",
    "local": r"LDL|STL",
}
AMD_GROUPS = {
    "float": r"v_(pk_)?(add|sub|subrev|mul|fma|fmac|max|min|mac|cmp\w*|div\w*|ldexp|rndne)_f(32|64)\w*",
    "special": r"v_(exp|log|rcp|sqrt|rsq)_\w+",
    "load": r"(global|buffer|flat)_load\w*",
    "store": r"(global|buffer|flat)_store\w*",
    "shared": r"ds_(read|write|load|store)\w*",
    "shuffle": r"ds_(b?permute|swizzle)\w*|v_\w+_dpp|v_mov_b32_dpp|v_readlane\w*|v_permlane\w*",
    "barrier": r"s_(barrier|waitcnt)",
    "local": r"scratch_\w+",
}


def group(names: list[str], groups: dict[str, str]) -> dict[str, int]:
    """Count instructions by group; integers, predicates and branches are `other`."""
    mix: Counter[str] = Counter()
    for name in names:
        mix[next((key for key, pattern in groups.items() if re.fullmatch(pattern, name)), "other")] += 1
    return dict(mix)


def resident_warps(gpu: Gpu, registers: int, shared: int, block_warps: int) -> int:
    """Return the warps per multiprocessor that registers, shared memory and the fixed limits allow."""
    if gpu.backend == "cuda":  # 64K registers, allocated to warps by 256; a block takes 1 KiB of shared memory more
        by_registers = 65536 // (-(-registers * 32 // 256) * 256) // block_warps
        shared += 1024
    else:  # each of 4 SIMDs has 512 registers per lane, allocated by 8
        by_registers = 4 * (512 // (-(-registers // 8) * 8)) // block_warps
    by_shared = gpu.shared // shared if shared else gpu.max_blocks
    return min(by_registers, by_shared, gpu.max_blocks, gpu.max_warps // block_warps) * block_warps


RHOS, FACTORS, SCORES = (1, 2, 3, 4, 5), (16, 32, 64, 128), ("dot", "l2")


def cases(quick: bool = False) -> Iterator[Case]:
    """Yield every kernel with the compile-time values of its launcher: over the paper's grid, or once each."""
    from drm_triton.kernels.gpu import gradients, sampling, softsort, softsort_tiled, topk, update

    yield Case("sample", sampling._shared_kernel, sampling.SHARED_SIZES, labels={"variant": "draws of groups"})
    for variant in ("shared",) if quick else ("proportional", "uniform", "shared", "uniform shared"):
        flags: dict[str, Any] = {"PROPORTIONAL": "uniform" not in variant, "SHARED": "shared" in variant}
        yield Case("sample", sampling._sample_kernel, sampling.SAMPLE_SIZES | flags, labels={"variant": variant})

    for score in SCORES:
        L2 = {"L2": score == "l2"}
        for d in (64,) if quick else FACTORS:
            labels: dict[str, Any] = {"d": d, "score": score}
            for rho in (5,) if quick and score == "dot" else () if quick else RHOS:
                yield gradients_case(rho, d, score)
            if score == "dot":  # merging does not depend on the score
                groups = {"d": d, "variant": f"groups of {SHARE}"}
                yield Case("update", update._merge_kernel, update.merge_sizes(d), ("d",), groups)
            for merged, dense in updates(quick, score):
                flags = L2 | {"SPHERE": False, "MERGED": merged, "DENSE": dense}
                variant = " + ".join([f"groups of {SHARE}"] * merged + ["dense"] * dense)
                sizes = update.update_sizes(d, merged)
                yield Case("update", update._update_kernel, sizes | flags, ("d",), labels | {"variant": variant})
            if not quick or score == "l2":
                flags = L2 | {"SEEN": True}
                multiples = ("d", "capacity", "items_per_split")
                yield Case("top-k", topk._candidates_kernel, topk.TOP_K_SIZES | flags, multiples, labels)
        if not quick or score == "l2":
            for kernel in (gradients._scores_kernel, gradients._user_gradient_kernel):
                yield Case("long gradients", kernel, gradients.LONG_SIZES | L2, ("d",), {"score": score})
    finish = {"HINGE": True, "MSE": True, "SOFTMAX": True, "PSL": True, "BPR": True, **gradients.finish_sizes(1024)}
    yield Case("long gradients", gradients._finish_kernel, finish, labels={"n": 1024})
    yield gradients_case(3, 128, "l2", "ap", mse=True)
    if not quick:
        yield gradients_case(3, 64, "l2", drm=False)
        yield gradients_case(3, 64, "l2", hinge=False)

    for dtype in ("fp32",) if quick else ("fp32", "fp64"):
        for mode in ("drm",) if quick else ("forward", "backward", "drm"):
            for n in (128,) if quick else (48, 128):
                labels = {"n": n, "variant": f"{mode} {dtype}"}
                constants: dict[str, Any] = {**softsort.softsort_sizes(n, 5), "MODE": mode}
                yield Case("soft top-k", softsort._lists_kernel, constants, ("n",), labels, dtype)
        for backward in (True,) if quick else (False, True):
            labels = {"variant": f"{'backward' if backward else 'forward'} {dtype}"}
            for kernel, constants in (
                (softsort_tiled._pairs_kernel, {**softsort_tiled.PAIRS_SIZES, "GRADIENT": backward}),
                (softsort_tiled._ranks_kernel, {**softsort_tiled.RANKS_SIZES, "DOT": backward}),
                (softsort_tiled._items_kernel, {**softsort_tiled.ITEMS_SIZES, "GRADIENT": backward}),
            ):
                yield Case("long soft top-k", kernel, constants, labels=labels, dtype=dtype)


def updates(quick: bool, score: str) -> list[tuple[bool, bool]]:
    """Return which (merged, dense) variants of `_update_kernel` to compile."""
    if quick:
        return [(True, True)] if score == "l2" else [(False, False)]
    return [(False, False), (True, False), (False, True), (True, True)]


def gradients_case(
    rho: int, d: int, score: str, weight: str = "uniform", hinge: bool = True, drm: bool = True, mse: bool = False
) -> Case:
    """Return `_gradients_kernel` as `list_gradients` launches it, with n = 16 rho."""
    from drm_triton.kernels.gpu import gradients

    sizes = gradients.gradients_sizes(16 * rho, d, rho)
    flags = {
        "L2": score == "l2",
        "HINGE": hinge,
        "DRM": drm,
        "MSE": mse,
        "SOFTMAX": False,
        "PSL": False,
        "BPR": False,
        "AP": weight == "ap",
    }
    flags["RESIDENT"] = d <= sizes["BLOCK_D"]
    losses = "+".join(name for name, on in (("hinge", hinge), ("drm", drm), ("mse", mse)) if on)
    labels = {"n": 16 * rho, "d": d, "score": score, "variant": f"{losses} {weight}"}
    return Case("gradients", gradients._gradients_kernel, {**flags, **sizes}, ("n", "d"), labels)


def estimate(case: Case, code: Code, gpu: Gpu) -> dict[str, float]:
    """Estimate operations and the least time of a million lists, or of one top-k run.

    `issue` is the time to issue the instructions of the gradient kernel, one per cycle on each of 4 schedulers. The
    roofline of bytes and operations does not include it. The body of a loop is counted once, so it is a lower bound.
    """
    if case.operation == "top-k":  # all of SketchFab: 15.5K queries, 28.8K items
        d = case.labels["d"]
        query_blocks = 15_500 / case.constants["BLOCK_M"]
        flops_s, bytes_s = 2 * d * 15_500 * 28_800 / gpu.flops, query_blocks * 4 * d * 28_800 / gpu.bandwidth
        return {"bytes_s": round(bytes_s, 6), "flops_s": round(flops_s, 6)}
    if case.operation != "gradients" or not case.constants["DRM"]:
        return {}
    n, d, rho = case.labels["n"], case.labels["d"], case.labels["n"] // 16
    bytes_in, bytes_out = 4 * (n * d + d + n + 1), 4 * (2 * n + d + 4)
    flops = (4 if case.labels["score"] == "dot" else 7) * n * d + 12 * n * n + 20 * n * rho
    update = 4 * (5 * n + n * d) + 16 * d * n
    seconds = {
        "bytes_s": 1e6 * (bytes_in + bytes_out) / gpu.bandwidth,
        "flops_s": 1e6 * flops / gpu.flops,
        "issue_s": 1e6 * code.instructions * case.constants["num_warps"] / (4 * gpu.processors * gpu.clock),
        "step_bytes_s": 1e6 * (bytes_in + bytes_out + update + 4 * (n + 1)) / gpu.bandwidth,
    }
    return {"flops": flops, **{key: round(value, 6) for key, value in seconds.items()}}


def survey(quick: bool = False) -> list[dict[str, Any]]:
    """Compile all cases for all GPUs and return one flat row each."""
    rows = []
    for case in cases(quick):
        for gpu in GPUS:
            code = compile_case(case, gpu)
            moved = traffic(case.operation, case.kernel.__name__, case.labels, case.constants)
            row = {
                "operation": case.operation,
                "kernel": case.kernel.__name__,
                **{key: case.labels.get(key, "") for key in ("n", "d", "score", "variant")},
                "gpu": gpu.name,
                "arch": str(gpu.arch),
                "num_warps": case.constants["num_warps"],
                **{key: value for key, value in asdict(code).items() if key not in ("mix", "ttir")},
                "fits": code.spilled == 0 and code.shared <= gpu.shared_block,
                **{f"code_{key}": code.mix.get(key, 0) for key in (*NVIDIA_GROUPS, "other")},
                **({"least_bytes": moved[0], "requested_bytes": moved[1]} if moved else {}),
                **estimate(case, code, gpu),
            }
            rows.append(row)
            print(
                f"{row['kernel']:24} n={row['n']!s:4} d={row['d']!s:4} {row['score']:4} {row['variant']:20} "
                f"{row['arch']:7} warps {row['num_warps']:2} regs {code.registers:3} spilled {code.spilled:4} "
                f"shared {code.shared:6} occupancy {code.occupancy:4.0%} instructions {code.instructions:5}"
                + (f" bytes {moved[0]:6} requested {moved[1] / moved[0]:.2f}x" if moved else ""),
                flush=True,
            )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print and save the survey; return 1 if a kernel spills or needs too much shared memory."""
    import torch
    import triton

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="compile every kernel once and write nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_static", help="path without suffix")
    options = parser.parse_args(arguments)
    rows = survey(options.quick)
    bad = [row for row in rows if not row["fits"]]
    print(f"triton {triton.__version__}, torch {torch.__version__}: {len(rows)} compilations, {len(bad)} do not fit")
    print("\nEstimates for one million lists, hinge + drm, not measured; HBM bytes as if nothing were cached:")
    for row in rows:
        if row.get("issue_s") and row["variant"] == "hinge+drm uniform":
            bound = max("bytes_s", "flops_s", "issue_s", key=lambda key: row[key])
            print(
                f"{row['gpu']:14} n={row['n']:3} d={row['d']:4} {row['score']:4} "
                f"{row['least_bytes']:6} B/list at least, {row['requested_bytes'] / row['least_bytes']:.2f}x read; "
                f"memory {row['bytes_s'] * 1e3:6.1f} ms, arithmetic {row['flops_s'] * 1e3:6.1f} ms, "
                f"issue {row['issue_s'] * 1e3:6.1f} ms: bound by {bound[:-2]}; "
                f"memory of the whole step {row['step_bytes_s'] * 1e3:6.1f} ms"
            )
        elif row["operation"] == "top-k" and row["score"] == "dot":
            print(
                f"{row['gpu']:14} top-k d={row['d']:4} of 15.5K queries over 28.8K items: product "
                f"{row['flops_s'] * 1e3:6.2f} ms, V from HBM if not cached {row['bytes_s'] * 1e3:6.2f} ms"
            )
    if not options.quick:
        write(options.out, rows, {"triton": triton.__version__, "torch": torch.__version__})
    return 1 if bad else 0


def write(path: Path, rows: list[dict[str, Any]], versions: dict[str, str]) -> None:
    """Save rows as CSV, and as JSON with versions and the assumed figures of the GPUs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    report = {**versions, "note": "times are estimates", "gpus": [asdict(gpu) for gpu in GPUS], "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
