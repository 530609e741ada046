"""Signals of a batch scheduler: recorded by a handler, and agreed on by all ranks at a step boundary."""

from contextlib import ExitStack
from typing import Self

from hpcai import stop
from hpcai.dist import watchdog
from hpcai.dist.mesh import Mesh


class StopSignals(ExitStack):
    """Context manager that turns ``stop.SIGNALS`` into a stop in the same step on all ranks. Ranks do not communicate
    until one of them receives a signal. All ranks of the job enter and leave such contexts in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.received: str | None = None
        self._boundary = watchdog.next_step_boundary(mesh.job.size)

    def __enter__(self) -> Self:
        self.enter_context(stop.on_signal(self._note))
        self.callback(self._boundary.leave)
        return self

    def _note(self, name: str) -> None:
        self.received = name

    @property
    def cause(self) -> str:
        """Return the name of the signal, and the rank if another one received it."""
        return self.received or self._boundary.reason

    def should_stop(self) -> bool:
        """Return whether all ranks stop at this step. Called after every step, it returns the same on each."""
        return self._boundary.should_stop(self.received)
