"""Functions that torch.compile leaves as they are, such as exchanges between processes.

torch's own mark (``torch.compiler.disable``) imports the compiler, a second and 10,000 file operations of every process, though
most processes never compile. This one imports nothing.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def disable_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which is never traced, with all that it calls: a compiled one that comes to it is in two parts there."""
    frames: Any = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return torch.compiler.disable(function)
    apart: Callable[P, R] | None = None

    @wraps(function)
    def call(*args: P.args, **words: P.kwargs) -> R:
        nonlocal apart
        if "torch._dynamo" not in sys.modules:
            return function(*args, **words)
        if apart is None:
            apart = torch.compiler.disable(function)
        return apart(*args, **words)

    # What the compiler looks for in a function that it meets; and it is not to begin with the frame of ``call`` itself.
    marks: Any = call
    marks._torchdynamo_disable, marks._torchdynamo_disable_msg, marks._torchdynamo_disable_recursive = True, None, True
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(marks.__code__, skipped)
    return call
