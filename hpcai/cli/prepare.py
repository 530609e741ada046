"""`hpcai prepare NAME ...`: run `python -m data_prep.NAME ...`, in a checkout or from a wheel: simulate, convert and check the
files that apps read. Behind mpiexec or srun each process makes its share."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import apps
from hpcai.errors import ConfigError
from hpcai.schema import join_names


def main(args: Sequence[str]) -> None:
    """Run the command, which ends with SystemExit. Raises ConfigError if the name is unknown."""
    files = (file for root in apps.package_folders("data_prep") for file in Path(root).glob("*.py"))
    commands = sorted({file.stem for file in files if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8")})
    names = join_names(commands) or "those in data_prep/ of a checkout, which is missing"
    if not args or args[0] in ("-h", "--help"):
        print(f"{__doc__}\nNames: {names}")
        return
    if args[0] not in commands:
        raise ConfigError(f"there is no command {args[0]!r}; expected one of {names}")
    sys.argv = list(args)
    runpy.run_module(f"data_prep.{args[0]}", run_name="__main__", alter_sys=True)
