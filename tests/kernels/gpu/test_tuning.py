"""Stored launch options: what is used, what counts as no choice, and how they are chosen."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is available on Linux only")

from drm_triton.bench import tuning as search
from drm_triton.exercises import Case
from drm_triton.kernels import gpu
from drm_triton.kernels.gpu import tuning
from tests.conftest import call

CPU = torch.device("cpu")
CASE = Case(18, 12, "dot", 2, B=2, n_users=3, n_items=24)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the cache of the user out of the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning.stored.cache_clear()
    return tuning.cache_file()


def test_choices_are_stored_for_a_gpu(cache: Path) -> None:
    assert tuning.stored("A") == {}
    tuning.store("A", {"_update_kernel d=64": {"num_stages": 2}})
    tuning.store("A", {"_update_kernel d=32": {"maxnreg": 96}})
    tuning.store("B", {"_sample_kernel n=8": {"num_warps": 2}})
    assert tuning.stored("A") == {"_update_kernel d=64": {"num_stages": 2}, "_update_kernel d=32": {"maxnreg": 96}}
    assert tuning.stored("C") == {}
    assert json.loads(cache.read_text()).keys() == {"A", "B"}


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"{",
        b"[]",
        b'{"A": 3}',
        b'{"A": {"": {"num_stages": 2}}}',
        b'{"A": {"_update_kernel d=64": {"num_warps": 2}}}',  # changes the rounding of a sum
        b'{"A": {"_update_kernel d=64": {"num_stages": 5}}}',
        b'{"A": {"_update_kernel d=64": {"num_stages": true}}}',
        b'{"A": {"_update_kernel d=64": {"BLOCK_D": 2}}}',
        b'{"A": {"_update_kernel d=64": [1]}}',
    ],
)
def test_a_bad_choice_is_none(cache: Path, content: bytes) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert tuning.stored("A") == {}
    tuning.store("A", {"_update_kernel d=32": {"maxnreg": 96}})
    assert tuning.stored("A") == {"_update_kernel d=32": {"maxnreg": 96}}


def test_a_launch_on_a_gpu_uses_the_stored_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "gpu_of", lambda device: "A")
    tuning.store("A", {"_update_kernel d=64": {"num_stages": 2}})
    options = {"d": 64, "num_warps": 4}
    assert tuning.chosen("_update_kernel", options, torch.device("cuda")) == {"num_stages": 2}
    assert tuning.chosen("_update_kernel", {"d": 65}, torch.device("cuda")) == {}
    assert tuning.chosen("_update_kernel", options, CPU) == {}


def test_the_faster_options_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a run is made up: the sum of the options of its launches."""
    monkeypatch.setattr(search, "TUNED", ("sample_lists",))

    def time(run: Callable[[], object]) -> float:
        tuning._launched.clear()
        run()
        forced = tuning._forced or {}
        return sum(100 + forced.get(key, {}).get("num_stages", 3) for _, key, _ in tuning._launched)

    monkeypatch.setattr(search, "GAIN", 0)
    choices = search.choose(gpu, CPU, CASE, time)
    assert {key.split()[0] for key in choices} == {"_sample_kernel", "_shared_kernel"}
    assert all(row == {"num_stages": 1} for row in choices.values())


def test_options_that_change_a_bit_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "TUNED", ("sample_lists",))
    monkeypatch.setattr(search, "same_bits", lambda a, b: False)
    assert search.choose(gpu, CPU, CASE, lambda run: 1.0) == {}
    assert "num_stages 1 changes the results and is left out" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_tuning_is_refused() -> None:
    code, _, err = call("bench", "kernels", "--tune")
    assert code == 2
    assert "--tune needs a GPU: " in err
