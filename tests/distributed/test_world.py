"""What ranks say to each other when one of them fails."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from drm_triton.cli import together as launcher
from drm_triton.distributed import fit, world
from drm_triton.distributed.world import LostRankError, ToldError, World
from drm_triton.errors import DrmError, InputError
from tests.distributed.thread_world import run_ranks


def outcomes(size: int, action: Callable[[World], object]) -> list[BaseException | object]:
    """Return what `together` returns or raises on each rank."""

    def run(world: World) -> BaseException | object:
        try:
            return world.together(lambda: action(world))
        except Exception as error:
            return error

    return run_ranks(size, run)


def test_an_error_on_some_ranks_is_raised_on_all_and_told_by_one() -> None:
    def action(world: World) -> int:
        if world.rank > 0:
            raise InputError(f"bad file {world.rank}")
        return world.rank

    zero, one, two = outcomes(3, action)
    assert type(one) is InputError
    assert str(one) == "rank 1: bad file 1"
    for other in (zero, two):
        assert type(other) is ToldError
        assert other.exit_code == InputError.exit_code


def test_an_error_on_all_ranks_names_none() -> None:
    def action(world: World) -> None:
        raise InputError("bad option")

    zero, one = outcomes(2, action)
    assert (type(zero), str(zero)) == (InputError, "bad option")
    assert type(one) is ToldError


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("surprise"), OSError(5, "broken", "file")])
def test_unexpected_errors_are_shared_too(error: Exception) -> None:
    def action(world: World) -> str:
        if world.rank == 1:
            raise error
        return "fine"

    zero, one = outcomes(2, action)
    assert type(zero) is ToldError
    assert zero.exit_code == 1
    assert one is error or (isinstance(error, OSError) and type(one) is DrmError)


def test_the_first_rank_that_fails_reports_it() -> None:
    store = dist.HashStore()
    assert World(1, 2, store).first_failure(2) == (1, 2)
    assert World(0, 2, store).first_failure(1) == (1, 2)


def test_a_rank_whose_store_does_not_answer_reports_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "STORE_TIMEOUT", 0.01)
    never = threading.Event()
    silent: Any = SimpleNamespace(compare_set=lambda *_: never.wait() and b"0 1")
    assert World(1, 2, silent).first_failure(1) == (1, 1)
    never.set()

    def gone(*_: object) -> None:
        raise RuntimeError("Broken pipe")

    broken: Any = SimpleNamespace(compare_set=gone)
    assert World(1, 2, broken).first_failure(1) == (1, 1)


@pytest.mark.parametrize(
    ("text", "ended", "words"),
    [
        ("[a/pair.cc:547] Connection closed by peer [10.0.0.1]:99. Check the logs.", True, "has ended (Connection"),
        ("[a/buffer.cc:98] Timed out waiting 5000ms for recv", False, "does not answer, waited 300 s (Timed"),
    ],
)
@pytest.mark.parametrize(("restarts", "advice"), [("1", "torchrun starts them again"), ("0", "the run can be resumed")])
def test_a_lost_rank(
    text: str, ended: bool, words: str, restarts: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)

    def operation() -> None:
        raise RuntimeError(text)

    with pytest.raises(LostRankError) as caught:
        World(0, 2)._call(operation)
    assert caught.value.ended == ended
    assert words in str(caught.value)
    assert advice in str(caught.value)
    assert "Check the logs" not in str(caught.value)


def test_launches_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
    assert fit.launch_id() == "job 7"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun without --rdzv-id
    here = fit.launch_id()
    monkeypatch.setattr("os.getppid", lambda: 1)  # another torchrun
    assert fit.launch_id() != here


def failure(code: int, timestamp: int) -> Any:
    return SimpleNamespace(exitcode=code, timestamp=timestamp, signal_name=lambda: "SIGKILL")


@pytest.mark.parametrize(
    ("failures", "code", "said"),
    [
        ({0: failure(1, 5), 1: failure(-9, 5)}, 137, "error: process 1 of 2 was killed (SIGKILL, perhaps because"),
        ({0: failure(2, 5), 1: failure(2, 6)}, 2, ""),
        ({0: failure(1, 5), 1: failure(-9, 35)}, 1, ""),  # it hung, and the launcher has killed it
        ({0: failure(-15, 5), 1: failure(2, 5)}, 2, ""),  # ended by the launcher
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(
    failures: dict[int, Any],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(launcher.LAUNCHER, "2")
    assert launcher._exit_code(failures) == code
    printed = capsys.readouterr().err
    assert printed.startswith(said)
    assert bool(printed) == bool(said)
