"""Calls that a type checker accepts or refuses. mypy checks this file; nothing runs it.

mypy reports an ignore comment that silences nothing (`warn_unused_ignores`), so a refusal that is lost is an error too.
"""

from drm_triton.model import DRM


def keywords() -> None:
    """The parameters of `DRM`, their types and their choices."""
    DRM(factors=32, lam=3, score="l2", eta=None)
    DRM(facters=32)  # type: ignore[call-arg]
    DRM(factors="many")  # type: ignore[arg-type]
    DRM(score="hamming")  # type: ignore[arg-type]
