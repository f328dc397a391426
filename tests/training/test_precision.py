"""Training with tables of bfloat16: rounded everywhere, the same bits again, and files in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from torch import Tensor

from drm_triton import DRM, Dataset, TrainConfig
from drm_triton.data.prepare.synthetic import Shape, generate
from drm_triton.errors import DrmError, InputError
from drm_triton.export import export
from drm_triton.kernels import get_backend
from drm_triton.kernels.precision import table_type
from drm_triton.training.checkpoint import FILE, read_tensors
from drm_triton.training.engine import SingleProcess
from drm_triton.training.loop import check_factors, initial_state, train
from drm_triton.training.preflight import memory_estimate
from drm_triton.training.state import EpochEnd

pytestmark = pytest.mark.usefixtures("no_curves")
CPU = torch.device("cpu")
CATALOGUE: dict[str, Any] = {"factors": 12, "epochs": 2, "batch_size": 32, "precision": "bfloat16", "backend": "cpu"}
LISTS = {**CATALOGUE, "objective": "hinge+drm"}


@pytest.fixture(scope="module")
def data() -> Dataset:
    users, items = generate(Shape(users=200, items=150, interactions=4000), 0)
    return Dataset.from_frame(pl.DataFrame({"user": users, "item": items}))


def is_bfloat16(x: Tensor) -> bool:
    return torch.equal(x.float(), x.bfloat16().float())


def same_model(a: DRM, b: DRM) -> bool:
    return torch.equal(a.user_factors, b.user_factors) and torch.equal(a.item_factors, b.item_factors)


def test_initial_factors_are_rounded_to_nearest(data: Dataset) -> None:
    for score in ("dot", "cosine"):
        config = TrainConfig(factors=12, score=score, precision="bfloat16")
        rounded = initial_state(config, data.train, CPU)
        exact = initial_state(TrainConfig(factors=12, score=score), data.train, CPU)
        assert torch.equal(rounded.U, exact.U.bfloat16().float())
        assert torch.equal(rounded.V, exact.V.bfloat16().float())
        assert torch.equal(rounded.V_state, exact.V_state)


@pytest.mark.parametrize("options", [CATALOGUE, LISTS], ids=["catalogue", "lists"])
def test_a_training_gives_the_same_bits_again(data: Dataset, options: dict[str, Any], threads: None) -> None:
    """With any number of threads, and if it was stopped. Another seed, or float32, gives another model."""
    model = DRM(**options, threads=1).fit(data)
    assert is_bfloat16(model.user_factors)
    assert is_bfloat16(model.item_factors)
    assert same_model(model, DRM(**options, threads=2).fit(data))
    assert not same_model(model, DRM(**{**options, "precision": "float32"}).fit(data))


@pytest.mark.parametrize("options", [CATALOGUE, LISTS], ids=["catalogue", "lists"])
def test_stopped_within_an_epoch_and_resumed_equals_uninterrupted(
    data: Dataset, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = DRM(**options).fit(data, run=tmp_path / "whole")
    DRM(**options).fit(data, run=tmp_path / "run", on_batch=lambda state, n_lists: state.step >= 3)
    stopped, metadata = read_tensors(tmp_path / "run" / "last" / FILE)
    assert metadata["training"]["step"] == 3
    assert {x.dtype for x in stopped.values()} == {torch.float32}
    resumed = DRM(**options).fit(data, run=tmp_path / "run", resume=True)
    assert same_model(resumed, whole)
    ours, theirs = (read_tensors(tmp_path / name / "last" / FILE)[0] for name in ("run", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert is_bfloat16(theirs["item_factors"])
    assert not is_bfloat16(theirs["item_state"])
    with pytest.raises(InputError, match="a resumed run cannot change `precision`"):
        DRM(**{**options, "precision": "float32"}).fit(data, run=tmp_path / "run", resume=True)


def test_tables_are_of_bfloat16_in_memory_except_on_the_cpu(data: Dataset) -> None:
    """The model has float32, whatever the tables were."""
    types = {}
    for backend in ("cpu", "reference"):
        seen: list[torch.dtype] = []

        def note(end: EpochEnd, seen: list[torch.dtype] = seen) -> None:
            seen += [end.state.tensors()[name].dtype for name in ("user_factors", "item_state")]

        model = DRM(**{**CATALOGUE, "epochs": 1, "backend": backend}).fit(data, [note])
        assert model.item_factors.dtype == torch.float32
        assert is_bfloat16(model.item_factors)
        types[backend] = seen
    assert types == {"cpu": [torch.float32, torch.float32], "reference": [torch.bfloat16, torch.float32]}


@pytest.mark.parametrize("options", [{}, {"objective": "psl"}, {"score": "l2", "pool": 20}], ids=str)
def test_backends_agree(data: Dataset, options: dict[str, Any]) -> None:
    """After five steps, nearly all factors are the same: a number rounds otherwise only if it differs much."""
    states = []
    config = TrainConfig(factors=8, batch_size=64, eval_every=0, lr=0.05, precision="bfloat16", **options)
    for name in ("cpu", "reference"):
        backend = get_backend(name)
        state = initial_state(config, data.train, CPU).to(CPU, table_type("bfloat16", backend.name))
        engine = SingleProcess(state, config, data, data.train, backend)
        states.append(train(state, config, data, engine, on_batch=lambda s, n_lists: s.step == 5))
    for table in ("U", "V"):
        a, b = (getattr(state, table).float() for state in states)
        assert (a != b).double().mean() < 0.02, table
        assert (a - b).abs().max() < 0.05, table


def test_a_model_is_saved_and_exported_in_float32(data: Dataset, tmp_path: Path) -> None:
    model = DRM(**CATALOGUE).fit(data)
    model.save(tmp_path / "model")
    again = DRM.load(tmp_path / "model")
    assert same_model(again, model)
    assert again.config.precision == "bfloat16"
    assert again.recommend(k=3).equals(model.recommend(k=3))
    assert torch.equal(again.fold_in([data.item_ids[:4]]), model.fold_in([data.item_ids[:4]]))
    export(model, tmp_path / "out")
    exported = np.load(tmp_path / "out" / "factors.npz")
    assert exported["item_factors"].dtype == np.float32
    assert (exported["item_factors"] == model.item_factors.numpy()).all()


def test_the_cosine_of_rounded_rows_is_a_cosine(data: Dataset) -> None:
    """Lengths of rows differ from 1 by rounding. The similarity is divided by them."""
    model = DRM(**CATALOGUE).fit(data)
    lengths = model.item_factors.norm(dim=1)
    lengths = lengths[lengths > 0]
    assert 1e-5 < (lengths - 1).abs().max() < 2.0**-7
    found = model.similar_items(data.item_ids[:5], k=3)
    places = {item: place for place, item in enumerate(data.item_ids)}
    for item, similar, score in found.select("item", "similar", "score").iter_rows():
        v, w = (model.item_factors[places[name]].double() for name in (item, similar))
        assert score == pytest.approx(torch.cosine_similarity(v, w, dim=0).item(), abs=1e-6)


def test_factors_that_are_not_finite_are_noticed(data: Dataset) -> None:
    config = TrainConfig(factors=8, precision="bfloat16")
    state = initial_state(config, data.train, CPU).to(CPU, torch.bfloat16)
    check_factors(state, config)
    state.V[3, 2] = torch.nan
    with pytest.raises(DrmError, match="item factors are not finite"):
        check_factors(state, config)


@pytest.mark.parametrize(("backend", "per_factor"), [("cpu", 4), ("auto", 4), ("triton", 2), ("reference", 2)])
def test_memory_of_the_tables(data: Dataset, backend: Any, per_factor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRM_BACKEND", "cpu")
    memory = memory_estimate(data, TrainConfig(factors=8, precision="bfloat16", backend=backend))
    rows = data.n_users + data.n_items
    assert memory["factors"] == per_factor * 8 * rows
    assert memory["adagrad state"] == 4 * 8 * rows
