"""`hpcai run APP CONFIG key=value ...`: what `python -m apps.APP CONFIG key=value ...` does, in a checkout and from a wheel.

CONFIG is a YAML file, or the name of one of the app's own, such as small. The same line runs alone, or behind mpiexec, srun or
torchrun (torchrun ... -m hpcai.cli.run APP ...). `hpcai run APP --help` lists every setting, --show prints the resolved run.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import apps
from hpcai.errors import ConfigError
from hpcai.schema import list_names


def main(words: Sequence[str]) -> None:
    """Ends as the app does: with its SystemExit, if it raises one. Raises ConfigError for an app or a file that is not there."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{__doc__}\nApps: {_app_names()}")
        return
    app = words[0]
    if app not in apps.list_apps():
        raise ConfigError(f"there is no app {app!r}; expected one of {_app_names()}")
    sys.argv = [app, *_resolve_config(app, words[1:])]
    runpy.run_module(f"apps.{app}", run_name="__main__", alter_sys=True)


def _app_names() -> str:
    return list_names(apps.list_apps()) or "those in apps/ of a checkout, which is not here"


def _resolve_config(app: str, words: Sequence[str]) -> list[str]:
    """``words`` in which the first, where it names one of the app's own files, is that file."""
    if not words or "=" in words[0] or "/" in words[0] or words[0].startswith("-") or Path(words[0]).is_file():
        return list(words)
    word = words[0]
    configs = {file.stem: file for file in sorted((apps.app_folder(app) / "configs").glob("*.yaml"))}
    name = word.removesuffix(".yaml").removesuffix(".yml")
    if name in configs:
        return [str(configs[name]), *words[1:]]
    if name != word:
        raise ConfigError(f"there is no file {word}, and {app} has none of that name; its own are {list_names(list(configs))}")
    return list(words)  # a command of the app


if __name__ == "__main__":
    from hpcai.cli import main as hpcai

    sys.exit(hpcai(["run", *sys.argv[1:]]))
