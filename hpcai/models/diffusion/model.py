"""A diffusion model: a denoising network, its objective, and sampling.

B samples, M ensemble members, C channels, S and s pixels along each dim of a sample and of a coarse field
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from hpcai.arrays import to_array, warn
from hpcai.errors import ConfigError, DataError
from hpcai.models.diffusion.blocks import Space, resize
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import DiffusionConfig, DiTConfig, FieldsConfig, FluxConfig, SamplerConfig, SD3Config, UNetConfig
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux
from hpcai.models.diffusion.grid import UNSHARDED, Grid
from hpcai.models.diffusion.noise import INITIAL, SAMPLER_STEPS, normals
from hpcai.models.diffusion.prediction import Objective
from hpcai.models.diffusion.samplers import plan_steps, sample
from hpcai.models.diffusion.sd3 import SD3
from hpcai.models.diffusion.unet import UNet
from hpcai.models.diffusion.vae import Latents
from hpcai.nn.weights import PretrainedMixin

_RANGE_TOLERANCE = 1e-3  # of standardized parameters, whose range is [-1, 1]
_MIN_RMS, _MAX_RMS = 0.05, 4.0  # of a standardized coarse field; simulated ones have 0.4 to 1.2
_BATCH_SIZE = 64
Kind = Literal["sample", "coarse", "fine"]
_NETWORKS: dict[type, Callable[[Any], nn.Module]] = {UNetConfig: UNet, DiTConfig: DiT, FluxConfig: Flux, SD3Config: SD3}


class Diffusion(PretrainedMixin):
    """x [B, C, ...], time [B], condition -> the prediction of ``cfg.objective`` [B, C', ...]

    ``seed``: of the counter-based random numbers of training (``hpcai.models.diffusion.noise``)
    """

    package = __package__
    static: Tensor | None
    weights: Tensor | None

    def __init__(self, cfg: DiffusionConfig | None = None, seed: int = 0) -> None:
        super().__init__()
        self.cfg, self.seed = cfg or DiffusionConfig(), seed
        self.objective = Objective(self.cfg.objective)
        plan_steps(self.objective, self.cfg.sampler)  # raises now if settings are inconsistent
        if self.cfg.residual == "measured":
            raise ConfigError("residual is measured where there are data, by apps.diffusion; give a number for each channel")
        if self.cfg.residual is not None and self.cfg.mean is None and self.cfg.fields and self.cfg.fields.coarse:
            actual = f"the coarse field has other channels than samples ({', '.join(self.cfg.fields.coarse.names)})"
            raise ConfigError(f"residual: {actual}; set it to null, or start.mean to a regression mean of the same data")
        self.network = _NETWORKS[type(self.cfg.network)](self.cfg.network)
        self.mean: Diffusion | None = None
        if self.cfg.mean is not None:
            mean = DiffusionConfig.model_validate(self.cfg.mean, strict=False)
            self.mean = Diffusion(mean, seed).requires_grad_(False).eval()
        latents, fields = self.cfg.latents, self.cfg.fields
        for name in ("tokens", "pooled"):
            size = getattr(latents, name, None)
            self.register_buffer(f"no_{name}", None if size is None else torch.zeros(size))
        channels = {"static": len(fields.static), "weights": fields.weighted and len(fields.names)} if fields else {}
        for name in ("static", "weights"):  # of all cells, [K, *S] and [C, *S]
            self.register_buffer(name, torch.zeros(channels[name], *self.cfg.size[1:]) if channels.get(name) else None)

    @property
    def grid(self) -> Grid:
        return getattr(self.network, "grid", UNSHARDED)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.mean is not None:
            self.mean.eval()
        return self

    def forward(self, x: Tensor, time: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        return self.network(x, time, condition)

    def sample(
        self, condition: Condition = UNCONDITIONAL, members: int = 1, *, seed: int = 0, sampler: SamplerConfig | None = None,
        size: Sequence[int] = (), indices: Tensor | None = None, unconditional: Condition | None = None,
        first_member: Tensor | int = 0, batch_size: int = _BATCH_SIZE,
    ) -> Tensor:  # fmt: skip
        """Generate ``members`` samples for each of B conditions, standardized (see ``to_physical``).   -> [M, B, C, *S]

        ``sampler``: by default ``cfg.sampler``. ``size``: (C, *S), if the settings do not have it. ``indices`` [B] of conditions,
        by default 0, 1, ...: a sample depends on the seed, this index and that of the member only, not on the rest of the batch.
        ``unconditional``: the condition without information, for guidance; by default ``self.unconditional(condition)``.
        ``first_member``: number of the first member, one for all conditions or [B]. Raises ConfigError for inconsistent settings or
        an unknown size, DataError for a condition that does not fit. Logs a warning for fields that do not look standardized, and
        physical parameters outside of the range of training."""
        given = [x for x in condition if x is not None]
        count, weight = len(given[0]) if given else 1, next(self.network.parameters())
        indices = torch.arange(count) if indices is None else indices
        if any(len(x) != count for x in given) or len(indices) != count:
            counts = [len(x) for x in (*given, indices)]
            raise DataError(f"conditions and indices are of {counts} samples; expected as many of each")
        shape, cfg, grid = self._sample_shape(condition, size), sampler or self.cfg.sampler, self.grid
        self._check_condition(condition, shape)
        grid.expect(shape[1:])
        box = (slice(None), *grid.box(shape[1:]))
        pairs = torch.cartesian_prod(torch.arange(members), torch.arange(count)).view(-1, 2).to(weight.device)
        indices, dtype = indices.to(weight.device), torch.promote_types(weight.dtype, torch.float32)
        offset = first_member.to(weight.device) if isinstance(first_member, Tensor) else first_member
        first = torch.zeros(count, dtype=torch.long, device=weight.device) + offset
        needs_empty = unconditional is None and cfg.guidance != 1 and given
        if needs_empty and self.cfg.fields is not None and not self.cfg.unconditional:
            actual = f"sampler.guidance is {cfg.guidance:g}, but model.unconditional is 0: the network never saw an empty condition"
            raise ConfigError(f"{actual}; set guidance to 1, give unconditional, or train with model.unconditional=0.1")
        batches, training = pairs.split(batch_size), self.training
        samples = []
        self.eval()
        try:
            for member, row in (batch.unbind(1) for batch in batches):
                rows = Condition(*(None if x is None else x.to(weight.device)[row] for x in condition))
                rows = rows._replace(fine=None if rows.fine is None else grid.shard(rows.fine))
                member = member + first[row]
                noise = normals(seed, INITIAL, indices[row], member, shape, box=box, dtype=dtype)
                empty = self.unconditional(rows) if needs_empty else unconditional

                def step_noise(step: int, row: Tensor = row, member: Tensor = member) -> Tensor:
                    return normals(seed, SAMPLER_STEPS + step, indices[row], member, shape, box=box, dtype=dtype)

                empty = None if empty is None else self.with_static(empty, len(row))
                args = self.objective, cfg, noise, self.with_static(rows, len(row)), empty, step_noise, grid
                states = sample(lambda x, time, given: self(self.fill_masked(x), time, given), *args)
                x = deque(states, maxlen=1).pop()
                samples.append(grid.gather(self.fill_masked(self.add_baseline(x, rows))))
        finally:
            self.train(training)
        return torch.cat(samples).view(members, count, *shape)

    def roll_out(
        self, condition: Condition, leads: int, members: int = 1, *, indices: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Generate forecasts from the states ``condition.fine`` [B, C, *S], each from the one before. Other arguments are those of
        ``sample``.   -> [M, leads, B, C, *S], standardized. Raises ConfigError if the model was not trained on trajectories."""
        if condition.fine is None or self._fields.interval is None:
            actual = "condition.fine is None" if condition.fine is None else "the model was not trained on trajectories"
            raise ConfigError(f"roll_out: {actual}; give initial states to a model of forecasts")
        count, shape, states = len(condition.fine), tuple(condition.fine.shape[1:]), list[Tensor]()
        index = (torch.arange(count) if indices is None else indices).repeat(members)
        member = torch.arange(members).repeat_interleave(count)
        repeated = Condition(*(None if x is None else x.repeat(members, *[1] * (x.ndim - 1)) for x in condition))
        for lead in range(leads):
            state = self.sample(repeated, size=shape, indices=index, first_member=lead * members + member, **kwargs)[0]
            repeated = repeated._replace(fine=state)
            states.append(state.view(members, count, *shape))
        return torch.stack(states, 1)

    def prepare_sample(self, sample: Tensor, noise: Callable[[torch.Size], Tensor] | None = None) -> Tensor:
        """Return a sample of the data in the space of the network; latents are sampled and scaled.   [B, 2C, h, w] -> [B, C, h, w]

        ``noise(size)``: Returns standard normal noise [B, *size] to sample latents; None: take their means.
        """
        cfg = self.cfg.latents
        if cfg is None:
            return sample
        latents = Latents(sample)
        mean = latents.mean
        return ((mean if noise is None else latents.sample(noise(mean.shape[1:]))) - cfg.shift) * cfg.scale

    def unconditional(self, condition: Condition) -> Condition:
        """Replace a condition for guidance: fields and parameters by zeros, classes by no class, texts by the empty text. Guidance
        strength and sizes stay."""
        replaced: dict[str, Tensor] = {}
        for name, x in condition._asdict().items():
            if name in ("tokens", "pooled") and x is not None:
                empty = getattr(self, f"no_{name}")
                if empty is None:
                    raise ConfigError(f"no embedding of the empty text: the settings have no latents.{name}; give unconditional")
                replaced[name] = empty.to(x.dtype).expand_as(x)
            elif x is not None and name not in ("guidance", "sizes"):
                replaced[name] = torch.full_like(x, self.cfg.network.classes) if name == "classes" else torch.zeros_like(x)
        return condition._replace(**replaced)

    def add_baseline(self, x: Tensor, condition: Condition, shift: Tensor | None = None) -> Tensor:
        """With ``cfg.residual``, turn the output of the sampler into a sample: add the baseline.   [B, C, *S] -> the same"""
        return x if self.cfg.residual is None else x * self.residual_scale(x) + self.baseline(condition, x, shift)

    def subtract_baseline(self, sample: Tensor, condition: Condition, shift: Tensor | None = None) -> Tensor:
        """Invert ``add_baseline``."""
        residual = self.cfg.residual is not None
        return (sample - self.baseline(condition, sample, shift)) / self.residual_scale(sample) if residual else sample

    def residual_scale(self, x: Tensor) -> Any:
        """Return ``cfg.residual``, of channels as a tensor that broadcasts to x."""
        return _fill(self.cfg.residual, x) if isinstance(self.cfg.residual, tuple) else self.cfg.residual

    @torch.no_grad()
    def baseline(self, condition: Condition, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """Return the local cells of what is added to residuals: the regression mean, the state that a forecast starts from, or the
        resized coarse field.   [B, C, *S]"""
        if self.mean is not None:
            complete = self.mean.with_static(condition, len(x), shift)
            predicted = self.mean(torch.zeros_like(x), x.new_zeros(len(x)), complete).to(x.dtype)
            return self.mean.add_baseline(predicted, condition, shift)
        is_forecast = self.cfg.fields is not None and self.cfg.fields.interval is not None
        given = condition.fine if is_forecast else condition.field
        if given is None:
            name, argument = ("the state before", "fine") if is_forecast else ("a coarse field", "field")
            raise DataError(f"the model generates the difference from {name}; give condition.{argument}")
        if is_forecast:
            return given[:, : x.shape[1]].to(x.dtype)
        size, space = self.grid.full_size(x.shape[2:]), getattr(self.network, "space", Space())
        return resize(given.to(x.dtype), size, space.periodic_dims, self.grid.box(size))

    def with_static(self, condition: Condition, count: int, shift: Tensor | None = None) -> Condition:
        """Return the condition of ``count`` samples with the local cells of static fields. ``shift`` [B, D]: cells by which each
        sample is shifted along periodic dims."""
        if self.static is None:
            return condition
        local = self._local(self.static, shift).expand(count, *[-1] * self.static.ndim)
        fine = local if condition.fine is None else torch.cat((condition.fine.to(local), local), 1)
        return condition._replace(fine=fine)

    def loss_weights(self, x: Tensor, shift: Tensor | None = None) -> Tensor | None:
        """Return the weights of the channels and local cells of x [B, C, ...]; None if all are equal.   Broadcast to x"""
        weights = None if self.weights is None else self._local(self.weights, shift)
        if not self.cfg.channel_weights:
            return weights
        each = _fill(self.cfg.channel_weights, x)
        return each if weights is None else each * weights

    def fill_masked(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """Set the masked local cells of x [B, C, *S], whose weights are 0, to 0: no prediction for them is learned."""
        if self.weights is None or self.weights.shape[1:] != self.grid.full_size(x.shape[2:]):
            return x
        return x * (self._local(self.weights, shift) != 0)

    def _local(self, fields: Tensor, shift: Tensor | None) -> Tensor:
        """Return the local cells of fields [K, *S], shifted for each sample.   [1 or B, K, *S]"""
        size, places = fields.shape[1:], list[Tensor]()
        if shift is None:
            return self.grid.shard(fields[None])
        for dim, (cells, n) in enumerate(zip(self.grid.box(size), size)):
            at = (torch.arange(cells.start, cells.stop, device=fields.device) - shift[:, dim, None]) % n
            places.append(at.view(len(shift), *(-1 if other == dim else 1 for other in range(len(size)))))
        chosen: tuple[Any, ...] = (slice(None), *places)
        return fields[chosen].transpose(0, 1)

    def to_physical(self, x: Tensor, kind: Kind = "sample") -> Tensor:
        """Convert standardized fields to physical units.   [..., C, *S] -> the same, float64"""
        dim, channels = self._channels(x, kind)
        invert = {"none": lambda z, _: z, "log": lambda z, floor: z.exp() - floor, "sqrt": lambda z, _: z.clamp(min=0).square()}
        return torch.stack([invert[form](mean + std * z, floor) for z, _, form, floor, mean, std in channels], dim)

    def standardize(self, x: Tensor, kind: Kind = "sample") -> Tensor:
        """Standardize fields in physical units: samples, ``coarse`` fields for ``Condition.field``, whose channels may be those of
        samples, or ``fine`` inputs for ``Condition.fine``. Raises DataError for another number of channels, and for values that are
        not finite, or have no logarithm or root.   [..., C, *S] -> the same"""
        dim, channels = self._channels(x, kind)
        apply = {"none": lambda z, _: z, "log": lambda z, floor: (z + floor).log(), "sqrt": lambda z, _: z.sqrt()}
        values = torch.stack([(apply[form](z, floor) - mean) / std for z, _, form, floor, mean, std in channels], dim).float()
        if not bool(values.isfinite().all()):
            forms = {"none": "{}", "log": "log({} + {:g})", "sqrt": "sqrt({})"}
            expected = ", ".join(forms[form].format(name, floor) for _, name, form, floor, *_ in channels)
            expected += "; add 1 to a density contrast" if "log" in expected else ""
            raise DataError(f"fields go from {float(x.min()):g} to {float(x.max()):g}; expected values with finite {expected}")
        return values

    def standardize_parameters(self, values: Mapping[str, float | Sequence[float]]) -> Tensor:
        """Standardize physical parameters, one number or one for each sample.   -> [B, P]. Raises DataError for other names."""
        fields = self._fields
        if set(values) != set(fields.parameters):
            actual, known = (", ".join(names) or "none" for names in (values, fields.parameters))
            raise DataError(f"parameters {actual}; the model was trained on {known}; give each of these")
        arrays = (torch.as_tensor(to_array(values[name], name), dtype=torch.float64) for name in fields.parameters)
        columns = torch.broadcast_tensors(*map(torch.atleast_1d, arrays))
        low, high = (torch.tensor(ends, dtype=torch.float64) for ends in (fields.low, fields.high))
        return (2 * (torch.stack(columns, 1) - low) / (high - low) - 1).float()

    def _check_condition(self, condition: Condition, shape: tuple[int, ...]) -> None:
        """Raise DataError for fields that do not fit ``shape`` or are not finite. Log a warning for those that do not look
        standardized, and for parameters out of range."""
        fields, coarse, parameters, sides = self.cfg.fields, condition.field, condition.parameters, list(shape[1:])
        if fields is None:
            return
        if self.static is not None and (actual := list(self.static.shape[1:])) != sides:
            raise DataError(f"the sample has {sides} cells, static fields of the model {actual}; give a condition of that size")
        if coarse is not None and fields.factor and [fields.factor * n for n in coarse.shape[2:]] != sides:
            actual = list(coarse.shape[2:])
            raise DataError(f"condition.field has {actual} pixels and the sample {sides}; expected {fields.factor} times as many")
        given = ("field", coarse, fields.coarse or fields), ("fine", condition.fine, fields if fields.interval else fields.fine)
        for argument, x, about in given:
            channels = () if x is None or about is None else zip(about.names, about.transforms, x.double().unbind(1))
            for name, form, values in channels:
                low, high, rms = (float(value) for value in (values.min(), values.max(), values.square().mean().sqrt()))
                if not math.isfinite(rms):
                    ends = f"{low:g} to {high:g}"
                    raise DataError(f"condition.{argument}: {name} goes from {ends}; expected finite values; fill others")
                is_odd = rms < _MIN_RMS or (form == "log" and low > 0)
                if rms > _MAX_RMS or (is_odd and values.numel() >= 64):  # a few cells may all be dense, or calm
                    text = "condition.%s: %s goes from %.3g to %.3g (RMS %.3g); expected standardized values of both signs, as of"
                    warn(text + " model.standardize(...)", argument, name, low, high, rms)
        if parameters is not None:
            for column in (parameters.abs() > 1 + _RANGE_TOLERANCE).any(0).nonzero()[:, 0].tolist():
                low, high = fields.low[column], fields.high[column]
                values = parameters[:, column].double().cpu()
                worst = low + (float(values[values.abs().argmax()]) + 1) / 2 * (high - low)
                name = f"{fields.parameters[column]} is {worst:g}"
                warn("%s, outside of %g to %g, the range that the model was trained on", name, low, high)

    @property
    def _fields(self) -> FieldsConfig:
        if self.cfg.fields is None:
            raise ConfigError("the model cannot convert samples to physical units: its settings have no fields")
        return self.cfg.fields

    def _channels(self, x: Tensor, kind: Kind) -> tuple[int, list[tuple[Tensor, str, str, float, float, float]]]:
        """Return the dim of channels of x [..., C, *S], and each of them in float64, with its name, transform, floor, mean and
        deviation. Raises DataError if the model was trained on another number of them."""
        fields, dim = self._fields, -(len(self.cfg.size) or 3)
        about = {"sample": fields, "coarse": fields.coarse or fields, "fine": fields.fine}[kind]
        if about is None or x.shape[dim] != len(about.names):
            expected = "no channels" if about is None else ", ".join(about.names)
            raise DataError(f"{kind} fields are {list(x.shape)}; expected {expected}, on which the model was trained, in dim {dim}")
        return dim, [*zip(x.double().unbind(dim), about.names, about.transforms, about.floors, about.mean, about.deviation)]

    def _sample_shape(self, condition: Condition, size: Sequence[int]) -> tuple[int, ...]:
        shape, coarse, factor = tuple(size) or self.cfg.size, condition.field, self.cfg.fields.factor if self.cfg.fields else 0
        if not shape:
            raise ConfigError("the size of a sample is unknown. The settings have none; give size=(channels, *sides)")
        if not size and coarse is not None and factor:  # the region may be larger or smaller than in training
            return (shape[0], *(factor * n for n in coarse.shape[2:]))
        return shape


def _fill(values: Sequence[float], x: Tensor) -> Tensor:
    """Return a number for each channel of x [B, C, ...], filled, not copied: can be captured.   [C, 1, ...]"""
    return torch.stack([x.new_full((1,) * (x.ndim - 2), value) for value in values])
