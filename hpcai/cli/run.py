"""`hpcai run APP CONFIG key=value ...`: run `python -m apps.APP CONFIG key=value ...`, in a checkout or from a wheel.

CONFIG is a YAML file, or the name of one in the app's configs, such as small. The same command runs on one process, or behind
mpiexec, srun or torchrun (torchrun ... -m hpcai.cli.run APP ...). `hpcai run APP --help` lists every setting, --show prints the
resolved settings.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import apps
from hpcai.errors import ConfigError
from hpcai.schema import join_names


def main(args: Sequence[str]) -> None:
    """Run the app, which may end with SystemExit. Raises ConfigError if the app or the file does not exist."""
    if not args or args[0] in ("-h", "--help"):
        print(f"{__doc__}\nApps: {_app_names()}")
        return
    app = args[0]
    if app not in apps.list_apps():
        raise ConfigError(f"there is no app {app!r}; expected one of {_app_names()}")
    sys.argv = [app, *_resolve_config(app, args[1:])]
    runpy.run_module(f"apps.{app}", run_name="__main__", alter_sys=True)


def _app_names() -> str:
    return join_names(apps.list_apps()) or "those in apps/ of a checkout, which is missing"


def _resolve_config(app: str, args: Sequence[str]) -> list[str]:
    """Return the arguments; if the first one names a config of the app, it is replaced by the path of that file."""
    if not args or "=" in args[0] or "/" in args[0] or args[0].startswith("-") or Path(args[0]).is_file():
        return list(args)
    arg = args[0]
    configs = {file.stem: file for file in sorted((apps.app_folder(app) / "configs").glob("*.yaml"))}
    name = arg.removesuffix(".yaml").removesuffix(".yml")
    if name in configs:
        return [str(configs[name]), *args[1:]]
    if name != arg:
        raise ConfigError(f"there is no file {arg}, and {app} has none of that name; its own are {join_names(list(configs))}")
    return list(args)  # a subcommand of the app


if __name__ == "__main__":
    from hpcai.cli import main as hpcai

    sys.argv.insert(1, "run")
    sys.exit(hpcai())
