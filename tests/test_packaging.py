"""The package as users install it: complete, one import name, quick to import, nothing started by an import."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HEAVY = "torch triton numba polars scipy matplotlib"


def checked(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a process printed, after checking that it succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def folders(repository: Path) -> dict[str, Path]:
    """Return the folder of each top-level part of the package: drm_triton itself, and the targets of its links."""
    package = repository / "drm_triton"
    return {"drm_triton": package, **{f"drm_triton.{link.name}": link.resolve() for link in links(package)}}


def links(package: Path) -> list[Path]:
    """Return the symlinks in a folder."""
    return [path for path in package.iterdir() if path.is_symlink()]


@pytest.fixture(scope="module")
def source(repository: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what is packed: setuptools would also pack what an older build left behind."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, copy)
    for folder in folders.values():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(folder, copy / folder.name, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel without the network."""
    where = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    checked(run_python("-m", "pip", "wheel", *options, where, source))
    (path,) = where.glob("*.whl")
    return path


def sources(folders: dict[str, Path], pattern: str) -> dict[str, Path]:
    """Return the files of the package that match, by their dotted parent package; links to mapped folders excluded."""
    found = {}
    for package, folder in folders.items():
        for path in folder.rglob(pattern):
            inside = path.relative_to(folder)
            if not (folder / inside.parts[0]).is_symlink():
                found[".".join([package, *inside.parts])] = path
    return found


def test_every_package_directory_is_listed(folders: dict[str, Path], project: dict[str, Any]) -> None:
    found = {name.removesuffix(".__init__.py") for name in sources(folders, "__init__.py")}
    assert sorted(project["tool"]["setuptools"]["packages"]) == sorted(found)


def test_every_module_is_in_a_package(folders: dict[str, Path]) -> None:
    for path in sources(folders, "*.py").values():
        assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py"


def test_the_wheel_has_one_top_level_name_and_is_pure_python(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"drm_triton"}
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "drm_triton/py.typed" in names
    assert {f"drm_triton/report/{name}" for name in ("page.html", "style.css", "script.js")} <= set(names)


def test_the_wheel_holds_every_module_of_the_repository(wheel: Path, folders: dict[str, Path]) -> None:
    packaged = {name.replace("/", ".") for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert packaged == set(sources(folders, "*.py"))


def test_a_wheel_imports_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "import drm_triton, drm_triton.kernels, drm_triton.cli; print(drm_triton.__file__)"
    assert str(tmp_path) in checked(run_python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path)))


def test_type_checkers_resolve_an_editable_install(source: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", site, "--editable"]
    checked(run_python("-m", "pip", "install", *options, source))
    (path,) = site.glob("*.pth")  # a path, not a hook of the import system, which type checkers cannot run
    assert Path(path.read_text().strip()) == source
    assert all((source / "drm_triton" / name / "__init__.py").is_file() for name in ("kernels", "cli"))


@pytest.mark.parametrize("code", ["import drm_triton", "import drm_triton.cli"])
def test_importing_loads_nothing_heavy(code: str) -> None:
    loaded = checked(run_python("-c", f"{code}, sys; print([m for m in '{HEAVY}'.split() if m in sys.modules])"))
    assert loaded.strip() == "[]"


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(argument: str) -> None:
    code = f"""
import sys
sys.argv = ["drm-triton", {argument!r}]
from drm_triton.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
print([m for m in "{HEAVY}".split() if m in sys.modules])
"""
    assert checked(run_python("-c", code)).strip().endswith("[]")


def test_the_library_works_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # as if no wheel of Triton existed for this platform
import torch, drm_triton
loss = drm_triton.drm_loss(torch.randn(2, 5), torch.tensor([[1., 0, 0, 0, 0]] * 2))
assert torch.isfinite(loss)
"""
    checked(run_python("-c", code))
