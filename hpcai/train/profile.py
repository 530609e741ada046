"""Traces of selected steps by torch.profiler: operations of the host and the GPU, with their times."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType

import torch

from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError

logger = logging.getLogger(__name__)

_NO_SPAN = nullcontext()
_gpu: bool | None = None
_tracing = False


def span(name: str) -> AbstractContextManager[object]:
    """Return a context manager that names a range: an NVTX range with a GPU, an entry of the trace within a profiled step, or
    nothing."""
    global _gpu
    if _gpu is None:
        _gpu = torch.cuda.is_available()
    traced = torch.profiler.record_function(name) if _tracing else _NO_SPAN
    return _marked(name, traced) if _gpu else traced


@contextmanager
def _marked(name: str, traced: AbstractContextManager[object]) -> Iterator[None]:
    with torch.cuda.nvtx.range("{}", name), traced:
        yield


class Profile:
    """Context manager that traces ``steps``: one step, or the first and the last, counted from 1; None traces nothing.

    The first rank of ``mesh`` writes ``directory/profile/rank-0000.json.gz``, for Perfetto or chrome://tracing, and the costliest
    operations as text beside it. On a GPU the steps are also marked for Nsight Systems: ``nsys profile
    --capture-range=cudaProfilerApi``. ``done``: the steps of the run before this start. Raises ConfigError if ``steps`` are out of
    order.
    """

    def __init__(self, directory: Path | None, steps: Sequence[int] | None, mesh: Mesh, done: int = 0) -> None:
        if steps is not None and (len(steps) not in (1, 2) or not 1 <= steps[0] <= steps[-1]):
            raise ConfigError(f"profiled steps are {list(steps)}; expected one step from 1 on, or the first and the last")
        enabled = directory is not None and steps is not None and mesh.is_first
        self.first, self.last = (steps[0], steps[-1]) if enabled and steps else (0, -1)
        self.path = (directory or Path()) / "profile" / f"rank-{mesh.job.rank:04d}.json.gz"
        self._cuda, self._done = mesh.device.type == "cuda", done
        self._trace: torch.profiler.profile | None = None
        self._step: AbstractContextManager[object] = _NO_SPAN

    def __enter__(self) -> "Profile":
        self._advance(self._done)
        return self

    def after_step(self, step: int) -> None:
        """Advance the trace. Called after each step, before any work of the next."""
        if self.first <= step + 1 and step <= self.last:
            self._advance(step)

    def _advance(self, step: int) -> None:
        if self._trace is not None:
            self._step.__exit__(None, None, None)
        if self._trace is not None and step >= self.last:
            self._stop(self._trace)
        elif self.first - 1 <= step < self.last:
            if self._trace is None:
                self._start()
            self._step = torch.profiler.record_function(f"step {step + 1}")
            self._step.__enter__()

    def _start(self) -> None:
        global _tracing
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            torch.cuda.synchronize()  # keeps queued work of earlier steps out of the trace
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace, _tracing = torch.profiler.profile(activities=activities), True
        self._trace.start()
        if self._cuda:
            torch.cuda.profiler.start()

    def _stop(self, trace: torch.profiler.profile) -> None:
        global _tracing
        self._trace, _tracing = None, False
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        trace.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.path))
            order = f"self_{'device' if self._cuda else 'cpu'}_time_total"
            table = trace.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
            self.path.with_name(f"{self.path.name.split('.')[0]}.txt").write_text(table, encoding="utf-8")
            logger.info("steps %d to %d are profiled: %s", self.first, self.last, self.path)
        except (OSError, RuntimeError) as error:  # a full disk is no reason to end a run
            logger.warning("steps %d to %d were profiled, but %s cannot be written: %s", self.first, self.last, self.path, error)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._trace is not None:  # the run ends within the profiled steps
            self._step.__exit__(None, None, None)
            with suppress(Exception) if error else _NO_SPAN:  # a failed GPU cannot be synchronized; keep its error
                self._stop(self._trace)
