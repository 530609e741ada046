"""ReFrame tests of a system: the acceptance runs that apps declare (apps/NAME/acceptance.toml), and the parts that they share.

`hpcai accept` calls them. With a ReFrame configuration of your own: reframe -C YOURS -c slurm/reframe/acceptance.py -t quick -r.
The features of a partition name its scales (scale_1_node, scale_2_nodes, ...) and gpu or cpu, its extras the processes of a node
(per_node).
"""

import json
import os
import shlex
import sys
from pathlib import Path

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import parameter, run_after, run_before, sanity_function, variable
from reframe.core.meta import make_test

from hpcai.cli.accept import parts, runs
from hpcai.cli.accept.system import SCALES

SESSION = json.loads(Path(os.environ["HPCAI_ACCEPTANCE"]).read_text()) if "HPCAI_ACCEPTANCE" in os.environ else {}
SCALES_HERE = SESSION.get("scales", list(SCALES))
UNITS = {"throughput": "samples/s", "deviation": "%", "time_to_target": "s", "energy": "J/sample", "loader_share": "%",
         "all_reduce": "GB/s", "all_to_all": "GB/s", "link_latency": "us", "link_rate": "GB/s", "slowest_rank": "%",
         "disk_write": "GB/s", "disk_read": "GB/s", "checkpoint_write": "GB/s", "job_end": "s"}  # fmt: skip


@sn.deferrable
def _value(number: float) -> float:
    return number


class Job(rfm.RunOnlyRegressionTest):
    """A job on ``scale``: its shell script, the limits of its figures, and its result, which outlives a session that is cut off."""

    valid_prog_environs = ["*"]
    time_limit = "10m"

    @run_after("init")
    def select(self):
        passed = self.display_name in SESSION.get("passed", ())
        self.valid_systems = [] if passed or not self.is_valid() else [f"+scale_{self.scale}"]
        self.tags |= {self.scale, "full"}
        self.postrun_cmds = ["code=$?", *self.after(), "echo $code >exit_code", "exit $code"]

    @property
    def stage(self):
        return Path(self.stagedir)

    def unit(self, figure):
        return UNITS[figure]

    def is_valid(self):
        return True

    def after(self):
        return ["rm -rf data run/checkpoints"]

    @run_after("setup")
    def place(self):
        extras = self.current_partition.extras
        self.per_node = int(extras.get("per_node", 1))
        self.num_tasks = round(self.per_node * SCALES[self.scale])
        self.num_cpus_per_task = self.job.num_cpus_per_task = extras.get("cpus_per_task")
        self.max_pending_time = extras.get("pending")
        launcher = self.job.launcher
        if launcher.registered_name == "srun":
            launcher.options = ['"${srun[@]}"']
        elif extras.get("pbs"):
            launcher.options = [f"--ppn {min(self.num_tasks, self.per_node)}", '"${mpiexec[@]}"']
        self.python = f'"${{container[@]}}" {extras.get("python", sys.executable)}' if SESSION else sys.executable
        figures = SESSION.get("references", {}).get(self.display_name, {})
        self.reference = {self.current_system.name: {name: (*figure, self.unit(name)) for name, figure in figures.items()}}
        self.executable = f"{self.python} -m hpcai.cli"
        self.set_ranks(self.num_tasks)
        self.set_commands()

    def set_ranks(self, ranks):
        self.num_tasks = self.job.num_tasks = ranks
        self.num_tasks_per_node = self.job.num_tasks_per_node = min(ranks, self.per_node)

    def command(self, *words):
        """Return the line of a command on all ranks."""
        return f"{self.job.launcher.run_command(self.job)} {self.python} -m {shlex.join(words)}"

    def command_alone(self, *words):
        """Return the line of a command of one process, with all cores that the ranks of a node have."""
        line = f"{self.python} -m {shlex.join(words)}"
        if self.job.launcher.registered_name == "srun":  # which may take the name of a container
            cpus = f"--cpus-per-task={self.num_cpus_per_task * self.num_tasks_per_node} " if self.num_cpus_per_task else ""
            line = f'srun --nodes=1 --ntasks=1 --ntasks-per-node=1 {cpus}"${{srun[@]}}" {line}'
        return f"{line} || exit"

    @sanity_function
    def validate(self):
        problem = self.failure() or self.problem()
        return sn.assert_false(problem, problem)

    def failure(self):
        """Return the end of a job that has failed, or "" for another."""
        path = self.stage / "exit_code"
        code = path.read_text().strip() if path.is_file() else None
        if code == "0":
            return ""
        return runs.describe_failure(code, self.stage / self.stderr.evaluate(), self.stage / self.stdout.evaluate())

    def problem(self):
        return ""

    def figures(self):
        return {}

    @run_before("performance")
    def measure(self):
        figures = {name: float(f"{value:.4g}") for name, value in self.figures().items() if value is not None}
        self.perf_variables = {
            name: sn.make_performance_function(_value(value), self.unit(name)) for name, value in figures.items()
        }

    @run_before("cleanup")
    def keep_result(self):
        if "kept" in SESSION:
            runs.keep_result(Path(SESSION["kept"]), self)


