"""``hpcai environment pack FILE.tar`` and ``hpcai environment unpack FILE.tar TARGET``."""

from collections.abc import Sequence

from hpcai.cli import dispatch

COMMANDS = {
    "pack": "FILE.tar          this Python with all that is installed for it, as one archive that works at any place",
    "unpack": "FILE.tar TARGET   onto each node's own disk; behind srun or mpiexec the archive is read once",
}


def main(argv: Sequence[str]) -> int:
    return dispatch("hpcai environment", COMMANDS, argv)
