"""Write one self-contained HTML page about one or more trained models: `write_report`."""

from collections.abc import Sequence
from pathlib import Path

from drm_triton import atomic
from drm_triton.progress import SILENT, Reporter
from drm_triton.report.differences import compare
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
    """Evaluate runs and write the results to `out`/report.html, atomically.

    Parameters
    ----------
    runs : run directories or saved models. Several runs are compared.
    out : directory to write.
    datasets : prepared data sets that are no longer at the path recorded in the runs. Each run uses the one it was
        trained on.
    on : "valid" or "test", the held-out part of the data to evaluate on. Default: test, or valid if there is no test
        part.
    users : number of users to show with their history and recommendations, from the least to the most active.
    k : number of items to recommend to each of these users.
    overwrite : replace an existing report.
    reporter : receives the progress.

    Returns
    -------
    Path of the page
    """
    atomic.check_directory(out, overwrite, marker=PAGE)  # fail before the slow part
    measured = measure_runs(runs, datasets, on, users, k, reporter)
    page = render(measured, compare(measured, reporter))
    with atomic.directory(out, overwrite, marker=PAGE) as folder:
        (folder / PAGE).write_text(page, encoding="utf-8", newline="\n")
    return Path(out) / PAGE
