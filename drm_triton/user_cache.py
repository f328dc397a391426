"""Directories for what can be made again: compiled kernels, and which data sets were verified.

What is read from them is trusted, so only the user may be able to write to them. Where that cannot be had, nothing is
kept. Only the standard library is imported.
"""

import os
import stat
from pathlib import Path


def private_directory(name: str, root: str | Path | None = None) -> Path | None:
    """Return a directory that only this user can write to, and create it if need be.

    Parameters
    ----------
    name : directory within `root`
    root : by default `drm-triton` in `XDG_CACHE_HOME`, or else in `~/.cache`

    Returns
    -------
    Path or None
        None if the directory cannot be made, or if another user could write to it or replace it.
    """
    try:
        base = Path(root) if root is not None else _home() / "drm-triton"
        place = base / name
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = place.resolve()
        return place if os.access(place, os.W_OK | os.X_OK) and is_private(place) else None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None


def is_private(place: Path) -> bool:
    """Return whether only this user, or root, can change a directory, or replace it or one of its parents.

    A directory with the sticky bit, such as /tmp, may be a parent: others cannot rename what this user owns there.
    """
    if not hasattr(os, "geteuid"):
        return True  # Windows: the profile of a user belongs to that user
    for folder in (place, *place.parents):
        status = folder.stat()
        mine = status.st_uid in (0, os.geteuid())
        sticky = folder != place and bool(status.st_mode & stat.S_ISVTX)
        others = bool(status.st_mode & stat.S_IWOTH) or (
            bool(status.st_mode & stat.S_IWGRP) and not _only_my_group(status.st_gid)
        )
        if not mine or (others and not sticky):
            return False
    return True


def _home() -> Path:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) if os.path.isabs(given) else Path.home() / ".cache"


def _only_my_group(group: int) -> bool:
    """Return whether a group is root's, or this user's own: many systems give each user one with the user's name."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return group == 0 or (
        group == user.pw_gid and found.gr_name == user.pw_name and not {*found.gr_mem} - {user.pw_name}
    )
