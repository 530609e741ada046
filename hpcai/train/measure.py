"""Sums of what was measured, on the device; few messages and few host reads per report.

A value is a mean over the batch, which its number of samples weighs, or a pair (sum, count). What is reported is always
sum / count over everything that was added on any process, never a mean of means.

A metric of an evaluation may also give a pair (sums, finish): one tensor or several, of the same shapes in every batch, and a
function. ``finish(*sums)`` is called once, on the CPU, with the sums over everything, and gives a number, or several by name.
Integers are added as int64, which is exact (torch divides them as float32: take ``.double()`` first), others as float64. ::

    return {"auc": ((signal, background), area)}     # counts by score [K], [K]; area(signal, background) -> float
    return {"spectrum": (power, by_scale)}           # [K]; by_scale(power) -> {"power_0": ..., "power_1": ...}
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hpcai.dist.collectives import broadcast_object, gather_distinct, all_reduce_
from hpcai.dist.mesh import Axis
from hpcai.errors import ConfigError

Value = Tensor | tuple[Tensor, Tensor | float]
Finish = Callable[..., Any]
Total = tuple[Tensor | Sequence[Tensor], Finish]
_Kinds = list[tuple[torch.dtype, tuple[int, ...]]]  # of the sums of one metric


class Measured:
    """Sums by name: ``add`` on the device, ``reduce`` over an axis once."""

    def __init__(self) -> None:
        self._sums: dict[str, list] = {}
        self._totals: dict[str, tuple[list[Tensor], Finish]] = {}

    def add(self, values: Mapping[str, Value | Total], samples: int) -> None:
        """Raises ConfigError for sums that are no tensors of real numbers, or of other shapes than those of the batch before."""
        for name, value in values.items():
            if finishes(value):
                self._add_total(name, *value)
                continue
            part, count = value if isinstance(value, tuple) else (value.detach() * samples, samples)
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] = entry[0] + part.detach().double()  # type: ignore[union-attr]
            entry[1] = entry[1] + (count.detach().double() if isinstance(count, Tensor) else count)

    def _add_total(self, name: str, sums: Tensor | Sequence[Tensor], finish: Finish) -> None:
        parts = [_exact(name, part) for part in ([sums] if isinstance(sums, Tensor) else sums)]
        whole, _ = self._totals.setdefault(name, ([torch.zeros_like(part) for part in parts], finish))
        _same(name, _kinds(whole), _kinds(parts))
        for total, part in zip(whole, parts):
            total += part

    def reduce(self, axis: Axis, device: torch.device, uneven: bool = False) -> dict[str, float]:
        """Numbers by name over all processes of ``axis``, which all call it; then sums start anew.

        ``uneven``: a process may have added nothing at all, and learns the names and shapes from the others. Raises ConfigError
        where processes have sums of unlike shapes, two metrics give one name, or ``finish`` gives no number.
        """
        own = self.names, {name: _kinds(whole) for name, (whole, _) in sorted(self._totals.items())}
        every = gather_distinct(own if any(own) else None, axis) if uneven else {0: own}
        names = sorted(set().union(*(counted for counted, _ in every.values())))
        kinds = _agreed({rank: totals for rank, (_, totals) in every.items()})
        owns, self._totals = self._totals, {}
        flat = [self._flat(names, device)]
        for name, (_, kind) in kinds.items():
            flat += owns[name][0] if name in owns else [torch.zeros(shape, dtype=dtype) for dtype, shape in kind]
        counted, *rest = _summed([tensor.to(device) for tensor in flat], axis)
        found, left = [means(names, counted.tolist())], iter(rest)
        sums = {name: [next(left) for _ in kind] for name, (_, kind) in kinds.items()}
        # One process makes a number and tells it, so that all decide by the same one.
        mine = [_finished(name, owns[name][1], sums[name]) for name, (rank, _) in kinds.items() if rank == axis.rank]
        found += chain.from_iterable(broadcast_object(mine, axis, rank) for rank in sorted({rank for rank, _ in kinds.values()}))
        return _once(found)

    def pack(self, names: list[str], axis: Axis, device: torch.device) -> Tensor:
        """Sum and count of each name over all processes of ``axis``, on the device; then sums start anew.   [2 N]"""
        flat = self._flat(names, device)
        return all_reduce_(flat, axis) if len(flat) else flat

    def _flat(self, names: list[str], device: torch.device) -> Tensor:
        flat = [x for name in names for x in self._sums.get(name, [0.0, 0.0])]
        self._sums = {}
        words: Any = {"dtype": torch.float64, "device": device}  # a number is filled in: a copy of it would wait for the device
        packed = [x.to(**words) if isinstance(x, Tensor) else torch.full((), x, **words) for x in flat]
        return torch.stack(packed) if packed else torch.zeros(0, **words)

    @property
    def names(self) -> list[str]:
        return sorted(self._sums)


def means(names: list[str], sums: list[float]) -> dict[str, float]:
    """Means by name, from what ``Measured.pack`` gave."""
    return {name: sums[2 * i] / sums[2 * i + 1] if sums[2 * i + 1] else float("nan") for i, name in enumerate(names)}


def finishes(value: Any) -> bool:
    """Whether ``value`` is a pair (sums, finish)."""
    return isinstance(value, tuple) and len(value) == 2 and callable(value[1])


def _exact(name: str, part: Any) -> Tensor:
    if not isinstance(part, Tensor) or part.is_complex():
        found = part.dtype if isinstance(part, Tensor) else type(part).__name__
        raise ConfigError(f"metric {name!r}: a sum is a {found}; expected (sums, finish) with a tensor of real numbers, or several")
    return part.detach().to(torch.float64 if part.is_floating_point() else torch.int64)


def _kinds(sums: list[Tensor]) -> _Kinds:
    return [(tensor.dtype, tuple(tensor.shape)) for tensor in sums]


def _same(name: str, before: _Kinds, now: _Kinds) -> None:
    if before != now:
        was, found = (", ".join(f"{str(dtype).removeprefix('torch.')} {list(shape)}" for dtype, shape in k) for k in (before, now))
        raise ConfigError(f"metric {name!r}: its sums are {found} in one batch and {was} in another; give the same shapes in all")


def _agreed(every: Mapping[int, dict[str, _Kinds]]) -> dict[str, tuple[int, _Kinds]]:
    """By name of a metric: the first rank that has its sums, and their kinds, which are the same on all that have them."""
    agreed: dict[str, tuple[int, _Kinds]] = {}
    for rank, totals in every.items():
        for name in sorted(totals):
            _same(name, agreed.setdefault(name, (rank, totals[name]))[1], totals[name])
    return agreed


def _summed(tensors: list[Tensor], axis: Axis) -> list[Tensor]:
    """Sums over the processes of ``axis``, on the CPU: one message and one host read for all of float64, one for all of int64."""
    summed = list(tensors)
    for dtype in (torch.float64, torch.int64):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype and tensor.numel()]
        if places:
            flat = all_reduce_(torch.cat([tensors[i].flatten() for i in places]), axis).cpu()
            for i, part in zip(places, flat.split([tensors[i].numel() for i in places])):
                summed[i] = part.view(tensors[i].shape)
    return summed


def _finished(name: str, finish: Finish, sums: list[Tensor]) -> dict[str, float]:
    given = finish(*sums)
    numbers = given if isinstance(given, Mapping) else {name: given}
    try:
        return {str(key): float(number) for key, number in numbers.items()}
    except (TypeError, ValueError, RuntimeError) as problem:
        raise ConfigError(f"metric {name!r}: finish gives no number ({problem}); expected one, or some by name") from problem


def _once(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    together: dict[str, float] = {}
    for part in parts:
        if twice := sorted(together.keys() & part):
            raise ConfigError(f"{', '.join(twice)}: given by more than one metric; let each give names of its own")
        together |= part
    return dict(sorted(together.items()))
