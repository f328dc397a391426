"""Compile the Triton kernels for real GPUs, without one: registers, spills, shared memory, size of the code.

The launches are those of the operations in `drm_triton/exercises.py`, with the tile sizes that the launchers choose.
Every launch is compiled to machine code for each GPU in `gpus`. These are facts about the code. What the kernels
execute is counted by `gpu_counts`, and no time is measured anywhere.

    python -m bench.gpu_static [--quick] [--arch 90]        prints a table, writes bench/results/gpu_static.{csv,json}

results/gpu_static_triton37.* holds the same with --quick --arch 90 under Triton 3.7, on which some GPU builds of torch
depend.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from drm_triton.bench.gpus import GPUS, Gpu
from drm_triton.bench.record import RESULTS, environment
from drm_triton.exercises import OPERATIONS, Case, Inputs, distinct


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel that did not happen."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record the launches of kernels on tensors of the CPU instead of running them. TRITON_INTERPRET must be off."""
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        launches.append(Launch(kernel, arguments, options))

    # Outputs have any values. So nothing may be asserted of them.
    with mock.patch.object(JITFunction, "run", run), mock.patch.object(torch, "_assert_async"):
        yield launches


@dataclass
class Code:
    """Facts about the machine code of a launch on a GPU."""

    registers: int
    spilled: int  # bytes per thread in memory: stack and spilled registers
    parked: int  # AMD scalar registers kept in lanes of a vector register: a move, no memory
    shared: int  # bytes per program
    warps: int  # warps resident per multiprocessor
    occupancy: float  # fraction of the most it can hold
    instructions: int  # of the code, each once
    mix: dict[str, int]
    num_warps: int  # of a program
    ttir: str = field(repr=False, default="")


def compiled_for(launch: Launch, gpu: Gpu) -> Any:
    """Compile a launch for a GPU as Triton does there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    from drm_triton.kernels.gpu.filter import filter_sizes

    target, kernel = GPUTarget(gpu.backend, gpu.arch, gpu.warp), launch.kernel
    backend = make_backend(target)
    options = {name: value for name, value in launch.options.items() if name != "maxnreg" or gpu.backend == "cuda"}
    if "FLOATS" in options and gpu.arch == 75:  # as `filter.estimate_groups` does there
        options |= filter_sizes(options["D"], floats=True)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*launch.arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, None)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def code_of(launch: Launch, gpu: Gpu) -> Code:
    """Compile a launch to machine code and read it."""
    compiled = compiled_for(launch, gpu)
    read = read_nvidia if gpu.backend == "cuda" else read_amd
    registers, spilled, parked, mix = read(compiled.asm)
    shared, block_warps = compiled.metadata.shared, compiled.metadata.num_warps
    warps = resident_warps(gpu, registers, shared, block_warps)
    occupancy, total, ttir = warps / gpu.max_warps, sum(mix.values()), compiled.asm["ttir"]
    return Code(registers, spilled, parked, shared, warps, occupancy, total, mix, block_warps, ttir)


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


def cases(quick: bool = False) -> list[Case]:
    """Return the sizes to compile for: so that each kernel is compiled once, or with one size varied at a time."""
    if quick:
        bfloat16 = [Case(80, 128, "l2", 4, torch.bfloat16)]
        return [Case(80, 128, "l2", 4), Case(46, 64, "dot"), Case(140, 64, "l2"), *bfloat16]
    sizes = [(18, 12), (46, 64), (80, 64), (140, 64), (46, 256)]
    shared = [Case(n, d, score, 32, B=64) for n, d in sizes for score in ("dot", "l2")]
    double = [*(Case(n, 64, "l2", 32, torch.float64, B=64) for n in (80, 140)), Case(140, 64, "l2", 1, torch.float64)]
    bfloat16 = [Case(n, d, "cosine", 32, torch.bfloat16, B=64) for n, d in sizes]
    long = [Case(1000, 64, "dot"), Case(140, 128, "dot", 64, B=64)]
    return [*shared, Case(46, 64, "cosine"), Case(46, 128, "l2"), *long, *double, *bfloat16]


def launches(quick: bool = False) -> dict[str, tuple[str, Case, Launch]]:
    """Return the operation, the case and the launch of everything to compile, or one per operation, type and kernel.

    `all_losses` launches what `list_gradients` does, with more code in the kernels.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from drm_triton.kernels import gpu

    backend = make_backend(GPUTarget("cuda", 90, 32))
    found: dict[str, tuple[str, Case, Launch]] = {}
    for name, case in distinct(gpu, cases(quick)):
        if quick and name == "list_gradients":
            continue
        with recorded() as made:
            OPERATIONS[name](gpu, Inputs.of(case).to(torch.device("cpu"), case.dtype))
        for launch in made:
            bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
            _, specialization, _ = bind(*launch.arguments, **launch.options)
            options = sorted((key, value) for key, value in launch.options.items() if key in ("num_warps", "maxnreg"))
            variant = f"{name} {case.dtype}" if quick else f"{specialization} {options}"
            found.setdefault(f"{launch.kernel.__name__} {variant}", (name, case, launch))
    return found


