"""The examples in deploy/ for schedulers: their commands are run here, as the scheduler would run them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest

from drm_triton import DRM
from drm_triton.data.prepare.synthetic import Shape, generate

DEPLOY = Path(__file__).parent.parent / "deploy"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    users, items = generate(Shape(users=40, items=30, interactions=300), 0)
    DRM(factors=4, epochs=1).fit(pl.DataFrame({"user": users, "item": items})).save(tmp_path / "model")
    return tmp_path / "model"


def run(command: list[str], folder: Path, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command with `drm-triton` and a stand-in for Slurm's `srun` in the path."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, line in (("srun", 'exec "$@"'), ("drm-triton", f'exec {sys.executable} -m drm_triton "$@"')):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    return subprocess.run(command, env={**os.environ, "PATH": path, **variables}, capture_output=True, text=True)


def test_the_slurm_array(model: Path, tmp_path: Path) -> None:
    script = DEPLOY / "recommend.sbatch"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    options = dict(
        line.removeprefix("#SBATCH --").split("=")
        for line in script.read_text().splitlines()
        if "#SBATCH --" in line and "=" in line
    )
    first, last = map(int, options["array"].split("-"))
    task = {"RUN": str(model), "OUT": str(tmp_path / "top"), "K": "5", "SLURM_ARRAY_TASK_ID": str(last)}
    done = run(["bash", str(script)], tmp_path, task)
    assert done.returncode == 0, done.stderr
    name = f"part-{last:05}-of-{last + 1 - first:05}.parquet"
    assert os.listdir(tmp_path / "top") == [name]
    assert pl.read_parquet(tmp_path / "top" / name)["rank"].max() == 5
    missing = run(["bash", str(script)], tmp_path, {**task, "RUN": ""})
    assert missing.returncode != 0
    assert "the run to recommend from" in missing.stderr


def test_the_kubernetes_job(model: Path, tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="parsing the example needs PyYAML, which MkDocs brings")
    job = yaml.safe_load((DEPLOY / "recommend-job.yaml").read_text())
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    count = job["spec"]["completions"]
    template = job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in template["volumes"]}
    assert job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == container["name"]
    (line,) = container["args"]
    line = line.replace("/data/", f"{model.parent}/")
    for index in (0, count - 1):
        done = run([*container["command"], line], tmp_path, {"JOB_COMPLETION_INDEX": str(index)})
        assert done.returncode == 0, done.stderr
    names = {f"part-{index:05}-of-{count:05}.parquet" for index in (0, count - 1)}
    assert set(os.listdir(tmp_path / "top50")) == names
