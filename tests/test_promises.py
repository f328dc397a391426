"""The promises of docs/promises.md that no other test proves."""

import ast
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from drm_triton import DRM, Dataset
from drm_triton.errors import InputError
from drm_triton.kernels import get_backend
from drm_triton.kernels.cpu import sampling
from drm_triton.kernels.protocol import ListPlan
from tests.conftest import call, run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_only_torch_triton_and_numba_have_upper_bounds(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    requirements = [line.split(";")[0] for line in project["dependencies"]]
    bounded = [re.split(r"[<>= ]", line)[0] for line in requirements if "<" in line or "==" in line]
    assert bounded == ["torch", "triton", "numba"]
    assert len(requirements) == 12


def test_the_lengths_of_the_long_runs_are_those_of_their_results(repository: Path) -> None:
    from drm_triton.bench.tally import tally

    assert tally() in (repository / "docs" / "promises.md").read_text("utf-8")


def test_ranking_makes_no_matrix_of_users_and_items() -> None:
    """The scores of 4096 users and 300,000 items would be 4.9 GB."""
    code = """
import resource, torch
from drm_triton.kernels import get_backend
backend = get_backend("cpu")
U, V = torch.randn(4096, 4), torch.randn(300_000, 4)
backend.top_k(U[:8], backend.pack_items(V[:64], "dot"), 10)  # compiled
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
items, _ = backend.top_k(U, backend.pack_items(V, "dot"), 50)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    if sys.platform != "linux":
        pytest.skip("ru_maxrss is in kilobytes on Linux only")
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 200  # megabytes


def test_the_memory_estimate_is_printed_before_training(tmp_path: Path) -> None:
    Dataset.from_csr(([0, 2, 3], [1, 0, 1]), n_items=3).save(tmp_path / "data")
    code, out, errors = call("train", "-d", tmp_path / "data", "--dry-run", "--json", "--factors", 8)
    assert code == 0, errors
    memory = json.loads(out)["memory_bytes"]
    assert memory["factors"] == memory["adagrad state"] == 4 * (2 + 3) * 8
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_factors_that_are_not_finite_are_neither_saved_loaded_nor_ranked(tmp_path: Path) -> None:
    model = DRM(factors=4, epochs=1).fit(Dataset.from_csr(([0, 2, 3], [1, 0, 1]), n_items=3))
    model.save(tmp_path / "model")
    model.item_factors[1, 2] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        model.recommend()
    with pytest.raises(InputError, match="not finite; train again with a lower `lr` or a higher `temperature`"):
        model.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    file = tmp_path / "model" / "model.safetensors"
    with open(file, "rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    tensors = load_file(file)
    tensors["user_factors"][0, 0] = float("inf")
    save_file(tensors, file, metadata={"drm-triton": header["__metadata__"]["drm-triton"]})  # without its checksum
    with pytest.raises(InputError, match="not finite"):
        DRM.load(tmp_path / "model")


class CountedRow:
    """Items of a user that count how often they are read."""

    def __init__(self, items: NDArray[np.int32]) -> None:
        self.items, self.size, self.reads = items, items.size, 0

    def __getitem__(self, position: int) -> np.int32:
        self.reads += 1
        return np.int32(self.items[position])


@pytest.mark.parametrize("share", [1, 32])
def test_a_user_with_nearly_all_items_costs_no_more_than_another(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One user has all but one of 200,000 items, another three. Only the binary searches are longer."""
    n_items, eta, missing = 200_000, 45, 123_456
    almost = np.delete(np.arange(n_items, dtype=np.int32), missing)
    few = np.array([1, 5, 9], dtype=np.int32)
    for row in (almost, few):
        indptr, indices = torch.tensor([0, row.size]), torch.from_numpy(row)
        plan = ListPlan(indptr, indices, n_items, rho=3, eta=eta, user_sampling="uniform", share=share)
        items = get_backend("cpu").sample_lists(plan, 0, 0, 200).items.numpy()
        assert not np.isin(items[:, 3:], row).any()

    # The kernel's own functions, not compiled, count the random numbers and the reads of the user's items.
    blocks: list[int] = []

    def philox(seed: int, word1: int, ident: int, block: int) -> tuple[np.uint64, ...]:
        blocks.append(block)
        return tuple(np.random.Generator(np.random.Philox(int(block))).integers(2**32, size=4, dtype=np.uint64))

    for name in ("below", "search", "word_of", "draw_below"):
        monkeypatch.setattr(sampling, name, getattr(sampling, name).py_func)
    monkeypatch.setattr(sampling, "philox", philox)
    none = np.empty(0, np.int64)
    for row in (almost, few):
        counted, negatives = CountedRow(row), np.empty(eta, np.int32)
        plan_arrays = sampling.PlanArrays(
            np.uint64(0),
            np.uint64(0),
            True,
            np.array([0, row.size]),
            np.array([0]),
            counted,  # type: ignore[arg-type]
            none,
            np.empty(0, np.int32),
            n_items,
            3,
            share,
        )
        block, buffers = sampling.sampling_buffers.py_func(eta)
        block.user[0] = block.number[0] = 0
        blocks.clear()
        if share == 1:
            sampling.draw_negatives.py_func(plan_arrays, 0, counted, buffers, negatives)
        else:
            sampling.draw_shared.py_func(plan_arrays, 0, buffers)
            count = sampling.find_shared.py_func(counted, 0, buffers, 0)
            own = sampling.own_arrays(1, eta)
            sampling.replace_shared.py_func(plan_arrays, block, buffers, count, 0, own)
            negatives = buffers.shared.copy()
            negatives[own.places[:count]] = own.items[:count]
        assert not np.isin(negatives, row).any()
        # Four numbers each, one per negative: none is rejected. A shared draw that is replaced costs one more block.
        assert len(blocks) <= 12 + (eta if share > 1 else 0)
        assert counted.reads <= (1 if share == 1 else 2) * eta * (row.size.bit_length() + 1)


def test_kernels_are_compiled_for_this_processor(tmp_path: Path) -> None:
    """Code that one processor left in the cache does not run on another, here one of 2003 without any extension."""
    (tmp_path / "small.py").write_text("""
from drm_triton.kernels.cpu.runtime.jit import kernel

@kernel
def multiply(a, b, out):
    for i in range(len(out)):
        out[i] = a[i] * b[i]
""")
    code = """
import re, sys
import numpy as np
from llvmlite.binding import get_host_cpu_features
sys.path.insert(0, sys.argv[1])
from small import multiply
a, b, out = np.arange(99, dtype=np.float32), np.full(99, 2, np.float32), np.zeros(99, np.float32)
multiply(a, b, out)
assert (out == a * b).all()
code = "".join(multiply.inspect_asm().values())
print(len(code) > 1000, get_host_cpu_features().get("avx", False), bool(re.search("[yz]mm[0-9]", code)))
"""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    here = run_python("-c", code, tmp_path, **cache)
    assert here.returncode == 0, here.stderr
    compiled, has_avx, uses_avx = here.stdout.split()
    assert compiled == "True"
    assert uses_avx == has_avx
    elsewhere = run_python("-c", code, tmp_path, **cache, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert elsewhere.stdout.split() == ["True", has_avx, "False"]


def test_nothing_is_pickled(repository: Path) -> None:
    for folder in ("drm_triton", "kernels", "cli", "bench"):
        for path in (repository / folder).rglob("*.py"):
            check_no_pickle(path)


def check_no_pickle(path: Path) -> None:
    """Fail if a source file imports a module that pickles, or calls a function that would."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules = {name.split(".")[0] for name in names}
        assert not {"pickle", "dill", "joblib", "shelve", "cloudpickle"} & modules, path
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
    code, _, errors = call(*arguments)
    assert code == 2
    assert nearest in errors
    assert "Traceback" not in errors


def test_a_mistyped_option_in_python_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean `factors`"):
        DRM(facters=8)  # type: ignore[call-arg]
