from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture
def shared_data():
    """Find a real data set, or skip the test where it is absent."""

    def find(name: str) -> Path:
        if not (SHARED / name).is_dir():
            pytest.skip(f"real data set {name} is not at {SHARED}")
        return SHARED / name

    return find
