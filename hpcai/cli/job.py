"""``hpcai job APP CONFIG.yaml key=value ... --site S --nodes N``: the batch script of a training, to read or to submit.

Settings are checked first, by the app's own code, so that a mistyped key costs nothing. The script is whole: options of the
scheduler, modules, binding and network of the site, and the run. Keep it, edit it, submit it by hand, or let --submit do so.

    hpcai job APP CONFIG.yaml --site perlmutter --nodes 32 --account m0000 --time 4:00:00
    ... --array seed=0-7              eight runs, each with a directory of its own below report.directory
    ... --array lr=1e-3,2e-3 --array seed=0-2        six runs
    ... --chain 5                     where jobs may not be requeued: five, one after another, until the run has finished
    ... --power-cap 300               watts of each GPU at most: train.power_cap, and the site's own option where it has one
    ... --stage /local/scratch/data   data.directory is copied there first, on every node
    ... --environment /scratch/mine.tar.gz   a Python environment, from conda-pack for one: unpacked on every node first

A run that is asked to stop saves itself and leaves with exit code 85, and the script has it started again.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pydantic

from hpcai.cli import apps
from hpcai.cli.script import Site, arguments_line, assign, find_site, list_sites, render
from hpcai.config import load
from hpcai.errors import ConfigError, HpcaiError, MeshError
from hpcai.schema import list_names, nearest_words
from hpcai.settings import RunConfig, mesh_shape

_STOP_BEFORE = 180
_MAX_TASKS = 1000


@dataclass(frozen=True)
class Task:
    """One run of an array: its words, and where it writes."""

    overrides: Sequence[str]
    directory: Path


@dataclass(frozen=True)
class Job:
    """What was asked for, checked."""

    app: str
    overrides: Sequence[str]
    settings: RunConfig
    site: Site
    per_node: int
    seconds: int | None
    tasks: Sequence[Task]
    args: argparse.Namespace

    @property
    def directory(self) -> Path:
        assert self.settings.report.directory is not None
        return self.settings.report.directory.absolute()

    @property
    def stop_before(self) -> int:
        """Seconds before the end of its time at which the run is asked to stop."""
        if self.args.stop_before is not None:
            return int(self.args.stop_before)
        return min(_STOP_BEFORE, max(1, self.seconds // 4)) if self.seconds else _STOP_BEFORE

    @property
    def script(self) -> Path:
        return self.directory / ("job.pbs" if self.site.pbs else "job.sh")


def main(argv: Sequence[str]) -> int:
    asked = _parse_args(argv)
    job = build_job(asked)
    text = render_script(job, shlex.join(["hpcai", "job", *argv]))
    found = check_paths(job)
    if asked.submit:
        if found:
            raise ConfigError("\n".join(found))
        for number in submit(job, text):
            print(number)
        return 0
    for line in [*found, *_hints(job)]:
        print(f"hpcai job: {line}", file=sys.stderr)
    print(text, end="")
    return 0


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="hpcai job", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("app", metavar="APP", help="a folder of apps/")
    add("words", nargs="*", metavar="CONFIG.yaml|key=value", help="settings of the run")
    add("--site", required=True, metavar="SITE", help=f"{', '.join(list_sites())}, or a file of your own")
    add("--nodes", required=True, type=int, metavar="N")
    add("--per-node", type=int, metavar="N", help="processes on each node (the site's number, one for each GPU)")
    add("--time", metavar="T", help="limit: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S (as Slurm writes it)")
    add("--stop-before", type=int, metavar="SECONDS", help=f"before that, when the run is asked to save itself ({_STOP_BEFORE})")
    add("--account", metavar="A", help="project that pays")
    add("--partition", "--queue", dest="queue", metavar="Q")
    add("--option", action="append", default=[], metavar="TEXT", help="another option of the scheduler: --option=--reservation=x")
    add("--power-cap", type=int, metavar="W", help="watts that each GPU of the job draws at most")
    add("--container", metavar="FILE", help="image to run in")
    add("--stage", metavar="FOLDER", help="on every node's own disk, to which data.directory is copied first ('$TMPDIR/data')")
    add("--environment", metavar="FILE", help="archive of a Python environment: sent to every node by sbcast")
    add("--environment-at", metavar="FOLDER", help="a new folder there, to which it is unpacked (one of the job)")
    add("--chain", type=int, metavar="N", help="jobs that follow one another, instead of one that is requeued")
    add("--array", action="append", default=[], metavar="KEY=VALUES", help="a run for each value: seed=0-7, step.lr=1e-3,2e-3")
    add("--any-directory", action="store_true", help="the run's directory is shared, though its path is a node's own as a rule")
    add("--submit", action="store_true", help="submit the script, and print the numbers of its jobs")
    return parser.parse_intermixed_args(list(argv))


def build_job(asked: argparse.Namespace) -> Job:
    """What was asked for, with settings, site and sizes. Raises ConfigError with every mistake, one per line."""
    site = find_site(asked.site)
    name = asked.app.removeprefix("apps.")
    declared = apps.require_module(name, "settings")
    files = [word for word in asked.words if word.endswith((".yaml", ".yml"))]
    rest = [word for word in asked.words if word not in files[:1]]
    rest += [f"train.power_cap={asked.power_cap}"] if asked.power_cap is not None else []
    file = files[0] if files else None
    settings = load(declared.Config, file, rest)
    per_node = site.per_node if asked.per_node is None else asked.per_node
    problems, seconds = _check_sizes(asked, site, per_node, settings), None
    if asked.time is not None:
        try:
            seconds = parse_time(asked.time)
        except ConfigError as problem:
            problems.append(str(problem))
    if seconds and asked.stop_before is not None and not 0 < asked.stop_before < seconds:
        problems.append(f"--stop-before {asked.stop_before} is not within the {seconds} s of --time; expected 1 to {seconds - 1}")
    if settings.report.directory is None:
        problems.append("report.directory is null, so that nothing could go on where it stopped; give report.directory=FOLDER")
    if asked.container and site.facts.get("container", "file") == "file":
        problems += [
            f"{path}: a container cannot be shown a path with {mark!r}, which parts paths from one another; rename it"
            for path in _paths_to_mount(settings, files[:1]) for mark in ",:^" if mark in str(path)
        ]  # fmt: skip
    if problems:
        raise ConfigError("\n".join(problems))
    tasks = _array_tasks(declared.Config, file, rest, settings, asked.array)
    if "power" in site.facts and any(word.startswith("train.power_cap=") for task in tasks for word in task.overrides):
        option = site.facts["power"]
        raise ConfigError(
            f"--array over train.power_cap: site {site.name} caps a whole job ({option}); submit one for each, with --power-cap"
        )
    return Job(name, [*files[:1], *rest], settings, site, per_node, seconds, tasks, asked)


def _check_sizes(asked: argparse.Namespace, site: Site, per_node: int, settings: RunConfig) -> list[str]:
    """What is wrong with the numbers and with what the site asks for."""
    found = []
    for name, value in (("--nodes", asked.nodes), ("--per-node", per_node), ("--chain", asked.chain)):
        if value is not None and value < 1:
            found.append(f"{name} is {value}; expected a whole number from 1")
    account = asked.account or (None if site.pbs else os.environ.get("SBATCH_ACCOUNT"))
    for name, value, what in (("account", account, "a project's name"), ("time", asked.time, "a limit such as 1:00:00"),
                              ("queue", asked.queue, "the name of a queue")):  # fmt: skip
        if site.requires(name) and not value:
            found.append(f"site {site.name} takes no job without --{name}; give {what}")
    if asked.chain and asked.array:
        found.append("--chain and --array are both given; give one: each run of an array is started again by itself")
    if asked.stage and getattr(settings.data, "directory", None) is None:
        found.append(f"--stage {asked.stage} copies data.directory, which is not set; give data.directory=FOLDER")
    if asked.environment_at and not asked.environment:
        found.append(f"--environment-at {asked.environment_at} is for --environment FILE, which is not given")
    if asked.environment and site.pbs:
        found.append(f"--environment is sent by Slurm's sbcast, and site {site.name} is PBS; give an image: --container FILE")
    if asked.container and asked.environment:
        found.append("--container and --environment are both given; in a container the environment is in the image: nothing to do")
    if asked.container and site.facts.get("container") == "none":
        found.append(
            f"--container {asked.container}: the file of site {site.name} has no flags for containers; add them to a copy of it "
            "(container=(apptainer exec --nv \"$HPCAI_IMAGE\")) and give that as --site FILE"
        )  # fmt: skip
    if not found:
        try:
            mesh_shape(settings.mesh.model_dump(), asked.nodes * per_node)
        except MeshError as problem:
            found.append(f"--nodes {asked.nodes} with {per_node} process{'es' if per_node > 1 else ''} on each: {problem}")
    return found


def parse_time(text: str) -> int:
    """A limit of time as Slurm writes it, in seconds. Raises ConfigError."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    seconds = 0
    if found:
        days, *parts = (int(part) if part else None for part in found.groups())
        numbers = [part for part in parts if part is not None]
        if days is not None:
            numbers += [0] * (3 - len(numbers))
        elif len(numbers) < 3:
            numbers = [0, *numbers, *[0] * (2 - len(numbers))]
        hours, minutes, rest = numbers
        seconds = (days or 0) * 86400 + hours * 3600 + minutes * 60 + rest
    if not seconds:
        raise ConfigError(f"--time {text} is no time; expected minutes (30), M:S, H:M:S (4:00:00), D-H, D-H:M or D-H:M:S")
    return seconds


