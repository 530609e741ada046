"""Lazy imports: modules of a package, so that reading settings never imports torch, and optional packages."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from hpcai.errors import MissingExtraError


def attach(package: str, modules: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], list[str]]:
    """Return ``__getattr__`` and ``__all__`` of ``package``; ``modules`` maps each module to the public names that it defines.

    A module must not have a name that it exports: once imported, the submodule would hide that attribute of the package.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(module_of))}")
        return getattr(import_module(module_of[name], package), name)

    return __getattr__, list(module_of)


def import_optional(module: str, purpose: str, extra: str) -> Any:
    """Import a module of an optional package, which ``extra`` installs. Raises MissingExtraError: "structures need gemmi: pip
    install ..." if ``purpose`` is "structures need"."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{purpose} {module.partition('.')[0]}: pip install 'hpcai-suite[{extra}]'") from error
