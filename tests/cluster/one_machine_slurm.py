"""A real Slurm on this machine alone: several slurmd on loopback ports, as root, beside any other and without its files.

No systemd, no cgroups, no accounting: what Debian's packages give (apt-get install slurm-wlm munge libpmix-dev). Each start has
its own folder, munge key, socket and ports, and ends by the process ids that it recorded.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = "slurm-wlm munge libpmix-dev"


def missing() -> str | None:
    """Why no Slurm can be started here; None when one can."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install -y --no-install-recommends {PACKAGES}"
    return None if os.geteuid() == 0 else "slurmctld and slurmd are started as root only"


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float


class OneMachineSlurm:
    """``with OneMachineSlurm(folder) as slurm: slurm.srun(["-n4", "hostname"])``. Nodes are named n1, n2, ..."""

    def __init__(
        self, folder: Path, nodes: int = 2, cpus: int = 4, gpus: int = 4, options: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self._nodes, self._cpus, self._gpus, self._options = folder, nodes, cpus, gpus, dict(options or {})
        conf = str(folder / "slurm.conf")
        strange = ("SLURM_", "SBATCH_", "PMI", "OMPI_", "MPI", "PALS_", "MASTER_", "TORCHELASTIC_", "HPCAI_")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
        # The nodes' names resolve nowhere, so rank 0 is named by hand; some tools look for USER
        self.env |= {"SLURM_CONF": conf, "HPCAI_ADDRESS": "127.0.0.1", "USER": "root"}

    def __enter__(self) -> "OneMachineSlurm":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def srun(self, words: Sequence[str | Path], timeout: float = 60, **environ: str) -> Ended:
        return self._run(["srun", *words], timeout, environ)

    def sbatch(self, script: str, *options: str, wait: bool = True, timeout: float = 90, **environ: str) -> Ended:
        """Submit the text of a script. With ``wait``, ``out`` is what the job wrote and ``code`` its exit code; else the job id."""
        number = len(list(self.folder.glob("job*.sh")))
        file, output = self.folder / f"job{number}.sh", self.folder / f"job{number}.out"
        file.write_text("#!/bin/bash\n" + script)
        began = time.monotonic()
        sent = self._run(["sbatch", "--parsable", f"--output={output}", "--open-mode=append", *options, file], timeout, environ)
        if not wait or sent.code:
            return Ended(sent.code, sent.out.strip(), sent.err, sent.seconds)
        job = sent.out.strip()
        # Not sbatch --wait, which looks at ever longer intervals
        self.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", timeout=timeout)
        code = re.search(r"ExitCode=(\d+):", self.command("scontrol", "show", "job", job))
        assert code is not None
        written = output.read_text() if output.exists() else ""
        return Ended(int(code[1]), written, sent.err, time.monotonic() - began)

    def command(self, *words: str) -> str:
        """The output of scontrol, squeue, scancel and the like; raises when it fails."""
        ended = self._run(list(words), 30, {})
        if ended.code:
            raise RuntimeError(f"{' '.join(words)}: exit code {ended.code}: {ended.err}")
        return ended.out

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self.command("squeue", "--noheader", "--states=all", "--format=%T", f"--job={job}").strip()

    def wait_for(self, job: str, *states: str, timeout: float = 60) -> str:
        until = time.monotonic() + timeout
        while (now := self.state(job)) not in states:
            if time.monotonic() > until:
                raise TimeoutError(f"job {job} is {now} after {timeout} s, not {' or '.join(states)}\n{self._logs()}")
            time.sleep(0.2)
        return now

    def _run(self, words: Sequence[str | Path], timeout: float, environ: Mapping[str, str]) -> Ended:
        began = time.monotonic()
        process = subprocess.Popen(
            words, env=self.env | environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise TimeoutError(f"{words[0]} did not end within {timeout} s\n{out}\n{err}") from None
        return Ended(process.returncode, out, err, time.monotonic() - began)

    def _start(self) -> None:
        for name in (
            "munge",
            "state",
            "log",
            "dev",
            *(f"{kind}/n{i + 1}" for kind in ("spool", "tmp") for i in range(self._nodes)),
        ):
            (self.folder / name).mkdir(parents=True)
        os.chmod(self.folder, 0o755)
        os.chmod(self.folder / "munge", 0o700)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        where = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        own = [f"--{option}={self.folder / 'munge' / name}" for option, name in where.items()]
        # --force: munged distrusts a key below a folder that all may write
        self._daemon("munged", "--force", f"--socket={self.folder / 'munge.sock'}", "--num-threads=1", *own)
        for gpu in range(self._gpus):  # null devices; plain files would be accepted, but leave CUDA_VISIBLE_DEVICES empty
            os.mknod(self.folder / "dev" / f"gpu{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
        self._write_conf()
        self._daemon("slurmctld", "-i", "-f", self.env["SLURM_CONF"])
        for i in range(self._nodes):
            self._daemon("slurmd", "-f", self.env["SLURM_CONF"], "-N", f"n{i + 1}")
        until = time.monotonic() + 30
        while self._run(["sinfo", "--noheader", "--Node", "--format=%t"], 30, {}).out.split() != ["idle"] * self._nodes:
            if time.monotonic() > until:
                raise TimeoutError(f"Slurm did not come up within 30 s\n{self._logs()}")
            time.sleep(0.1)

    def _write_conf(self) -> None:
        here, host, ports = self.folder, socket.gethostname().split(".")[0], _free_ports(self._nodes + 1)
        memory = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20 / self._nodes * 0.9)
        settings = {
            "ClusterName": "test",
            # MPICH names its shared memory by the step, and a rank that is killed leaves it to the next step of that name
            "FirstJobId": random.randrange(1_000, 60_000_000),
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": ports[0],
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={here}/munge.sock",
            "CredType": "cred/munge",
            "StateSaveLocation": f"{here}/state",
            "SlurmdSpoolDir": f"{here}/spool/%n",
            "TmpFS": f"{here}/tmp/%n",  # one for each node, or PMIx steps of two nodes collide
            "SlurmctldPidFile": f"{here}/slurmctld.pid",
            "SlurmdPidFile": f"{here}/slurmd.%n.pid",
            "SlurmctldLogFile": f"{here}/log/slurmctld.log",
            "SlurmdLogFile": f"{here}/log/slurmd.%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0",
            "SlurmdParameters": "config_overrides",  # more CPUs than there are
            "ReturnToService": 2,
            "JobRequeue": 1,
            "KillWait": 5,
            "CompleteWait": 0,
            "MinJobAge": 300,
            "InactiveLimit": 0,
            "GresTypes": "gpu",
            **self._options,
        }
        node = f"CPUs={self._cpus} RealMemory={memory} State=UNKNOWN NodeHostname={host} NodeAddr=127.0.0.1"
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [f"NodeName=n{i + 1} Port={ports[i + 1]} Gres=gpu:{self._gpus} {node}" for i in range(self._nodes)]
        lines += [f"PartitionName=main Nodes=n[1-{self._nodes}] Default=YES MaxTime=INFINITE State=UP"]
        (here / "slurm.conf").write_text("\n".join(lines) + "\n")
        (here / "gres.conf").write_text(f"Name=gpu File={here}/dev/gpu[0-{self._gpus - 1}]\n")
        # Slurm 22.05 reads this file whatever the plugins, and else expects cgroups
        (here / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n")

    def _daemon(self, *words: str) -> None:
        # It detaches and keeps its output open, so that none is asked for
        done = subprocess.run(words, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}\n{self._logs()}")

    def _stop(self) -> None:
        if (self.folder / "slurmctld.pid").exists():
            self._run(["scancel", "--user=root"], 30, {})
            until = time.monotonic() + 10
            while time.monotonic() < until and self._run(["squeue", "--noheader"], 30, {}).out.strip():
                time.sleep(0.2)
        for file in [*self.folder.glob("slurmd.*.pid"), self.folder / "slurmctld.pid", self.folder / "munge" / "pid"]:
            if file.exists() and file.read_text().strip():
                _end(int(file.read_text()))

    def _logs(self) -> str:
        return "\n".join(f"{log}:\n" + "\n".join(log.read_text().splitlines()[-20:]) for log in self.folder.glob("log/*"))


def _end(pid: int) -> None:
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        if not _alive(pid):
            return
        os.kill(pid, number)
        until = time.monotonic() + patience
        while _alive(pid) and time.monotonic() < until:
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    """False for a zombie, which a detached daemon stays where nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to connections, which could take one before the daemon does."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)


if __name__ == "__main__":  # for trying things: one_machine_slurm.py FOLDER, until Ctrl-C
    reason = missing()
    if reason:
        sys.exit(reason)
    with OneMachineSlurm(Path(sys.argv[1])) as running:
        print(f"export SLURM_CONF={running.env['SLURM_CONF']} HPCAI_ADDRESS=127.0.0.1")
        signal.pause()
