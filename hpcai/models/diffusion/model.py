"""A network that takes noise away, what it says of a noisy sample, and samples that are drawn with it.

B samples, M members of an ensemble, C channels, S and s places along each dim of a sample and of a coarse field
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcai.errors import ConfigError, DataError
from hpcai.models.diffusion.blocks import resize
from hpcai.models.diffusion.condition import UNCONDITIONAL, Condition
from hpcai.models.diffusion.config import DiffusionConfig, DiTConfig, FieldsConfig, FluxConfig, SamplerConfig, UNetConfig
from hpcai.models.diffusion.dit import DiT
from hpcai.models.diffusion.flux import Flux
from hpcai.models.diffusion.grid import UNSHARDED, Grid
from hpcai.models.diffusion.noise import INITIAL, SAMPLER_STEPS, normals
from hpcai.models.diffusion.prediction import Objective
from hpcai.models.diffusion.samplers import plan_steps, sample
from hpcai.models.diffusion.unet import UNet
from hpcai.models.diffusion.vae import Latents
from hpcai.nn.weights import PretrainedMixin

logger = logging.getLogger(__name__)
_RANGE_TOLERANCE = 1e-3  # of a parameter's range, half of which is 1
_BATCH_SIZE = 64  # samples that are drawn together, where nothing else is said
_NETWORKS: dict[type, Callable[[Any], nn.Module]] = {UNetConfig: UNet, DiTConfig: DiT, FluxConfig: Flux}


class Diffusion(PretrainedMixin):
    """network(x [B, C, ...], time [B], condition) -> what ``objective`` says that it says [B, C', ...].

    ``seed``: of the random numbers of training, which are counted (``hpcai.models.diffusion.noise``).
    """

    package = __package__

    def __init__(self, cfg: DiffusionConfig | None = None, seed: int = 0) -> None:
        super().__init__()
        self.cfg, self.seed = cfg or DiffusionConfig(), seed
        self.objective = Objective(self.cfg.objective)
        plan_steps(self.objective, self.cfg.sampler)  # which says at once what does not go together
        self.network = _NETWORKS[type(self.cfg.network)](self.cfg.network)
        latents = self.cfg.latents
        for name in ("tokens", "pooled"):
            size = getattr(latents, name, None)
            self.register_buffer(f"no_{name}", None if size is None else torch.zeros(size))

    @property
    def grid(self) -> Grid:
        """Which places of a sample this process holds."""
        return getattr(self.network, "grid", UNSHARDED)

    def forward(self, x: Tensor, time: Tensor, condition: Condition = UNCONDITIONAL) -> Tensor:
        found: Tensor = self.network(x, time, condition)
        return found

    def sample(
        self, condition: Condition = UNCONDITIONAL, members: int = 1, *, seed: int = 0, sampler: SamplerConfig | None = None,
        size: Sequence[int] = (), indices: Tensor | None = None, unconditional: Condition | None = None,
        batch_size: int = _BATCH_SIZE,
    ) -> Tensor:  # fmt: skip
        """``members`` samples for each of B conditions, as the network sees them (``physical`` makes fields of them).
        [M, B, C, *S]

        ``sampler``: by default that of the settings. ``size``: (C, *S) of a sample, where the settings do not know it.
        ``number`` [B]: those of the conditions, by default 0, 1, ...: a member depends on the seed, this number and the number of
        the member, not on what is drawn beside it. ``nothing``: the condition of a sample that none is asked of, for guidance; by
        default what ``self.nothing`` says. Raises ConfigError for settings that
        do not go together or a size that is not known, DataError for a condition that does not fit; parameters outside of the
        range that the model was trained on are told, and taken.
        """
        given = [x for x in condition if x is not None]
        count, weight = len(given[0]) if given else 1, next(self.network.parameters())
        indices = torch.arange(count) if indices is None else indices
        if any(len(x) != count for x in given) or len(indices) != count:
            counts = [len(x) for x in (*given, indices)]
            raise DataError(f"conditions and their numbers are of {counts} samples; expected as many of each")
        shape, cfg, grid = self._sample_shape(condition, size), sampler or self.cfg.sampler, self.grid
        self._check_condition(condition, shape)
        grid.expect(shape[1:])
        box = (slice(None), *grid.box(shape[1:]))
        pairs = torch.cartesian_prod(torch.arange(members), torch.arange(count)).view(-1, 2).to(weight.device)
        indices, dtype = indices.to(weight.device), torch.promote_types(weight.dtype, torch.float32)
        compares = unconditional is None and cfg.guidance != 1 and given
        parts, was = pairs.split(batch_size), self.training
        found = []
        self.eval()
        try:
            for member, row in (part.unbind(1) for part in parts):
                own = Condition(*(None if x is None else x.to(weight.device)[row] for x in condition))
                noise = normals(seed, INITIAL, indices[row], member, shape, box=box, dtype=dtype)
                none = self.unconditional(own) if compares else unconditional

                def fresh(step: int, row: Tensor = row, member: Tensor = member) -> Tensor:
                    return normals(seed, SAMPLER_STEPS + step, indices[row], member, shape, box=box, dtype=dtype)

                x = deque(sample(self, self.objective, cfg, noise, own, none, fresh, grid), maxlen=1).pop()
                found.append(grid.gather(self.add_coarse(x, own)))
        finally:
            self.train(was)
        return torch.cat(found).view(members, count, *shape)

    def prepare_sample(self, sample: Tensor, fresh: Callable[[torch.Size], Tensor] | None = None) -> Tensor:
        """What the network sees of a sample of the data: of latents (draw - shift) * scale.   [B, 2C, h, w] -> [B, C, h, w]

        ``fresh(size)``: numbers of the normal distribution [B, *size], by which latents are drawn; None: their means.
        """
        cfg = self.cfg.latents
        if cfg is None:
            return sample
        latents = Latents(sample)
        mean = latents.mean
        return ((mean if fresh is None else latents.sample(fresh(mean.shape[1:]))) - cfg.shift) * cfg.scale

    def unconditional(self, condition: Condition) -> Condition:
        """In place of each thing that is asked what says nothing, for guidance: zeros for fields and parameters, the class that is
        none, the empty text."""
        none: dict[str, Tensor] = {}
        for name, x in condition._asdict().items():
            if name in ("tokens", "pooled") and x is not None:
                empty = getattr(self, f"no_{name}")
                if empty is None:
                    raise ConfigError(f"the model knows no empty text: its settings have no latents.{name}; give nothing")
                none[name] = empty.to(x.dtype).expand_as(x)
            elif x is not None and name != "guidance":
                none[name] = torch.full_like(x, self.cfg.network.classes) if name == "classes" else torch.zeros_like(x)
        return condition._replace(**none)

    def add_coarse(self, x: Tensor, condition: Condition) -> Tensor:
        """A sample, from what the network makes of noise.   [B, C, *S] -> the same"""
        return x if self.cfg.residual is None else x * self.cfg.residual + self._coarse(condition, x)

    def subtract_coarse(self, sample: Tensor, condition: Condition) -> Tensor:
        """And back."""
        return sample if self.cfg.residual is None else (sample - self._coarse(condition, sample)) / self.cfg.residual

    def _coarse(self, condition: Condition, x: Tensor) -> Tensor:
        network: Any = self.network
        if condition.field is None:
            raise DataError("the model makes differences from a coarse field; give condition.field")
        size = self.grid.full_size(x.shape[2:])
        return resize(condition.field.to(x.dtype), size, network.space.periodic_dims, self.grid.box(size))

    def to_physical(self, x: Tensor) -> Tensor:
        """Fields in the units that the settings name, from what the network sees.   [..., C, *S] -> the same, float64"""
        fields = self._fields
        values = self._per_channel(fields.mean, x) + self._per_channel(fields.deviation, x) * x.double()
        return values if fields.floor is None else values.exp() - fields.floor

    def standardize(self, x: Tensor) -> Tensor:
        """What the network sees of fields in the units that the settings name, such as a coarse one to be refined."""
        fields, values = self._fields, x.double()
        values = values if fields.floor is None else (values + fields.floor).log()
        return ((values - self._per_channel(fields.mean, x)) / self._per_channel(fields.deviation, x)).float()

    def standardize_parameters(self, values: Mapping[str, float | Sequence[float]]) -> Tensor:
        """What the network sees of physical parameters in the units that the settings name: a number of each, or one for each
        sample.   [B, P]. Raises DataError for names that the settings do not have."""
        fields = self._fields
        if set(values) != set(fields.parameters):
            found, known = (", ".join(names) or "none" for names in (values, fields.parameters))
            raise DataError(f"parameters {found}; the model was trained on {known}; give each of these")
        columns = [torch.atleast_1d(torch.as_tensor(values[name], dtype=torch.float64)) for name in fields.parameters]
        low, high = (torch.tensor(ends, dtype=torch.float64) for ends in (fields.low, fields.high))
        return (2 * (torch.stack(torch.broadcast_tensors(*columns), 1) - low) / (high - low) - 1).float()

    def _check_condition(self, condition: Condition, shape: tuple[int, ...]) -> None:
        """Raise DataError for a coarse field that does not lie under a sample of ``shape``, and tell parameters out of range."""
        fields, coarse, asked = self.cfg.fields, condition.field, condition.parameters
        if fields is None:
            return
        if coarse is not None and fields.factor and [fields.factor * n for n in coarse.shape[2:]] != list(shape[1:]):
            found, sides = list(coarse.shape[2:]), list(shape[1:])
            raise DataError(f"condition.field has {found} places and the sample {sides}; expected {fields.factor} times as many")
        if asked is not None:
            for column in (asked.abs() > 1 + _RANGE_TOLERANCE).any(0).nonzero()[:, 0].tolist():
                low, high = fields.low[column], fields.high[column]
                given = asked[:, column].double().cpu()
                worst = low + (float(given[given.abs().argmax()]) + 1) / 2 * (high - low)
                name = f"{fields.parameters[column]} is {worst:g}"
                logger.warning("%s, outside of %g to %g, the range that the model was trained on", name, low, high)

    @property
    def _fields(self) -> FieldsConfig:
        if self.cfg.fields is None:
            raise ConfigError("the model does not know what its samples are in physical units: its settings have no fields")
        return self.cfg.fields

    def _per_channel(self, values: Sequence[float], x: Tensor) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=x.device).view(-1, *(1,) * self._dims)

    @property
    def _dims(self) -> int:
        return len(self.cfg.size) - 1 or 2

    def _sample_shape(self, condition: Condition, size: Sequence[int]) -> tuple[int, ...]:
        if size or self.cfg.size:
            shape = tuple(size) or self.cfg.size
            coarse, factor = condition.field, self.cfg.fields.factor if self.cfg.fields else 0
            if not size and coarse is not None and factor:  # of a larger or smaller region than those of the training
                shape = (shape[0], *(factor * n for n in coarse.shape[2:]))
            return shape
        raise ConfigError("what is the size of a sample? The settings have none; give size=(channels, places, ...)")
