"""A real Slurm for all tests of this folder, started on first use, and a function that submits jobs to it."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apps.universes import write_universes
from tests.cluster.one_machine_slurm import OneMachineSlurm, unavailable_reason
from tests.cluster.slurm_jobs import ENDLESS, Submit

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneMachineSlurm]:
    """Two nodes, n1 and n2, of four CPUs and four emulated GPUs each."""
    reason = unavailable_reason()
    if reason:
        pytest.skip(f"no Slurm on this machine: {reason}")
    with OneMachineSlurm(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        # Over UCX the MPICH wheel (5.0) sends 4 KiB of its heap with its address, in lines of Slurm's PMI of up to 1,024
        # characters: whether they fit depends on the content of the heap. Over libfabric it sends only the address.
        running.env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HPCAI_TIMEOUT": "60"}
        running.env |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        yield running


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_universes(tmp_path_factory.mktemp("universes"))


@pytest.fixture
def submit(slurm: OneMachineSlurm, data: Path) -> Submit:
    def submit(run: Path, *args: str) -> list[str]:
        command = [
            sys.executable, "-m", "hpcai.cli", "job", "cosmoflow", "apps/cosmoflow/configs/small.yaml", *ENDLESS,
            f"data.directory={data}", f"report.directory={run}", "--site", "generic", "--any-directory", "--submit", *args,
        ]  # fmt: skip
        result = subprocess.run(command, env=slurm.env, cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    return submit
