"""``hpcai data check DIR`` and ``hpcai data stage SOURCE TARGET``."""

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "check": "DIR             files against their manifest, values, duplicates, what the training needs of the disk; --repair",
    "stage": "SOURCE TARGET   copy to node-local disks; behind mpiexec or srun the nodes read each byte once",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: hpcai data COMMAND ...\n\n" + "\n".join(f"  {name:<6} {text}" for name, text in COMMANDS.items()))
        return 0
    if argv[0] not in COMMANDS:
        print(f"hpcai data: there is no command {argv[0]!r}; expected one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return import_module(f"hpcai.cli.{argv[0]}").main(argv[1:]) or 0
