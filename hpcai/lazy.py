"""Modules that are imported on first use: those of a package, so that reading settings never imports torch, and optional ones."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from hpcai.errors import MissingExtraError


def attach(package: str, modules: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], list[str]]:
    """``__getattr__`` and ``__all__`` of ``package``; ``modules`` maps each module to the public names that it holds.

    A module must not bear the name of what it exports: on second use the submodule would stand in its place.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home))}")
        return getattr(import_module(home[name], package), name)

    return __getattr__, list(home)


def import_optional(module: str, purpose: str, extra: str) -> Any:
    """A module of an optional package, which ``extra`` brings. Raises MissingExtraError: "structures need gemmi: pip install ..."
    where ``purpose`` is "structures need"."""
    try:
        return import_module(module)
    except ImportError as problem:
        raise MissingExtraError(f"{purpose} {module.partition('.')[0]}: pip install 'hpcai-suite[{extra}]'") from problem
