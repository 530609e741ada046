"""Apps by name: what one of them declares, in a module of its folder."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import hpcai


def every() -> list[str]:
    """Names of all apps of the checkout; none where there is no checkout."""
    if find_spec("apps") is None:  # the command's own path has neither the current folder nor the checkout
        sys.path += [str(Path.cwd()), str(Path(hpcai.__file__).parents[1])]
    places = import_module("apps").__path__ if find_spec("apps") else []
    return [app.name for app in iter_modules(places) if app.ispkg]


def names(part: str) -> list[str]:
    """Apps that have the module ``part``."""
    return [name for name in every() if find_spec(f"apps.{name}.{part}")]


def find(name: str, part: str) -> ModuleType | None:
    """The module ``apps.<name>.<part>``, if that app has one. Only folders of ``apps`` are ever imported."""
    return import_module(f"apps.{name}.{part}") if name in names(part) else None
