"""Exponential moving average of the weights (Polyak and Juditsky 1992, with the usual geometric weights)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """a = decay*a + (1 - decay)*w after every step, started at the first weights. None as ``decay``: the weights themselves."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self.decay = decay
        self._live = [t for t in model.state_dict(keep_vars=True).values() if decay is not None and t.is_floating_point()]
        self._names = [n for n, t in model.state_dict().items() if decay is not None and t.is_floating_point()]
        self._mean = [t.detach().clone() for t in self._live]

    @torch.no_grad()
    def update(self) -> None:
        if self.decay is not None:
            torch._foreach_lerp_(self._mean, [t.detach() for t in self._live], 1.0 - self.decay)

    def state(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._mean))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the average; outside, what it was."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for live, mean in zip(self._live, self._mean):
            live.data, mean.data = mean.data, live.data
