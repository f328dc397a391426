"""Calls that a type checker accepts or refuses. mypy checks this file; nothing runs it.

mypy reports an ignore comment that silences nothing (`warn_unused_ignores`), so a refusal that is lost is an error too.
"""

from pathlib import Path

from drm_triton.data.dataset import Dataset
from drm_triton.model import DRM
from drm_triton.training.tune import tune


def keywords(data: Dataset) -> None:
    """The parameters of `DRM` and `tune`, their types and their choices."""
    DRM(factors=32, lam=3, score="l2", eta=None)
    DRM(facters=32)  # type: ignore[call-arg]
    DRM(factors="many")  # type: ignore[arg-type]
    DRM(score="hamming")  # type: ignore[arg-type]
    tune(data, Path("study"), trials=3, factors=32, score="l2")
    tune(data, Path("study"), facters=32)  # type: ignore[call-overload]
    tune(data, Path("study"), score="hamming")  # type: ignore[call-overload]
    tune(data, Path("study"), model="wmf", confidence=3.0)
