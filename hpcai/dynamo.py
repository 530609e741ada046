"""Functions that ``torch.compile`` does not trace, such as communication.

``torch.compiler.disable`` imports the compiler, which costs every process a second and 10,000 file operations, though most never
compile. This decorator imports nothing.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def disable_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: ``function`` and everything that it calls run eagerly. A compiled caller has a graph break there."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return torch.compiler.disable(function)
    disabled: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    # The attributes of a function that the compiler reads; and it must not trace the frame of ``call`` itself.
    marks: Any = call
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg, marks._torchdynamo_disable_recursive = True, None, True
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(marks.__code__, skipped)
    return call
