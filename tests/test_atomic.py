"""Files and directories that appear complete or not at all."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest

from drm_triton import atomic
from drm_triton.errors import DrmError, InputError
from drm_triton.lock import Lock
from tests.conftest import ROOT

needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="needs pipes, links and permission bits")
needs_user = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
TEXT = "years of work"


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let writes beyond `size` bytes in a file fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails, not the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_imports_nothing_heavy() -> None:
    script = "import sys, drm_triton.atomic; print([m for m in ('torch', 'polars', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "[]\n"


# -- files -------------------------------------------------------------------------------------------------------------


def test_write_text_replaces_a_file_and_keeps_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    for text in ("old\n", "new\r\nline\n"):
        atomic.write_text(file, text)
        assert file.read_bytes() == text.encode()
    assert names(tmp_path) == ["a.txt"]


def test_write_file_fills_a_hidden_sibling(tmp_path: Path) -> None:
    seen = []

    def write(temporary: Path) -> None:
        seen.append(temporary)
        assert temporary.read_bytes() == b""
        assert not (tmp_path / "a.txt").exists()
        temporary.write_text("x")

    atomic.write_file(tmp_path / "a.txt", write)
    assert seen[0].parent == tmp_path
    assert seen[0].name.startswith(".a.txt.")
    assert seen[0].name.endswith(atomic.PARTIAL)


@needs_posix
def test_a_new_file_has_the_usual_mode_even_if_its_writer_makes_it_private(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text("x")
        temporary.chmod(0o600)

    atomic.write_file(tmp_path / "a.txt", write)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o666 & ~umask()


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "a.txt").write_text(TEXT)

    def write(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    expected = DrmError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as raised:
        atomic.write_file(tmp_path / "a.txt", write)
    if isinstance(error, OSError):
        assert "Input/output error; what was saved before is intact" in str(raised.value)
    assert (tmp_path / "a.txt").read_text() == TEXT
    assert names(tmp_path) == ["a.txt"]


@needs_posix
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with full_disk(1000), pytest.raises(DrmError, match=r"no space left to write .*a.txt; .* is intact") as raised:
        atomic.write_text(tmp_path / "a.txt", "x" * 10_000)
    assert raised.value.exit_code == 1
    frame = pl.DataFrame({"id": range(10_000)})
    with full_disk(1000), pytest.raises(DrmError, match="no space left"):  # an error of Polars, not of the system
        atomic.write_file(tmp_path / "a.parquet", frame.write_parquet)
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == TEXT


def test_missing_parents(tmp_path: Path) -> None:
    with pytest.raises(DrmError, match="cannot write"):
        atomic.write_text(tmp_path / "a" / "b.txt", "x")
    atomic.write_text(tmp_path / "a" / "b.txt", "x", parents=True)
    with pytest.raises(DrmError, match="cannot write"):
        atomic.write_text(tmp_path / "a" / "b.txt" / "c", "x", parents=True)
    assert (tmp_path / "a" / "b.txt").read_text() == "x"


@needs_posix
def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for text in ("old", "new"):  # the target does not exist at first
        atomic.write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_text() == text


@needs_posix
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(InputError, match="a pipe or a device, not a file; use another"):
            atomic.check_file(path, "use another")
        with pytest.raises(InputError, match="a pipe or a device"):
            atomic.write_text(path, "x")
    assert pipe.is_fifo()
    assert names(tmp_path) == ["link", "pipe"]


@needs_posix
def test_a_pipe_that_appears_during_the_work_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a pipe or a device"):
        atomic.write_file(tmp_path / "pipe", lambda temporary: os.mkfifo(tmp_path / "pipe"))
    assert names(tmp_path) == ["pipe"]


def test_check_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    assert atomic.check_file(tmp_path / "a.txt") == (tmp_path / "a.txt").resolve()
    assert atomic.check_file(tmp_path / "new.txt") == (tmp_path / "new.txt").resolve()
    with pytest.raises(InputError, match="is a directory; give another file"):
        atomic.check_file(tmp_path)
    with pytest.raises(InputError, match="missing is not a writable directory; give another file"):
        atomic.check_file(tmp_path / "missing" / "a.txt")
    assert names(tmp_path) == ["a.txt"]


@needs_user
def test_check_file_in_a_locked_directory(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(InputError, match="not a writable directory"):
        atomic.check_file(tmp_path / "locked" / "a.txt")


# -- directories -------------------------------------------------------------------------------------------------------


def make(path: Path, content: str = "new", overwrite: bool = False, marker: str | None = "mark") -> None:
    with atomic.directory(path, overwrite, marker) as folder:
        (folder / "mark").write_text(content)


def test_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    with atomic.directory(tmp_path / "a" / "out") as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
        assert folder.parent == tmp_path / "a"
        assert folder.name.startswith(".out.")
        assert folder.name.endswith(atomic.PARTIAL)
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "inner" / "file").read_text() == "x"
    assert names(tmp_path / "a") == ["out"]


@needs_posix
def test_a_new_directory_has_the_usual_mode(tmp_path: Path) -> None:
    make(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), OSError(5, "Input/output error")])
def test_a_failed_block_leaves_the_old_directory(tmp_path: Path, error: BaseException, overwrite: bool) -> None:
    if overwrite:
        make(tmp_path / "out", TEXT)

    def work() -> None:
        with atomic.directory(tmp_path / "out", overwrite, "mark") as folder:
            (folder / "mark").write_text("half")
            raise error

    with pytest.raises(InputError if isinstance(error, OSError) else type(error)):
        work()
    assert names(tmp_path) == (["out"] if overwrite else [])
    assert not overwrite or (tmp_path / "out" / "mark").read_text() == TEXT


def test_an_existing_directory_is_replaced_only_on_request(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    for call in (make, lambda path: atomic.check_directory(path)):
        with pytest.raises(InputError, match=r"already exists; give another, or use `overwrite`"):
            call(tmp_path / "out")
    assert (tmp_path / "out" / "mark").read_text() == "old"
    make(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / "mark").read_text() == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("marker", ["mark", None])
def test_overwrite_spares_directories_of_others(tmp_path: Path, marker: str | None) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    make(thesis, overwrite=True, marker=marker)  # an empty directory is free
    (thesis / "mark").rename(thesis / "chapter.tex")
    with pytest.raises(InputError, match="was not made by this program, so `overwrite` does not replace it"):
        make(thesis, overwrite=True, marker=marker)
    assert names(thesis) == ["chapter.tex"]


def test_without_a_marker_only_an_empty_directory_is_replaced(tmp_path: Path) -> None:
    make(tmp_path / "out")
    with pytest.raises(InputError, match="was not made by this program"):
        make(tmp_path / "out", overwrite=True, marker=None)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("victim", ["file", "folder"])
def test_a_path_through_a_missing_directory_is_refused_too(tmp_path: Path, victim: str, overwrite: bool) -> None:
    if victim == "folder":
        (tmp_path / "victim").mkdir()
    precious = tmp_path / "victim" / "notes" if victim == "folder" else tmp_path / "victim"
    precious.write_text(TEXT)
    with pytest.raises(InputError, match="exists"):
        make(tmp_path / "nope" / ".." / "victim", overwrite=overwrite)
    assert precious.read_text() == TEXT
    assert names(tmp_path) == ["victim"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("late", ["file", "folder"])
def test_what_appears_during_the_work_is_spared(tmp_path: Path, late: str, overwrite: bool) -> None:
    place = tmp_path / "out"
    precious = place / "notes" if late == "folder" else place

    def work() -> None:
        with atomic.directory(place, overwrite, "mark") as folder:
            (folder / "mark").touch()
            precious.parent.mkdir(exist_ok=True)
            precious.write_text(TEXT)

    with pytest.raises(InputError, match="exists"):
        work()
    assert precious.read_text() == TEXT
    assert names(tmp_path) == ["out"]


@needs_posix
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_another_process_works_on_is_spared(tmp_path: Path, when: str) -> None:
    """The mark of an old directory alone does not say that it may be replaced."""
    place, held = tmp_path / "out", []

    def work() -> None:
        with atomic.directory(place, True, "mark") as folder:
            (folder / "mark").touch()
            assert when == "meanwhile"
            make(place, "old")
            held.append(Lock(place, "run"))

    if when == "before":
        make(place, "old")
        held.append(Lock(place, "run"))
    with pytest.raises(InputError, match="another process works on this directory"):
        work()
    with pytest.raises(InputError, match="another process works on this directory"):
        atomic.discard_directory(place, "mark")
    assert (place / "mark").read_text() == "old"
    held.pop().release()
    atomic.discard_directory(place, "mark")
    assert names(tmp_path) == []


@needs_posix
def test_a_directory_that_is_replaced_while_it_is_locked_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    make(tmp_path / "out", "old")
    flock = fcntl.flock

    def late(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        make(tmp_path / "out", "new", overwrite=True)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(InputError, match="another process works on this run"):
        Lock(tmp_path / "out", "run")
    with Lock(tmp_path / "out", "run") as lock:
        lock.check(tmp_path / "out")


def test_a_swap_that_fails_restores_the_old_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", "old")
    rename = Path.rename

    def fail(source: Path, target: Path) -> Path:
        if source.name.endswith(atomic.PARTIAL):
            raise OSError(5, "Input/output error")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail)
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    with pytest.raises(InputError, match="Input/output error; nothing was left behind"):
        make(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out" / "mark").read_text() == "old"
    assert names(tmp_path) == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
from drm_triton import atomic

if sys.argv[2] == "fallback":
    atomic._exchange = lambda one, other: False
rename = Path.rename
def killed(source, target):
    rename(source, target)
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = killed
with atomic.directory(sys.argv[1], overwrite=True, marker="mark") as folder:
    (folder / "mark").write_text("new")
os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_posix
@pytest.mark.parametrize("how", ["exchange", "fallback"])
def test_a_kill_during_a_swap_loses_nothing(tmp_path: Path, how: str) -> None:
    """Where the system exchanges two directories, there is no moment without one; elsewhere the old one comes back."""
    make(tmp_path / "out", "old")
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "out", how], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    if how == "fallback":
        assert not (tmp_path / "out").exists()
        atomic.check_directory(tmp_path / "out", overwrite=True, marker="mark")
    assert (tmp_path / "out" / "mark").read_text() == ("new" if how == "exchange" else "old")
    make(tmp_path / "out", "newer", overwrite=True)
    assert names(tmp_path) == ["out"]


@needs_posix
def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(tmp_path: Path) -> None:
    (tmp_path / ".out.0123abcd.partial").mkdir()
    (tmp_path / ".out.0123abcd.partial" / "file").touch()
    (tmp_path / ".out.0123abcd.old").mkdir()
    (tmp_path / ".out.mine.partial").mkdir()
    with atomic.directory(tmp_path / "out", True, "mark") as living:
        (living / "mark").write_text("first")
        make(tmp_path / "out", "second")
        assert living.exists()
    assert (tmp_path / "out" / "mark").read_text() == "first"
    assert names(tmp_path) == [".out.mine.partial", "out"]


def test_temporary_files_are_removed_after_an_hour(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.txt.0123abcd.partial", tmp_path / ".a.txt.4567abcd.partial"
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    atomic.write_text(tmp_path / "a.txt", "x")
    assert names(tmp_path) == [new.name, "a.txt"]


def test_an_empty_directory_that_cannot_be_renamed_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    (place / "lost+found").mkdir()
    inode = place.stat().st_ino
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place)
    with atomic.directory(place, overwrite=True, last="mark") as folder:
        assert folder.parent == place  # on the same file system
        (folder / "mark").write_text("x")
        (folder / "more").mkdir()
    assert names(place) == ["lost+found", "mark", "more"]
    assert place.stat().st_ino == inode
    with pytest.raises(InputError, match=r"it is a mount point, .* remove what it contains"):
        make(place, overwrite=True)


@needs_posix
def test_what_a_killed_process_left_in_a_directory_that_it_was_to_fill_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "mount"
    left = place / ".mount.0123abcd.partial"
    left.mkdir(parents=True)
    (left / "file").touch()
    with pytest.raises(InputError, match="was not made by this program"):
        make(place, overwrite=True)  # not a mount point: nobody fills it
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place)
    with atomic.directory(place, overwrite=True, marker="mark") as living:
        assert names(place) == [living.name]
        with pytest.raises(InputError, match="was not made by this program"):
            make(place, overwrite=True)
        (living / "mark").touch()
    assert names(place) == ["mark"]


def test_filling_a_directory_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place)
    rename = Path.rename

    def fail(source: Path, target: Path) -> Path:
        if source.name == "mark" and target.parent == place:
            raise OSError(5, "Input/output error")
        return rename(source, target)

    def work() -> None:
        with atomic.directory(place, overwrite=True, last="mark") as folder:
            (folder / "mark").touch()
            (folder / "other").touch()

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InputError, match="Input/output error"):
        work()
    assert names(place) == []


KILLED_AT_WORK = """
import os, signal, sys
from drm_triton import atomic

