"""Optimizers. Each updates in one fused pass over weight, gradient and moments, and skips it when told by a device scalar."""

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from hpcai.errors import ConfigError
from hpcai.settings import StepConfig


class Optimizer:
    """``step(lr, skip)`` updates the parameters unless the device scalar ``skip`` is 1. No host read.

    SGD with the learning rate inside the momentum, v = mu v + lr (g + wd w), w -= v (Keras; MLPerf HPC CosmoFlow): with the
    constant s = peak learning rate and u = v/s this is u = mu u + (lr/s) (g + wd w), w -= s u, the usual fused update at
    rate s of a gradient scaled by lr/s. A rate of zero needs no special case.

    Weights, gradients and moments are updated as one row of numbers each, in the order of memory: torch's fused kernels copy
    whatever is not contiguous, channels-last weights among them, and are then slower than the plain ones.
    """

    def __init__(self, model: nn.Module, cfg: StepConfig) -> None:
        self.cfg = cfg
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._rows = {name: nn.Parameter(_row(p.detach(), p)) for name, p in self.parameters.items()}
        decayed, kept = _split(self.parameters, cfg)
        parts = ((decayed, cfg.weight_decay), (kept, 0.0))
        groups = [{"params": [self._rows[name] for name in names], "weight_decay": decay} for names, decay in parts if names]
        # Fused kernels exist for the CPU, CUDA and a few others; torch says so itself where they do not.
        if cfg.optimizer == "sgd":
            self.inner: torch.optim.Optimizer = torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=True)
        else:
            self.inner = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)
        self._decays = [group["weight_decay"] for group in self.inner.param_groups]
        self._scale = torch.ones((), device=next(iter(self._rows.values())).device)

    def step(self, lr: float, skip: Tensor) -> None:
        inside = self.cfg.optimizer == "sgd" and self.cfg.lr_in_momentum
        factor = lr / self.cfg.lr
        for group, decay in zip(self.inner.param_groups, self._decays):
            group["lr"] = self.cfg.lr if inside else lr
            group["weight_decay"] = decay * factor if inside else decay
        for name, parameter in self.parameters.items():
            row = self._rows[name]
            if row.data_ptr() != parameter.data_ptr():  # somebody gave the parameter other memory
                row.data = _row(parameter.detach(), parameter)
            row.grad = None if parameter.grad is None else _row(parameter.grad, parameter)
        # The protocol of torch.amp.GradScaler: fused kernels divide by grad_scale and return at once when found_inf is 1.
        self.inner.grad_scale = self._scale.fill_(1.0 / factor if factor else torch.inf) if inside else None  # type: ignore[attr-defined]
        self.inner.found_inf = skip  # type: ignore[attr-defined]
        self.inner.step()

    def state(self) -> dict[str, Tensor]:
        """Moments, in the shape of their parameters, and counters by ``<parameter>.<what>``; empty before the first step."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for what, value in self.inner.state.get(self._rows[name], {}).items():
                if isinstance(value, Tensor):
                    found[f"{name}.{what}"] = _shaped(value, parameter) if value.ndim else value
        return found

    def allocate(self, what: str, parameter: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Room for one entry of ``state()``, to load into."""
        target, row = self.parameters[parameter], self._rows[parameter]
        value = torch.zeros(row.shape if len(size) else (), dtype=dtype, device=row.device)
        self.inner.state[row][what] = value
        return _shaped(value, target) if value.ndim else value


def _row(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """The numbers of ``tensor`` in the order in which ``parameter`` lies in memory: a view, unless it lies otherwise."""
    if tensor.stride() != parameter.stride():
        tensor = torch.empty_like(parameter, requires_grad=False).copy_(tensor)
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def _shaped(row: Tensor, parameter: nn.Parameter) -> Tensor:
    return torch.as_strided(row, parameter.size(), parameter.stride())


def _split(parameters: dict[str, nn.Parameter], cfg: StepConfig) -> tuple[list[str], list[str]]:
    """Names of the parameters that decay, and of the others."""
    if not parameters:
        raise ConfigError("the model has no parameter to train")
    for name, parameter in parameters.items():
        if sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride())) + 1 != parameter.numel():
            raise ConfigError(
                f"parameter {name} has gaps in memory or repeats itself (strides {parameter.stride()}); make it contiguous"
            )
    patterns = cfg.decay_names if cfg.weight_decay else ()
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in parameters):
            raise ConfigError(
                f"step.decay_names: {pattern!r} matches no parameter; the model has {', '.join(list(parameters)[:20])}"
            )
    decays = [any(fnmatchcase(name, pattern) for pattern in patterns) for name in parameters]
    return [n for n, d in zip(parameters, decays) if d], [n for n, d in zip(parameters, decays) if not d]
