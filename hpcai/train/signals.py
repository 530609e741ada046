"""Signals of a scheduler: noted by a handler, agreed by all processes at a step boundary."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai import stop
from hpcai.dist.mesh import Mesh


class StopSignals:
    """Within the context, SIGTERM, SIGUSR1 and SIGUSR2 ask the run to stop; ``agreed()`` tells all processes in the same step.

    The vote of one step is a sum of one integer between the hosts. It is counted while the next step runs, so that none waits.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.everyone = mesh.everyone
        self.received: str | None = None
        self._vote: tuple[torch.Tensor, Any] | None = None
        self._noting: AbstractContextManager[None] = stop.noting(self._note)

    def __enter__(self) -> "StopSignals":
        self._noting.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._vote is not None and kind is None:
            self._vote[1].wait()
        self._noting.__exit__(kind, error, trace)

    def _note(self, name: str) -> None:
        self.received = name

    def agreed(self) -> bool:
        """Whether any process had been asked to stop by the last call, the same answer on every process."""
        if self.everyone.size == 1:
            return self.received is not None
        stop = False
        if self._vote is not None:
            votes, work = self._vote
            work.wait()
            stop = bool(votes.item())  # a tensor of the host: no device is waited for
        votes = torch.tensor([int(self.received is not None)], dtype=torch.int32)
        self._vote = votes, torch_dist.all_reduce(votes, group=self.everyone.group, async_op=True)
        return stop
