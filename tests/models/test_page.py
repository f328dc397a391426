"""docs/models.md is what the docstrings and options say."""

from pathlib import Path

from drm_triton.models.__main__ import page


def test_docs_list_the_models(repository: Path) -> None:
    written = (repository / "docs" / "models.md").read_text("utf-8")
    assert written == page(), "run: python -m drm_triton.models > docs/models.md"
