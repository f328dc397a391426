"""torch on one thread: for results that must not depend on the number of threads, and beside threads of our own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch on one thread: the order of its sums depends on the number of threads.

    Its other threads also keep their processors busy for some milliseconds after each operation, while they wait for
    the next one. Kernels on two processors took 1.6 times as long beside them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