class Workload(Job):
    """A run that an app declares: correct or not (small), until its target, or its throughput at several scales."""

    app = variable(str)
    mode = parameter(runs.MODES)
    scale = parameter(SCALES_HERE)
    keep_files = ["run"]

    def is_valid(self):
        self.descr = f"{self.app}: {self.mode} run"
        if self.mode == "small":
            self.tags |= {"quick"}
        else:
            self.time_limit = "1h"
        return self.mode in ("weak", "strong") or self.scale == "1_node"

    def set_commands(self):
        gpus = "gpu" in self.current_partition.features
        if self.mode in ("small", "target"):
            self.set_ranks(min(self.num_tasks, 8))
        commands = runs.plan_run(self.app, self.mode, self.num_tasks, self.per_node, gpus)
        self.skip_if(commands is None, f"{self.app} has no {self.mode} run on {self.num_tasks} ranks")
        self.prerun_cmds = [self.command_alone("hpcai.cli", *words) for words in commands.prepare]
        self.executable_opts = [*map(shlex.quote, commands.run)]

    def problem(self):
        mistake = runs.find_mistake(self.app, self.stage / "run") if self.mode == "small" else ""
        if self.mode == "target" and runs.read_figures(self.app, self.mode, self.stage / "run")["time_to_target"] is None:
            mistake = "the run ended before its target; look at the curves of its page: hpcai report RUN"
        verdict = runs.judge_mlperf(self.app, self.stage / "run")
        if verdict is not None:
            (self.stage / "mlperf.json").write_text(json.dumps(verdict))
            self.keep_files += ["mlperf.json"]
        return mistake

    def unit(self, figure):
        return f"{runs.unit(self.app)}/s" if figure == "throughput" else UNITS[figure]

    def figures(self):
        return runs.read_figures(self.app, self.mode, self.stage / "run")


class Part(Job):
    """A part that all workloads share, measured alone."""

    scale = parameter([scale for scale in SCALES_HERE if SCALES[scale] >= 1])

    def is_valid(self):
        self.tags |= {"quick"} if self.scale == "1_node" else set()
        return True

    def set_run(self, part):
        """Set the run that an app declares for ``part``, and return its arguments."""
        gpus = "gpu" in self.current_partition.features
        commands = runs.plan_run(runs.app_of(part), "small", self.num_tasks, self.per_node, gpus, part)
        self.prerun_cmds = [self.command_alone("hpcai.cli", *words) for words in commands.prepare]
        self.executable_opts = [*map(shlex.quote, commands.run)]
        return commands.run[1:]


@rfm.simple_test
class HPCAI_ranks(Part):  # noqa: N801
    """Ranks, cores and GPUs, versions, network and disks: hpcai doctor --ranks; a rank that computes slowly is named."""

    descr = "ranks, network and disks"
    keep_files = ["doctor.json"]

    def set_commands(self):
        self.executable_opts = ["doctor --ranks --json doctor.json --directory ."]

    def failure(self):
        return parts.describe_errors(self.stage / "doctor.json") if (self.stage / "doctor.json").is_file() else super().failure()

    def problem(self):
        return parts.find_slow_rank(self.stage / "doctor.json")

    def figures(self):
        return parts.read_rates(self.stage / "doctor.json")


@rfm.simple_test
class HPCAI_checkpoint(Part):  # noqa: N801
    """The rate of a checkpoint: of 0.4 GB on CPUs, of 14 GB on GPUs."""

    descr = "rate of a checkpoint"

    def set_commands(self):
        self.set_run("checkpoint")

    def figures(self):
        return {"checkpoint_write": parts.checkpoint_rate(self.stage / "run")}


@rfm.simple_test
class HPCAI_resume(Part):  # noqa: N801
    """A killed rank ends its job; the job, started again, ends with the weights of an uninterrupted one."""

    descr = "a killed rank, and the resumed job"

    def set_commands(self):
        self.set_ranks(min(self.num_tasks, 8))  # which share the batch
        words = self.set_run("resume")
        again = [word.replace("report.directory=run", "report.directory=again") for word in words]
        self.postrun_cmds[1:-2] = [  # with checkpoints
            '[ $code = 0 ] || { echo $code >exit_code; exit $code; }',
            self.command("hpcai.cli.accept.killed_rank", *again) + " 2>killed.err", "echo $? $(date +%s.%N) >killed_code",
            self.command("hpcai.cli", "run", *again), "code=$?", "rm -rf data",
        ]  # fmt: skip

    def problem(self):
        return parts.find_difference(self.stage / "run", self.stage / "again") or parts.job_end(self.stage)[1]

    def figures(self):
        return {"job_end": parts.job_end(self.stage)[0]}


for _app in runs.declared_apps():
    rfm.simple_test(make_test(f"HPCAI_{_app}", (Workload,), {"app": _app}, module=__name__))
