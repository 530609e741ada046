"""Package names that import their module on first use, so that reading settings never imports torch."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy(package: str, names: dict[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """``__getattr__`` and ``__all__`` of ``package``, whose ``names`` map each public name to the module that holds it.

    A module must not bear the name of what it exports: on second use the submodule would stand in its place.
    """

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(names))}")
        return getattr(import_module(names[name], package), name)

    return __getattr__, list(names)
