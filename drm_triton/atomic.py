"""Write files and directories so that they appear complete or not at all.

The content is written to a temporary sibling, flushed to disk, and renamed. A reader, or a process that is killed at
any moment, finds the old content or the new one. A temporary sibling of NAME is called `.NAME.XXXXXXXX.partial`; only a
process that is killed without warning leaves one behind. The next that writes NAME removes it: a directory at once,
because its lock is free, and a file after an hour.
"""

import ctypes
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from drm_triton.errors import DrmError, InputError
from drm_triton.lock import FILE, Lock, locked

PARTIAL = ".partial"  # suffix of temporary siblings
ASIDE = ".old"  # suffix of the directory where an old one waits, if the system cannot exchange two

STALE = 3600  # seconds after which a temporary file that nobody wrote to is that of a killed process

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


# -- files -------------------------------------------------------------------------------------------------------------


def check_file(path: str | Path, advice: str = "give another file") -> Path:
    """Refuse a path where no file can be written, before any work is done.

    A new file and a regular file that exists are accepted. Links are followed.

    Parameters
    ----------
    path : file to write later
    advice : what to do instead, the last words of the message

    Returns
    -------
    Path
        The absolute path without links, where the file will be.

    Raises
    ------
    InputError
        If the path is a directory, a pipe or a device, or if its directory is missing or not writable.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"cannot write {path}: it is a directory; {advice}")
    _check_regular(target, path, advice)
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write {path}: {target.parent} is not a writable directory; {advice}")
    return target


def write_file(path: str | Path, write: Callable[[Path], object], parents: bool = False) -> None:
    """Write a file atomically.

    An existing file is replaced. A link is followed, not replaced.

    Parameters
    ----------
    path : file to write
    write : called with the path of an empty temporary sibling, which it fills
    parents : create missing parent directories

    Raises
    ------
    DrmError
        If the file cannot be written. An old file is then unchanged.
    InputError
        If `path` is a pipe or a device: a rename would replace it by a file.
    """
    target = Path(os.path.realpath(path))
    temporary = _sibling(target)
    try:
        _check_regular(target, path)
        if parents:
            target.parent.mkdir(parents=True, exist_ok=True)
        clean(target)
        # Not created by `tempfile`: its files are private, and this one needs the mode of any new file.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        write(temporary)
        os.chmod(temporary, mode)  # safetensors replaces the file by a private one
        move_file(temporary, target)
    except DrmError:
        raise
    except Exception as error:
        if _is_full(error):
            raise DrmError(
                f"no space left to write {path}; what was saved before is intact; "
                "free some space, then resume or start again"
            ) from error
        if _is_of_disk(error):
            reason = getattr(error, "strerror", None) or error
            raise DrmError(f"cannot write {path}: {reason}; what was saved before is intact") from error
        raise
    finally:
        with suppress(OSError):  # the path may not even lead through directories
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str, parents: bool = False) -> None:
    """Write a text file atomically, in UTF-8 and with the line ends of `text`. See `write_file`."""
    write_file(path, lambda temporary: temporary.write_text(text, encoding="utf-8", newline=""), parents)


def move_file(complete: Path, target: Path) -> None:
    """Flush a complete file to disk and rename it to `target`, which it replaces."""
    flush(complete)
    _check_regular(target, target)
    complete.replace(target)


def link_or_copy(existing: str | Path, new: str | Path) -> None:
    """Make `new` a hard link to a file, or a copy where the file system has no links. An old file is removed."""
    Path(new).unlink(missing_ok=True)
    try:
        os.link(existing, new)
    except OSError:
        shutil.copyfile(existing, new)


# -- directories -------------------------------------------------------------------------------------------------------


def check_directory(path: str | Path, overwrite: bool = False, marker: str | None = None) -> Path:
    """Refuse a path where no directory can be written, before any work is done.

    Parameters
    ----------
    path : directory to write later
    overwrite : accept an existing directory if it is empty or contains a file `marker`
    marker : name of a file by which this program recognises its own directories; None if it must not replace any

    Returns
    -------
    Path
        The absolute path without links and "..". Write to this path: it stays the same place even if missing
        directories on the way are created in the meantime.

    Raises
    ------
    InputError
        If the path is taken, if another process works on it, or if it cannot be written.
    """
    try:
        place = Path(os.path.realpath(path))
        _recover(place)
        clean_fixed(place)
        taken = os.path.lexists(place)
        if taken and not overwrite:
            raise InputError(
                f"the output directory {path} already exists; give another, or use `overwrite` to replace it"
            )
        if taken and not _replaceable(place, marker):
            raise InputError(
                f"{path} exists and was not made by this program, so `overwrite` does not replace it; "
                "give another directory"
            )
        with _in_nobodys_use(place):
            pass
        if taken and _is_fixed(place):
            if not is_empty(place):
                raise InputError(
                    f"cannot replace {path}: it is a mount point, or its parent is not writable; remove what it "
                    "contains, or give another directory"
                )
            if os.access(place, os.W_OK | os.X_OK):
                return place
        parent = place.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(f"cannot write {path}: {parent} is not a writable directory; give another directory")
    except OSError as error:  # for example a name that is too long, or a directory without permission to enter
        raise InputError(f"cannot write {path}: {error.strerror or error}; give another directory") from error
    return place


@contextmanager
def directory(
    path: str | Path, overwrite: bool = False, marker: str | None = None, last: str | None = None
) -> Iterator[Path]:
    """Write a directory atomically.

    Yield a temporary sibling of `path`, which takes its place when the block ends. If the block raises, the temporary
    directory is removed and an old directory is unchanged. Missing parent directories are created.

    An empty directory that cannot be renamed, because it is a mount point or its parent is not writable, is filled: the
    temporary directory is within it, and its entries move up one by one, `last` at the end. A process that is killed
    between these moves leaves entries without `last`.

    Parameters
    ----------
    path, overwrite, marker : see `check_directory`, which runs at the start and again before the rename
    last : name of the file by which readers recognise the directory; by default `marker`

    Raises
    ------
    InputError
        If the path is taken, or if it cannot be written.
    """
    place = check_directory(path, overwrite, marker)
    temporary, handle = place, None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fixed = place.exists() and _is_fixed(place)
        if not fixed:
            clean(place)
        temporary, handle = _temporary_directory(place / place.name if fixed else place)
        yield temporary
        for file in temporary.rglob("*"):
            flush(file)
        flush(temporary)
        if fixed:
            _fill(place, temporary, last or marker)
        else:
            check_directory(place, overwrite, marker)  # again: the block may have taken hours
            with _in_nobodys_use(place):
                _swap(temporary, place, overwrite)
            flush(place.parent)
    except DrmError:
        raise
    except Exception as error:
        full = _is_full(error)
        if not _is_of_disk(error):
            raise
        reason = str(error).strip().split("\n", 1)[0]
        advice = "free some space" if full else "check the directory's permissions"
        raise InputError(
            f"cannot write {path}: {reason}; nothing was left behind; {advice} or give another directory"
        ) from error
    finally:  # after a success it no longer exists, or it is the old one; after a failure or Ctrl-C it must not stay
        if temporary != place:
            shutil.rmtree(temporary, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _temporary_directory(place: Path) -> tuple[Path, int | None]:
    """Create a temporary sibling of a directory. Return it with the handle of its lock, None without one."""
    while True:
        temporary = _sibling(place)
        temporary.mkdir()
        handle = locked(temporary)
        if temporary.exists():  # a process that cleans up may have taken it before it was locked
            return temporary, handle
        if handle is not None:
            os.close(handle)


def discard_directory(path: str | Path, marker: str) -> None:
    """Remove a directory that `overwrite` may replace, if it exists. See `check_directory`."""
    place = check_directory(path, overwrite=True, marker=marker)
    if place.exists():
        doomed = _sibling(place)
        with _in_nobodys_use(place):
            place.rename(doomed)  # first, so that it disappears at once
        shutil.rmtree(doomed)


def _in_nobodys_use(place: Path) -> AbstractContextManager[object]:
    """Lock a directory that is about to be replaced, if it is one that processes lock."""
    return Lock(place, "directory") if (place / FILE).exists() else nullcontext()


def _replaceable(place: Path, marker: str | None) -> bool:
    """Return whether `place` is an empty directory or one with the marker of this program."""
    if marker is not None and (place / marker).is_file():
        return True
    return place.is_dir() and is_empty(place)


def is_empty(place: Path) -> bool:
    """Return whether a directory is empty, or contains only what a file system has at its mount point."""
    return not {entry.name for entry in place.iterdir()} - ({"lost+found"} if os.path.ismount(place) else set())


def _is_fixed(place: Path) -> bool:
    """Return whether an existing directory cannot be renamed."""
    return os.path.ismount(place) or not os.access(place.parent, os.W_OK | os.X_OK)


def _fill(place: Path, temporary: Path, last: str | None) -> None:
    """Move what is in `temporary` to its parent, which must be empty besides, `last` at the end."""
    if {entry.name for entry in place.iterdir()} - {temporary.name, "lost+found"}:
        raise InputError(f"{place} exists and is no longer empty; give another directory")
    moved: list[Path] = []
    try:
        for entry in sorted(temporary.iterdir(), key=lambda entry: entry.name == last):
            entry.rename(place / entry.name)
            moved.append(place / entry.name)
    except BaseException:
        for entry in reversed(moved):
            entry.rename(temporary / entry.name)
        raise
    flush(place)


def _swap(temporary: Path, place: Path, overwrite: bool) -> None:
    """Rename `temporary` to `place`. With `overwrite`, an old directory is at `temporary` or gone afterwards.

    Without a system call that exchanges both, the old directory moves aside first. A failure restores it, and after a
    kill between the two renames `_recover` does.
    """
    if not (overwrite and place.exists()):
        temporary.rename(place)  # fails if `place` is a file or a directory that is not empty
        return
    if _exchange(temporary, place):
        return
    aside = _sibling(place, ASIDE)
    aside.mkdir()
    handle = locked(aside)
    old = aside / "old"
    place.rename(old)
    try:
        temporary.rename(place)
    except BaseException:
        old.rename(place)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step. Return False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def _recover(place: Path) -> None:
    """Put back an old directory that a process moved aside before it was killed."""
    for aside in _leftovers(place):
        if aside.name.endswith(ASIDE) and (aside / "old").is_dir() and not os.path.lexists(place):
            handle = locked(aside)
            if handle is not None:
                (aside / "old").rename(place)
                shutil.rmtree(aside, ignore_errors=True)
                os.close(handle)


# -- both --------------------------------------------------------------------------------------------------------------


def _sibling(path: Path, suffix: str = PARTIAL) -> Path:
    """Return a new temporary name beside `path`."""
    # A long name is cut, so that the temporary name is not longer than the file system allows.
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}{suffix}")


def _leftovers(path: Path) -> list[Path]:
    """Return the temporary siblings of `path` that exist, those of living processes too."""
    pattern = re.compile(rf"\.{re.escape(path.name[:50])}\.[0-9a-f]{{8}}({re.escape(PARTIAL)}|{re.escape(ASIDE)})")
    try:
        return [path.with_name(name) for name in os.listdir(path.parent) if pattern.fullmatch(name)]
    except OSError:
        return []


def clean(path: Path) -> None:
    """Remove the temporary siblings of `path` that killed processes left."""
    for left in _leftovers(path):
        with suppress(OSError):
            if left.is_dir():
                handle = locked(left)
                if handle is not None:
                    shutil.rmtree(left, ignore_errors=True)
                    os.close(handle)
            elif time.time() - left.stat().st_mtime > STALE:
                left.unlink()


def clean_fixed(place: Path) -> None:
    """Remove what a killed process left in a directory that cannot be renamed and that it was to fill."""
    if place.is_dir() and _is_fixed(place):
        clean(place / place.name)


def clean_within(place: Path) -> None:
    """Remove the temporary files that killed processes left in a directory. The caller has its lock."""
    for left in place.rglob(f".*{PARTIAL}"):
        left.unlink(missing_ok=True)


def _check_regular(target: Path, path: str | Path, advice: str = "give another file") -> None:
    """Refuse a pipe or a device, which a rename would replace by a file."""
    if target.exists() and not target.is_file() and not target.is_dir():
        raise InputError(f"cannot write {path}: it is a pipe or a device, not a file; {advice}")


def _is_full(error: Exception) -> bool:
    """Return whether a write failed for lack of space."""
    return _has_code(error, _NO_SPACE)


def _is_of_disk(error: Exception) -> bool:
    """Return whether the system refused to write."""
    return isinstance(error, OSError) or _has_code(error, (*_NO_SPACE, errno.EIO, errno.EROFS))


def _has_code(error: Exception, codes: Collection[int]) -> bool:
    """Return whether an error is one of the system with one of these numbers.

    Polars and safetensors raise their own error classes, which contain the system's message but not its number.
    """
    known = isinstance(error, OSError) and error.errno in codes
    return known or any(os.strerror(code) in str(error) for code in codes)


def flush(path: Path) -> None:
    """Flush a file or a directory to disk, so that a power cut after the rename cannot leave it empty."""
    if os.name == "nt":
        return  # Windows can flush neither a directory nor a file that is open for reading only
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
