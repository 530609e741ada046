"""What an app offers in ``apps/<name>/ablation.py`` to ``hpcai ablate``, which measures what each of its switches brings.

``CONFIG`` is a settings class with ``mesh``; ``switches(cfg, mesh)`` lists the switches in the order in which they are added up;
``trial(cfg, mesh, on)`` is a context manager that gives a ``Trial`` with the switches named in ``on``, and releases it at its end.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Switch:
    """One optimisation: ``what`` it is in a line, and why it cannot be had here (``why_not``), if so."""

    name: str
    what: str
    why_not: str | None = None


class Trial(Protocol):
    """A training with some of the switches on. All trials begin with the same weights."""

    samples: int
    """per step, over all processes"""

    def numerics(self) -> tuple[float, Tensor]:
        """Loss and flat float32 gradient [parameters], on the CPU, of one batch at the first weights; called before any update."""

    def around(self) -> AbstractContextManager[object]:
        """What a training enters once, such as a policy of garbage collection: entered around each ``run``, and not timed."""

    def run(self, steps: int) -> None:
        """So many steps of the real thing: samples from files, update, and an evaluation that has ended when this returns."""