def _format_time(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


# ---- Arrays ---------------------------------------------------------------------------------------------------------------------


def _array_tasks(
    schema: type[RunConfig], file: str | None, words: Sequence[str], settings: RunConfig, arrays: Sequence[str]
) -> list[Task]:
    """The runs of an array, each with its settings checked; none without one. Raises ConfigError."""
    if not arrays:
        return []
    choices = [_array_values(settings, array) for array in arrays]
    keys = [key for key, _ in choices]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"--array sets {next(key for key in keys if keys.count(key) > 1)} twice; give all its values in one")
    tasks, base, wrong = [], settings.report.directory, []
    combinations = list(product(*(values for _, values in choices)))
    if len(combinations) > _MAX_TASKS:
        raise ConfigError(f"--array makes {len(combinations)} runs; expected at most {_MAX_TASKS}; split it")
    assert base is not None
    for values in combinations:
        pairs = list(zip(keys, values))
        directory = base / "_".join(f"{key.rpartition('.')[2]}-{re.sub('[^A-Za-z0-9.+-]+', '-', value)}" for key, value in pairs)
        own = [f"{key}={value}" for key, value in pairs]
        try:
            load(schema, file, [*words, *own])
        except ConfigError as problem:
            wrong += [line for line in str(problem).splitlines() if line not in wrong]
        tasks.append(Task([*own, f"report.directory={directory}"], directory.absolute()))
    if wrong:
        raise ConfigError("\n".join(wrong))
    directories = [task.directory for task in tasks]
    if len(set(directories)) < len(directories):
        twice = next(path for path in directories if directories.count(path) > 1)
        raise ConfigError(f"--array: two runs would write to {twice}; expected values that differ in letters and digits")
    return tasks


