"""``hpcai job APP CONFIG.yaml key=value ... --site S --nodes N``: write or submit the batch script of a training.

The app's own code validates the settings first, so that a mistyped key costs no queue time. The script is complete: options of the
scheduler, modules, binding and network of the site, and the run. Keep it, edit it, submit it by hand, or let --submit do so.

    hpcai job APP CONFIG.yaml --site perlmutter --nodes 32 --account m0000 --time 4:00:00
    ... --array seed=0-7              eight runs, each with its own directory below report.directory
    ... --array lr=1e-3,2e-3 --array seed=0-2        six runs
    ... --chain 5                     for sites without requeueing: five jobs in sequence, until the run has finished
    ... --power-cap 300               at most 300 W per GPU: sets train.power_cap, and the site's own option if it has one
    ... --stage /local/scratch/data   data.directory is first copied there, on every node
    ... --environment /scratch/mine.tar.gz   a Python environment, e.g. of conda-pack: first unpacked on every node

A run that receives a stop request saves a checkpoint and exits with code 85, and the script restarts it.
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

from hpcai.cli import apps, make_parser
from hpcai.cli.script import Site, assign, find_site, list_sites, render
from hpcai.config import load
from hpcai.errors import ConfigError, HpcaiError, MeshError
from hpcai.log import flatten, format_duration
from hpcai.schema import CONTROL, Schema, format_key, join_names
from hpcai.settings import RunConfig, mesh_shape

_STOP_BEFORE = 180
_MAX_TASKS = 1000


@dataclass(frozen=True)
class Task:
    """One run of an array: its overrides, and its output directory."""

    overrides: Sequence[str]
    directory: Path


@dataclass(frozen=True)
class Job:
    """A validated request for a job."""

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
        """Seconds before the time limit at which the run is signalled to stop."""
        if self.args.stop_before is not None:
            return int(self.args.stop_before)
        return min(_STOP_BEFORE, max(1, self.seconds // 4)) if self.seconds else _STOP_BEFORE

    @property
    def script(self) -> Path:
        return self.directory / ("job.pbs" if self.site.pbs else "job.sh")


def main(argv: Sequence[str]) -> int:
    if line := next((arg for arg in (*argv, os.getcwd()) if CONTROL.search(arg)), None):
        raise ConfigError(f"{line!r}: contains a control character; write it without")
    parser = make_parser("job", __doc__, sites=", ".join(list_sites()), stop=_STOP_BEFORE)
    job = build_job(args := parser.parse_intermixed_args(argv))
    text = render(job.site, _scheduler_options(job), _shell_lines(job), shlex.join(["hpcai", "job", *argv]))
    problems = check_paths(job)
    if args.submit:
        if problems:
            raise ConfigError("\n".join(problems))
        for job_id in submit(job, text):
            print(job_id)
        return 0
    if not job.directory.is_dir():
        problems.append(f"the job's output goes to {job.directory}; before submitting: mkdir -p {shlex.quote(str(job.directory))}")
    if job.settings.train.power_cap and "power" not in job.site.facts:
        problems.append(
            f"site {job.site.name} has no option for power: set the limit of each GPU in another way ('nvidia-smi -pl', on most "
            "systems for root only); the run ends at its start if another limit is enforced"
        )
    if job.site.pbs:
        problems.append(f"the script resubmits itself from {job.script}; keep it there")
    for line in problems:
        print(f"hpcai job: {line}", file=sys.stderr)
    print(text, end="")
    return 0


def build_job(args: argparse.Namespace) -> Job:
    """Return the job with settings, site and sizes. Raises ConfigError with every mistake, one per line."""
    site = find_site(args.site)
    name = args.app.removeprefix("apps.")
    module = apps.require_module(name, "settings")
    files = [arg for arg in args.overrides if arg.endswith((".yaml", ".yml"))]
    overrides = [arg for arg in args.overrides if arg not in files[:1]]
    overrides += [f"train.power_cap={args.power_cap}"] if args.power_cap is not None else []
    file = files[0] if files else None
    settings = load(module.Config, file, overrides)
    per_node = site.per_node if args.per_node is None else args.per_node
    problems, seconds = _check_sizes(args, site, per_node, settings), None
    if args.time is not None:
        try:
            seconds = parse_time(args.time)
        except ConfigError as problem:
            problems.append(str(problem))
    if seconds and args.stop_before is not None and not 0 < args.stop_before < seconds:
        problems.append(f"--stop-before {args.stop_before} is not within the {seconds} s of --time; expected 1 to {seconds - 1}")
    if settings.report.directory is None:
        problems.append("report.directory is null, so that the run could not resume; give report.directory=FOLDER")
    if args.container and site.facts.get("container", "file") == "file":
        problems += [
            f"{path}: a container cannot mount a path with {character!r}, which separates paths; rename it"
            for path in _paths_to_mount(settings, files[:1]) for character in ",:^" if character in str(path)
        ]  # fmt: skip
    if problems:
        raise ConfigError("\n".join(problems))
    tasks = _array_tasks(module.Config, file, overrides, settings, args.array)
    if "power" in site.facts and any(arg.startswith("train.power_cap=") for task in tasks for arg in task.overrides):
        option = site.facts["power"]
        advice = "submit one for each, with --power-cap"
        raise ConfigError(f"--array over train.power_cap: site {site.name} caps a whole job ({option}); {advice}")
    return Job(name, [*files[:1], *overrides], settings, site, per_node, seconds, tasks, args)


def _check_sizes(args: argparse.Namespace, site: Site, per_node: int, settings: RunConfig) -> list[str]:
    """Return the errors in sizes and options, given the requirements of the site."""
    problems = site.check_options({name: getattr(args, name) for name in ("account", "time", "queue", "container")})
    for name, value in (("--nodes", args.nodes), ("--per-node", per_node), ("--chain", args.chain)):
        if value is not None and value < 1:
            problems.append(f"{name} is {value}; expected a whole number from 1")
    if args.chain and args.array:
        problems.append("--chain and --array are both given; give one: each run of an array is restarted by itself")
    if args.stage and getattr(settings.data, "directory", None) is None:
        problems.append(f"--stage {args.stage} copies data.directory, which is not set; give data.directory=FOLDER")
    if args.environment_at and not args.environment:
        problems.append(f"--environment-at {args.environment_at} is for --environment FILE, which is not given")
    if args.environment and site.pbs:
        problems.append(f"--environment is broadcast by Slurm's sbcast, site {site.name} is PBS; give an image: --container FILE")
    if args.container and args.environment:
        problems.append("--container and --environment are both given; a container has the environment in its image; leave one out")
    if not problems:
        try:
            mesh_shape(settings.mesh.model_dump(), args.nodes * per_node)
        except MeshError as problem:
            problems.append(f"--nodes {args.nodes} with {per_node} process{'es' if per_node > 1 else ''} on each: {problem}")
    return problems


def parse_time(text: str) -> int:
    """Return a time limit in Slurm's syntax as seconds. Raises ConfigError."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", text)
    seconds = 0
    if match:
        numbers = [int(number) for number in match[2].split(":")]
        units = (3600, 60, 1) if match[1] or len(numbers) == 3 else (60, 1)  # without days, one or two numbers begin with minutes
        seconds = int(match[1] or 0) * 86400 + sum(number * unit for number, unit in zip(numbers, units))
    if not seconds:
        raise ConfigError(f"--time {text} is not a time; expected minutes (30), M:S, H:M:S (4:00:00), D-H, D-H:M or D-H:M:S")
    return seconds


