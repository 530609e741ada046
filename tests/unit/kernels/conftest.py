"""Kernels that are stood in for, as if every tensor lay on a GPU."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hpcai import kernels
from hpcai.kernels import triton_support

Asked = list[tuple[str, Any]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Asked]:
    """``asked(module, name=twin, ...)``: functions of ``hpcai.kernels.<module>_triton`` are these twins; what was asked of them, as
    (name, dtype of the first argument)."""
    found: Asked = []
    monkeypatch.setattr(triton_support, "is_supported", lambda x: True)

    def replace(module: str, **twins: Callable[..., Any]) -> Asked:
        double = ModuleType(module)
        for name, twin in twins.items():

            def noted(x: Any, *words: Any, name: str = name, twin: Callable[..., Any] = twin) -> Any:
                found.append((name, x.dtype))
                return twin(x, *words)

            setattr(double, name, noted)
        monkeypatch.setattr(kernels, f"{module}_triton", double, raising=False)
        return found

    return replace