def _array_values(settings: RunConfig, array: str) -> tuple[str, list[str]]:
    """The whole name of the setting that an array is over, and its values: ``seed=0-3`` -> train.seed and 0, 1, 2, 3."""
    name, equals, text = array.partition("=")
    values = [part for part in re.split(r",(?![^\[]*\])", text) if part]
    if not equals or not values:
        raise ConfigError(f"--array {array}: expected KEY=FIRST-LAST or KEY=VALUE,VALUE,..., such as seed=0-7 or step.lr=1e-3,2e-3")
    span = re.fullmatch(r"(\d+)-(\d+)", text)
    if span:
        if int(span[1]) > int(span[2]):
            raise ConfigError(f"--array {array}: the first value is larger than the last; write {name}={span[2]}-{span[1]}")
        last = min(int(span[2]), int(span[1]) + _MAX_TASKS)  # one more is refused
        values = [str(number) for number in range(int(span[1]), last + 1)]
    known = [key for key in _flatten_settings(settings) if key != "report.directory"]
    if name == "report.directory":
        raise ConfigError(f"--array {array}: each run gets a directory of its own below report.directory; leave it out")
    if name in known:
        return name, values
    same = [key for key in known if key.rpartition(".")[2] == name]
    if len(same) == 1:
        return same[0], values
    ends = nearest_words(name.rpartition(".")[2], [key.rpartition(".")[2] for key in known])
    near = same or [key for end in ends for key in known if key.rpartition(".")[2] == end] or nearest_words(name, known)
    hint = f"did you mean {' or '.join(near[:4])}?" if near else f"the sections are {list_names(list(settings.model_dump()))}"
    raise ConfigError(f"--array {array}: {'several settings are' if same else 'no setting is'} called {name}; {hint}")


def _flatten_settings(settings: pydantic.BaseModel) -> dict[str, Any]:
    """Every setting by its dotted name."""
    found: dict[str, Any] = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        found |= {f"{name}.{key}": v for key, v in _flatten_settings(value).items()} if isinstance(value, pydantic.BaseModel) else {name: value}
    return found


