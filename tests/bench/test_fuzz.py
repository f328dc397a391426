"""A short run of the fuzzing, and the inputs that were kept."""

from collections.abc import Mapping

import pytest
from torch import Tensor

from drm_triton.training.tensor_file import TensorFile
from tests.conftest import repository_root

repository_root()  # the bench is not in a wheel

from drm_triton.bench import fuzz  # noqa: E402


@pytest.mark.parametrize("name", fuzz.KINDS)
def test_changed_files_are_refused_or_read_as_they_were(name: str) -> None:
    assert fuzz.fuzz(name, cases=150, seed=1) == []


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
