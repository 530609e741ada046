"""Imports of packages that only some data sets need."""

from importlib import import_module
from typing import Any

from hpcai.errors import MissingExtraError


def import_extra(module: str, purpose: str, extra: str) -> Any:
    """Return an imported module of an optional package. Raises MissingExtraError with the pip command if it is not installed."""
    try:
        return import_module(module)
    except ImportError as problem:
        raise MissingExtraError(f"{purpose} needs {module}: pip install 'hpcai-suite[{extra}]'") from problem