# ---- The script -----------------------------------------------------------------------------------------------------------------


def render_script(job: Job, command: str) -> str:
    """The text of the script; ``command`` is what it was asked for with."""
    return render(job.site, _scheduler_options(job), _shell_lines(job), command)


def _scheduler_options(job: Job) -> list[str]:
    """What the scheduler is told."""
    asked, directory = job.args, job.directory
    if job.site.pbs:
        chosen = job.site.facts.get("select")
        found = [
            f"-N {job.app}",
            f"-o {shlex.quote(f'{directory}/')}",
            f"-l select={asked.nodes}" + (f":{chosen}" if chosen else ""),
        ]
        found += [f"-l walltime={_format_time(job.seconds)}"] if job.seconds else []
        found += [f"-A {asked.account}"] if asked.account else []
        return found + ([f"-q {asked.queue}"] if asked.queue else []) + asked.option
    output = str(directory).replace("%", "%%") + ("/job-%A_%a.out" if job.tasks else "/job-%j.out")
    found = [f"--job-name={job.app}", f"--output={shlex.quote(output)}", f"--signal=USR1@{job.stop_before}"]
    found += [f"--nodes={asked.nodes}"] + ([f"--ntasks-per-node={job.per_node}"] if asked.per_node is not None else [])
    found += [f"--time={_format_time(job.seconds)}"] if job.seconds else []
    found += [f"--account={asked.account}"] if asked.account else []
    queue = job.site.facts.get("queue", "required")
    found += [f"{'--partition' if queue == 'required' else queue}={asked.queue}"] if asked.queue else []
    cap, option = job.settings.train.power_cap, job.site.facts.get("power")
    found += [f"{option}={cap}"] if cap and option else []
    found += [f"--array=0-{len(job.tasks) - 1}"] if job.tasks else []
    return found + asked.option


def _shell_lines(job: Job) -> list[str]:
    """What the script sets before all else: folder, Python, what there is to copy, and the words of the run."""
    asked, here = job.args, Path.cwd()
    found = [f"cd {shlex.quote(str(here))} || exit"]
    if asked.container:
        image = asked.container if job.site.facts.get("container") == "name" else str(Path(asked.container).absolute())
        found += ["export PYTHONSAFEPATH=1  # the image's hpcai, and not that of this folder"]
        found += [assign("HPCAI_IMAGE", image), assign("HPCAI_PYTHON", "python")]
        found += [assign("HPCAI_FOLDERS", ",".join(map(str, _paths_to_mount(job.settings, job.overrides[:1]))))]
    else:
        none = job.site.facts.get("container") == "none"
        found += [*_python_path(here), *([] if none else ["HPCAI_IMAGE="]), assign("HPCAI_PYTHON", sys.executable)]
    found += [*_environment_lines(job), "HPCAI_STAGE="]
    if asked.stage:
        source = job.settings.data.directory  # type: ignore[attr-defined]
        found[-1:] = [assign("HPCAI_DATA", str(source)), f'HPCAI_STAGE="{_expand_in_shell(asked.stage)}"']
    found += [f"HPCAI_REQUEUE={0 if asked.chain else 1}", assign("HPCAI_RUN", str(job.directory))]
    if job.site.pbs:
        found += [f"HPCAI_PER_NODE={job.per_node} HPCAI_SECONDS={job.seconds or 0} HPCAI_STOP_BEFORE={job.stop_before}"]
        found += [assign("HPCAI_SCRIPT", str(job.script))]
    found += [arguments_line([f"apps.{job.app}", *job.overrides])]
    if job.tasks:
        found += [f"case ${{{'HPCAI_TASK' if job.site.pbs else 'SLURM_ARRAY_TASK_ID'}:?}} in"]
        for number, task in enumerate(job.tasks):
            found += [f'  {number}) {assign("HPCAI_RUN", str(task.directory))}; set -- "$@" {shlex.join(task.overrides)} ;;']
        found += ["esac"]
    return found


def _environment_lines(job: Job) -> list[str]:
    """The archive, and the folder to which each node unpacks it: one of this start of this job, unless another was asked for."""
    if not job.args.environment:
        return [] if job.site.pbs else ["HPCAI_ENVIRONMENT="]
    disk = next(iter(job.site.facts.get("local", "").split()), "/tmp")
    at = f"{disk}/hpcai-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
    if job.args.environment_at:
        at = _expand_in_shell(job.args.environment_at)
    return [assign("HPCAI_ENVIRONMENT", str(Path(job.args.environment).absolute())), f'HPCAI_AT="{at}"']


