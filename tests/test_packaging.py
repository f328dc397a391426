"""The package as users get it: one import name, quick to import, nothing started."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the files git knows, without the network."""
    where = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(where), str(ROOT))
    (path,) = where.glob("*.whl")
    return path


def test_the_wheel_has_one_top_level_name_and_is_pure_python(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"drm_triton"}
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "drm_triton/py.typed" in names
    assert {f"drm_triton/report/{name}" for name in ("page.html", "style.css", "script.js")} <= set(names)


def test_the_wheel_holds_every_module_of_the_repository(wheel: Path) -> None:
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    folders = {"drm_triton": "drm_triton", "kernels": "drm_triton/kernels", "cli": "drm_triton/cli"}
    folders["bench"] = "drm_triton/bench"
    for folder, place in folders.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT / folder).as_posix()
            if inside.split("/")[0] not in ("kernels", "cli", "bench") or folder != "drm_triton":
                assert f"{place}/{inside}" in packaged


def test_a_wheel_imports_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import drm_triton, drm_triton.kernels, drm_triton.cli; print(drm_triton.__file__)"
    assert str(tmp_path) in run("-c", code, cwd=tmp_path)


@pytest.mark.parametrize("code", ["import drm_triton", "import drm_triton.cli"])
def test_importing_loads_nothing_heavy(code: str) -> None:
    heavy = "torch triton numba polars scipy matplotlib"
    loaded = run("-c", f"{code}, sys; print([m for m in '{heavy}'.split() if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_help_and_version_load_nothing_heavy() -> None:
    code = """
import sys
sys.argv = ["drm-triton", {argument!r}]
from drm_triton.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
print([m for m in "torch triton numba polars scipy matplotlib".split() if m in sys.modules])
"""
    for argument in ("--help", "--version"):
        assert run("-c", code.format(argument=argument)).strip().endswith("[]")


def test_the_library_works_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # as where there is no wheel for it
import torch, drm_triton
loss = drm_triton.drm_loss(torch.randn(2, 5), torch.tensor([[1., 0, 0, 0, 0]] * 2))
assert torch.isfinite(loss)
"""
    run("-c", code)
