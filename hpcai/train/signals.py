"""Signals of a batch scheduler: recorded by a handler, and agreed on by all ranks at a step boundary."""

from contextlib import AbstractContextManager
from types import TracebackType

from hpcai import stop
from hpcai.dist import watchdog
from hpcai.dist.mesh import Mesh


class StopSignals:
    """Context manager that turns ``stop.SIGNALS`` into a stop in the same step on all ranks. Ranks do not communicate
    until one of them receives a signal. All ranks of the job enter and leave such contexts in the same order."""

    def __init__(self, mesh: Mesh) -> None:
        self.received: str | None = None
        self._boundary = watchdog.next_step_boundary(mesh.job.size)
        self._noting: AbstractContextManager[None] = stop.on_signal(self._note)

    def __enter__(self) -> "StopSignals":
        self._noting.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._boundary.leave()
        self._noting.__exit__(kind, error, trace)

    def _note(self, name: str) -> None:
        self.received = name

    @property
    def cause(self) -> str:
        """Return the name of the signal, and the rank if another one received it."""
        return self.received or self._boundary.reason

    def should_stop(self) -> bool:
        """Return whether all ranks stop at this step. Called after every step, it returns the same on each."""
        return self._boundary.should_stop(self.received)
