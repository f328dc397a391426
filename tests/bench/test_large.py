"""The data that `bench.large` generates."""

from pathlib import Path

import numpy as np
import polars as pl

from drm_triton.bench import large


def test_generated_data_is_skewed_and_always_the_same(tmp_path: Path) -> None:
    tables = []
    for name in ("one", "other"):
        large.generate(tmp_path / name, 0.001)
        tables.append(pl.read_parquet(tmp_path / name / "raw" / "*.parquet"))
    assert tables[0].equals(tables[1])
    table = tables[0]
    sizes = large.sizes(0.001)
    assert len(table) == sizes["interactions"] == 100_000
    for role in ("user", "item"):
        assert 0.98 * sizes[f"{role}s"] < table[role].n_unique() <= sizes[f"{role}s"]
    counts = np.sort(table["item"].value_counts()["count"].to_numpy())
    assert counts[-len(counts) // 10 :].sum() > 0.3 * len(table)  # of a tenth of the items
    same_class = (table["user"] - table["item"]).to_numpy() % large.CLASSES == 0
    assert 0.3 < same_class.mean() < 0.6


def test_the_shard_has_users(tmp_path: Path) -> None:
    for n_users in (1, 10_000, 10**7):
        index, count = map(int, large.shard(n_users).split("/"))
        assert 0 <= index < count
