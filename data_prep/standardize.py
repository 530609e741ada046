"""Standardization of fields by channel: the logarithm or square root of skewed values, then mean and deviation.

N samples, C channels, S cells of each side"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep import moments

Array = NDArray[Any]
SKEWED = 1.0                                    # skewness above which a transform is chosen
FLOOR = 0.01                                    # added before a logarithm, in means of the channel
UNDO = "field = f(mean + deviation * value) by channel, f of the transform: none x, log exp(x) - floor, sqrt x^2"
FORWARD: dict[str, Callable[[Array, float], Array]] = {
    "none": lambda x, floor: x, "log": lambda x, floor: np.log(x + floor), "sqrt": lambda x, floor: np.sqrt(x),
}  # fmt: skip
BACK: dict[str, Callable[[Array, float], Array]] = {
    "none": lambda x, floor: x, "log": lambda x, floor: np.exp(x) - floor, "sqrt": lambda x, floor: np.square(np.maximum(x, 0)),
}  # fmt: skip


class Standard(NamedTuple):
    """(transform(field) - mean) / deviation of each channel; ``sides``: the number of dims after the channels."""

    sides: int
    transforms: tuple[str, ...]                 # none; log, of field + floor; sqrt
    floors: tuple[float, ...]
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> "Standard":
        """Return that of an index."""
        from hpcai.models.diffusion.config import by_channel  # with pydantic, which other commands do without
        values = by_channel(header)
        return cls(len(header["box"]), *(values[name] for name in cls._fields[1:]))

    @classmethod
    def choose(cls, fields: Array, transforms: Mapping[int, str]) -> "Standard":
        """Return that of some samples, of their values that are not NaN. Channels that are not in ``transforms`` have that of least
        skewness.   fields [N, C, *S]"""
        kinds, floors = list[str](), list[float]()
        for channel, values in enumerate(np.moveaxis(fields, 1, 0)):
            values = values[~np.isnan(values)]
            floor = float(f"{FLOOR * abs(values.mean()):.2g}")
            kinds.append(transforms.get(channel) or _least_skewed(values, floor))
            floors.append(floor if kinds[-1] == "log" else 0.0)
        return cls(fields.ndim - 2, tuple(kinds), tuple(floors)).measured(fields)

    def measured(self, fields: Array) -> "Standard":
        """Return the same transforms with mean and deviation of ``fields`` [N, C, *S], rounded to 4 digits."""
        columns = zip(np.moveaxis(self.transform(fields), 1, 0), np.moveaxis(fields, 1, 0))
        statistics = [moments.summarize([moments.compute(values[~np.isnan(own), None])]) for values, own in columns]
        mean, deviation = (tuple(float(f"{each[key][0]:.4g}") for each in statistics) for key in ("mean", "deviation"))
        return self._replace(mean=mean, deviation=deviation)

    def transform(self, fields: Array) -> Array:
        """Return transformed values.   [..., C, *S] -> the same, float64"""
        return self._by_channel(FORWARD, fields.astype(np.float64))

    def apply(self, fields: Array) -> Array:
        """Return standardized values, from physical units.   [..., C, *S] -> the same, float64"""
        mean, deviation = self._columns()
        return (self.transform(fields) - mean) / deviation

    def invert(self, values: Array) -> Array:
        """Return physical units, from standardized values.   [..., C, *S] -> the same, float64"""
        mean, deviation = self._columns()
        return self._by_channel(BACK, mean + deviation * values.astype(np.float64))

    def _columns(self) -> tuple[Array, Array]:
        ones = (1,) * self.sides
        return np.reshape(self.mean, (-1, *ones)), np.reshape(self.deviation, (-1, *ones))

    def _by_channel(self, functions: Mapping[str, Callable[[Array, float], Array]], values: Array) -> Array:
        axis = values.ndim - self.sides - 1
        parts = zip(np.moveaxis(values, axis, 0), self.transforms, self.floors)
        with np.errstate(invalid="ignore", divide="ignore"):  # NaN is found by whoever takes the values
            return np.stack([functions[kind](part, floor) for part, kind, floor in parts], axis)


def skewness(values: Array) -> float:
    centred = values - values.mean()
    return float((centred**3).mean() / max(float((centred**2).mean()) ** 1.5, 1e-300))


def _least_skewed(values: Array, floor: float) -> str:
    """Return the transform after which the distribution of a channel is least skewed; of values of both signs none."""
    if values.min() < 0 or skewness(values) < SKEWED or not floor:
        return "none"
    return min(FORWARD, key=lambda kind: abs(skewness(FORWARD[kind](values, floor))))
