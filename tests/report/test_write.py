"""`write_report`: the file it writes, and what happens when it fails."""

from pathlib import Path
from unittest import mock

import pytest

from drm_triton.errors import InputError
from drm_triton.report import write_report
from tests.report.conftest import read


def test_the_page_is_written(folder: Path, tmp_path: Path) -> None:
    assert write_report([folder / "dot"], tmp_path / "page", users=2, k=3) == tmp_path / "page" / "report.html"
    assert len(read(tmp_path / "page" / "report.html").all("ol")[-1].all("li")) == 3


def test_only_a_report_is_replaced(folder: Path) -> None:
    before = sorted((folder / "songs").iterdir())
    with pytest.raises(InputError, match="already exists"):
        write_report([folder / "dot"], folder / "songs")
    with pytest.raises(InputError, match="not made by this program"):
        write_report([folder / "dot"], folder / "songs", overwrite=True)
    assert sorted((folder / "songs").iterdir()) == before


def test_a_failure_leaves_the_old_page(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page"
    write_report([folder / "dot"], out)
    before = (out / "report.html").read_bytes()
    with pytest.raises(InputError, match="already exists"):
        write_report([folder / "elsewhere"], out)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", mock.Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(InputError, match="No space left"):
            write_report([folder / "elsewhere"], out, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
    assert (out / "report.html").read_bytes() == before
    write_report([folder / "elsewhere"], out, overwrite=True)
    assert (out / "report.html").read_bytes() != before
