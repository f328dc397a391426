"""Training and recommending give the bits on record: a refactoring may not move them in silence.

`tests/bits.json` holds SHA-256 digests for each environment in which they were recorded. Bits depend on the processor
and on the versions of the numerical libraries, so an environment without a record is skipped. To add one, or to renew
it after a change that has to move the rounding (say so in CHANGELOG.md):

    python -m pytest tests/test_bits.py --record-bits
"""

import hashlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from drm_triton import DRM, Dataset

RECORD = Path(__file__).with_name("bits.json")

CASES: dict[str, dict[str, Any]] = {
    f"{score}-share{share}-rho{rho}" + ("-cov" if cov else ""): {"score": score, "share": share, "rho": rho, "cov": cov}
    for score, share, rho, cov in product(("dot", "l2"), (1, 32), (1, 3), (0.0, 0.5))
    if cov == 0 or score == "l2"
}
CASES |= {
    "dot-share32-long": {"score": "dot", "eta": 150},  # most items of a long list have gradient 0
    "softmax": {"objective": "softmax", "batch_size": 64},
    "softmax-pool": {"objective": "softmax", "batch_size": 64, "pool": 48},
    "softmax@k": {"objective": "softmax@k", "batch_size": 64},
    **{f"{name}-sampled": {"objective": name, "negatives": "sampled", "rho": 2} for name in ("softmax", "psl", "bpr")},
}


def environment() -> str:
    """What the bits depend on besides this repository."""
    import llvmlite.binding
    import numba
    import scipy
    import torch

    versions = [f"{module.__name__} {module.__version__}" for module in (numba, np, scipy, torch)]
    return ", ".join([f"cpu {llvmlite.binding.get_host_cpu_name()}", *versions])


@pytest.fixture(scope="module")
def data() -> Dataset:
    """300 users, 200 items, groups with a taste of their own; the same on every machine."""
    rng = np.random.Generator(np.random.Philox(11))
    likes = rng.random((300, 200)) < np.where(np.arange(300)[:, None] % 4 == np.arange(200) % 4, 0.2, 0.01)
    likes[:, 0] = True  # nobody is without items
    users, items = np.nonzero(likes)
    return Dataset.from_frame(pl.DataFrame({"user": users, "item": items}))


def digests(data: Dataset, options: dict[str, Any], threads: int) -> dict[str, str]:
    """SHA-256 of the factors after a short training, and of what is then recommended."""
    usual = {"objective": "hinge+drm", "eta": 45, "factors": 24, "batch_size": 256, "epochs": 2, "backend": "cpu"}
    every = {"cov_every": 3} if options.get("cov") else {}
    model = DRM(**{**usual, **every, **options}, threads=threads).fit(data)
    lists = model.recommend(k=7)
    parts = {
        "factors": [model.user_factors.numpy().tobytes(), model.item_factors.numpy().tobytes()],
        "recommend": [lists[name].to_numpy().tobytes() for name in ("user", "rank", "item", "score")],
    }
    return {name: hashlib.sha256(b"".join(values)).hexdigest() for name, values in parts.items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_on_record(case: str, threads: int, data: Dataset, request: pytest.FixtureRequest) -> None:
    records = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    here = environment()
    if request.config.getoption("--record-bits") and threads == 1:  # two threads are then compared with one
        if hasattr(request.config, "workerinput"):
            pytest.fail("record bits in one process: add -n 0")
        records.setdefault(here, {})[case] = digests(data, CASES[case], threads)
        RECORD.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", "utf-8")
        return
    if case not in records.get(here, {}):
        pytest.skip(f"no bits on record for {here}")
    assert digests(data, CASES[case], threads) == records[here][case]
