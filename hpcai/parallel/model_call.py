"""Losses and metrics cut at the place where they call their model, whose parts are on several processes.

``function(model, batch)`` is pure and calls its model once. It runs twice: with a stand-in that ends it where it calls the model,
and with one that gives what the model would have given. All else of a stand-in is the model's own.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hpcai.errors import ConfigError

ContextFactory = Callable[[], AbstractContextManager[Any]]


@dataclass
class ModelCall:
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def shapes(self) -> Any:
        """What decides the shapes of all that the model computes: those of its tensors, and integers and names by value."""
        return _shapes((self.args, self.kwargs))

    @property
    def has_grad_args(self) -> bool:
        """Whether other arguments than the first depend on weights."""
        return any(tensor.requires_grad for tensor in _tensors((self.args[1:], self.kwargs)))


def capture_call(function: Callable[..., Any], model: nn.Module, batch: Any, context: ContextFactory) -> ModelCall:
    """What ``function(model, batch)`` calls the model with, within ``around()``. Raises ConfigError where it never does."""

    def capture(*args: Any, **words: Any) -> Any:
        raise _CallCaptured(ModelCall(args, words))

    try:
        with context():
            function(_ModelProxy(model, capture), batch)
    except _CallCaptured as captured:
        if not captured.call.args:
            raise ConfigError("a loss or metric gives the model no positional argument; stages of a pipeline need one") from None
        return captured.call
    raise ConfigError("a loss or metric never calls the model; stages of a pipeline need one call")


def resume_after(function: Callable[..., Any], model: nn.Module, batch: Any, context: ContextFactory, output: Any) -> Any:
    """What ``function(model, batch)`` returns where the model returns ``output``. Raises ConfigError at a second call."""
    count = 0

    def replay(*_: Any, **__: Any) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            raise ConfigError("a loss or metric calls the model more than once; stages of a pipeline need one call")
        return output

    with context():
        return function(_ModelProxy(model, replay), batch)


class _CallCaptured(BaseException):
    """Ends a function where it calls its model, also one that catches every Exception."""

    def __init__(self, call: ModelCall) -> None:
        self.call = call


class _ModelProxy:
    """A model whose call is another; all else is its own."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self._model, self._call = model, call

    def __call__(self, *args: Any, **words: Any) -> Any:
        return self._call(*args, **words)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (dict, tuple, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(value)


def _shapes(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tuple(tree.shape), tree.dtype
    if isinstance(tree, dict):
        return tuple((name, _shapes(value)) for name, value in tree.items())
    if isinstance(tree, (tuple, list)):
        return tuple(_shapes(value) for value in tree)
    return tree if isinstance(tree, (int, str, type(None))) else type(tree)
