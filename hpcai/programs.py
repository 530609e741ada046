"""How apps and the makers of their data are started here: from a checkout, or out of a wheel, which has them in ``hpcai/suite``."""

from pathlib import Path

import hpcai

SUITE = Path(hpcai.__file__).with_name("suite")
"""The folder of a wheel's apps, data_prep and slurm, which a checkout does not have."""

_COMMANDS = {"apps": "hpcai run", "data_prep": "hpcai prepare"}


def command_of(module: str) -> str:
    """The words that start the module ``apps.NAME``, ``data_prep.NAME``, or another."""
    package, _, name = module.partition(".")
    return f"{_COMMANDS[package]} {name}" if package in _COMMANDS and SUITE.is_dir() else f"python -m {module}"


def command_of_app(app: str, config: str = "small") -> str:
    """The words that start an app with one of its own files of settings."""
    return f"{command_of(f'apps.{app}')} {config if SUITE.is_dir() else f'apps/{app}/configs/{config}.yaml'}"
