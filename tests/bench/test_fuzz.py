"""A short run of the fuzzing, and the inputs that were kept."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from drm_triton.training.tensor_file import TensorFile
from tests.conftest import repository_root

repository_root()  # the bench is not in a wheel

from drm_triton.bench import fuzz  # noqa: E402

CASES = {"store": 150, "http": 150, "table": 60}  # of kinds whose cases take long


@pytest.mark.parametrize("name", fuzz.KINDS)
def test_changed_inputs_are_refused_or_read_as_they_were(name: str) -> None:
    assert fuzz.fuzz(name, cases=CASES.get(name, 400), seed=1) == []


@pytest.mark.parametrize("name", fuzz.KINDS)
def test_every_kept_input_is_refused_with_one_paragraph(name: str) -> None:
    inputs = sorted(fuzz.CORPUS.glob(f"{name}--*"))
    assert inputs
    for input_name, error in fuzz.refused(name, inputs).items():
        assert error, input_name
        assert "\n" not in error, input_name


def test_a_finding_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that accepts everything, as without checksums, is found out."""
    read = TensorFile.read

    def unverified(file: TensorFile, wanted: Mapping[str, tuple[int, Tensor]]) -> str | None:
        read(file, wanted)
        return file.checksum

    monkeypatch.setattr(TensorFile, "read", unverified)
    found = fuzz.fuzz("model", cases=60, seed=2)
    assert any("damaged data was accepted" in line for line in found)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_a_crash_and_a_hang_are_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    class Reader:
        def __init__(self, folder: Path) -> None:
            self.inputs = {"a": b"some bytes"}

        def read(self, name: str, content: bytes) -> str | None:
            if self.crashes:
                ctypes.string_at(0)
            while True:
                pass

        crashes = True

    monkeypatch.setattr(fuzz, "SECONDS", 0.05)
    monkeypatch.setitem(fuzz.KINDS, "reader", (Reader, 1))
    (found,) = fuzz.batch("reader", 1, 0, tmp_path)[0]
    assert "the process died (-11)" in found
    assert (tmp_path / "reader--last--0").read_bytes().startswith(b"a\n")
    Reader.crashes = False
    (found,) = fuzz.batch("reader", 1, 0, tmp_path)[0]
    assert "TooLong: more than 0.05 s" in found