with atomic.directory(sys.argv[1], overwrite=True, marker="mark") as folder:
    (folder / "file").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a mount point")
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can mount")
def test_a_real_mount_point(tmp_path: Path) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", place], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        assert subprocess.run([sys.executable, "-c", KILLED_AT_WORK, place], cwd=ROOT).returncode == -signal.SIGKILL
        assert len(names(place)) == 1
        make(place, overwrite=True)
        assert names(place) == ["mark"]
    finally:
        subprocess.run(["umount", place], check=True)


@needs_posix
def test_a_link_to_a_directory_stays_a_link(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    make(tmp_path / "link", "new", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out" / "mark").read_text() == "new"
    assert names(tmp_path) == ["link", "out"]


@needs_posix
def test_a_directory_on_a_full_disk(tmp_path: Path) -> None:
    with full_disk(1000), pytest.raises(InputError, match="nothing was left behind; free some space or") as raised:
        make(tmp_path / "out", "x" * 10_000)
    assert raised.value.exit_code == 2
    assert names(tmp_path) == []


def test_names_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    make(tmp_path / ("x" * 255))
    atomic.write_text(tmp_path / ("y" * 255), "x")
    with pytest.raises(InputError, match="too long"):
        make(tmp_path / ("x" * 256))


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is not a writable directory; give another directory"):
        atomic.check_directory(tmp_path / "file" / "out")


@needs_user
def test_check_directory_in_a_locked_directory(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(InputError, match="not a writable directory"):
        atomic.check_directory(tmp_path / "locked" / "out")
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(InputError, match="ermission denied"):
        atomic.check_directory(tmp_path / "closed" / "a" / "out")
