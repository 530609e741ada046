"""`hpcai prepare NAME ...`: what `python -m data_prep.NAME ...` does, in a checkout and from a wheel: simulate, convert and check
the files that apps read. Behind mpiexec or srun each process makes its share.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import apps
from hpcai.errors import ConfigError
from hpcai.schema import list_names


def main(words: Sequence[str]) -> None:
    """Ends as the maker does, with SystemExit. Raises ConfigError where there is none of that name."""
    known = list_commands()
    told = list_names(known) or "those in data_prep/ of a checkout, which is not here"
    if not words or words[0] in ("-h", "--help"):
        print(f"{__doc__}\nNames: {told}")
        return
    if words[0] not in known:
        raise ConfigError(f"nothing is made by the name {words[0]!r}; expected one of {told}")
    sys.argv = list(words)
    runpy.run_module(f"data_prep.{words[0]}", run_name="__main__", alter_sys=True)


def list_commands() -> list[str]:
    """The modules of ``data_prep`` that are commands, in alphabetical order."""
    files = (file for root in apps.package_folders("data_prep") for file in Path(root).glob("*.py"))
    return sorted({file.stem for file in files if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8")})
