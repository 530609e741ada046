"""A real Slurm on one machine: several slurmd on loopback ports, as root, independent of another Slurm of the machine.

No systemd, no cgroups, no accounting: Debian's packages suffice (apt-get install slurm-wlm munge libpmix-dev). Each start has its
own folder, munge key, socket and ports, and ends by the process ids that it recorded.
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
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = Path(__file__).with_name("slurm.conf")
PACKAGES = "slurm-wlm munge libpmix-dev"


def unavailable_reason() -> str | None:
    """Return the reason that no Slurm can be started on this machine, or None."""
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not found: apt-get install -y --no-install-recommends {PACKAGES}"
    return None if os.geteuid() == 0 else "slurmctld and slurmd are started as root only"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    seconds: float


class OneMachineSlurm:
    """``with OneMachineSlurm(folder) as slurm: slurm.srun(["-n4", "hostname"])``. Nodes are named n1, n2, ..."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 4, gpus: int = 4) -> None:
        self.folder, self._nodes, self._cpus, self._gpus = folder, nodes, cpus, gpus
        conf = str(folder / "slurm.conf")
        launcher_variables = ("SLURM_", "SBATCH_", "PMI", "OMPI_", "MPI", "PALS_", "MASTER_", "TORCHELASTIC_", "HPCAI_")
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(launcher_variables)}
        # Names of nodes do not resolve, so the address of rank 0 is set; some tools need USER
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

    def srun(self, args: Sequence[str | Path], timeout: float = 60, **environ: str) -> Result:
        return self._run(["srun", *args], timeout, environ)

    def sbatch(self, script: str, *options: str, wait: bool = True, timeout: float = 90, **environ: str) -> Result:
        """Submit the text of a script. With ``wait``, the result has the output and exit code of the job; else its id."""
        number = len(list(self.folder.glob("job*.sh")))
        file, output = self.folder / f"job{number}.sh", self.folder / f"job{number}.out"
        file.write_text("#!/bin/bash\n" + script)
        start = time.monotonic()
        reply = self._run(["sbatch", "--parsable", f"--output={output}", "--open-mode=append", *options, file], timeout, environ)
        if not wait or reply.code:
            return Result(reply.code, reply.out.strip(), reply.err, reply.seconds)
        job = reply.out.strip()
        # Not sbatch --wait, which polls at increasing intervals
        self.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", timeout=timeout)
        code = re.search(r"ExitCode=(\d+):", self.command("scontrol", "show", "job", job))
        assert code is not None
        stdout = output.read_text() if output.exists() else ""
        return Result(int(code[1]), stdout, reply.err, time.monotonic() - start)

    def command(self, *args: str) -> str:
        """Return the output of scontrol, squeue, scancel and the like. Raises RuntimeError if the command fails."""
        result = self._run(list(args), 30, {})
        if result.code:
            raise RuntimeError(f"{' '.join(args)}: exit code {result.code}: {result.err}")
        return result.out

    def state(self, job: str) -> str:
        """Return PENDING, RUNNING, COMPLETED, FAILED, ..."""
        return self.command("squeue", "--noheader", "--states=all", "--format=%T", f"--job={job}").strip()

    def wait_for(self, job: str, *states: str, timeout: float = 60) -> str:
        until = time.monotonic() + timeout
        while (now := self.state(job)) not in states:
            if time.monotonic() > until:
                raise TimeoutError(f"job {job} is {now} after {timeout} s, not {' or '.join(states)}\n{self._logs()}")
            self._restart_ended()
            time.sleep(0.2)
        return now

    def _restart_ended(self) -> None:
        """Start slurmd again on nodes where it crashed, as systemd does; its steps run on."""
        for i in range(self._nodes):
            pid = self.folder / f"slurmd.n{i + 1}.pid"
            if (text := pid.read_text().strip()) and not _alive(int(text)):
                warnings.warn(f"slurmd of n{i + 1} ended, and is started again\n{self._logs()}", stacklevel=3)
                pid.write_text("")
                self._start_slurmd(i)

    def _run(self, args: Sequence[str | Path], timeout: float, environ: Mapping[str, str]) -> Result:
        start = time.monotonic()
        process = subprocess.Popen(
            args, env=self.env | environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise TimeoutError(f"{args[0]} did not end within {timeout} s\n{out}\n{err}") from None
        return Result(process.returncode, out, err, time.monotonic() - start)

    def _start(self) -> None:
        of_nodes = [f"{kind}/n{i + 1}" for kind in ("spool", "tmp") for i in range(self._nodes)]
        for name in ("munge", "state", "log", "dev", *of_nodes):
            (self.folder / name).mkdir(parents=True)
        os.chmod(self.folder, 0o755)
        os.chmod(self.folder / "munge", 0o700)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        names = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder / 'munge' / name}" for option, name in names.items()]
        # --force: munged refuses a key below a world-writable folder
        self._daemon("munged", "--force", f"--socket={self.folder / 'munge.sock'}", "--num-threads=1", *options)
        for gpu in range(self._gpus):  # null devices; plain files would be accepted, but leave CUDA_VISIBLE_DEVICES empty
            os.mknod(self.folder / "dev" / f"gpu{gpu}", 0o666 | 0o020000, os.makedev(1, 3))
        self._write_conf()
        self._daemon("slurmctld", "-i", "-f", self.env["SLURM_CONF"])
        for i in range(self._nodes):
            self._start_slurmd(i)
        until = time.monotonic() + 30
        while self._run(["sinfo", "--noheader", "--Node", "--format=%t"], 30, {}).out.split() != ["idle"] * self._nodes:
            if time.monotonic() > until:
                raise TimeoutError(f"Slurm did not come up within 30 s\n{self._logs()}")
            time.sleep(0.1)

    def _start_slurmd(self, i: int) -> None:
        self._daemon("slurmd", "-f", self.env["SLURM_CONF"], "-N", f"n{i + 1}")

    def _write_conf(self) -> None:
        folder, host, ports = self.folder, socket.gethostname().split(".")[0], _free_ports(self._nodes + 1)
        memory = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20 / self._nodes * 0.9)
        # MPICH names its shared memory by the step, and a rank that is killed leaves it to the next step of that name
        job = random.randrange(1_000, 60_000_000)
        text = TEMPLATE.read_text().format(folder=folder, host=host, port=ports[0], job=job, nodes=self._nodes)
        node = f"CPUs={self._cpus} RealMemory={memory} State=UNKNOWN NodeHostname={host} NodeAddr=127.0.0.1"
        lines = [f"NodeName=n{i + 1} Port={ports[i + 1]} Gres=gpu:{self._gpus} {node}\n" for i in range(self._nodes)]
        (folder / "slurm.conf").write_text(text + "".join(lines))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/gpu[0-{self._gpus - 1}]\n")
        # Slurm 22.05 reads this file whatever the plugins, and else expects cgroups
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n")

    def _daemon(self, *args: str) -> None:
        # Daemons detach and keep their output open: no pipes
        result = subprocess.run(args, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if result.returncode:
            raise RuntimeError(f"{' '.join(args)} ended with {result.returncode}\n{self._logs()}")

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
        return "\n".join(f"{log}:\n" + "\n".join(log.read_text().splitlines()[-20:]) for log in self.folder.glob("log/*.log"))


def _end(pid: int) -> None:
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        if not _alive(pid):
            return
        os.kill(pid, number)
        until = time.monotonic() + patience
        while _alive(pid) and time.monotonic() < until:
            time.sleep(0.05)


def _alive(pid: int) -> bool:
    """Return whether a process runs. An ended daemon stays a zombie if no process waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def _free_ports(count: int) -> list[int]:
    """Return ports below the ephemeral ones, which a connection could take before the daemon does."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.add(port)
    return list(ports)


if __name__ == "__main__":  # for trying things: one_machine_slurm.py FOLDER, until Ctrl-C
    reason = unavailable_reason()
    if reason:
        sys.exit(reason)
    with OneMachineSlurm(Path(sys.argv[1])) as running:
        print(f"export SLURM_CONF={running.env['SLURM_CONF']} HPCAI_ADDRESS=127.0.0.1")
        signal.pause()
