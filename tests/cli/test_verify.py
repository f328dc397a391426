"""`--verify`: data of a model that changed without a trace, as on a failing disk, is not used."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.cli.test_serve import first_lines, request, start
from tests.cli.test_serve_hostile import wait_until, workers_of
from tests.conftest import HANG, call, rot

COMMANDS = {
    "recommend": ["--user", "u1"],
    "recommend --shard": ["--all", "--shard", "0/2", "--out", "top"],
    "similar": ["--item", "7"],
    "export": ["--out", "factors"],
    "serve": ["--port", "0"],
    "serve --workers": ["--port", "0", "--workers", "2"],
}


@pytest.fixture
def model(saved_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model that a test may damage. Commands run in its folder, and `serve` ends when it would serve."""
    monkeypatch.chdir(tmp_path)
    for name in ("serve_alone", "serve_in_workers"):
        monkeypatch.setattr(f"drm_triton.serving.server.{name}", lambda settings, *_: None)
    return shutil.copytree(saved_model, tmp_path / "model")


@pytest.mark.parametrize("command", COMMANDS)
def test_data_that_changed_without_a_trace(command: str, model: Path) -> None:
    def run(*flags: str) -> tuple[int, str, str]:
        for place in ("top", "factors"):
            shutil.rmtree(place, ignore_errors=True)
        return call(command.split()[0], model, *COMMANDS[command], *flags)

    assert run("--verify")[0] == 0
    rot(model / "data")
    assert run()[0] == 0  # sizes and times say nothing
    for flags in (["--verify"], []):  # what was found damaged stays so
        code, out, errors = run(*flags)
        assert (code, out, errors.count("\n")) == (2, "", 1), errors
        assert f"{model / 'data'} is damaged: its content (train.*, " in errors
        assert ") does not have the checksum that meta.json records; restore it from a copy, or prepare" in errors
    assert not [*Path("top").glob("*.parquet"), *Path("factors").glob("*")]


@pytest.mark.parametrize("command", [["train", "--dry-run", "--from"], ["refit", "--out", "final"]])
def test_an_update_and_a_final_training_always_verify(command: list[str], model: Path) -> None:
    data = ["--dataset", shutil.copytree(model / "data", "new")] if command[0] == "train" else []
    rot(model / "data")
    code, _, errors = call(*command, model, *data)
    assert code == 2
    assert f"{model / 'data'} is damaged" in errors


@pytest.mark.parametrize("command", COMMANDS)
def test_a_changed_model_file_is_refused_with_and_without_the_flag(command: str, model: Path) -> None:
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    for flags in ([], ["--verify"]):
        code, out, errors = call(command.split()[0], model, *COMMANDS[command], *flags)
        assert (code, out, errors.count("\n")) == (2, "", 1), errors
        assert f"{file} is damaged: its content does not have the checksum that it records; restore" in errors


def test_the_flag_is_named_where_a_checksum_is_missing(model: Path) -> None:
    meta = model / "data" / "meta.json"
    meta.write_text(meta.read_text().replace('"checksum"', '"checksun"'))  # a flipped bit
    assert call("recommend", model, "--user", "u1")[0] == 0
    code, _, errors = call("recommend", model, "--user", "u1", "--verify")
    assert code == 2
    assert f"{model / 'data'} cannot be verified: meta.json records no checksum of the content" in errors
    assert "leave out --verify" in errors


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the workers in /proc")
def test_reloads_and_new_workers_verify(saved_model: Path, tmp_path: Path) -> None:
    path, log = shutil.copytree(saved_model, tmp_path / "model"), tmp_path / "log"
    service = start(path, "--port", 0, "--workers", 2, "--verify", log=log)
    try:
        port, _ = first_lines(service)
        rot(path / "data")
        service.send_signal(signal.SIGHUP)
        wait_until(lambda: log.read_text().count("reload failed, the old model stays") == 2)
        assert request(port, "GET", "/recommendations?user=u1")[0] == 200
        rot(path / "data")  # gives it a stamp again
        os.kill(workers_of(service.pid)[0], signal.SIGKILL)
        wait_until(lambda: "ended with code 2; starting another" in log.read_text())
        assert f"error: {path / 'data'} is damaged: " in log.read_text()
    finally:
        service.send_signal(signal.SIGTERM)
        service.communicate(timeout=HANG)
