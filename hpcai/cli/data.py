"""``hpcai data check DIR`` and ``hpcai data stage SOURCE TARGET``."""

from collections.abc import Sequence

from hpcai.cli import run_command

COMMANDS = {
    "check": "DIR             validate files against their index, values, duplicates, and the read rate of the disk; --index",
    "stage": "SOURCE TARGET   copy to node-local disks; behind mpiexec or srun each byte is read once from the source",
}


def main(argv: Sequence[str]) -> int:
    return run_command("hpcai data", COMMANDS, argv)
