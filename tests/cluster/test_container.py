"""``hpcai job --container`` under real Slurm: the files that a run in an image can read, and its restart.

The image and Apptainer are emulated (stand_in_apptainer.py); %environment is that of containers/cpu.def. With
HPCAI_TEST_ROOT=FOLDER the image is the root that ``make containers`` left, without files of this machine.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcai.train.checkpoint_reader import list_checkpoints as checkpoints
from tests.apps.app_runs import App
from tests.apps.universes import write_universes
from tests.cluster.one_machine_slurm import OneMachineSlurm
from tests.cluster.slurm_jobs import ENDLESS, Submit, loss_by_step, read_events, restart_requeued, wait_for_step
from tests.containers.definition import read_stages

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SLURM = ("sbatch", "scontrol", "squeue", "srun", "scancel", "sinfo")
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image of this machine's system, the environment of the tests and this checkout, without Slurm."""
    folder = tmp_path_factory.mktemp("image")
    file = folder / "hpcai.sif"
    if unpacked := os.environ.get("HPCAI_TEST_ROOT"):
        file.write_text(json.dumps({"root": str(Path(unpacked).resolve())}))
        return file
    meta = folder / "root/.singularity.d/env"
    meta.mkdir(parents=True)
    (meta / "90-environment.sh").write_text(read_stages(ROOT / "containers/cpu.def")[-1].sections["environment"])
    system = [f"/{name}" for name in ("usr", "bin", "sbin", "lib", "lib64", "etc") if Path(f"/{name}").exists()]
    mounts = [[path, path] for path in dict.fromkeys([*system, sys.base_prefix])]
    mounts += [[str(ROOT / name), f"/opt/hpcai/src/{name}"] for name in ("hpcai", "apps", "data_prep", "slurm")]
    mounts += [[sys.prefix, "/opt/hpcai/venv"]]
    hidden = [path for path in map(shutil.which, SLURM) if path]
    file.write_text(json.dumps({"root": str(folder / "root"), "mounts": mounts, "hidden": hidden}))
    return file


@pytest.fixture
def apptainer(slurm: OneMachineSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that jobs run as ``apptainer``."""
    program = tmp_path / "bin/apptainer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -SEs {HERE / "stand_in_apptainer.py"} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setitem(slurm.env, "PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


def run_in_image(apptainer: Path, image: Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [apptainer, "exec", *flags, image, "sh", "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_stand_in_mounts_the_image_and_bound_paths_only(apptainer: Path, image: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    commands = f"command -v {' '.join(SLURM)}; command -v python; ls {tmp_path}; touch /opt/x; touch {tmp_path}/y; exit 7"
    bare = run_in_image(apptainer, image, commands)
    assert bare.stdout == "/opt/hpcai/venv/bin/python\n" and bare.returncode == 7
    assert "Read-only file system" in bare.stderr and not (tmp_path / "y").exists()
    bound = run_in_image(apptainer, image, commands, "--nv", "--bind", str(tmp_path))
    assert "file" in bound.stdout and (tmp_path / "y").exists()
    for args, code, message in (
        (["--gpus"], 2, "unrecognized arguments: --gpus"),
        (["--bind", "/nowhere"], 255, "mount source /nowhere doesn't exist"),
    ):
        result = run_in_image(apptainer, image, "true", *args)
        assert result.returncode == code and message in result.stderr
    assert "could not open image" in run_in_image(apptainer, tmp_path / "no.sif", "true").stderr


def test_a_job_in_an_image_equals_the_job_without_one(
    slurm: OneMachineSlurm, submit: Submit, data: Path, image: Path, apptainer: Path, tmp_path: Path
) -> None:
    run, reference = tmp_path / "run", tmp_path / "reference"
    (number,) = submit(run, "--nodes", "2", "--container", str(image), "train.steps=3")
    App("cosmoflow", write_universes, ENDLESS).on_ranks(2, data, reference, "train.steps=3")
    state = slurm.wait_for(number, "COMPLETED", "FAILED", timeout=90)
    assert state == "COMPLETED", (run / f"job-{number}.out").read_text()
    assert read_events(run, "start")[0]["world"] == 2
    assert list(loss_by_step(run)) == [1, 2, 3] and loss_by_step(run) == loss_by_step(reference)
    assert (run / "report.html").exists()


@pytest.mark.claim
def test_a_stopped_run_in_an_image_is_restarted_from_outside(
    slurm: OneMachineSlurm, submit: Submit, data: Path, image: Path, apptainer: Path, tmp_path: Path
) -> None:
    """The data are staged on the node. The loss curve equals that of an uninterrupted run without a container."""
    run, reference, disk = tmp_path / "run", tmp_path / "reference", tmp_path / "disk"
    args = ["--nodes", "2", "--container", str(image), "--stage", f"{disk}/$SLURM_JOB_ID", "train.steps=100"]
    (number,) = submit(run, *args)
    wait_for_step(run, 3)
    slurm.command("scancel", "--signal=USR1", number)
    restart_requeued(slurm, number)
    (stopped,) = read_events(run, "stop")
    assert stopped["reason"] == "signal"
    assert [path.name for path in checkpoints(run / "checkpoints")] == [f"step-{stopped['step']:08d}"]
    App("cosmoflow", write_universes, ENDLESS).on_ranks(2, data, reference, "train.steps=100")
    assert slurm.wait_for(number, "COMPLETED", "FAILED", timeout=150) == "COMPLETED", (run / f"job-{number}.out").read_text()
    assert [e["resumed_from"] for e in read_events(run, "start")] == [None, stopped["step"]]
    assert list(loss_by_step(run)) == list(range(1, 101)) and loss_by_step(run) == loss_by_step(reference)
    assert f"directory: {disk / number}" in (run / "settings.yaml").read_text()
    assert (run / "report.html").exists()
