"""The report of a working installation is correct, and a broken installation still gives a report."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drm_triton import deep, doctor, kernels, machine
from drm_triton.cli.doctor import format_report
from drm_triton.exercises import OPERATIONS, Case
from drm_triton.issue_file import add_section, anonymous
from drm_triton.kernels import reference
from drm_triton.kernels.batches import ListBatch
from drm_triton.kernels.protocol import (
    CatalogueBatch,
    CatalogueGradients,
    GradientTerms,
    ListPlan,
    Objective,
    PackedItems,
    Rounding,
    SeenItems,
)
from drm_triton.names import Score
from tests.conftest import call, run_python
from tests.conftest import environment as child_environment
from tests.kernels.gpu.conftest import triton_kernels


def run(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `drm-triton doctor` in a new process. `path` comes first on its search path."""
    changes: dict[str, str | None] = {"TRITON_INTERPRET": None, "DRM_BACKEND": None, "DRM_DATA": None, **environment}
    if path is not None:
        changes["PYTHONPATH"] = os.pathsep.join([str(path), child_environment()["PYTHONPATH"]])
    return run_python("-m", "drm_triton", "doctor", *arguments, cwd=None, **changes)


def test_a_working_installation(tmp_path: Path) -> None:
    done = run("--json", DRM_DATA=str(tmp_path / "not yet"))
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["packages"]["torch"] == {"version": torch.__version__, "error": None}
    assert report["data"]["directory"] == str(tmp_path / "not yet")
    assert report["data"]["free"] > 0
    assert set(report["backends"]) == set(kernels.BACKENDS)
    expected = "triton" if torch.cuda.is_available() else "cpu"
    assert (report["backend"]["chosen"], report["backend"]["by"]) == (expected, "auto")
    for name, backend in report["backends"].items():
        if name == "triton" and not torch.cuda.is_available():
            assert backend["status"] == "not usable"
        else:
            assert backend["status"] == "ok", (name, backend)
            assert backend["difference"] < doctor.TOLERANCE


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_interpreter_passes_the_self_test_and_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is available on Linux only")
    found = doctor.self_test("triton")
    assert found["status"] == "ok"
    assert found["difference"] < doctor.TOLERANCE
    monkeypatch.delenv("DRM_BACKEND", raising=False)
    skip_self_tests(monkeypatch)
    report = doctor.examine()
    assert report["backends"]["triton"]["status"] == "ok"
    assert (report["backend"]["chosen"], report["backend"]["by"]) == ("cpu", "auto")


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

    def run_child(task: str, name: str, timeout: float | None = None) -> dict[str, Any]:
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
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float,
    score: Score,
    dense: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    reference.update_rows(table, state, terms, 1.01 * lr, score, dense, rounding)


def wrong_on_the_sphere(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float,
    score: Score,
    dense: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    reference.update_rows(table, state, terms, lr, "dot" if score == "cosine" else score, dense, rounding)


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


def unstable(s: Tensor, y: Tensor, w: Tensor, tau: float, mask: Tensor) -> tuple[Tensor, Tensor]:
    loss, ds = reference.drm_lists(s, y, w, tau, mask)
    return loss, ds + 1e-9 * torch.rand(())


def test_the_self_test_needs_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "get_backend", lambda name=None: altered(drm_lists=unstable))
    found = doctor.self_test("cpu")
    assert found["status"] == "failed"
    assert "two runs differ in their bits" in found["reason"]


WARPS = """
import json, torch
from drm_triton.bench.gpu_static import cases, recorded
from drm_triton.exercises import OPERATIONS, SEVERAL_WARPS, Inputs, distinct
from drm_triton.kernels import gpu

def most_warps(cases):
    most = {}
    for name, case in distinct(gpu, cases):
        with recorded() as launches:
            OPERATIONS[name](gpu, Inputs.of(case).to(torch.device("cpu"), case.dtype))
        for launch in launches:
            kernel = launch.kernel.__name__
            most[kernel] = max(most.get(kernel, 0), launch.options["num_warps"])
    return most

print(json.dumps([most_warps(SEVERAL_WARPS), most_warps(cases())]))
"""


