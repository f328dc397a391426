"""The examples run and do what they say."""

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_two_tower_learns_from_features(capsys):
    main = runpy.run_path(str(EXAMPLES / "two_tower.py"))["main"]
    before, after = main(steps=100, n_users=200, n_items=300, seed=0)
    assert after > 0.3 > 5 * before  # a random order of the items gives about 0.02
    assert f"after {after:.4f}" in capsys.readouterr().out
