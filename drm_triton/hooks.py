"""Callbacks for `fit` that log each epoch to TensorBoard, MLflow or Weights & Biases.

Their packages are optional and imported when a hook is made. A hook is a context manager, which ends the log:

    with TensorBoard("logs/ratings", model.config) as log:
        model.fit(data, [log])
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any

from drm_triton.base_config import Config
from drm_triton.errors import InputError
from drm_triton.names import LOSSES, LogTo
from drm_triton.training.state import EpochEnd

EXTRAS = {"torch.utils.tensorboard": "tensorboard"}  # modules that are not called like their extra


class Hook(ABC):
    """A callback that logs the figures of each epoch, with the number of the epoch as the step."""

    def __call__(self, end: EpochEnd) -> None:
        """Log one epoch."""
        self.log(figures(end.record), end.record["epoch"])

    @abstractmethod
    def log(self, values: dict[str, float], epoch: int) -> None:
        """Log values by name."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """End the log. `failed` says whether the training raised an error."""

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(failed=kind is not None)


class TensorBoard(Hook):
    """Log to TensorBoard.

    Parameters
    ----------
    directory : for the event files; `tensorboard --logdir DIRECTORY` shows them
    config : options of the model, logged as text
    """

    def __init__(self, directory: str | Path, config: Config | None = None) -> None:
        self.directory, self.config = str(directory), config
        self._open = _package("torch.utils.tensorboard").SummaryWriter
        self.writer: Any = None  # opened by the first epoch: a directory that is not empty cannot become a run

    def log(self, values: dict[str, float], epoch: int) -> None:
        """Log values by name."""
        if self.writer is None:
            self.writer = self._open(self.directory)
            if self.config is not None:
                self.writer.add_text("config", f"```toml\n{self.config.resolved().to_toml()}```")
        for name, value in values.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        """Close the files."""
        if self.writer is not None:
            self.writer.close()


class MLflow(Hook):
    """Log to MLflow, as a new run of the current experiment (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME).

    Parameters
    ----------
    name : of the run
    config : options of the model, logged as parameters
    """

    def __init__(self, name: str | None = None, config: Config | None = None) -> None:
        self.mlflow = _package("mlflow")
        self.mlflow.start_run(run_name=name)
        if config is not None:
            self.mlflow.log_params(_options(config))

    def log(self, values: dict[str, float], epoch: int) -> None:
        """Log values by name. MLflow allows no @ in a name, so ndcg@10 is ndcg_at_10."""
        self.mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in values.items()}, step=epoch)

    def close(self, failed: bool) -> None:
        """End the run."""
        self.mlflow.end_run("FAILED" if failed else "FINISHED")


class WandB(Hook):
    """Log to Weights & Biases, as a new run (WANDB_PROJECT, WANDB_MODE=offline).

    Parameters
    ----------
    name : of the run
    config : options of the model
    """

    def __init__(self, name: str | None = None, config: Config | None = None) -> None:
        self.run = _package("wandb").init(name=name, config={} if config is None else _options(config))

    def log(self, values: dict[str, float], epoch: int) -> None:
        """Log values by name."""
        self.run.log(values, step=epoch)

    def close(self, failed: bool) -> None:
        """End the run."""
        self.run.finish(exit_code=int(failed))


def hook(to: LogTo, run: Path, config: Config) -> Hook:
    """Return the hook with a name. TensorBoard's files go to `run`/tensorboard; the others name their run after it."""
    if to == "tensorboard":
        return TensorBoard(run / "tensorboard", config)
    return {"mlflow": MLflow, "wandb": WandB}[to](run.name, config)


def figures(record: dict[str, Any]) -> dict[str, float]:
    """Return what a record of an epoch says of it, without parts of the loss that are not in use.

    Examples
    --------
    >>> figures({"epoch": 2, "loss": 1.5, "hinge": 0.0, "softmax": 1.5, "valid/ndcg@10": 0.25})
    {'loss': 1.5, 'softmax': 1.5, 'valid/ndcg@10': 0.25}
    """
    return {name: float(value) for name, value in record.items() if name != "epoch" and (value or name not in LOSSES)}


def _options(config: Config) -> dict[str, Any]:
    return {"model": config.model, **config.resolved().to_dict()}


def _package(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        extra = EXTRAS.get(module, module)
        raise InputError(
            f"`log={extra}` needs the package {extra}, which cannot be imported ({error}); "
            f"install it with: pip install 'drm-triton[{extra}]'"
        ) from error
