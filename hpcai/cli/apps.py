"""Discovery of apps: the file ``apps/<name>/<part>.py`` is the module ``apps.<name>.<part>``.

The packages ``apps`` and ``data_prep`` are found on Python's path, in the current folder, or in the checkout. A wheel contains its
own in ``hpcai/suite``: they come first, since they match the installed ``hpcai``, and those of the current folder are added.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import hpcai
from hpcai.errors import ConfigError
from hpcai.programs import SUITE


def find_module(name: str, part: str) -> ModuleType | None:
    """Return the module ``apps.<name>.<part>``, or None if the app or its file does not exist.

    ``name`` may come from an untrusted file: it is only compared with the names of existing apps.
    """
    return import_module(f"apps.{name}.{part}") if name in with_part(part) else None


def require_module(name: str, part: str) -> ModuleType:
    """Return the module ``apps.<name>.<part>``. Raises ConfigError, which lists the apps that have it."""
    module = find_module(name, part)
    if module is None:
        problem = f"apps/{name} has no file {part}.py" if name in list_apps() else f"there is no app {name!r}"
        raise ConfigError(f"{problem}; expected one of {', '.join(with_part(part)) or 'those of a checkout, which is missing'}")
    return module


def list_apps() -> list[str]:
    """Return the names of all apps, in alphabetical order; empty if there is neither a checkout nor a wheel with apps."""
    return sorted(_app_folders())


def with_part(part: str) -> list[str]:
    """Return the apps that have a file ``<part>.py``, in alphabetical order, without importing them."""
    return sorted(app for app, path in _app_folders().items() if part in {module.name for module in iter_modules([path])})


def app_folder(name: str) -> Path:
    """Return the folder of an app. Raises KeyError if there is no such app."""
    return Path(_app_folders()[name])


def package_folders(package: str) -> list[str]:
    """Return the folders of the package ``apps`` or ``data_prep``, or an empty list, and make it importable: here through
    ``sys.path``, and in child processes that receive this path."""
    suite, checkout = [str(SUITE)] if SUITE.is_dir() else [], str(Path(hpcai.__file__).parents[1])
    # An installed command has neither the current folder nor the checkout on its path.
    sys.path[:] = dict.fromkeys([*suite, *sys.path, str(Path.cwd()), checkout])
    if find_spec(package) is None:
        return []
    module = import_module(package)
    if not hasattr(module, "__path__"):
        raise ConfigError(f"{module.__file__}: another module has the name {package}; start from another folder, or rename it")
    return list(module.__path__)


def _app_folders() -> dict[str, str]:
    """Return the folder of each app by name; of two with one name the first, as in an import."""
    folders = [(app, f"{parent}/{app.name}") for parent in package_folders("apps") for app in iter_modules([parent])]
    return {app.name: folder for app, folder in reversed(folders) if app.ispkg and app.name.isidentifier()}