def test_the_self_test_on_a_gpu_launches_every_kernel_with_several_warps() -> None:
    pytest.importorskip("triton", reason="Triton is available on Linux only")
    done = run_python("-c", WARPS, TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    tested, possible = json.loads(done.stdout)
    assert set(tested) == set(possible) == triton_kernels()
    for kernel, warps in possible.items():
        assert warps == 1 or tested[kernel] > 1, f"{kernel} has up to {warps} warps, in the self-test one"


def fake_findings(**last: Any) -> dict[str, Any]:
    """Return what a child that checks a backend deeply prints."""
    check = {"operation": "top_k", "case": "n 18, d 12, dot, float32", "difference": 1e-7, "repeatable": True}
    times = {"operation": "top_k", "case": "n 18, d 12, dot, float32", "lists": 9, "floor_ns": 1.0}
    machine = {"launch_us": 5.0, "torch_launch_us": 4.0, "bandwidth_gb_s": 2000.0}
    rows = [check | {"problem": None}, machine, times | {"ns_per_list": 3.0, "times_floor": 3.0}]
    return {"place": "cuda, Test GPU", **{str(number): row for number, row in enumerate(rows)}, **last}


@pytest.mark.parametrize(
    ("last", "problem"),
    [
        ({}, None),
        ({"sanitizer": {"memcheck": "no error"}}, None),
        ({"sanitizer": {"compute-sanitizer": "not installed"}}, None),
        ({"sanitizer": {"memcheck": "no error", "racecheck": "1 hazard"}}, "compute-sanitizer, racecheck: 1 hazard"),
        (
            {"status": "failed", "reason": "killed by SIGSEGV in /home/ann/x.py"},
            "the check ended after top_k (n 18, d 12, dot, float32): killed by SIGSEGV in /home/ann/x.py",
        ),
        (
            {"3": fake_findings()["0"] | {"repeatable": False, "problem": "top_k: two runs differ"}},
            "top_k: two runs differ",
        ),
    ],
)
def test_the_deep_check_is_reported_and_written_without_personal_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, last: dict[str, Any], problem: str | None
) -> None:
    def run_child(task: str, argument: str, timeout: float | None = None) -> dict[str, Any]:
        if task == "inspect":
            return {"chosen": "triton", "why_not": {"triton": None}, "importing": None, "gpus": [], "no_gpu": None}
        return fake_findings(**last) if task == "deep" else {
            "status": "ok", "difference": 0.0, "seconds": 0.0, "place": "cuda",
        }  # fmt: skip

    monkeypatch.setattr(doctor, "_run_child", run_child)
    file = tmp_path / "report.json"
    code, out, err = call("doctor", "--deep", "--out", file)
    assert (code, err) == (0 if problem is None else 1, err)
    assert "within 1e-07 of the float64 reference" in out
    assert "n 18, d 12, dot, float32: 3 ns a list, 3.0 times the floor" in out
    assert ("PROBLEM" in out) == (problem is not None)
    if problem is not None:
        assert problem in out
    text = file.read_text("utf-8")
    written = json.loads(text)["doctor"]
    assert written["deep"]["checks"][0]["difference"] == 1e-7
    assert "data" not in written
    for secret in (str(Path(doctor.__file__).parent), str(Path(sys.executable).parent), "/home/ann", platform.node()):
        assert secret not in text


