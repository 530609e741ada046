"""``hpcai data check DIR`` and ``hpcai data stage SOURCE TARGET``."""

from collections.abc import Sequence

from hpcai.cli import run_command

COMMANDS = {
    "check": "DIR             files against their manifest, values, duplicates, what the training needs of the disk; --index",
    "stage": "SOURCE TARGET   copy to node-local disks; behind mpiexec or srun the nodes read each byte once",
}


def main(argv: Sequence[str]) -> int:
    return run_command("hpcai data", COMMANDS, argv)