# ---- Arrays ---------------------------------------------------------------------------------------------------------------------


def _array_tasks(
    schema: type[RunConfig], file: str | None, overrides: Sequence[str], settings: RunConfig, arrays: Sequence[str]
) -> list[Task]:
    """Return the runs of an array, with validated settings; empty without one. Raises ConfigError."""
    if not arrays:
        return []
    choices = [_array_values(settings, array) for array in arrays]
    keys = [key for key, _ in choices]
    if len(set(keys)) < len(keys):
        raise ConfigError(f"--array sets {next(key for key in keys if keys.count(key) > 1)} twice; give all its values in one")
    tasks, base, problems = [], settings.report.directory, []
    combinations = list(product(*(values for _, values in choices)))
    if len(combinations) > _MAX_TASKS:
        raise ConfigError(f"--array makes {len(combinations)} runs; expected at most {_MAX_TASKS}; split it")
    assert base is not None
    for values in combinations:
        pairs = list(zip(keys, values))
        directory = base / "_".join(f"{key.rpartition('.')[2]}-{re.sub('[^A-Za-z0-9.+-]+', '-', value)}" for key, value in pairs)
        task_overrides = [f"{key}={value}" for key, value in pairs]
        try:
            load(schema, file, [*overrides, *task_overrides])
        except ConfigError as problem:
            problems += [line for line in str(problem).splitlines() if line not in problems]
        tasks.append(Task([*task_overrides, f"report.directory={directory}"], directory.absolute()))
    if problems:
        raise ConfigError("\n".join(problems))
    directories = [task.directory for task in tasks]
    if len(set(directories)) < len(directories):
        duplicate = next(path for path in directories if directories.count(path) > 1)
        raise ConfigError(f"--array: two runs would write to {duplicate}; expected values that differ in letters and digits")
    return tasks


