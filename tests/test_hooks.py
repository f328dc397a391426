"""Hooks log what the run records: to TensorBoard itself, and to stand-ins of MLflow and Weights & Biases."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from drm_triton import DRM, Dataset
from drm_triton.errors import InputError
from drm_triton.hooks import Hook, MLflow, TensorBoard, WandB, hook
from drm_triton.training.state import EpochEnd

DATA = Dataset.from_csr(([0, 6, 12], [*range(6), *range(2, 8)]), n_items=9)


def logged(log: Hook, model: DRM) -> list[dict[str, Any]]:
    """Train with a hook and return the records of the epochs."""
    records: list[dict[str, Any]] = []

    def keep(end: EpochEnd) -> None:
        records.append(end.record)

    with log:
        model.fit(DATA, [log, keep])
    return records


def test_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = DRM(factors=2, epochs=3)
    records = logged(TensorBoard(tmp_path / "log", model.config), model)
    found = events.EventAccumulator(str(tmp_path / "log"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"loss", "softmax", "lists", "lists_per_second", "seconds"}
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [
        (record["epoch"], pytest.approx(record["loss"])) for record in records
    ]
    text = found.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "factors = 2" in text


def test_tensorboard_makes_no_directory_before_the_first_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path / "log"):
        pass
    assert not (tmp_path / "log").exists()


def test_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    names = ("start_run", "log_params", "log_metrics", "end_run")
    fake = {name: lambda *a, _name=name, **k: calls.append((_name, a, k)) for name in names}
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**fake))
    model = DRM(factors=2, epochs=2)
    log = hook("mlflow", tmp_path / "songs", model.config)
    assert isinstance(log, MLflow)
    records = logged(log, model)
    assert calls[0] == ("start_run", (), {"run_name": "songs"})
    assert calls[1][1][0] == {"model": "drm", **model.config.resolved().to_dict()}
    assert [(call[1][0]["loss"], call[2]) for call in calls[2:-1]] == [
        (record["loss"], {"step": record["epoch"]}) for record in records
    ]
    assert calls[-1] == ("end_run", ("FINISHED",), {})
    log.log({"valid/ndcg@10": 0.5}, 7)
    assert calls[-1] == ("log_metrics", ({"valid/ndcg_at_10": 0.5},), {"step": 7})  # it refuses an @
    with pytest.raises(ZeroDivisionError), log:
        _ = 1 / 0
    assert calls[-1] == ("end_run", ("FAILED",), {})


def test_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", package)
    model = DRM(factors=2, epochs=2)
    log = hook("wandb", tmp_path / "songs", model.config)
    assert isinstance(log, WandB)
    records = logged(log, model)
    package.init.assert_called_once_with(name="songs", config={"model": "drm", **model.config.resolved().to_dict()})
    run = package.init.return_value
    assert [(call.args[0]["loss"], call.kwargs["step"]) for call in run.log.call_args_list] == [
        (record["loss"], record["epoch"]) for record in records
    ]
    run.finish.assert_called_once_with(exit_code=0)


@pytest.mark.parametrize(("make", "name"), [(MLflow, "mlflow"), (WandB, "wandb")])
def test_a_missing_package_is_named(make: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"`log={name}` needs the package {name}.*drm-triton\[{name}\]"):
        make()
