"""Packages that not every data set needs."""

from importlib import import_module
from typing import Any

from hpcai.errors import MissingExtraError


def needed(module: str, purpose: str, extra: str) -> Any:
    """A module of such a package. Raises MissingExtraError, which says how to get it, where it is not installed."""
    try:
        return import_module(module)
    except ImportError as problem:
        raise MissingExtraError(f"{purpose} needs {module}: pip install 'hpcai-suite[{extra}]'") from problem
