"""Ranks as threads of one process: they exchange tensors through memory. Quick, so that many cases can be tried."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from drm_triton.distributed.world import Chosen, ToldError, World


class Board:
    """What the ranks say to each other. `kills` ranks that wait when one of them fails."""

    def __init__(self, size: int) -> None:
        self.said: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def say(self, rank: int, what: Any) -> list[Any]:
        self.said[rank] = what
        self.barrier.wait()
        heard = list(self.said)
        self.barrier.wait()
        return heard


class ThreadWorld(World):
    """A rank that is a thread."""

    def __init__(self, rank: int, size: int, board: Board) -> None:
        super().__init__(rank, size, local=rank)
        self.board = board

    def exchange(
        self, parts: Sequence[Sequence[Tensor | Chosen]], sizes: Sequence[Sequence[int]] | None = None
    ) -> list[list[Tensor]]:
        heard = self.board.say(self.rank, parts)
        received = [
            [one.copied() if isinstance(one, Chosen) else one.clone() for one in theirs[self.rank]] for theirs in heard
        ]
        if sizes is not None:
            assert [[len(tensor) for tensor in part] for part in received] == [list(part) for part in sizes]
        self.board.barrier.wait()  # nobody changes a tensor before all have copied it
        return received

    def lengths(self, leaving: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(theirs[self.rank]) for theirs in self.board.say(self.rank, leaving)]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [theirs.clone() for theirs in self.board.say(self.rank, tensor)]
        self.board.barrier.wait()
        return gathered

    def gather_objects(self, value: Any) -> list[Any]:
        return self.board.say(self.rank, value)


def run_ranks(size: int, function: Callable[[World], Any]) -> list[Any]:
    """Call a function on each rank of a world; return what the ranks return. The first error is raised."""
    board, results, errors = Board(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadWorld(rank, size, board))
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    errors.sort(key=lambda error: isinstance(error, (threading.BrokenBarrierError, ToldError)))
    if errors:
        raise errors[0]
    return results
