"""Finding what apps declare: the file ``apps/<name>/<part>.py`` is the module ``apps.<name>.<part>``."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import hpcai


def find(name: str, part: str) -> ModuleType | None:
    """The module ``apps.<name>.<part>``, or None where there is no such app or it has no such file.

    ``name`` may come from a file that somebody else wrote: it is only compared with the apps that are there.
    """
    return import_module(f"apps.{name}.{part}") if name in names(part) else None


def every() -> list[str]:
    """All apps, in alphabetical order; none where there is no checkout."""
    return sorted(_folders())


def names(part: str) -> list[str]:
    """The apps that have a file ``<part>.py``, in alphabetical order; none of them is imported."""
    return sorted(app for app, folder in _folders().items() if part in {module.name for module in iter_modules([folder])})


def root() -> str:
    """The folder that holds `apps`, which Python must find to run one."""
    return str(Path(next(iter(_folders().values()))).parents[1])


def _folders() -> dict[str, str]:
    """The folder of each app by the app's name."""
    if find_spec("apps") is None:                        # the command's own path has neither the current folder nor the checkout
        places = str(Path.cwd()), str(Path(hpcai.__file__).parents[1])
        sys.path += [place for place in places if place not in sys.path]
    roots = import_module("apps").__path__ if find_spec("apps") else []
    found = ((app, f"{root}/{app.name}") for root in roots for app in iter_modules([root]))
    return {app.name: folder for app, folder in found if app.ispkg and app.name.isidentifier()}
