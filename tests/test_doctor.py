"""The report tells the truth about a sound installation, and still comes out on a broken one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drm_triton import doctor, kernels, machine
from drm_triton.cli.doctor import _text
from drm_triton.kernels import reference

ROOT = Path(__file__).parents[1]


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "DRM_BACKEND", "DRM_DATA")}
    variables["PYTHONPATH"] = os.pathsep.join(str(p) for p in (path, ROOT) if p)
    return subprocess.run(
        [sys.executable, "-m", "drm_triton", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**variables, **environment},
    )


def test_a_sound_installation(tmp_path: Path) -> None:
    done = run("--json", TRITON_INTERPRET="1", DRM_DATA=str(tmp_path / "not yet"))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["packages"]["torch"] == {"version": torch.__version__, "error": None}
    assert report["data"]["directory"] == str(tmp_path / "not yet")
    assert report["data"]["free"] > 0
    assert set(report["backends"]) == set(kernels.BACKENDS)
    expected = "triton" if torch.cuda.is_available() else "cpu"  # the interpreter is not chosen by itself
    assert (report["backend"]["chosen"], report["backend"]["by"]) == (expected, "auto")
    for name, backend in report["backends"].items():
        assert backend["status"] == "ok", (name, backend)
        assert backend["difference"] < doctor.TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why_triton_is_not_used() -> None:
    done = run()
    assert done.returncode == 0
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("  triton ") and "not usable" in line)
    assert "with TRITON_INTERPRET=1 its self-test runs" in line
    assert "Backend cpu (by auto) will run, and computes what it should." in done.stdout


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ImportError('libtorch.so: no such file')", "BROKEN: ImportError: libtorch.so: no such file"),
        ("import os; os.abort()", "BROKEN: importing it ends the program: the process was killed by SIGABRT"),
        ("raise RuntimeError('two\\nlines')", "BROKEN: RuntimeError: two"),
    ],
)
def test_a_broken_torch_is_a_line_of_the_report(tmp_path: Path, code: str, told: str) -> None:
    (tmp_path / "torch.py").write_text(code)
    done = run(path=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("  torch "))
    assert told in line
    assert "No backend can run here" in done.stdout


def test_a_broken_numba_fails_the_cpu_backend_alone(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    report = json.loads(run("--json", path=tmp_path).stdout)
    assert report["packages"]["numba"]["error"] == "ImportError: Numba needs NumPy 2.3 or less"
    assert report["backends"]["cpu"]["status"] == "not usable"
    assert report["backends"]["reference"]["status"] == "ok"
    assert report["ok"] is False  # it is the one that would run


def test_an_unknown_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = doctor._ask
    monkeypatch.setenv("DRM_BACKEND", "abacus")
    monkeypatch.setattr(doctor, "_ask", lambda q, name: ask(q, name) if q == "survey" else {"status": "ok"})
    report = doctor.examine()
    assert (report["ok"], report["backend"]["by"]) == (False, "DRM_BACKEND")
    reason = "environment variable DRM_BACKEND must be auto, reference, triton, cpu, got 'abacus'"
    assert report["backend"]["reason"] == reason


def altered(**operations: object) -> SimpleNamespace:
    return SimpleNamespace(**{name: getattr(reference, name) for name in kernels.OPERATIONS} | operations)


def wrong_step(table, state, rows, coef, X, source, lr, score, share=1):
    reference.update_rows(table, state, rows, coef, X, source, 1.01 * lr, score)


def wrong_ranking(queries, V, k, score, seen):
    items, scores = reference.top_k(queries, V, k + 1, score, seen)
    return items[:, 1:], scores[:, :-1]


def wrong_scores(queries, V, k, score, seen):
    items, scores = reference.top_k(queries, V, k, score, seen)
    return items, scores * float("nan")


def wrong_lists(plan, epoch, start, stop):
    return reference.sample_lists(plan, epoch + 1, start, stop)


@pytest.mark.parametrize(
    "wrong",
    [{"update_rows": wrong_step}, {"top_k": wrong_ranking}, {"top_k": wrong_scores}, {"sample_lists": wrong_lists}],
)
def test_a_backend_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch, wrong: dict) -> None:
    monkeypatch.setattr(kernels, "get_backend", lambda name=None: altered())
    assert doctor.self_test("cpu")["status"] == "ok"
    monkeypatch.setattr(kernels, "get_backend", lambda name=None: altered(**wrong))
    assert doctor.self_test("cpu")["status"] == "failed"


def test_a_failed_self_test_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(question: str, argument: str) -> dict:
        if question == "survey":
            return {"chosen": "cpu", "why_not": {"cpu": None}, "importing": None}
        return {"status": "failed", "reason": "it differs from the reference by 3.0e-01"}

    monkeypatch.setattr(doctor, "_ask", ask)
    report = doctor.examine()
    assert report["ok"] is False
    text = _text(report)
    assert "cpu *         FAILED: it differs from the reference by 3.0e-01" in text
    assert "Backend cpu (by auto) will run, and FAILS its self-test." in text


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import time; print('{doctor.ANSWER}{{\"a\": 1}}', flush=True); time.sleep(60)"
    monkeypatch.setattr(doctor, "CHILD", code)
    monkeypatch.setattr(doctor, "PATIENCE", 1)
    assert doctor._ask("survey", "") == {"a": 1, "status": "failed", "reason": "it did not end within 1 s"}


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
