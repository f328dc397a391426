"""The report of a working installation is correct, and a broken installation still gives a report."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drm_triton import doctor, kernels, machine
from drm_triton.cli.doctor import format_report
from drm_triton.kernels import reference
from drm_triton.kernels.protocol import (
    CatalogueBatch,
    CatalogueGradients,
    GradientTerms,
    ListBatch,
    ListPlan,
    Objective,
    PackedItems,
    SeenItems,
)
from drm_triton.names import Score
from tests.conftest import environment as child_environment
from tests.conftest import run_python


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `drm-triton doctor` in a new process. `path` comes first on its search path."""
    changes: dict[str, str | None] = {"TRITON_INTERPRET": None, "DRM_BACKEND": None, "DRM_DATA": None, **environment}
    if path is not None:
        changes["PYTHONPATH"] = os.pathsep.join([str(path), child_environment()["PYTHONPATH"]])
    return run_python("-m", "drm_triton", "doctor", *arguments, cwd=None, **changes)


def test_a_working_installation(tmp_path: Path) -> None:
    done = run("--json", TRITON_INTERPRET="1", DRM_DATA=str(tmp_path / "not yet"))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["packages"]["torch"] == {"version": torch.__version__, "error": None}
    assert report["data"]["directory"] == str(tmp_path / "not yet")
    assert report["data"]["free"] > 0
    assert set(report["backends"]) == set(kernels.BACKENDS)
    expected = "triton" if torch.cuda.is_available() else "cpu"  # auto never chooses the interpreter
    assert (report["backend"]["chosen"], report["backend"]["by"]) == (expected, "auto")
    for name, backend in report["backends"].items():
        assert backend["status"] == "ok", (name, backend)
        assert backend["difference"] < doctor.TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why_triton_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TRITON_INTERPRET", "DRM_BACKEND"):
        monkeypatch.delenv(variable, raising=False)
    skip_self_tests(monkeypatch)
    text = format_report(doctor.examine())
    (line,) = (line for line in text.splitlines() if line.startswith("  triton ") and "not usable" in line)
    assert "with TRITON_INTERPRET=1 the self-test runs" in line
    assert "Backend cpu (chosen by auto) works." in text


def skip_self_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspect in this process, and let each backend that can run pass its self-test, untried."""

    def run_child(task: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {"status": "ok", "difference": 0.0, "seconds": 0.0, "place": "cpu"}
        if task == "inspect":
            doctor._inspect(lambda **findings: found.update(findings))
        return found

    monkeypatch.setattr(doctor, "_run_child", run_child)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('libtorch.so: no such file')", "BROKEN: ImportError: libtorch.so: no such file"),
        ("import os; os.abort()", "BROKEN: importing it ends the program: the process was killed by SIGABRT"),
        ("raise RuntimeError('two\\nlines')", "BROKEN: RuntimeError: two"),
    ],
)
def test_a_broken_torch_is_a_line_of_the_report(tmp_path: Path, code: str, message: str) -> None:
    (tmp_path / "torch.py").write_text(code)
    done = run(path=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("  torch "))
    assert message in line
    assert "No backend can run on this machine" in done.stdout


def test_a_broken_numba_fails_the_cpu_backend_alone(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    report = json.loads(run("--json", path=tmp_path).stdout)
    assert report["packages"]["numba"]["error"] == "ImportError: Numba needs NumPy 2.3 or less"
    assert report["backends"]["cpu"]["status"] == "not usable"
    assert report["backends"]["reference"]["status"] == "ok"
    assert report["ok"] is False  # it is the default


def test_an_unknown_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRM_BACKEND", "abacus")
    skip_self_tests(monkeypatch)
    report = doctor.examine()
    assert (report["ok"], report["backend"]["by"]) == (False, "DRM_BACKEND")
    reason = "environment variable DRM_BACKEND must be auto, reference, triton, cpu, got 'abacus'"
    assert report["backend"]["reason"] == reason


def altered(**operations: object) -> SimpleNamespace:
    """Return the reference backend with some operations replaced."""
    return SimpleNamespace(**vars(reference) | operations)


def wrong_step(
    table: Tensor, state: Tensor, terms: GradientTerms, lr: float, score: Score, dense: Tensor | None = None
) -> None:
    reference.update_rows(table, state, terms, 1.01 * lr, score, dense)


def wrong_on_the_sphere(
    table: Tensor, state: Tensor, terms: GradientTerms, lr: float, score: Score, dense: Tensor | None = None
) -> None:
    reference.update_rows(table, state, terms, lr, "dot" if score == "cosine" else score, dense)


def wrong_catalogue(U: Tensor, V: Tensor, batch: CatalogueBatch, objective: Objective) -> CatalogueGradients:
    gradients = reference.catalogue_gradients(U, V, batch, objective)
    return gradients._replace(item_grad=1.01 * gradients.item_grad)


def wrong_ranking(queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    ranked, scores = reference.top_k(queries, items, k + 1, seen)
    return ranked[:, 1:], scores[:, :-1]


def wrong_scores(queries: Tensor, items: PackedItems, k: int, seen: SeenItems | None = None) -> tuple[Tensor, Tensor]:
    ranked, scores = reference.top_k(queries, items, k, seen)
    return ranked, scores * float("nan")


def wrong_lists(plan: ListPlan, epoch: int, start: int, stop: int) -> ListBatch:
    return reference.sample_lists(plan, epoch + 1, start, stop)


@pytest.mark.parametrize(
    "wrong",
    [
        {"update_rows": wrong_step},
        {"update_rows": wrong_on_the_sphere},
        {"catalogue_gradients": wrong_catalogue},
        {"top_k": wrong_ranking},
        {"top_k": wrong_scores},
        {"sample_lists": wrong_lists},
    ],
)
def test_a_backend_with_wrong_results_fails(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object]) -> None:
    monkeypatch.setattr(kernels, "get_backend", lambda name=None: altered())
    assert doctor.self_test("cpu")["status"] == "ok"
    monkeypatch.setattr(kernels, "get_backend", lambda name=None: altered(**wrong))
    assert doctor.self_test("cpu")["status"] == "failed"


def test_a_failed_self_test_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_child(task: str, argument: str) -> dict[str, Any]:
        if task == "inspect":
            return {"chosen": "cpu", "why_not": {"cpu": None}, "importing": None}
        return {"status": "failed", "reason": "its results differ from the reference by 3.0e-01"}

    monkeypatch.setattr(doctor, "_run_child", run_child)
    report = doctor.examine()
    assert report["ok"] is False
    text = format_report(report)
    assert "cpu *         FAILED: its results differ from the reference by 3.0e-01" in text
    assert "Backend cpu (chosen by auto) FAILS its self-test." in text


def test_a_child_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout, output=f'{doctor.PREFIX}{{"a": 1}}\n'.encode())

    monkeypatch.setattr(subprocess, "run", hang)
    monkeypatch.setattr(doctor, "TIMEOUT", 1)
    assert doctor._run_child("inspect", "") == {"a": 1, "status": "failed", "reason": "no result after 1 s"}


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**19}\n")
    monkeypatch.setattr(machine, "_cgroups", lambda: [tmp_path / "inner", tmp_path])
    assert machine.cpu_limit() == 0.5
    if Path("/proc/meminfo").exists():
        memory = machine.memory()
        assert (memory["limit"], memory["free"]) == (2**20, 2**19)
