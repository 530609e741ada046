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
    """

    def __init__(self, model: nn.Module, cfg: StepConfig) -> None:
        self.cfg = cfg
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        decayed, kept = _split(self.names, cfg)
        groups = [{"params": part, "weight_decay": decay} for part, decay in ((decayed, cfg.weight_decay), (kept, 0.0)) if part]
        # Fused kernels exist for the CPU, CUDA and a few others; torch says so itself where they do not.
        if cfg.optimizer == "sgd":
            self.inner: torch.optim.Optimizer = torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=True)
        else:
            self.inner = torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, fused=True)
        self._decays = [group["weight_decay"] for group in self.inner.param_groups]
        device = next(iter(self.names)).device
        self._scale = torch.ones((), device=device)

    def step(self, lr: float, skip: Tensor) -> None:
        inside = self.cfg.optimizer == "sgd" and self.cfg.lr_in_momentum
        factor = lr / self.cfg.lr
        for group, decay in zip(self.inner.param_groups, self._decays):
            group["lr"] = self.cfg.lr if inside else lr
            group["weight_decay"] = decay * factor if inside else decay
        # The protocol of torch.amp.GradScaler: fused kernels divide by grad_scale and return at once when found_inf is 1.
        self.inner.grad_scale = self._scale.fill_(1.0 / factor if factor else torch.inf) if inside else None  # type: ignore[attr-defined]
        self.inner.found_inf = skip  # type: ignore[attr-defined]
        self.inner.step()

    def state(self) -> dict[str, Tensor]:
        """Moments and counters by ``<parameter>.<what>``; empty before the first step."""
        return {
            f"{name}.{what}": value
            for parameter, name in self.names.items()
            for what, value in self.inner.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def allocate(self, what: str, parameter: str, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Room for one entry of ``state()``, to load into."""
        target = {name: p for p, name in self.names.items()}[parameter]
        like = target.detach().to(dtype) if size == target.size() else torch.zeros(size, dtype=dtype, device=target.device)
        self.inner.state[target][what] = torch.zeros_like(like)
        return self.inner.state[target][what]


def _split(names: dict[nn.Parameter, str], cfg: StepConfig) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    if not names:
        raise ConfigError("the model has no parameter to train")
    for pattern in cfg.decay_names if cfg.weight_decay else ():
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            raise ConfigError(
                f"step.decay_names: {pattern!r} matches no parameter; the model has {', '.join(list(names.values())[:20])}"
            )
    decays = [bool(cfg.weight_decay) and any(fnmatchcase(name, pattern) for pattern in cfg.decay_names) for name in names.values()]
    return [p for p, d in zip(names, decays) if d], [p for p, d in zip(names, decays) if not d]
