"""A lock on a directory, so that two processes do not write to it at once."""

import os
from pathlib import Path
from types import TracebackType

from drm_triton.errors import DrmError, InputError

try:
    import fcntl
except ImportError:  # Windows: there is no lock
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"


def locked(path: str | Path) -> int | None:
    """Open an existing file or directory and lock it. Return the handle, which has the lock until it is closed.

    None means that another process has the lock, or that there is none to have.
    """
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY)
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
    except OSError:
        pass
    if handle is not None:
        os.close(handle)
    return None


class Lock:
    """An exclusive lock on a directory. It ends with `release`, or with the process, however that ends.

    The lock is the system's (flock), on the file `.lock` in the directory. The file itself means nothing and stays. It
    moves with the directory if that is renamed. A file system without locks gives none.

    Parameters
    ----------
    directory : an existing directory
    what : what the directory is, for the message

    Raises
    ------
    InputError
        If another process has the lock, or another object in this one.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Lock(folder, "run"):
    ...     Lock(folder, "run")
    Traceback (most recent call last):
    ...
    drm_triton.errors.InputError: ... another process works on this run; wait until it ends, or stop it
    """

    def __init__(self, directory: str | Path, what: str) -> None:
        self._handle: int | None = None
        if fcntl is None:
            return
        try:
            self._handle = os.open(Path(directory) / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InputError(
                f"{directory}: cannot be written ({error.strerror}); give another directory, or change its permissions"
            ) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            in_use = not self._is_of(directory)  # another process has just replaced it
        except BlockingIOError:
            in_use = True
        except OSError:  # no locks here
            in_use = False
        if in_use:
            self.release()
            raise InputError(f"{directory}: another process works on this {what}; wait until it ends, or stop it")

    def check(self, directory: str | Path) -> None:
        """Raise if another directory is now where this one was, or none. Call it before writing there."""
        if fcntl is not None and not self._is_of(directory):
            raise DrmError(
                f"{directory} was moved, removed or replaced while this process worked on it; nothing more is written "
                "there; start again with another directory"
            )

    def _is_of(self, directory: str | Path) -> bool:
        """Return whether the lock is on the file in this directory."""
        try:
            return self._handle is not None and os.path.samestat(
                os.fstat(self._handle), os.stat(Path(directory) / FILE)
            )
        except OSError:
            return False

    def release(self) -> None:
        """Let others have the lock."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
