"""Sums of metrics on the device, with few collectives and host reads per report.

A value is a mean over the batch, weighted by its samples, or a pair (sum, count). The reported value is sum / count over everything
that any rank added, never a mean of means.

A metric of an evaluation may also be a pair (sums, finish): one tensor or several, with the same shapes in every batch, and a
function. ``finish(*sums)`` is called once, on the CPU, with the sums over all batches and ranks, and returns a scalar, or several
by name. Integers are accumulated as int64, which is exact (torch divides them as float32: take ``.double()`` first), others as
float64. ::

    return {"auc": ((signal, background), area)}     # counts by score [K], [K]; area(signal, background) -> float
    return {"spectrum": (power, by_scale)}           # [K]; by_scale(power) -> {"power_0": ..., "power_1": ...}

``PerSample`` is for a metric that is no function of sums: each rank keeps its values, and all ranks compute the metric together.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from hpcai.dist.collectives import all_gather_numbers, all_reduce_, broadcast_object, gather_distinct
from hpcai.dist.mesh import Axis
from hpcai.errors import ConfigError, DataError

Value = Tensor | tuple[Tensor, Tensor | float]
Finish = Callable[..., Any]
Total = tuple[Tensor | Sequence[Tensor], Finish]
_Specs = list[tuple[torch.dtype, tuple[int, ...]]]  # dtypes and shapes of the sums of one metric


class PerSample(NamedTuple):
    """Values of the samples of a batch [samples, ...]. ``compute(*values, axis)`` is called once on all ranks of ``axis``, a
    collective call, with the values of all batches of a rank, and returns the same scalar on all of them."""

    values: tuple[Tensor, ...]
    compute: Callable[..., Any]


class MetricSums:
    """Sums of metrics by name: ``add`` accumulates on the device, ``reduce`` reduces over an axis once per report."""

    def __init__(self) -> None:
        self._sums: dict[str, list] = {}
        self._totals: dict[str, tuple[list[Tensor], Finish]] = {}
        self._per_sample: dict[str, list[PerSample]] = {}

    def add(self, values: Mapping[str, Value | Total | PerSample], samples: int) -> None:
        """Add the values of a batch. Raises ConfigError if sums are no real tensors, or differ in shape from the batch before."""
        for name, value in values.items():
            if isinstance(value, PerSample):
                self._per_sample.setdefault(name, []).append(value)
                continue
            if has_finish(value):
                sums, finish = value
                parts = [_upcast(name, part) for part in ([sums] if isinstance(sums, Tensor) else sums)]
                totals, _ = self._totals.setdefault(name, ([torch.zeros_like(part) for part in parts], finish))
                _check_specs(name, _specs(totals), _specs(parts))
                for total, new in zip(totals, parts):
                    total += new
                continue
            part, count = value if isinstance(value, tuple) else (value.detach() * samples, samples)
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] = entry[0] + part.detach().double()  # type: ignore[union-attr]
            entry[1] = entry[1] + (count.detach().double() if isinstance(count, Tensor) else count)

    def reduce(self, axis: Axis, device: torch.device, uneven: bool = False) -> dict[str, float]:
        """Return the metrics by name over all ranks of ``axis``, which call it together, and reset the sums. With ``uneven``, a
        rank may have added nothing, and gets names and shapes from the others. Raises ConfigError if sums of ranks differ in shape,
        two metrics return the same name, or ``finish`` returns no number, and DataError if a rank has no sample for a metric of
        ``PerSample``."""
        local = self.names, {name: _specs(sums) for name, (sums, _) in sorted(self._totals.items())}, sorted(self._per_sample)
        specs = gather_distinct(local if any(local) else None, axis) if uneven else {0: local}
        if uneven and (kept := sorted(set().union(*(per_sample for _, _, per_sample in specs.values())))):
            complete = all_gather_numbers([kept == sorted(self._per_sample)], axis).flatten().tolist()
            if 0 in complete:
                text = f"rank {complete.index(0)} of {axis.size} has no sample for the metric {kept[0]}"
                raise DataError(f"{text}; take batches of at least {axis.size} samples")
        names = sorted(set().union(*(counted for counted, _, _ in specs.values())))
        # By metric: the first rank that has its sums, and their dtypes and shapes, which are the same on all such ranks.
        kinds: dict[str, tuple[int, _Specs]] = {}
        for rank, (_, by_name, _) in specs.items():
            for name, kind in sorted(by_name.items()):
                _check_specs(name, kinds.setdefault(name, (rank, kind))[1], kind)
        totals, self._totals = self._totals, {}
        flat = [self._flatten(names, device)]
        for name, (_, kind) in kinds.items():
            flat += totals[name][0] if name in totals else [torch.zeros(shape, dtype=dtype) for dtype, shape in kind]
        counted, *rest = _all_reduce([tensor.to(device) for tensor in flat], axis)
        results, remaining = means(names, counted.tolist()), iter(rest)
        sums = {name: [next(remaining) for _ in kind] for name, (_, kind) in kinds.items()}
        # One rank computes a metric and broadcasts it, so that all ranks decide by the same value.
        finished = [_finish(name, totals[name][1], sums[name]) for name, (rank, _) in kinds.items() if rank == axis.rank]
        senders = sorted({rank for rank, _ in kinds.values()})
        for part in chain.from_iterable([broadcast_object(finished, axis, rank) for rank in senders]):
            if repeated := sorted(results.keys() & part):
                raise ConfigError(f"{', '.join(repeated)}: returned by more than one metric; give each metric its own names")
            results |= part
        per_sample, self._per_sample = self._per_sample, {}
        for name, parts in sorted(per_sample.items()):
            columns = [torch.cat(column).detach().to(device) for column in zip(*(part.values for part in parts))]
            results[name] = float(parts[0].compute(*columns, axis))
        return dict(sorted(results.items()))

    def all_reduce(self, names: list[str], axis: Axis, device: torch.device) -> Tensor:
        """Return sum and count of each name over all ranks of ``axis``, on the device, and reset the sums.   [2 N]"""
        flat = self._flatten(names, device)
        return all_reduce_(flat, axis) if len(flat) else flat

    def _flatten(self, names: list[str], device: torch.device) -> Tensor:
        flat = [x for name in names for x in self._sums.get(name, [0.0, 0.0])]
        self._sums = {}
        kwargs: Any = {"dtype": torch.float64, "device": device}  # a scalar is filled in: its copy would synchronize
        packed = [x.to(**kwargs) if isinstance(x, Tensor) else torch.full((), x, **kwargs) for x in flat]
        return torch.stack(packed) if packed else torch.zeros(0, **kwargs)

    @property
    def names(self) -> list[str]:
        return sorted(self._sums)


def means(names: list[str], sums: list[float]) -> dict[str, float]:
    """Return means by name for the result of ``MetricSums.all_reduce``."""
    return {name: sums[2 * i] / sums[2 * i + 1] if sums[2 * i + 1] else float("nan") for i, name in enumerate(names)}


def has_finish(value: Any) -> TypeGuard[Total]:
    """Return whether ``value`` is a pair (sums, finish)."""
    return isinstance(value, tuple) and len(value) == 2 and callable(value[1])


def _upcast(name: str, part: Any) -> Tensor:
    if not isinstance(part, Tensor) or part.is_complex():
        kind = part.dtype if isinstance(part, Tensor) else type(part).__name__
        raise ConfigError(f"metric {name!r}: a sum is a {kind}; expected (sums, finish) with a tensor of real numbers, or several")
    return part.detach().to(torch.float64 if part.is_floating_point() else torch.int64)


def _specs(sums: list[Tensor]) -> _Specs:
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in sums]


def _check_specs(name: str, before: _Specs, now: _Specs) -> None:
    if before != now:
        was, actual = (", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in k) for k in (before, now))
        raise ConfigError(f"metric {name!r}: its sums are {actual} in one batch and {was} in another; give the same shapes in all")


def _all_reduce(tensors: list[Tensor], axis: Axis) -> list[Tensor]:
    """Return sums over the ranks of ``axis``, on the CPU: one collective and one host read for float64, and one for int64."""
    summed = list(tensors)
    for dtype in (torch.float64, torch.int64):
        indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype and tensor.numel()]
        if indices:
            flat = all_reduce_(torch.cat([tensors[i].flatten() for i in indices]), axis).cpu()
            for i, part in zip(indices, flat.split([tensors[i].numel() for i in indices])):
                summed[i] = part.view(tensors[i].shape)
    return summed


def _finish(name: str, finish: Finish, sums: list[Tensor]) -> dict[str, float]:
    result = finish(*sums)
    scalars = result if isinstance(result, Mapping) else {name: result}
    try:
        return {str(key): float(number) for key, number in scalars.items()}
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ConfigError(f"metric {name!r}: finish returns no number ({problem}); expected one, or some by name") from problem