def survey(gpus: list[Gpu], quick: bool = False) -> list[dict[str, Any]]:
    """Compile all launches for some GPUs and return one flat row each."""
    rows = []
    for name, case, launch in launches(quick).values():
        for gpu in gpus:
            code = code_of(launch, gpu)
            row = {
                "operation": name,
                "kernel": launch.kernel.__name__,
                **{key: getattr(case, key) for key in ("n", "d", "score", "share")},
                "dtype": str(case.dtype).removeprefix("torch."),
                "gpu": gpu.name,
                "arch": str(gpu.arch),
                **{key: value for key, value in asdict(code).items() if key not in ("mix", "ttir")},
                "fits": code.spilled == 0 and code.shared <= gpu.shared_block,
                **{f"code_{key}": code.mix.get(key, 0) for key in (*NVIDIA_GROUPS, "other")},
            }
            rows.append(row)
            print(
                f"{row['kernel']:24} n={case.n:<4} d={case.d:<3} {case.score:6} share {case.share:<2} {row['dtype']} "
                f"{row['arch']:6} warps {code.num_warps:2} registers {code.registers:3} spilled {code.spilled:4} "
                f"shared {code.shared:6} occupancy {code.occupancy:4.0%} instructions {code.instructions:5}",
                flush=True,
            )
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Print and save the survey; return 1 if a kernel spills or needs too much shared memory."""
    import triton

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="compile one launch of each kernel per operation")
    parser.add_argument("--arch", choices=[str(gpu.arch) for gpu in GPUS], help="compile for one GPU instead of all")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_static", help="path without suffix")
    options = parser.parse_args(arguments)
    rows = survey([gpu for gpu in GPUS if options.arch in (None, str(gpu.arch))], options.quick)
    bad = [row for row in rows if not row["fits"]]
    for row in bad:
        print(f"does not fit: {row['kernel']} n={row['n']} d={row['d']} {row['dtype']} on {row['arch']}")
    print(f"triton {triton.__version__}, torch {torch.__version__}: {len(rows)} compilations, {len(bad)} do not fit")
    made = {key: value for key, value in environment().items() if key in ("date", "commit", "torch")}
    write(options.out, rows, {**made, "triton": triton.__version__, "quick": options.quick})
    return 1 if bad else 0


def write(path: Path, rows: list[dict[str, Any]], versions: dict[str, Any]) -> None:
    """Save rows as CSV, and versions, the figures of the GPUs and a summary as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    summary = {
        gpu.name: {
            "arch": str(gpu.arch),
            "compilations": sum(row["gpu"] == gpu.name for row in rows),
            "do not fit": sum(row["gpu"] == gpu.name and not row["fits"] for row in rows),
        }
        for gpu in GPUS
        if any(row["gpu"] == gpu.name for row in rows)
    }
    report = {**versions, "summary": summary, "gpus": [asdict(gpu) for gpu in GPUS]}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
