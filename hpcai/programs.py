"""Commands that start apps and data preparation, in a checkout or an installed wheel, which has them in ``hpcai/suite``."""

from pathlib import Path

import hpcai

SUITE = Path(hpcai.__file__).with_name("suite")
"""The directory of apps, data_prep and slurm in a wheel; absent in a checkout."""

_COMMANDS = {"apps": "hpcai run", "data_prep": "hpcai prepare"}


def command_of(module: str) -> str:
    """Return the command that starts the module ``apps.NAME``, ``data_prep.NAME``, or another."""
    package, _, name = module.partition(".")
    return f"{_COMMANDS[package]} {name}" if package in _COMMANDS and SUITE.is_dir() else f"python -m {module}"


def command_of_app(app: str, config: str = "small") -> str:
    """Return the command that starts an app with one of its config files."""
    return f"{command_of(f'apps.{app}')} {config if SUITE.is_dir() else f'apps/{app}/configs/{config}.yaml'}"
