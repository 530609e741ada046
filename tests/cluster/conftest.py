"""``slurm``: one real Slurm for all tests of this folder, started on first use."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from one_machine_slurm import OneMachineSlurm, missing


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneMachineSlurm]:
    """Two nodes, n1 and n2, of four CPUs and four make-believe GPUs each."""
    reason = missing()
    if reason:
        pytest.skip(f"no Slurm on this machine: {reason}")
    with OneMachineSlurm(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        root = str(Path(__file__).parents[2])
        # The MPICH wheel tells its peers its UCX address. With all transports that is longer than what Slurm PMI2 carries,
        # and with some environments the job then hangs at its start; with two transports it is short.
        running.env |= {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HPCAI_TIMEOUT": "60", "UCX_TLS": "tcp,self"}
        yield running
