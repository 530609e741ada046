"""Signals of a scheduler: noted by a handler, agreed by all processes at a step boundary."""

from contextlib import AbstractContextManager
from types import TracebackType

from hpcai import stop
from hpcai.dist import watchdog
from hpcai.dist.mesh import Mesh


class StopSignals:
    """Within the context, SIGTERM, SIGUSR1 and SIGUSR2 ask the run to stop; ``agreed()`` tells all processes in the same step.

    Processes say nothing to each other until one is asked. All of the job enter one context after another together.
    """

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
        """Which signal it was, and of another process on which."""
        return self.received or self._boundary.reason

    def agreed(self) -> bool:
        """Whether all processes stop here, since one was asked to: the same answer on each, which calls it after every step."""
        return self._boundary.should_stop(self.received)
