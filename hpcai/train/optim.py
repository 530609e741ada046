"""Optimizers that update a flat parameter in one fused pass over weights, gradient, moments and average, or change nothing if a
device scalar is set. Nothing is read from the device, so that a step can be captured."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import accumulate, groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.dist.collectives import all_gather_object, all_reduce_
from hpcai.dist.mesh import Axis
from hpcai.errors import ConfigError
from hpcai.kernels import fused_optimizer
from hpcai.parallel.sharding import ALONE, FlatParameter, FlatShard, local_view
from hpcai.settings import StepConfig
from hpcai.train.muon import MatrixGroup

_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "lamb": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_MOMENTS |= {"adagrad": ("sum",), "adamw": _MOMENTS["adam"], "lars": _MOMENTS["sgd"], "muon": _MOMENTS["sgd"]}
_MATRIX_DIMS = 2, 3  # a weight with 3 dims is a stack of matrices, such as those of experts


class _State:
    """The optimizer state of one flat parameter; LAMB and LARS also have ``segments``, ``table_indices`` and ``direction``.
    ``optimizer``: That of the settings, or AdamW for what Muon does not update."""

    segments: fused_optimizer.Segments
    table_indices: Tensor  # [parameters] indices into the table of norms
    direction: Tensor

    def __init__(self, flat_param: FlatParameter, cfg: StepConfig) -> None:
        self.flat_param = flat_param
        wide = flat_param.weights.dtype in (torch.float32, torch.float64)
        self._master = None if wide else flat_param.weights.float()
        dtype = torch.bfloat16 if cfg.moments == "bf16" else self.weights.dtype
        view = flat_param.views[0]
        is_matrix = len(view.spec.global_shape) in _MATRIX_DIMS and any(fnmatchcase(view.name, each) for each in cfg.muon_names)
        self.optimizer = "adamw" if cfg.optimizer == "muon" and not is_matrix else cfg.optimizer
        names = _MOMENTS[self.optimizer] if self.optimizer not in ("sgd", "lars") or cfg.momentum else ()
        self.moments = {name: torch.zeros_like(self.weights, dtype=dtype) for name in names}
        self.average = self.weights.clone() if cfg.ema_decay is not None else None
        self.decay = cfg.weight_decay if flat_param.decays else 0.0

    @property
    def weights(self) -> Tensor:
        """The master weights."""
        return self.flat_param.weights if self._master is None else self._master

    @property
    def low(self) -> Tensor | None:
        return None if self._master is None else self.flat_param.weights


class Optimizer:
    """An optimizer of flat parameters: ``step(scale, skip)`` updates them by ``scale`` times their gradients (None: 1) with the
    learning rate ``lr``, unless ``skip`` is 1. All three are device scalars. An average moves by the fraction ``take`` towards
    the weights. sgd: the learning rate is inside the momentum, v = mu v + lr (g + wd w), w -= v (Keras), or outside it (torch).
    adagrad: Duchi et al. 2011. adamw: Loshchilov and Hutter 2019; adam: its weight decay is part of the gradient. lamb: You et
    al., ICLR 2020; lars: You, Gitman and Ginsburg 2017; both adapt the rate of the parameters that ``decay_names`` matches, and
    of no others. muon: ``hpcai.train.muon``, with Nesterov momentum, and AdamW for all but the matrices that ``muon_names``
    matches. Weights narrower than float32 have a float32 master copy here, which is updated, averaged and saved."""

    def __init__(self, flat_params: list[FlatParameter], cfg: StepConfig) -> None:
        if not flat_params:
            raise ConfigError("the model has no parameter to train")
        self.cfg = cfg
        self.states = [_State(flat_param, cfg) for flat_param in flat_params]
        first = self.states[0].weights
        self.lr = torch.zeros((), dtype=first.dtype, device=first.device)
        self.take = torch.full_like(self.lr, 1.0 - (cfg.ema_decay or 0.0))
        self.count = torch.zeros((), device=first.device)  # number of updates
        self._seed = torch.zeros((), dtype=torch.int64, device=first.device)
        self._minus_one = torch.full_like(self.lr, -1.0)
        self.matrix_groups = _group_matrices([state for state in self.states if state.optimizer == "muon"], cfg.bucket_mb * 1e6)
        if cfg.optimizer in ("lamb", "lars"):  # a row per parameter, in the same order on all ranks with shards of it
            names = sorted({part.name for row in flat_params for part in row.views})
            index = {name: i for i, name in enumerate(names)}
            axes = {axis.name: axis for row in flat_params for axis in row.sharded_axes}
            self._sharded_axes: list[tuple[Axis, Tensor]] = []  # and the rows of the parameters that are sharded along each
            for _, axis in sorted(axes.items()):
                rows = sorted({index[part.name] for row in flat_params if axis in row.sharded_axes for part in row.views})
                self._sharded_axes.append((axis, torch.tensor(rows, dtype=torch.int64, device=first.device)))
            for state in self.states:
                parts, weights = state.flat_param.views, state.weights
                ranges = [(part.flat_offset, part.length) for part in parts]
                state.segments = fused_optimizer.Segments(ranges, weights.device, len(weights))
                state.table_indices = torch.tensor([index[part.name] for part in parts], dtype=torch.int64, device=weights.device)
                if cfg.optimizer == "lamb":
                    state.direction = torch.zeros_like(weights)
            self._table = torch.zeros((len(names), 2), dtype=first.dtype, device=first.device)

    @torch.no_grad()
    def step(self, scale: Tensor | None, skip: Tensor) -> None:
        cfg = self.cfg
        self.count += 1 - skip
        self._seed.copy_(self.count)  # a repeated or resumed step draws the same random bits
        present = [(state, gradient) for state in self.states if (gradient := state.flat_param.gradient()) is not None]
        if cfg.optimizer in ("lamb", "lars"):
            self._layerwise_step(present, scale, skip)
            return
        self._muon_step({state: gradient for state, gradient in present if state.optimizer == "muon"}, scale, skip)
        for state, gradient in present:
            if state.optimizer == "sgd":
                fused_optimizer.sgd_(
                    state.weights, gradient, state.moments.get("momentum_buffer"), lr=self.lr, scale=scale, found_inf=skip,
                    momentum=cfg.momentum, weight_decay=state.decay, lr_in_momentum=cfg.lr_in_momentum, nesterov=cfg.nesterov,
                    seed=self._seed, offset=state.flat_param.offset, **self._copies(state),
                )  # fmt: skip
            elif state.optimizer == "adagrad":
                fused_optimizer.adagrad_(
                    state.weights, gradient, state.moments["sum"], lr=self.lr, scale=scale, found_inf=skip, eps=cfg.eps,
                    weight_decay=state.decay, seed=self._seed, offset=state.flat_param.offset, **self._copies(state),
                )  # fmt: skip
            elif state.optimizer != "muon":
                fused_optimizer.adam_(
                    state.weights, gradient, state.moments["exp_avg"], state.moments["exp_avg_sq"], lr=self.lr, step=self.count,
                    scale=scale, found_inf=skip, betas=cfg.betas, eps=cfg.eps, weight_decay=state.decay,
                    decoupled=state.optimizer == "adamw", seed=self._seed, offset=state.flat_param.offset, **self._copies(state),
                )  # fmt: skip

    def _copies(self, state: _State) -> dict[str, Any]:
        """Return arguments of copies that the same pass updates: bf16 weights and the average."""
        return {"bf16_copy": state.low, "average": state.average, "average_rate": self.take}

    def _layerwise_step(self, present: list[tuple[_State, Tensor]], scale: Tensor | None, skip: Tensor) -> None:
        """Update parameters at rates that depend on their norms (LAMB, LARS); norms of sharded parameters are all-reduced."""
        cfg, lars = self.cfg, self.cfg.optimizer == "lars"
        sums = []
        for state, gradient in present:
            if lars:
                sums.append(fused_optimizer.lars_norms(state.weights, gradient, state.segments, scale=scale))
                continue
            sums.append(
                fused_optimizer.lamb_direction_(
                    state.weights, gradient, state.moments["exp_avg"], state.moments["exp_avg_sq"], state.direction,
                    state.segments, step=self.count, scale=scale, found_inf=skip, betas=cfg.betas, eps=cfg.eps,
                    weight_decay=state.decay, seed=self._seed, offset=state.flat_param.offset,
                )
            )  # fmt: skip
        if self._sharded_axes:  # sums over all ranks that hold shards of a parameter, in one all-reduce for each axis
            self._table.zero_()
            for (state, _), part in zip(present, sums):
                self._table.index_copy_(0, state.table_indices, part)
            for axis, lines in self._sharded_axes:
                self._table.index_copy_(0, lines, all_reduce_(self._table[lines], axis))
            sums = [self._table[state.table_indices] for state, _ in present]
        for (state, gradient), norms in zip(present, sums):
            ratio = torch.ones_like(norms[:, 0])
            if state.flat_param.decays:
                coefficient = cfg.trust if lars else 1.0
                ratio = fused_optimizer.trust_ratio(norms, weight_decay=state.decay, coefficient=coefficient, lars=lars)
            if lars:
                fused_optimizer.lars_(
                    state.weights, gradient, state.moments.get("momentum_buffer"), state.segments, ratio, lr=self.lr, scale=scale,
                    found_inf=skip, momentum=cfg.momentum, weight_decay=state.decay, seed=self._seed,
                    offset=state.flat_param.offset, **self._copies(state),
                )  # fmt: skip
            else:
                fused_optimizer.lamb_update_(
                    state.weights, state.direction, state.segments, ratio, lr=self.lr, found_inf=skip, **self._copies(state)
                )

    def _muon_step(self, gradients: dict[_State, Tensor], scale: Tensor | None, skip: Tensor) -> None:
        """Update the matrices of Muon. Ranks with shards of them all come here, because orthogonalization communicates."""
        kwargs: dict[str, Any] = {"found_inf": skip, "lr_in_momentum": False}
        for states, group in self.matrix_groups:
            momenta = [torch.zeros_like(state.weights) for state in states]
            for state, momentum in zip(states, momenta):
                if state in gradients:  # with learning rate -1, SGD adds g + mu v to its weights
                    fused_optimizer.sgd_(
                        momentum, gradients[state], state.moments["momentum_buffer"], lr=self._minus_one, scale=scale,
                        weight_decay=0.0, momentum=self.cfg.muon_momentum, nesterov=True, seed=self._seed,
                        offset=state.flat_param.offset, **kwargs,
                    )  # fmt: skip
            group.orthogonalize_(momenta)
            for state, update in zip(states, momenta):
                if state in gradients:
                    fused_optimizer.sgd_(
                        state.weights, update, None, lr=self.lr, scale=None, momentum=0.0, weight_decay=state.decay, **kwargs,
                        **self._copies(state),
                    )  # fmt: skip

    def full_weights(self) -> dict[str, Tensor]:
        """Return the master weights by parameter, in the shapes of the model, of flat parameters that are not sharded."""
        rows = [(state.flat_param.views, state.weights) for state in self.states if state.flat_param.shard_axis.size == 1]
        return {part.name: part.full(weights) for parts, weights in rows for part in parts}

    def weights(self) -> dict[str, Tensor | FlatShard]:
        """Return the master weights by parameter."""
        return self._by_parameter(state.weights for state in self.states)

    def averages(self) -> dict[str, Tensor | FlatShard]:
        """Return the average of the weights by parameter, or nothing without one."""
        return self._by_parameter(state.average for state in self.states)

    def state(self) -> dict[str, Tensor | FlatShard]:
        """Return moments as ``<parameter>.<moment>``, and ``step``, the number of updates."""
        tensors: dict[str, Tensor | FlatShard] = {"step": self.count}
        for moment in dict.fromkeys(moment for state in self.states for moment in state.moments):
            moments = self._by_parameter(state.moments.get(moment) for state in self.states)
            tensors |= {f"{name}.{moment}": value for name, value in moments.items()}
        return tensors

    def _by_parameter(self, tensors: Iterable[Tensor | None]) -> dict[str, Tensor | FlatShard]:
        pairs = [(state.flat_param, x) for state, x in zip(self.states, tensors) if x is not None]
        return {part.name: local_view(part, x, flat_param) for flat_param, x in pairs for part in flat_param.views}

    @torch.no_grad()
    def cast_master_weights(self) -> None:
        """Cast the master weights to the dtype of the model, after they were loaded."""
        for state in self.states:
            if state.low is not None:
                state.low.copy_(state.weights)


def _group_matrices(states: list[_State], size: float) -> list[tuple[list[_State], MatrixGroup]]:
    """Group neighbours among the states of matrices that are sharded over the same axes, into groups of about ``size`` bytes."""
    nbytes = (s.weights.itemsize * sum(prod(view.spec.global_shape) for view in s.flat_param.views) for s in states)
    pairs = groupby(zip(states, accumulate(nbytes)), lambda pair: (pair[0].flat_param.sharded_axes, pair[1] // size))
    groups = [[state for state, _ in group] for _, group in pairs]
    return [(group, MatrixGroup([state.flat_param for state in group])) for group in groups]


def match_names(model: nn.Module, cfg: StepConfig, setting: str = "decay_names", stages: Axis = ALONE) -> set[str]:
    """Return the names of parameters that ``cfg.decay_names`` matches, or of matrices that ``cfg.muon_names`` matches, if the
    optimizer uses them. Raises ConfigError for a pattern that matches none on any rank along ``stages``."""
    is_muon = setting == "muon_names"
    names = [name for name, p in model.named_parameters() if p.requires_grad and (not is_muon or p.ndim in _MATRIX_DIMS)]
    is_used = cfg.optimizer == "muon" if is_muon else cfg.weight_decay or cfg.optimizer in ("lamb", "lars")
    patterns = getattr(cfg, setting) if is_used else ()
    seen = all_gather_object([any(fnmatchcase(name, pattern) for name in names) for pattern in patterns], stages)
    for pattern, *matches in zip(patterns, *seen):
        if not any(matches):
            kind = "matrix" if is_muon else "parameter"
            raise ConfigError(f"step.{setting}: {pattern!r} matches no {kind}; the model has {', '.join(names[:20])}")
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
