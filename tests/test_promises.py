"""What docs/promises.md says and no other test holds."""

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from drm_triton import DRM, Dataset
from drm_triton.cli import main
from drm_triton.errors import InputError
from drm_triton.kernels import get_backend
from drm_triton.kernels.interface import ListPlan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("drm_triton", "kernels", "cli", "bench") for path in (ROOT / folder).rglob("*.py")]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a fresh Python of this repository."""
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_only_torch_and_triton_have_upper_bounds() -> None:
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    bounded = [
        re.split(r"[<>=; ]", line)[0] for line in needed if "<" in line.split(";")[0] or "==" in line.split(";")[0]
    ]
    assert bounded == ["torch", "triton"]
    assert len(needed) == 11


def test_ranking_makes_no_matrix_of_users_and_items() -> None:
    """The scores of 4096 users and 300,000 items would be 4.9 GB."""
    code = """
import resource, torch
from drm_triton.kernels import get_backend
ops = get_backend("cpu")
U, V = torch.randn(4096, 4), torch.randn(300_000, 4)
ops.top_k(U[:8], V[:64], 10, "dot", None)  # compiled
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
items, _ = ops.top_k(U, V, 50, "dot", None)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    if sys.platform != "linux":
        pytest.skip("ru_maxrss is in kilobytes on Linux only")
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200  # megabytes


def test_the_memory_estimate_is_told_before_training(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    Dataset.from_csr(([0, 2, 3], [1, 0, 1]), n_items=3).save(tmp_path / "data")
    command = f"drm-triton train -d {tmp_path / 'data'} --dry-run --json --factors 8"
    with mock.patch("sys.argv", command.split()), contextlib.suppress(SystemExit):
        main()
    memory = json.loads(capsys.readouterr().out)["memory_bytes"]
    assert memory["factors"] == memory["adagrad state"] == 4 * (2 + 3) * 8
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_factors_that_are_not_finite_are_neither_saved_loaded_nor_ranked(tmp_path: Path) -> None:
    model = DRM(factors=4, epochs=1).fit(Dataset.from_csr(([0, 2, 3], [1, 0, 1]), n_items=3))
    model.save(tmp_path / "model")
    model.item_factors[1, 2] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        model.recommend()
    with pytest.raises(InputError, match="not finite"):
        model.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    file = tmp_path / "model" / "model.safetensors"
    with open(file, "rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    tensors = load_file(file)
    tensors["user_factors"][0, 0] = float("inf")
    save_file(tensors, file, metadata=header["__metadata__"])
    with pytest.raises(InputError, match="not finite"):
        DRM.load(tmp_path / "model")


@pytest.mark.parametrize("share", [1, 32])
def test_a_user_with_nearly_all_items_costs_no_more_than_another(share: int) -> None:
    """Of 200,000 items one user has all but one, another three: the searches are longer, and nothing else."""
    n_items, missing, seconds = 200_000, 123_456, []
    almost = torch.arange(n_items, dtype=torch.int32)
    for row in (almost[almost != missing], torch.tensor([1, 5, 9], dtype=torch.int32)):
        indptr = torch.tensor([0, len(row)])
        plan = ListPlan(indptr, row, n_items, rho=3, eta=45, user_sampling="uniform", share=share)
        times = []
        for _ in range(5):
            began = time.perf_counter()
            _, items = get_backend("cpu").sample_lists(plan, 0, 0, 2000)
            times.append(time.perf_counter() - began)
        seconds.append(min(times))
        assert not torch.isin(items[:, 3:], row).any()
    assert seconds[0] < 20 * seconds[1]


def test_kernels_are_compiled_for_the_processor_at_hand(tmp_path: Path) -> None:
    """What one processor has left in the cache is not run by another, here one of 2003 without any extension."""
    code = """
import re, torch
from llvmlite.binding import get_host_cpu_features
from drm_triton.kernels import reference
from drm_triton.kernels.cpu import topk
U, V = torch.randn(9, 5), torch.randn(70, 5)
assert torch.equal(topk.top_k(U, V, 10, "dot")[0], reference.top_k(U, V, 10, "dot")[0])
code = "".join(topk.rank_blocks.inspect_asm().values())
print(len(code) > 1000, get_host_cpu_features().get("avx", False), bool(re.search("[yz]mm[0-9]", code)))
"""
    here = run("-c", code, NUMBA_CACHE_DIR=str(tmp_path))
    assert here.returncode == 0, here.stderr
    compiled, has_avx, uses_avx = here.stdout.split()
    assert compiled == "True"
    assert uses_avx == has_avx
    elsewhere = run("-c", code, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert elsewhere.stdout.split() == ["True", has_avx, "False"]
    without = run("-c", code, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_ENABLE_AVX="0")
    assert without.returncode == 0, without.stderr


def test_nothing_is_pickled() -> None:
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "dill", "joblib", "shelve", "cloudpickle"} & {name.split(".")[0] for name in names}, (
                path
            )
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "torch.save"), path
                allowed = {k.arg: ast.unparse(k.value) for k in node.keywords}.get("allow_pickle", "False")
                assert allowed == "False", path


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["train", "--facters", "8"], "--factors"),
        (["recommend", "runs/x", "--usr", "1"], "--user"),
        (["prepare", "tabel", "--raw", "x.csv"], "table"),
        (["trian"], "train"),
    ],
)
def test_a_mistyped_option_is_an_error_with_the_nearest_name(arguments: list[str], nearest: str) -> None:
    done = run("-m", "drm_triton", *arguments)
    assert done.returncode == 2
    assert nearest in done.stderr
    assert "Traceback" not in done.stderr


def test_a_mistyped_option_in_python_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean 'factors'"):
        DRM(facters=8)
