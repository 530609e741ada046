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
        # Over UCX the MPICH wheel (5.0) tells its peers 4 KiB of its heap beside its address, through lines of Slurm's PMI that
        # hold 1,024 characters: whether they fit depends on what lies there. Over libfabric it sends the address alone.
        running.env |= {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "HPCAI_TIMEOUT": "60"}
        running.env |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        yield running
