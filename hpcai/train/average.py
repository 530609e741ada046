"""An exponential moving average of the weights (Polyak and Juditsky 1992)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce_
from hpcai.parallel.replicate import GradientSums
from hpcai.parallel.rows import Share, placed
from hpcai.parallel.shard import FullySharded
from hpcai.settings import StepConfig
from hpcai.train.optim import Optimizer


class Average:
    """a += (1 - step.average)*(w - a) after every step, from the first weights on; without ``step.average`` the weights themselves.

    The optimizer averages the parameters in the pass that updates them; the floating-point buffers are averaged here.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, sums: GradientSums | FullySharded, cfg: StepConfig) -> None:
        self.cfg, self.optimizer, self.sums = cfg, optimizer, sums
        kept = model.state_dict(keep_vars=True).items()
        self._live = {n: b for n, b in kept if not isinstance(b, nn.Parameter) and b.is_floating_point()}
        live = self._live.items() if cfg.average is not None else ()
        self._mean = {name: placed(buffer.detach().clone(), buffer) for name, buffer in live}

    @torch.no_grad()
    def update(self) -> None:
        if self._mean:
            change = torch._foreach_sub(list(self._live.values()), self.buffers)
            torch._foreach_add_(self.buffers, torch._foreach_mul(change, self.optimizer.take))

    def state(self) -> dict[str, Tensor | Share]:
        return {**self.optimizer.averages(), **self._mean}

    @property
    def buffers(self) -> list[Tensor]:
        """The averages of the buffers, in place."""
        return list(self._mean.values())

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model holds the average, with level statistics (``level``); afterwards its weights are what they were. All
        processes that train call it together. Memory stays where it is, so that captured graphs go on.
        """
        self.level()
        rows = [(s.row.weights, s.weights, s.average) for s in self.optimizer.states] if self.cfg.average is not None else []
        pairs = [(live, live.clone() if live is full else full, mean) for live, full, mean in rows]
        buffers = [(live, live.clone(), self._mean.get(name)) for name, live in self._live.items()]
        self._put([(live, mean) for live, _, mean in pairs + buffers if mean is not None], shared=bool(pairs))
        try:
            yield
        finally:
            self._put([(live, before) for live, before, _ in pairs + buffers], shared=bool(pairs))

    @torch.no_grad()
    def level(self) -> None:
        """Set running statistics, and their averages, to their means over all copies, in one message. Training does not read them;
        an evaluation or a checkpoint does, and then sees the samples of all copies and not of one."""
        axis, kept = self.sums.mesh["replicate"], [*self._live.values(), *self._mean.values()]
        if axis.size == 1 or not kept:
            return
        flat = all_reduce_(torch.cat([tensor.reshape(-1).to(self.optimizer.lr.dtype) for tensor in kept]), axis).div_(axis.size)
        for tensor, value in zip(kept, flat.split([tensor.numel() for tensor in kept])):
            tensor.copy_(value.view(tensor.shape))

    @torch.no_grad()
    def _put(self, pairs: list[tuple[Tensor, Tensor]], shared: bool) -> None:
        self.sums.settle()
        for live, value in pairs:
            live.copy_(value)
        if shared:
            self.sums.spread()
            self.sums.settle()
