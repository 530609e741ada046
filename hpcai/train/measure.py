"""Sums of what was measured, on the device; one reduction and one host read per report.

A value is a mean over the batch, which its number of samples weighs, or a pair (sum, count). What is reported is always
sum / count over everything that was added on any process, never a mean of means.
"""

import torch
from torch import Tensor

from hpcai.dist.collect import gather_objects, sum_in_place
from hpcai.dist.mesh import Axis

Value = Tensor | tuple[Tensor, Tensor | float]


class Measured:
    """Sums and counts by name: ``add`` on the device, ``reduce`` over an axis once."""

    def __init__(self) -> None:
        self._sums: dict[str, list] = {}

    def add(self, values: dict[str, Value], samples: int) -> None:
        for name, value in values.items():
            if isinstance(value, tuple):
                part, count = value[0].detach(), value[1]
            else:
                part, count = value.detach() * samples, samples
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] = entry[0] + part.double()
            entry[1] = entry[1] + (count.detach().double() if isinstance(count, Tensor) else count)

    def reduce(self, axis: Axis, device: torch.device, uneven: bool = False) -> dict[str, float]:
        """Means by name over all processes of ``axis``, which all call it; then sums start anew.

        ``uneven``: a process may have added nothing at all, and learns the names from the others.
        """
        names = sorted(set().union(*gather_objects(sorted(self._sums), axis)) if uneven else self._sums)
        return means(names, self.pack(names, axis, device).tolist())  # the one host read

    def pack(self, names: list[str], axis: Axis, device: torch.device) -> Tensor:
        """Sum and count of each name over all processes of ``axis``, on the device; then sums start anew.   [2 N]"""
        flat = [x for name in names for x in self._sums.get(name, [0.0, 0.0])]
        self._sums = {}
        packed = [torch.as_tensor(x, dtype=torch.float64, device=device) for x in flat]
        return sum_in_place(torch.stack(packed), axis) if packed else torch.zeros(0, dtype=torch.float64, device=device)

    @property
    def names(self) -> list[str]:
        return sorted(self._sums)


def means(names: list[str], sums: list[float]) -> dict[str, float]:
    """Means by name, from what ``Measured.pack`` gave."""
    return {name: sums[2 * i] / sums[2 * i + 1] if sums[2 * i + 1] else float("nan") for i, name in enumerate(names)}
