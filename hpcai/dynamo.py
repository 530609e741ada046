"""Functions that ``torch.compile`` does not trace, such as communication; and whether the compiler or ``torch.func`` is at work.

``torch.compiler.disable`` imports the compiler, which costs every process a second and 10,000 file operations, though most never
compile. This decorator imports nothing.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from hpcai.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` (grad, vmap, jvp) is active, outside of ``torch.compile``."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def needs_plain_derivatives() -> bool:
    """Whether ``torch.compile`` is tracing, or ``torch.func`` does more than the one grad that DimeNet++ takes for its forces."""
    if torch.compiler.is_compiling() or (innermost := torch._C._functorch.peek_interpreter_stack()) is None:
        return torch.compiler.is_compiling()
    return innermost.level() > 1 or innermost.key() != torch._C._functorch.TransformType.Grad


class UntransformedFunction(torch.autograd.Function):
    """A function that communicates or rounds to FP8. Transforms of ``torch.func`` raise ConfigError."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if is_transformed():
            raise ConfigError(f"torch.func cannot transform {cls.__name__}; transform a model without parallelize and FP8")
        return super().apply(*args)


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
