"""How much of a large result is made at a time, where it is never needed whole."""

from torch import Tensor

_GPU = 1 << 28  # bytes: enough to fill it


def several(x: Tensor, each: int, cpu: int) -> int:
    """How many things of ``each`` bytes, one at least: as many as fit ``cpu`` bytes where ``x`` is on a CPU, for its cache."""
    return max(1, (cpu if x.device.type == "cpu" else _GPU) // each)
