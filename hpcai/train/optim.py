"""Optimizers: each updates a row in one fused pass over weights, gradient, moments and average, and leaves all of them as they are
when a device scalar says so. Nothing is read from the device, so that a step can be captured."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_gather_object, all_reduce_
from hpcai.dist.mesh import Axis
from hpcai.errors import ConfigError
from hpcai.kernels import fused_optimizer
from hpcai.parallel.rows import ALONE, Row, Share, held
from hpcai.settings import StepConfig

_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "lamb": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_MOMENTS |= {"adamw": _MOMENTS["adam"], "lars": _MOMENTS["sgd"]}


class _State:
    """What an optimizer keeps for one row; ``segments``, ``lines`` and ``direction`` where it needs them (lamb, lars)."""

    segments: fused_optimizer.Segments
    lines: Tensor  # [parts] the parameters' lines in the table of norms
    direction: Tensor

    def __init__(self, row: Row, cfg: StepConfig) -> None:
        self.row = row
        wide = row.weights.dtype in (torch.float32, torch.float64)
        self._master = None if wide else row.weights.float()
        kept = torch.bfloat16 if cfg.moments == "bf16" else self.weights.dtype
        names = _MOMENTS[cfg.optimizer] if cfg.optimizer not in ("sgd", "lars") or cfg.momentum else ()
        self.moments = {name: torch.zeros_like(self.weights, dtype=kept) for name in names}
        self.average = self.weights.clone() if cfg.average is not None else None
        self.decay = cfg.weight_decay if row.decays else 0.0

    @property
    def weights(self) -> Tensor:
        """The weights in full precision."""
        return self.row.weights if self._master is None else self._master

    @property
    def low(self) -> Tensor | None:
        return None if self._master is None else self.row.weights


class Optimizer:
    """``step(scale, skip)`` updates the rows by ``scale`` times their gradients (None: 1) at the rate that ``set_rate`` set, unless
    ``skip`` is 1; all three are device scalars. An average takes the share ``take`` of the weights.

    sgd: the learning rate is inside the momentum, v = mu v + lr (g + wd w), w -= v (Keras), or outside it
    (torch). adamw: Loshchilov and Hutter 2019; adam: its weight decay is part of the gradient. lamb: You et al., ICLR 2020; lars:
    You, Gitman and Ginsburg 2017; both adapt the rate of the parameters that ``decay_names`` names, and of no others.
    Weights narrower than float32 have a float32 master copy here; that copy is updated, averaged and saved.
    """

    def __init__(self, rows: list[Row], cfg: StepConfig) -> None:
        if not rows:
            raise ConfigError("the model has no parameter to train")
        self.cfg = cfg
        self.states = [_State(row, cfg) for row in rows]
        first = self.states[0].weights
        self.lr = torch.zeros((), dtype=first.dtype, device=first.device)
        self.take = torch.full_like(self.lr, 1.0 - (cfg.average or 0.0))
        self.count = torch.zeros((), device=first.device)  # updates made
        self._seed = torch.zeros((), dtype=torch.int64, device=first.device)
        if cfg.optimizer in ("lamb", "lars"):  # a line per parameter in a table that is the same on all ranks that have parts of it
            names = sorted({part.name for row in rows for part in row.parts})
            line = {name: i for i, name in enumerate(names)}
            axes = {axis.name: axis for row in rows for axis in row.axes}
            self._divided = [(axes[name], self._lines(rows, axes[name], line)) for name in sorted(axes)]
            for state in self.states:
                parts, weights = state.row.parts, state.weights
                stretches = [(part.start, part.length) for part in parts]
                state.segments = fused_optimizer.Segments(stretches, weights.device, len(weights))
                state.lines = torch.tensor([line[part.name] for part in parts], dtype=torch.int64, device=weights.device)
                if cfg.optimizer == "lamb":
                    state.direction = torch.zeros_like(weights)
            self._table = torch.zeros((len(names), 2), dtype=first.dtype, device=first.device)

    def set_rate(self, lr: float) -> None:
        self.lr.fill_(lr)

    @torch.no_grad()
    def step(self, scale: Tensor | None, skip: Tensor) -> None:
        cfg = self.cfg
        self.count += 1 - skip
        self._seed.copy_(self.count)  # random bits of a step are the same however often it is tried, and after a resume
        present = [(state, gradient) for state in self.states if (gradient := state.row.gradient()) is not None]
        if cfg.optimizer in ("lamb", "lars"):
            self._adapted(present, scale, skip)
            return
        for state, gradient in present:
            if cfg.optimizer == "sgd":
                fused_optimizer.sgd_(
                    state.weights, gradient, state.moments.get("momentum_buffer"), lr=self.lr, scale=scale, skip=skip,
                    momentum=cfg.momentum, weight_decay=state.decay, lr_in_momentum=cfg.lr_in_momentum, nesterov=cfg.nesterov,
                    seed=self._seed, offset=state.row.first, **self._copies(state),
                )  # fmt: skip
            else:
                fused_optimizer.adam_(
                    state.weights, gradient, state.moments["exp_avg"], state.moments["exp_avg_sq"], lr=self.lr, step=self.count,
                    scale=scale, skip=skip, betas=cfg.betas, eps=cfg.eps, weight_decay=state.decay,
                    decoupled=cfg.optimizer == "adamw", seed=self._seed, offset=state.row.first, **self._copies(state),
                )  # fmt: skip

    def _copies(self, state: _State) -> dict[str, Any]:
        """What the pass that updates the weights also writes: narrow weights and their average."""
        return {"low": state.low, "average": state.average, "take": self.take}

    def _adapted(self, present: list[tuple[_State, Tensor]], scale: Tensor | None, skip: Tensor) -> None:
        """Update parameters at rates that their norms decide: a share's sums are added over the ranks that hold the others."""
        cfg, lars = self.cfg, self.cfg.optimizer == "lars"
        sums = []
        for state, gradient in present:
            if lars:
                sums.append(fused_optimizer.lars_norms(state.weights, gradient, state.segments, scale=scale))
                continue
            sums.append(
                fused_optimizer.lamb_direction_(
                    state.weights, gradient, state.moments["exp_avg"], state.moments["exp_avg_sq"], state.direction,
                    state.segments, step=self.count, scale=scale, skip=skip, betas=cfg.betas, eps=cfg.eps,
                    weight_decay=state.decay, seed=self._seed, offset=state.row.first,
                )
            )  # fmt: skip
        for (state, gradient), norms in zip(present, self._over_parts([state for state, _ in present], sums)):
            ratio = torch.ones_like(norms[:, 0])
            if state.row.decays:
                coefficient = cfg.trust if lars else 1.0
                ratio = fused_optimizer.trust_ratio(norms, weight_decay=state.decay, coefficient=coefficient, lars=lars)
            if lars:
                fused_optimizer.lars_(
                    state.weights, gradient, state.moments.get("momentum_buffer"), state.segments, ratio, lr=self.lr, scale=scale,
                    skip=skip, momentum=cfg.momentum, weight_decay=state.decay, seed=self._seed, offset=state.row.first,
                    **self._copies(state),
                )  # fmt: skip
            else:
                fused_optimizer.lamb_update_(
                    state.weights, state.direction, state.segments, ratio, lr=self.lr, skip=skip, **self._copies(state)
                )

    @staticmethod
    def _lines(rows: list[Row], axis: Axis, line: dict[str, int]) -> Tensor:
        """The lines of parameters whose parts lie along ``axis``."""
        found = sorted({line[part.name] for row in rows if axis in row.axes for part in row.parts})
        return torch.tensor(found, dtype=torch.int64, device=rows[0].weights.device)

    def _over_parts(self, states: list[_State], sums: list[Tensor]) -> list[Tensor]:
        """Sums per parameter over all ranks that hold parts of it, in one message for each axis."""
        if not self._divided:
            return sums
        self._table.zero_()
        for state, part in zip(states, sums):
            self._table.index_copy_(0, state.lines, part)
        for axis, lines in self._divided:
            self._table.index_copy_(0, lines, all_reduce_(self._table[lines], axis))
        return [self._table[state.lines] for state in states]

    def whole(self) -> dict[str, Tensor]:
        """The weights in full precision as the model has them, of rows that are not cut into shares."""
        rows = [(state.row.parts, state.weights) for state in self.states if state.row.cut.size == 1]
        return {part.name: part.whole(weights) for parts, weights in rows for part in parts}

    def weights(self) -> dict[str, Tensor | Share]:
        """The weights in full precision, by parameter."""
        return self._named(state.weights for state in self.states)

    def averages(self) -> dict[str, Tensor | Share]:
        """The average of the weights, by parameter; empty without one."""
        return self._named(state.average for state in self.states)

    def state(self) -> dict[str, Tensor | Share]:
        """Moments by ``<parameter>.<what>``, and ``step``, the number of updates made."""
        found: dict[str, Tensor | Share] = {"step": self.count}
        for what in _MOMENTS[self.cfg.optimizer]:
            moments = self._named(state.moments.get(what) for state in self.states)
            found |= {f"{name}.{what}": value for name, value in moments.items()}
        return found

    def _named(self, rows: Iterable[Tensor | None]) -> dict[str, Tensor | Share]:
        pairs = [(state.row, row) for state, row in zip(self.states, rows) if row is not None]
        return {part.name: held(part, row, of) for of, row in pairs for part in of.parts}

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the master weights to what the model computes with, after they were loaded."""
        for state in self.states:
            if state.low is not None:
                state.low.copy_(state.weights)


def decayed(model: nn.Module, cfg: StepConfig, stages: Axis = ALONE) -> set[str]:
    """The names of parameters that ``cfg.decay_names`` matches. Raises ConfigError for a pattern that matches none on any of the
    ranks along ``stages``."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    patterns = cfg.decay_names if cfg.weight_decay or cfg.optimizer in ("lamb", "lars") else ()
    seen = all_gather_object([any(fnmatchcase(name, pattern) for name in names) for pattern in patterns], stages)
    for pattern, *matches in zip(patterns, *seen):
        if not any(matches):
            raise ConfigError(f"step.decay_names: {pattern!r} matches no parameter; the model has {', '.join(names[:20])}")
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
