"""Rounds of reloading: all workers of a service take a new model, or all keep the old one.

A round has two steps. First each worker loads the new model, while it answers with the old one, and says whether it
could. Then the process that watches the workers decides: if all could, each takes the new model; otherwise each drops
it. The processes share an array of one integer each, which only its owner writes, so that no lock is needed.

    row of a worker         r if it has loaded the model of round r, -r if it could not
    row of the supervisor   its round, and in the last row its decision: r for the new model, -r for the old one
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUND, DECISION = -2, -1  # rows of the supervisor, after those of the workers


class Rounds:
    """What the processes of a service say about the rounds.

    Parameters
    ----------
    cells : int64 [workers + 2], shared by the processes; zeros at the start

    Examples
    --------
    >>> rounds = Rounds(np.zeros(4, dtype=np.int64))
    >>> rounds.begin()
    >>> rounds.answer(0, 1, True), rounds.decide(), rounds.decision
    (None, None, 0)
    >>> rounds.answer(1, 1, False), rounds.decide(), rounds.decision
    (None, None, -1)
    """

    def __init__(self, cells: NDArray[np.int64]) -> None:
        self._cells = cells

    @property
    def number(self) -> int:
        """The number of the last round that has begun; 0 before the first."""
        return int(self._cells[ROUND])

    @property
    def decision(self) -> int:
        """The last round that was decided: its number for the new model, the negative of it for the old one."""
        return int(self._cells[DECISION])

    @property
    def is_open(self) -> bool:
        """Whether a round has begun that is not decided."""
        return abs(self.decision) != self.number

    def begin(self) -> None:
        """Begin a round. Only the supervisor does."""
        self._cells[ROUND] += 1

    def answer(self, row: int, number: int, loaded: bool) -> None:
        """Say whether the worker `row` has loaded the model of a round."""
        self._cells[row] = number if loaded else -number

    def decide(self) -> None:
        """Decide the open round as soon as it can be. Only the supervisor does."""
        number, answers = self.number, self._cells[:ROUND]
        if self.is_open and (answers == -number).any():
            self._cells[DECISION] = -number
        elif self.is_open and (answers == number).all():
            self._cells[DECISION] = number

    def give_up(self) -> None:
        """Decide the open round, if there is one, for the old model: a worker that ended cannot be started again."""
        if self.is_open:
            self._cells[DECISION] = -self.number


class Member:
    """The part of one worker. Create it before the worker loads its first model.

    Parameters
    ----------
    rounds : what the processes share
    row : the row of the worker
    """

    def __init__(self, rounds: Rounds, row: int) -> None:
        self.rounds, self._row = rounds, row
        self.last = rounds.number  # the round in which the worker has loaded a model the last time

    def answer(self, number: int, loaded: bool) -> None:
        """Say whether the worker has loaded the model of a round."""
        self.last = number
        self.rounds.answer(self._row, number, loaded)