def _python_path(here: Path) -> list[str]:
    """Where Python finds the apps, unless they are installed or lie in this folder."""
    root = Path(apps.apps_root()).resolve()
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if root == here.resolve() or root in installed:
        return []
    return [f"export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}"]


def _paths_to_mount(settings: RunConfig, words: Sequence[str]) -> list[Path]:
    """What a container must be shown of what ``settings`` name, and of the file that the first of ``words`` may be: all beyond
    this folder. Of what is not there yet, the nearest folder above it."""
    named = [Path(word) for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    found = []
    for path in [*named, *(value for value in _flatten_settings(settings).values() if isinstance(value, Path))]:
        there = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
        if not there.resolve().is_relative_to(Path.cwd().resolve()) and there != Path("/"):
            found.append(there)
    return list(dict.fromkeys(found))


def _expand_in_shell(text: str) -> str:
    """``text`` between double quotes, where only $NAMES are replaced, and one that is not set ends the script."""
    return re.sub(r'(["\\`]|\$(?!\{))', r"\\\1", re.sub(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))", r"${\1\2:?}", text))


# ---- What lies where, and submitting --------------------------------------------------------------------------------------------


def check_paths(job: Job) -> list[str]:
    """What is wrong with files and folders of this machine, which may be another one than the script is for."""
    found, asked = [], job.args
    parent = next(path for path in (job.directory, *job.directory.parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        found.append(f"report.directory {job.directory}: {parent} cannot be written to; name a folder of yours that all nodes see")
    local = [os.path.expandvars(place) for place in job.site.facts.get("local", "").split()]
    within = next((place for place in local if job.directory.resolve().is_relative_to(place)), None)
    if within and not asked.any_directory:
        found.append(
            f"report.directory {job.directory}: {within} is each node's own, where no other node finds the checkpoints; name a "
            "folder that all nodes see, or say --any-directory where they do see it"
        )
    source = getattr(job.settings.data, "directory", None)
    if source is not None and not Path(source).exists():
        found.append(f"data.directory {source} is not there; make or name it (hpcai data check looks one over)")
    if asked.container and job.site.facts.get("container") != "name" and not Path(asked.container).is_file():
        found.append(f"--container {asked.container}: there is no such file; expected an image, made with apptainer build")
    if asked.environment and not Path(asked.environment).is_file():
        found.append(f"--environment {asked.environment}: there is no such file; expected an archive (docs/cluster.md)")
    return found


def _hints(job: Job) -> list[str]:
    """What a person must know who submits the script by hand."""
    found = []
    if not job.directory.is_dir():
        found.append(f"the job's output goes to {job.directory}; before submitting: mkdir -p {shlex.quote(str(job.directory))}")
    if job.settings.train.power_cap and "power" not in job.site.facts:
        found.append(
            f"site {job.site.name} has no option for power: set the limit of each GPU otherwise ('nvidia-smi -pl', most systems "
            "let root alone do it); the run ends at its start where another one is enforced"
        )
    if job.site.pbs:
        found.append(f"the script submits itself again from {job.script}; keep it there")
    return found


def submit(job: Job, text: str) -> list[str]:
    """Puts the script into the run's directory and submits it; the numbers of the jobs. Raises HpcaiError."""
    program = "qsub" if job.site.pbs else "sbatch"
    if shutil.which(program) is None:
        raise HpcaiError(
            f"{program} is not on this machine; run this on a login node, or leave out --submit and take the script there"
        )
    job.directory.mkdir(parents=True, exist_ok=True)
    job.script.write_text(text)
    if job.tasks and job.site.pbs:  # a job of a PBS array cannot submit itself again
        return [_submit(["qsub", "-v", f"HPCAI_TASK={number}", str(job.script)]) for number in range(len(job.tasks))]
    numbers: list[str] = []
    for _ in range(job.args.chain or 1):
        words = ["qsub"] if job.site.pbs else ["sbatch", "--parsable"]
        if numbers and job.site.pbs:
            words += ["-W", f"depend=afternotok:{numbers[-1]}"]
        elif numbers:
            words += [f"--dependency=afternotok:{numbers[-1]}", "--kill-on-invalid-dep=yes"]
        numbers.append(_submit([*words, str(job.script)]))
    return numbers


def _submit(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise HpcaiError(f"{shlex.join(words)} refused the job: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().partition(";")[0]
