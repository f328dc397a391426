"""The kernel benchmark: its sections run, and its tensors are on the right device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drm_triton.bench import baselines, kernels
from drm_triton.bench.record import Row
from drm_triton.errors import InputError
from drm_triton.issue_file import NAME
from drm_triton.kernels import cpu
from drm_triton.losses import softmax_loss

TINY = kernels.Sizes(users=40, items=60, rho=2, eta=6, factors=4, batch=32)


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each function once and return one second as its time."""

    def time_in_turns(runners: dict[str, Callable[[], object]], *_: object, **__: object) -> dict[str, float]:
        for run in runners.values():
            run()
        return dict.fromkeys(runners, 1.0)

    monkeypatch.setattr(kernels, "time_in_turns", time_in_turns)


def test_published_neuralsort_runs_on_the_device_of_the_scores() -> None:
    s = torch.zeros(2, 5, device="meta")
    loss, gradient = baselines.published_neuralsort(s, s, 2, 1.0)
    assert loss.device.type == gradient.device.type == "meta"


@pytest.mark.usefixtures("once")
def test_peaks_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "backend_and_device", lambda: (cpu, "meta"))
    made: list[Tensor] = []
    ones = torch.ones

    def recorded(*sizes: int, **options: Any) -> Tensor:
        made.append(ones(*sizes, **options))
        return made[-1]

    monkeypatch.setattr(torch, "ones", recorded)
    rows = {row["name"]: row for row in kernels.peaks(TINY, quick=True)}
    assert {x.device.type for x in made} == {"meta"}
    assert rows["fma"]["gflops"] == pytest.approx(2 * 8192**3 / 1e9)
    assert rows["copy"]["gbytes"] == pytest.approx(2 * 2**28 / 1e9)


@pytest.mark.usefixtures("once")
def test_rows_have_rates_and_plots_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(
        grid: dict[str, list[int]], usual: Row, measure: Callable[[Row, float], dict[str, Any]], quick: bool
    ) -> list[Row]:
        return along({axis: [usual[axis]] for axis in ("n", "d", "K") if axis in usual}, usual, measure, quick)

    along = kernels.along
    monkeypatch.setattr(kernels, "along", small)
    rows = kernels.run(["drm", "step", "scaling"], quick=True, folder=tmp_path, size=TINY)
    assert {row["name"] for row in rows if row["section"] == "scaling"} == {
        "sample", "gradients", "update", "drm", "top-k",
    }  # fmt: skip
    for row in rows:
        assert row["gbytes"] > 0
    drm = next(row for row in rows if row["section"] == "drm")
    assert drm["gflops"] == pytest.approx(32 * (8 * 8**2 + 40 * 8 * 2) / 1e9)  # B (8 n^2 + 40 n K)
    printed = capsys.readouterr().out
    assert "kernels_n.png, kernels_d.png" in printed
    assert all((tmp_path / name).exists() for name in ("kernels.csv", "kernels.json", "kernels_n.png", "kernels_d.png"))


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_results_of_a_gpu_are_a_section_of_the_issue_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "backend_and_device", lambda: (cpu, device))
    rows = kernels.run(["peaks"], quick=True, folder=tmp_path)
    file = tmp_path / NAME
    assert file.exists() == (device == "meta")
    if file.exists():
        assert json.loads(file.read_text())["bench"]["rows"] == rows


@pytest.mark.usefixtures("once")
def test_long_lists_are_compared_with_a_sort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "LONG_LISTS", [(2, 100)])
    rows = kernels.run(["long"], quick=True, folder=tmp_path, size=TINY)
    losses = ["softmax_loss", "softmax_at_k_loss", "psl_loss", "bpr_loss"]
    operators = [f"soft_topk, {method}, k = {k}" for k in (20, 100) for method in ("neuralsort", "lapsum")]
    assert [row["name"] for row in rows] == ["ours", "torch.sort", "softmax, torch", *losses, *operators]
    assert all((row["B"], row["n"], row["K"]) == (2, 100, 20) for row in rows)
    assert all(row["times_sort"] == row["times_softmax"] == 1 for row in rows)
    assert "1.00 x torch.sort    1.00 x softmax in torch" in capsys.readouterr().out


def test_softmax_of_torch_is_ours() -> None:
    s, y = torch.randn(3, 8), torch.rand(3, 8) < 0.3
    torch.testing.assert_close(baselines.torch_softmax(s, y), softmax_loss(s, y))


def test_a_batch_must_consist_of_whole_groups() -> None:
    with pytest.raises(InputError, match=r"`batch` must be a multiple of 32, .* got 100"):
        kernels.Sizes(batch=100)
