"""How the functions here are compiled, and where the result is kept between processes."""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

# reassoc and contract allow vector sums and fused multiply-add; NaN and infinity keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()


class _Cache(FunctionCache):
    """Numba's cache on disk, keyed by every source file of this package.

    Numba itself looks only at the file of the cached function: a change in another file whose functions it calls
    would go unnoticed.
    """

    def _index_key(self, sig: Any, codegen: Any) -> tuple:
        return (*super()._index_key(sig, codegen), _SOURCES)


def inline(function: Callable) -> Any:
    """Compile a function that only other compiled functions call."""
    return njit(nogil=True, fastmath=FASTMATH, error_model="numpy")(function)


def kernel(function: Callable) -> Any:
    """Compile a function that Python calls: without the GIL, and cached where a writable place is found for it."""
    dispatcher = inline(function)
    with suppress(RuntimeError):  # no place beside this file nor in the user's cache folder: compiled in each process
        dispatcher._cache = _Cache(function)
    return dispatcher
