"""A trained model on one page: `write_report` makes it from runs, as an HTML file that needs nothing else."""

from collections.abc import Sequence
from pathlib import Path

from drm_triton import atomic
from drm_triton.progress import SILENT, Reporter
from drm_triton.report.measure import measure_runs
from drm_triton.report.page import render

__all__ = ["PAGE", "write_report"]

PAGE = "report.html"


def write_report(
    runs: Sequence[str | Path],
    out: str | Path,
    datasets: Sequence[str | Path] = (),
    on: str | None = None,
    users: int = 50,
    k: int = 10,
    overwrite: bool = False,
    reporter: Reporter = SILENT,
) -> Path:
    """Measure runs and write what was found to `out`/report.html, atomically.

    Parameters
    ----------
    runs : run directories or saved models; several are compared
    out : directory to write
    datasets : prepared data that is not, or no longer, where the runs found it; each run takes the one it was fit on
    on : "valid" or "test"; by default test, or valid where the data has no test part
    users : how many users to show with their history and top-k, spread over activity
    k : length of the lists shown
    overwrite : replace an earlier report

    Returns
    -------
    Path of the page
    """
    atomic.check_directory(out, overwrite, marker=PAGE)  # before anything that takes time
    page = render(measure_runs(runs, datasets, on, users, k, reporter))
    with atomic.directory(out, overwrite, marker=PAGE) as folder:
        (folder / PAGE).write_text(page, encoding="utf-8", newline="\n")
    return Path(out) / PAGE