def _array_values(settings: RunConfig, array: str) -> tuple[str, list[str]]:
    """Return the full name and the values of the setting of an array: ``seed=0-3`` -> train.seed and 0, 1, 2, 3."""
    name, equals, text = array.partition("=")
    values = [part for part in re.split(r",(?![^\[]*\])", text) if part]
    if not equals or not values:
        raise ConfigError(f"--array {array}: expected KEY=FIRST-LAST or KEY=VALUE,VALUE,..., such as seed=0-7 or step.lr=1e-3,2e-3")
    span = re.fullmatch(r"(\d+)-(\d+)", text)
    if span:
        if int(span[1]) > int(span[2]):
            raise ConfigError(f"--array {array}: the first value is larger than the last; write {name}={span[2]}-{span[1]}")
        last = min(int(span[2]), int(span[1]) + _MAX_TASKS)  # one more is an error
        values = [str(number) for number in range(int(span[1]), last + 1)]
    known = [key for key in flatten(settings.model_dump()) if key != "report.directory"]
    if name == "report.directory":
        raise ConfigError(f"--array {array}: each run gets a directory of its own below report.directory; leave it out")
    if name in known:
        return name, values
    matches = [key for key in known if key.rpartition(".")[2] == name]
    if len(matches) == 1:
        return matches[0], values
    near = matches or [format_key(key) for key in Schema(type(settings)).suggest(tuple(name.split(".")))]
    hint = f"did you mean {' or '.join(near[:4])}?" if near else f"the sections are {join_names(list(settings.model_dump()))}"
    raise ConfigError(f"--array {array}: {'several settings are' if matches else 'no setting is'} called {name}; {hint}")


# ---- The script -----------------------------------------------------------------------------------------------------------------


def _scheduler_options(job: Job) -> list[str]:
    args, directory = job.args, job.directory
    if job.site.pbs:
        select = job.site.facts.get("select")
        options = [
            f"-N {job.app}",
            f"-o {shlex.quote(f'{directory}/')}",
            f"-l select={args.nodes}" + (f":{select}" if select else ""),
        ]
        options += [f"-l walltime={format_duration(job.seconds)}"] if job.seconds else []
        return options + job.site.access_options(args.account, args.queue) + args.option
    output = str(directory).replace("%", "%%") + ("/job-%A_%a.out" if job.tasks else "/job-%j.out")
    options = [f"--job-name={job.app}", f"--output={shlex.quote(output)}", f"--signal=USR1@{job.stop_before}"]
    options += [f"--nodes={args.nodes}"] + ([f"--ntasks-per-node={job.per_node}"] if args.per_node is not None else [])
    options += [f"--time={format_duration(job.seconds)}"] if job.seconds else []
    options += job.site.access_options(args.account, args.queue)
    cap, option = job.settings.train.power_cap, job.site.facts.get("power")
    options += [f"{option}={cap}"] if cap and option else []
    options += [f"--array=0-{len(job.tasks) - 1}"] if job.tasks else []
    return options + args.option


def _shell_lines(job: Job) -> list[str]:
    """Return the lines before the site's own: working directory, Python, data to copy, and the arguments of the run."""
    args, folder = job.args, Path.cwd()
    lines = [f"cd {shlex.quote(str(folder))} || exit"]
    if args.container:
        lines += ["export PYTHONSAFEPATH=1  # the image's hpcai, not that of this folder"]
        lines += [assign("HPCAI_IMAGE", job.site.image(args.container)), assign("HPCAI_PYTHON", "python")]
        lines += [assign("HPCAI_FOLDERS", ",".join(map(str, _paths_to_mount(job.settings, job.overrides[:1]))))]
    else:
        root, none = apps.app_folder(job.app).parents[1].resolve(), job.site.facts.get("container") == "none"
        installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
        if root != folder.resolve() and root not in installed:
            lines += [f"export PYTHONPATH={shlex.quote(str(root))}${{PYTHONPATH:+:$PYTHONPATH}}"]  # of the app
        lines += [*([] if none else ["HPCAI_IMAGE="]), assign("HPCAI_PYTHON", sys.executable)]
    if args.environment:  # the archive, and the folder to unpack it to on each node: by default one for each start of the job
        parent = next(iter(job.site.facts.get("local", "").split()), "/tmp")
        path = f"{parent}/hpcai-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"
        path = _expand_in_shell(args.environment_at) if args.environment_at else path
        lines += [assign("HPCAI_ENVIRONMENT", str(Path(args.environment).absolute())), f'HPCAI_AT="{path}"']
    elif not job.site.pbs:
        lines += ["HPCAI_ENVIRONMENT="]
    lines += ["HPCAI_STAGE="]
    if args.stage:
        source = job.settings.data.directory  # type: ignore[attr-defined]
        lines[-1:] = [assign("HPCAI_DATA", str(source)), f'HPCAI_STAGE="{_expand_in_shell(args.stage)}"']
    lines += [f"HPCAI_REQUEUE={0 if args.chain else 1}", assign("HPCAI_RUN", str(job.directory))]
    if job.site.pbs:
        lines += [f"HPCAI_PER_NODE={job.per_node} HPCAI_SECONDS={job.seconds or 0} HPCAI_STOP_BEFORE={job.stop_before}"]
        lines += [assign("HPCAI_SCRIPT", str(job.script))]
    lines += ["set -- " + " \\\n  ".join(map(shlex.quote, [f"apps.{job.app}", *job.overrides]))]  # one argument per line
    if job.tasks:
        lines += [f"case ${{{'HPCAI_TASK' if job.site.pbs else 'SLURM_ARRAY_TASK_ID'}:?}} in"]
        for number, task in enumerate(job.tasks):
            lines += [f'  {number}) {assign("HPCAI_RUN", str(task.directory))}; set -- "$@" {shlex.join(task.overrides)} ;;']
        lines += ["esac"]
    return lines