def test_the_deep_check_in_this_process() -> None:
    """The cases are few, and the times those of nothing; the rows are complete."""
    cases = [Case(18, 12, "cosine", 4, dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    rows = list(deep.check(reference, torch.device("cpu"), cases))
    assert {row["operation"] for row in rows} == set(OPERATIONS)
    assert [row["problem"] for row in rows] == [None] * len(rows)
    assert {row["case"].split()[-1] for row in rows} == {"float32", "float64", "bfloat16"}


def unrounded(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float,
    score: Score,
    dense: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    reference.update_rows(table, state, terms, lr, score, dense)


def rounded_otherwise(
    table: Tensor,
    state: Tensor,
    terms: GradientTerms,
    lr: float,
    score: Score,
    dense: Tensor | None = None,
    rounding: Rounding | None = None,
) -> None:
    assert rounding is not None
    reference.update_rows(table, state, terms, lr, score, dense, rounding._replace(step=1))


@pytest.mark.parametrize("wrong", [unrounded, rounded_otherwise])
def test_the_deep_check_finds_wrong_rounding(wrong: Any) -> None:
    case = Case(18, 12, "dot", 1, torch.bfloat16)
    right, spoilt = altered(name="cpu"), altered(name="cpu", update_rows=wrong)
    assert [row["problem"] for row in deep.check(right, torch.device("cpu"), [case])] == [None] * 2
    assert all(row["problem"] for row in deep.check(spoilt, torch.device("cpu"), [case]))


def test_times_beside_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "time_in_turns", lambda runners, **_: dict.fromkeys(runners, 2e-3))
    monkeypatch.setattr(deep, "COPIED", 1 << 10)
    case = Case(18, 12, "dot", 4)
    machine, *rows = deep.measure(reference, torch.device("cpu"), [case])
    assert machine["bandwidth_gb_s"] == pytest.approx(2 * 1024 / 2e-3 / 1e9)
    assert [row["operation"] for row in rows] == list(deep.TIMED_OPERATIONS)
    sample = rows[0]
    drawn = 4 * 9 * (1 + 18) + 4 * 3 * 17 + 9 * 17  # users and items, shared items, replaced
    assert sample["floor_ns"] == pytest.approx(1e9 * drawn / (2 * 1024 / 2e-3) / 9)
    assert sample["times_floor"] == pytest.approx(sample["ns_per_list"] / sample["floor_ns"])
    assert rows[-1]["lists"] == case.n_users


MEASURED = """
import json, torch
from unittest import mock
from triton.runtime import driver
from drm_triton import deep
from drm_triton.exercises import Case
from drm_triton.kernels import gpu
from tests.fake_driver import Driver

def run_once(runners, **options):
    for run in runners.values():
        run()
    return dict.fromkeys(runners, 1e-3)

fake = Driver()
driver.set_active(fake)
with mock.patch.object(torch, "_assert_async"), mock.patch.object(deep, "time_in_turns", run_once):
    machine, *rows = deep.measure(gpu, torch.device("cpu"), [Case(46, 64, "dot", 4)])
launched = [launch[0] for launch in fake.launches]
print(json.dumps([machine, rows, {name: launched.count(name) for name in set(launched)}]))
"""


def test_times_of_the_gpu_kernels_with_a_driver_that_launches_nothing() -> None:
    pytest.importorskip("triton", reason="Triton is available on Linux only")
    done = run_python("-c", MEASURED, TRITON_INTERPRET=None)
    assert done.returncode == 0, done.stderr
    machine, rows, launched = json.loads(done.stdout)
    assert machine["launch_us"] > 0
    assert launched.pop("_lists_kernel") == deep.CALLS + 1  # of the latency, and one to compile
    assert [row["operation"] for row in rows] == list(deep.TIMED_OPERATIONS)
    assert launched["_sample_kernel"] == 2  # once for the bytes, once timed
    assert all(count % 2 == 0 for count in launched.values())


def test_compute_sanitizer_runs_the_self_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        '#!/bin/sh\necho "========= $2 of $6 $PYTORCH_NO_CUDA_MEMORY_CACHING"\n[ $2 != racecheck ] || exit $4\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert deep.sanitize(["python", "program"]) == {
        "memcheck": "no error",
        "racecheck": "========= racecheck of program 1",
        "initcheck": "no error",
        "synccheck": "no error",
    }
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert deep.sanitize([]) == {"compute-sanitizer": "not installed"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/ann/env/lib/x.so: no such file", "…/x.so: no such file"),
        ("in 'C:\\Users\\ann\\x.py' line 3", "in '…/x.py' line 3"),
        ("20 GB/s, and/or n/a", "20 GB/s, and/or n/a"),
        (f"on {platform.node()}", "on …"),
        (3.5, 3.5),
        (float("inf"), "inf"),
    ],
)
def test_texts_of_the_issue_file_are_anonymous(text: object, expected: object) -> None:
    assert anonymous([{"a": text}]) == [{"a": expected}]


def test_sections_of_the_issue_file_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    for old in ("[1, 2]", "{", '{"other": 1}'):
        file.write_text(old)
        add_section(file, "doctor", {"a": 1})
        add_section(file, "bench", [2])
        content = json.loads(file.read_text())
        assert (content["doctor"], content["bench"]) == ({"a": 1}, [2])
        assert set(content) == {"drm-triton", "doctor", "bench"}


@pytest.mark.parametrize(("capability", "usable"), [((7, 0), False), ((7, 5), True), ((12, 0), True)])
def test_gpus_older_than_the_compiled_code_are_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], usable: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert (kernels.why_no_gpu() is None) == usable


def test_a_failed_self_test_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_child(task: str, argument: str, timeout: float | None = None) -> dict[str, Any]:
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
    assert doctor._run_child("inspect", "", 1) == {"a": 1, "status": "failed", "reason": "no result after 1 s"}


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
        (tmp_path / "memory.stat").write_text("anon 7\nactive_file 100\ninactive_file 20\n")
        assert machine.memory()["free"] == 2**19 + 120
