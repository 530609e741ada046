"""Split a loss or metric at its model call, for a model whose stages are on several ranks.

``function(model, batch)`` is pure and calls its model once. It runs twice, with a proxy of the model: the first proxy captures the
arguments and ends the function, the second returns the model's output. All other attributes are the model's own.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hpcai.errors import ConfigError

ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclass
class ModelCall:
    """The arguments of a model call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def shapes(self) -> Any:
        """The arguments that determine all shapes in the model: shapes and dtypes of tensors, values of integers and strings."""
        return _shapes((self.args, self.kwargs))

    @property
    def has_grad_args(self) -> bool:
        """Whether an argument other than the first requires a gradient."""
        return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((self.args[1:], self.kwargs)))


class NoCallError(ConfigError):
    """A function does not call its model. ``result``: What it returned."""

    def __init__(self, result: Any) -> None:
        super().__init__("a loss or metric never calls the model; pipeline stages need one call")
        self.result = result


def capture_call(function: Callable[..., Any], model: nn.Module, batch: Any, context: ContextFactory) -> ModelCall:
    """Return the model call of ``function(model, batch)``, run under ``context()``. Raises NoCallError if there is none."""

    def capture(*args: Any, **kwargs: Any) -> Any:
        raise _CallCaptured(ModelCall(args, kwargs))

    try:
        with context():
            result = function(_ModelProxy(model, capture), batch)
    except _CallCaptured as captured:
        (call,) = captured.args
        if not call.args:
            raise ConfigError("a loss or metric calls the model without a positional argument; pipeline stages need one") from None
        return call
    raise NoCallError(result)


def resume_after(function: Callable[..., Any], model: nn.Module, batch: Any, context: ContextFactory, output: Any) -> Any:
    """Return ``function(model, batch)`` for a model that returns ``output``. Raises ConfigError at a second call."""
    count = 0

    def replay(*_: Any, **__: Any) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            raise ConfigError("a loss or metric calls the model more than once; pipeline stages need one call")
        return output

    with context():
        return function(_ModelProxy(model, replay), batch)


class _CallCaptured(BaseException):
    """Ends a function at its model call, even if it catches every Exception. Its argument is the ``ModelCall``."""


class _ModelProxy:
    """A model with a replaced call; all other attributes are its own."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, dict):
        return tuple((name, _shapes(value)) for name, value in tree.items())
    if isinstance(tree, (tuple, list)):
        return tuple(_shapes(value) for value in tree)
    return tree if isinstance(tree, (int, str, type(None))) else type(tree)