def _paths_to_mount(settings: RunConfig, arguments: Sequence[str]) -> list[Path]:
    """Return the paths outside the current folder that a container must mount: those in ``settings``, and the file that the first
    of ``arguments`` may be. A path that does not exist is replaced by its nearest existing parent."""
    paths = [Path(arg) for arg in arguments if arg.endswith((".yaml", ".yml")) and "=" not in arg]
    mounts = []
    for path in [*paths, *(value for value in flatten(settings.model_dump()).values() if isinstance(value, Path))]:
        existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
        if not existing.resolve().is_relative_to(Path.cwd().resolve()) and existing != Path("/"):
            mounts.append(existing)
    return list(dict.fromkeys(mounts))


def _expand_in_shell(text: str) -> str:
    """Return ``text`` for double quotes in which only $NAMES are expanded; an unset one ends the script."""
    return re.sub(r'(["\\`]|\$(?!\{))', r"\\\1", re.sub(r"\$(?:\{(\w+)\}|([A-Za-z_]\w*))", r"${\1\2:?}", text))


# ---- Paths, and submission ------------------------------------------------------------------------------------------------------


def check_paths(job: Job) -> list[str]:
    """Return the errors in files and folders on this machine, which need not be the one that runs the script."""
    problems, args = [], job.args
    parent = next(path for path in (job.directory, *job.directory.parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problems.append(f"report.directory {job.directory}: {parent} is not writable; name a folder of yours that all nodes see")
    local = [os.path.expandvars(place) for place in job.site.facts.get("local", "").split()]
    node_local = next((place for place in local if job.directory.resolve().is_relative_to(place)), None)
    if node_local and not args.any_directory:
        fault = f"report.directory {job.directory}: {node_local} is node-local, where no other node finds the checkpoints"
        problems.append(f"{fault}; name a folder that all nodes see, or give --any-directory if they do see it")
    source = getattr(job.settings.data, "directory", None)
    if source is not None and not Path(source).exists():
        problems.append(f"data.directory {source} does not exist; make it or name another (hpcai data check validates one)")
    if args.container and job.site.facts.get("container") != "name" and not Path(args.container).is_file():
        problems.append(f"--container {args.container}: there is no such file; expected an image, made with apptainer build")
    if args.environment and not Path(args.environment).is_file():
        problems.append(f"--environment {args.environment}: there is no such file; expected an archive (docs/cluster.md)")
    return problems


def submit(job: Job, text: str) -> list[str]:
    """Write the script to the run's directory and submit it. Return the job ids. Raises HpcaiError."""
    program = "qsub" if job.site.pbs else "sbatch"
    if shutil.which(program) is None:
        raise HpcaiError(f"{program} is not installed here; run this on a login node, or omit --submit and copy the script there")
    job.directory.mkdir(parents=True, exist_ok=True)
    job.script.write_text(text)
    if job.tasks and job.site.pbs:  # a job of a PBS array cannot resubmit itself
        return [_submit(["qsub", "-v", f"HPCAI_TASK={task}", str(job.script)]) for task in range(len(job.tasks))]
    job_ids: list[str] = []
    for _ in range(job.args.chain or 1):
        command = ["qsub"] if job.site.pbs else ["sbatch", "--parsable"]
        if job_ids and job.site.pbs:
            command += ["-W", f"depend=afternotok:{job_ids[-1]}"]
        elif job_ids:
            command += [f"--dependency=afternotok:{job_ids[-1]}", "--kill-on-invalid-dep=yes"]
        job_ids.append(_submit([*command, str(job.script)]))
    return job_ids


def _submit(command: Sequence[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if process.returncode:
        raise HpcaiError(f"{shlex.join(command)} refused the job: {process.stderr.strip() or process.stdout.strip()}")
    return process.stdout.strip().partition(";")[0]
