"""Ranks that never start: the others report for whom they wait, and a signal ends them within a second."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import fork_script

PROGRAM = """
from hpcai import config, dist
from hpcai.dist import watchdog
watchdog.FIRST_REPORT = watchdog.NEXT_REPORT = 0.3
def main(settings):
    with dist.start({"replicate": -1}):
        pass
config.run(config.Settings, main)
"""
ROOT = Path(__file__).resolve().parents[3]
MISSING = {"0": "rank 0 at the rendezvous with 2 of 3 ranks: 1-2", "1": "at the rendezvous with rank 0 at 127.0.0.1"}


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., tuple[fork_script.ForkProcess, Path]]:
    """Return a function that starts a rank of three, and returns its process and the file of its stderr."""
    (program := tmp_path / "program.py").write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as free:
        job = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}

    def start_rank(rank: str, **environ: str) -> tuple[fork_script.ForkProcess, Path]:
        file = tmp_path / rank
        environ = {**job, "RANK": rank, "LOCAL_RANK": rank, **environ}
        return fork_script.fork_script(program, out=tmp_path / "out", err=file, **environ), file

    return start_rank


def wait_for(file: Path, text: str) -> None:
    until = time.monotonic() + 60
    while not file.exists() or not re.search(text, file.read_text()):
        assert time.monotonic() < until, file.exists() and file.read_text()
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGUSR1, 85), (signal.SIGINT, 130)])
@pytest.mark.parametrize("rank", MISSING)
def test_a_waiting_rank_reports_the_missing_and_ends_by_a_signal(start: Callable, rank: str, number: int, code: int) -> None:
    process, file = start(rank)
    wait_for(file, MISSING[rank])
    began = time.monotonic()
    os.kill(process.pid, number)
    process.join(20)
    assert process.exitcode == code and time.monotonic() - began < 5, file.read_text()
    assert "Traceback" not in file.read_text()


def test_a_signal_to_one_waiting_rank_ends_the_others_with_its_code(start: Callable) -> None:
    ranks = [start("0"), start("1")]
    wait_for(ranks[0][1], "at the rendezvous with 1 of 3 ranks: 2")
    os.kill(ranks[1][0].pid, signal.SIGTERM)
    for process, _ in ranks:
        process.join(20)
    assert [process.exitcode for process, _ in ranks] == [85, 85]
    assert "a signal ended this job before training began" in ranks[0][1].read_text()


@pytest.mark.parametrize("shell", [["sh"], ["sh", "-s"], ["sh", "script"]])
def test_a_process_in_an_interactive_shell_of_srun_is_alone(tmp_path: Path, shell: list[str]) -> None:
    """Its variables are those of four tasks. A shell with a script is one of the four."""
    slurm = "JOB_ID=7 STEP_ID=0 NTASKS=4 STEP_NUM_TASKS=4 PROCID=0 LOCALID=0 STEP_NODELIST=n1 STEP_TASKS_PER_NODE=4 PTY_PORT=33"
    environ = {"PATH": os.environ["PATH"]} | {f"SLURM_{word.partition('=')[0]}": word.partition("=")[2] for word in slurm.split()}
    code = "from hpcai.dist.environment import read_rank_info; info = read_rank_info(); print(info.world, info.launcher)"
    (tmp_path / "script").write_text(command := f"cd {ROOT}; '{sys.executable}' -c '{code}'; true\n")
    done = subprocess.run(shell, input=command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout == ("4 srun\n" if "script" in shell else "1 a shell of srun --pty\n"), done.stderr


def test_the_wait_ends_after_the_timeout_of_the_rendezvous(start: Callable) -> None:
    process, file = start("0", HPCAI_TIMEOUT="1")
    process.join(30)
    assert process.exitcode == 2 and "waited 1 s for 2 of 3 ranks: 1-2; start all ranks, or raise HPCAI_TIMEOUT" in file.read_text()
