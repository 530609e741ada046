"""An exponential moving average of the weights (Polyak and Juditsky 1992)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_reduce_
from hpcai.parallel.data_parallel import GradientReducer
from hpcai.parallel.fsdp import FSDP
from hpcai.parallel.sharding import FlatShard, with_spec
from hpcai.settings import StepConfig
from hpcai.train.optim import Optimizer


class WeightAverage:
    """Average of the weights: a += (1 - step.ema_decay)*(w - a) after each step, from the initial weights. Without that setting
    it is the weights themselves. The optimizer averages the parameters in the pass that updates them. Floating-point buffers are
    averaged here."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, reducer: GradientReducer | FSDP, cfg: StepConfig) -> None:
        self.cfg, self.optimizer, self.reducer = cfg, optimizer, reducer
        state = model.state_dict(keep_vars=True).items()
        self._buffers = {n: b for n, b in state if not isinstance(b, nn.Parameter) and b.is_floating_point()}
        live = self._buffers.items() if cfg.ema_decay is not None else ()
        self._averages = {name: with_spec(buffer.detach().clone(), buffer) for name, buffer in live}

    @torch.no_grad()
    def update(self) -> None:
        if self._averages:
            averages = list(self._averages.values())
            change = torch._foreach_sub(list(self._buffers.values()), averages)
            torch._foreach_add_(averages, torch._foreach_mul(change, self.optimizer.take))

    def state(self) -> dict[str, Tensor | FlatShard]:
        return {**self.optimizer.averages(), **self._averages}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager: the model holds the averaged weights, with synchronised buffers, and gets its own back afterwards. All
        training ranks enter it together. Weights are copied into the same memory, so captured CUDA graphs stay valid."""
        self.sync_buffers()
        states = self.optimizer.states if self.cfg.ema_decay is not None else []
        rows = [(s.flat_param.weights, s.weights, s.average) for s in states]
        saved = [(live, live.clone() if live is full else full, mean) for live, full, mean in rows]
        buffers = [(live, live.clone(), self._averages.get(name)) for name, live in self._buffers.items()]
        self._load([(live, mean) for live, _, mean in saved + buffers if mean is not None], shared=bool(saved))
        try:
            yield
        finally:
            self._load([(live, before) for live, before, _ in saved + buffers], shared=bool(saved))

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Set running statistics and their averages to their means over all replicas, in one all-reduce. Training does not read
        them. An evaluation or a checkpoint does, and would otherwise see the samples of one replica only."""
        axis, buffers = self.reducer.mesh["replicate"], [*self._buffers.values(), *self._averages.values()]
        if axis.size == 1 or not buffers:
            return
        flat = all_reduce_(torch.cat([tensor.reshape(-1).to(self.optimizer.lr.dtype) for tensor in buffers]), axis).div_(axis.size)
        for tensor, value in zip(buffers, flat.split([tensor.numel() for tensor in buffers])):
            tensor.copy_(value.view(tensor.shape))

    @torch.no_grad()
    def _load(self, pairs: list[tuple[Tensor, Tensor]], shared: bool) -> None:
        self.reducer.wait()
        for live, value in pairs:
            live.copy_(value)
        if shared:
            self.reducer.all_gather_parameters()
            self.reducer.wait()
