"""Finding what apps declare: the file ``apps/<name>/<part>.py`` is the module ``apps.<name>.<part>``.

The packages ``apps`` and ``data_prep`` are those that Python finds by itself, in the current folder, or in the checkout. A wheel
holds its own in ``hpcai/suite``: they come first, as they fit the ``hpcai`` beside them, and those of the current folder are added.
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
    """The module ``apps.<name>.<part>``, or None where there is no such app or it has no such file.

    ``name`` may come from a file that somebody else wrote: it is only compared with the apps that are there.
    """
    return import_module(f"apps.{name}.{part}") if name in with_part(part) else None


def require_module(name: str, part: str) -> ModuleType:
    """The module ``apps.<name>.<part>``. Raises ConfigError, which lists the apps that have it."""
    module = find_module(name, part)
    if module is None:
        what = f"apps/{name} has no file {part}.py" if name in list_apps() else f"there is no app {name!r}"
        raise ConfigError(f"{what}; expected one of {', '.join(with_part(part)) or 'those in apps/ of a checkout, which is not here'}")
    return module


def list_apps() -> list[str]:
    """All apps, in alphabetical order; none where there are neither a checkout nor those of a wheel."""
    return sorted(_app_folders())


def with_part(part: str) -> list[str]:
    """The apps that have a file ``<part>.py``, in alphabetical order; none of them is imported."""
    return sorted(app for app, app_folder in _app_folders().items() if part in {module.name for module in iter_modules([app_folder])})


def app_folder(name: str) -> Path:
    """Where the files of an app are. Raises KeyError where there is no such app."""
    return Path(_app_folders()[name])


def package_folders(package: str) -> list[str]:
    """The folders of ``apps`` or ``data_prep``, which can be imported from now on, also by processes that are given this path of
    modules; none where there is no such package."""
    if SUITE.is_dir():
        sys.path[:] = dict.fromkeys([str(SUITE), *sys.path, str(Path.cwd())])
    elif find_spec(package) is None:                     # the command's own path has neither the current folder nor the checkout
        sys.path[:] = dict.fromkeys([*sys.path, str(Path.cwd()), str(Path(hpcai.__file__).parents[1])])
    if find_spec(package) is None:
        return []
    found = import_module(package)
    if not hasattr(found, "__path__"):
        raise ConfigError(f"{found.__file__}: another module has the name {package}; start from another folder, or rename it")
    return list(found.__path__)


def apps_root() -> str:
    """The folder that holds `apps`, which Python must find to run one."""
    return str(Path(next(iter(_app_folders().values()))).parents[1])


def _app_folders() -> dict[str, str]:
    """The folder of each app by the app's name; the first of two with one name, as an import has it."""
    found = [(app, f"{root}/{app.name}") for root in package_folders("apps") for app in iter_modules([root])]
    return {app.name: app_folder for app, app_folder in reversed(found) if app.ispkg and app.name.isidentifier()}
