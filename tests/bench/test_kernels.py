"""The kernel benchmark: sections run, on a GPU's devices too as far as that can be seen without one."""

import pytest
import torch

from drm_triton.bench import kernels, rivals
from drm_triton.kernels import cpu

TINY = kernels.Sizes(users=40, items=60, rho=2, eta=6, factors=4, batch=8)


@pytest.fixture
def once(monkeypatch):
    """Run everything once, and say that it took a second."""

    def race(runners, *_, **__):
        for run in runners.values():
            run()
        return dict.fromkeys(runners, 1.0)

    monkeypatch.setattr(kernels, "race", race)


def test_the_published_way_runs_where_its_scores_lie():
    s = torch.zeros(2, 5, device="meta")
    loss, gradient = rivals.published_neuralsort(s, s, 2, 1.0)
    assert loss.device.type == gradient.device.type == "meta"


@pytest.mark.usefixtures("once")
def test_peaks_are_those_of_the_device(monkeypatch):
    monkeypatch.setattr(kernels, "backend", lambda: (cpu, "meta"))
    made = []
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: made.append(ones(*a, **k)) or made[-1])
    rows = {row["name"]: row for row in kernels.peaks(TINY, quick=True)}
    assert {x.device.type for x in made} == {"meta"}
    assert rows["fma"]["gflops"] == pytest.approx(2 * 8192**3 / 1e9)
    assert rows["copy"]["gbytes"] == pytest.approx(2 * 2**28 / 1e9)


@pytest.mark.usefixtures("once")
def test_rows_carry_counted_rates_and_plots_their_sizes(tmp_path, monkeypatch, capsys):
    def small(grid, usual, measure, quick):
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
    assert drm["gflops"] == pytest.approx(8 * (8 * 8**2 + 40 * 8 * 2) / 1e9)  # B (8 n^2 + 40 n K)
    printed = capsys.readouterr().out
    assert "kernels_n.png, kernels_d.png" in printed
    assert all((tmp_path / name).exists() for name in ("kernels.csv", "kernels.json", "kernels_n.png", "kernels_d.png"))
