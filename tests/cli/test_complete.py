"""Shell completion, requested as the completion scripts of the shells do."""

from pathlib import Path

import pytest

from tests.conftest import run_python

CODE = "import sys; sys.argv[0] = 'drm-triton'; from drm_triton.cli import main; main()"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for file in ("data/melon/meta.json", "data/ml-1m/meta.json", "data/raw/melon/train.json"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    for run in ("melon-dot", "melon-l2", "other"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "config.toml").touch()
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path


def offered(place: Path, line: str, shell: str = "bash", data: Path | None = None) -> list[str]:
    words = ["drm-triton", *line.split(" ")]
    request = {
        "bash": {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": " ".join(words)},
        "fish": {"_TYPER_COMPLETE_ARGS": " ".join(words), "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    variables = {"DRM_DATA": str(data) if data else None, "_DRM_TRITON_COMPLETE": f"complete_{shell}", **request}
    done = run_python("-c", CODE, cwd=place, **variables)
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("exp", ["export"]),
        ("train --dataset ", ["melon", "ml-1m"]),
        ("train -d me", ["melon"]),
        ("train --resume runs/m", ["runs/melon-dot", "runs/melon-l2"]),
        ("train --objective hi", ["hinge+drm", "hinge"]),
        ("tune --score ", ["dot", "l2", "cosine"]),
        ("info ", ["melon", "ml-1m"]),
        ("evaluate ", ["runs/melon-dot", "runs/melon-l2", "runs/other"]),
        ("evaluate runs/other --dataset ml", ["ml-1m"]),
        ("compare runs/other runs/m", ["runs/melon-dot", "runs/melon-l2"]),
        ("compare runs/other --dataset ml", ["ml-1m"]),
        ("recommend runs/o", ["runs/other"]),
        ("recommend elsewhere/", []),  # left to the shell
        ("report runs/m", ["runs/melon-dot", "runs/melon-l2"]),
        ("report runs/other runs/m", ["runs/melon-dot", "runs/melon-l2"]),
        ("report runs/other --dataset ml", ["ml-1m"]),
        ("export ", ["runs/melon-dot", "runs/melon-l2", "runs/other"]),
        ("export runs/other --to ", ["npz", "parquet", "faiss", "hnswlib"]),
        ("prepare me", ["melon"]),
        ("reproduce ta", ["table1", "table3", "table4", "table5"]),
        ("reproduce table3 --dataset m", ["ml-20m", "melon", "ml-1m"]),
    ],
)
def test_names_are_completed(place: Path, line: str, expected: list[str]) -> None:
    assert offered(place, line) == expected


def test_the_data_directory_of_the_environment(place: Path) -> None:
    (place / "data").rename(place / "store")
    assert offered(place, "info m") == []
    assert offered(place, "info m", data=place / "store") == ["melon", "ml-1m"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(place: Path, shell: str) -> None:
    assert any("Melon playlists" in line for line in offered(place, "prepare me", shell))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_shown(place: Path, shell: str) -> None:
    # The variable replaces the detection of the current shell.
    done = run_python("-c", CODE, "--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_DRM_TRITON_COMPLETE=complete_{shell}" in done.stdout


def test_completing_loads_nothing_heavy(place: Path) -> None:
    code = CODE.replace("main()", "").rstrip("; ") + (
        "\ntry: main()\nexcept SystemExit: pass\n"
        "print([m for m in 'torch triton numba polars scipy numpy'.split() if m in sys.modules])"
    )
    request = {"COMP_WORDS": "drm-triton\nevaluate\n", "COMP_CWORD": "2", "_DRM_TRITON_COMPLETE": "complete_bash"}
    done = run_python("-c", code, cwd=place, **request)
    assert done.stdout.splitlines() == ["runs/melon-dot", "runs/melon-l2", "runs/other", "[]"]
