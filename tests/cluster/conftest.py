"""``slurm``: one real Slurm for all tests of this folder, started on first use. ``submit``: a job of it, on ``data``."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.apps.universes import write_universes
from tests.cluster.one_machine_slurm import OneMachineSlurm, missing
from tests.cluster.submitted import ENDLESS, Submit

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneMachineSlurm]:
    """Two nodes, n1 and n2, of four CPUs and four make-believe GPUs each."""
    reason = missing()
    if reason:
        pytest.skip(f"no Slurm on this machine: {reason}")
    with OneMachineSlurm(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        # Over UCX the MPICH wheel (5.0) tells its peers 4 KiB of its heap beside its address, through lines of Slurm's PMI that
        # hold 1,024 characters: whether they fit depends on what lies there. Over libfabric it sends the address alone.
        running.env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HPCAI_TIMEOUT": "60"}
        running.env |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        yield running


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_universes(tmp_path_factory.mktemp("universes"))


@pytest.fixture
def submit(slurm: OneMachineSlurm, data: Path) -> Submit:
    def submit(run: Path, *words: str) -> list[str]:
        command = [
            sys.executable, "-m", "hpcai.cli", "job", "cosmoflow", "apps/cosmoflow/configs/small.yaml", *ENDLESS,
            f"data.directory={data}", f"report.directory={run}", "--site", "generic", "--any-directory", "--submit", *words,
        ]  # fmt: skip
        done = subprocess.run(command, env=slurm.env, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return submit
