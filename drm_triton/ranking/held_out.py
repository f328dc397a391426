"""A trained model and the held-out part of its data that it may be measured on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drm_triton.data.dataset import CSR, Dataset
from drm_triton.distributed.measure import gather_measured
from drm_triton.distributed.rows import Division
from drm_triton.distributed.world import World
from drm_triton.errors import InputError
from drm_triton.models import load
from drm_triton.names import CUT_OFFS, MIN_TRAIN
from drm_triton.progress import SILENT, Reporter
from drm_triton.ranking.evaluate import Evaluation, average, evaluate_users
from drm_triton.recommender import Recommender
from drm_triton.training.run import dataset_of


@dataclass(frozen=True)
class HeldOut:
    """A model with the data that it is measured on.

    Attributes
    ----------
    model : the model
    data : the data set that it was trained on
    seen : CSR [M, N], the interactions before the held-out part; they are excluded from the rankings
    relevant : CSR [M, N], the held-out items of each user
    """

    model: Recommender[Any]
    data: Dataset
    seen: CSR
    relevant: CSR

    @classmethod
    def of_run(cls, run: str | Path, on: str = "test", dataset: Path | None = None) -> "HeldOut":
        """Load a run and its data. Refuse data that the model was not trained on, and a part that it was trained on.

        Parameters
        ----------
        run : run directory or saved model
        on : "valid" or "test", the part of the data to measure on
        dataset : the data set, if it is not at the path that the run recorded
        """
        model, data = load(run), dataset_of(run, dataset)
        data.verify()  # what is measured is only as true as the data
        try:
            return cls(model, data, *model.held_out(data, on))
        except InputError as error:
            raise InputError(f"{run}: {error}") from None

    def evaluate(
        self,
        ks: Sequence[int] = CUT_OFFS,
        min_train: int = MIN_TRAIN,
        reporter: Reporter = SILENT,
        step: str = "ranking all items for every user",
        beyond_accuracy: bool = False,
        world: World | None = None,
    ) -> Evaluation:
        """Rank all unseen items for every user, and report the progress under the name `step`.

        In a world of several processes, each ranks for a part of the users. All of them return the same result.
        """
        n_users = self.data.n_users
        own = slice(0, n_users) if world is None else Division(n_users, world.size).rows(world.rank)
        with reporter.step(step, total=own.stop - own.start, unit="users") as shown:
            measured = evaluate_users(
                self.model.ranker(),
                self.seen,
                self.relevant,
                range(own.start, own.stop),
                ks,
                min_train,
                lambda done, total: shown.advance(done - shown.done),
                beyond_accuracy,
            )
            return average([measured] if world is None else gather_measured(world, measured))
