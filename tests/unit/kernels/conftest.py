"""Substitutes of the Triton kernels, as if every tensor were on a GPU."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hpcai import kernels
from hpcai.kernels import triton_support

Calls = list[tuple[str, Any]]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Calls]:
    """``kernel_calls(module, name=reference, ...)`` replaces functions of ``hpcai.kernels.<module>_triton``, and returns the list
    of their calls: (name, dtype of the first argument)."""
    calls: Calls = []
    monkeypatch.setattr(triton_support, "is_supported", lambda x: True)

    def replace(module: str, **references: Callable[..., Any]) -> Calls:
        substitute = ModuleType(module)
        for name, reference in references.items():

            def call(x: Any, *args: Any, name: str = name, reference: Callable[..., Any] = reference) -> Any:
                calls.append((name, x.dtype))
                return reference(x, *args)

            setattr(substitute, name, call)
        monkeypatch.setattr(kernels, f"{module}_triton", substitute, raising=False)
        return calls

    return replace
