"""Times of the parts of a step, for the reports of a run.

On a CPU the clock reads the host at the beginning of each part. A GPU runs behind the host: there, one step of each report records
CUDA events, which are read when the report waits for the GPU anyway. What remains of a step is time in which the GPU had no work.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from hpcai.log import BETWEEN
from hpcai.startup import Clock

PARTS = ("data", "forward", "backward", "pipeline", "graph", "reduce", "update", "other", "evaluate", "save")
"""``pipeline``: forward and backward passes of micro-batches in turn; ``graph``: what a CUDA graph replays"""

Marks = list[tuple[str, Any]]  # parts, each with the event at its beginning


class StepClock(Clock):
    """A clock of the parts of steps on ``device``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("other")
        self._on_gpu, self._measuring = device.type == "cuda", False
        self._marks: Marks = []
        self.device_seconds: dict[str, float] = {}  # of the step that was measured last

    def begin(self, part: str) -> None:
        super().begin(part)
        if self._measuring and not torch.cuda.is_current_stream_capturing():  # an event of a graph has no time
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((part, event))
            self._measuring = part != "other"

    def wait_for(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches. The time in which they are awaited is the part ``data``."""
        self.begin("data")
        for batch in batches:
            self.begin("other")
            yield batch
            self.begin("data")
        self.begin("other")

    def measure_next_step(self) -> None:
        """Record the parts of the next step on a GPU, up to the beginning of ``other``."""
        self._measuring, self._marks = self._on_gpu, []

    def take_marks(self) -> Marks:
        """Return the marks of the measured step, if there is a new one. They can be read when the GPU has reached the last."""
        marks, self._marks = self._marks, []
        return marks

    def end_interval(self, steps: int, marks: Marks) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last call, without ``BETWEEN``, and the mean seconds of each part of one of ``steps``."""
        self.begin(self.part)
        training, steps = sum(seconds for part, seconds in self.parts.items() if part not in BETWEEN), max(steps, 1)
        parts, self.parts = {part: self.parts.get(part, 0.0) / steps for part in PARTS}, {}
        if self._on_gpu:
            if marks:
                self.device_seconds = {}
                for (part, began), (_, ended) in pairwise(marks):
                    self.device_seconds[part] = self.device_seconds.get(part, 0.0) + began.elapsed_time(ended) / 1000
            idle = max(training / steps - sum(self.device_seconds.values()), 0.0)
            waited = min(parts["data"], idle)
            parts = {part: parts[part] for part in BETWEEN} | self.device_seconds | {"data": waited, "other": idle - waited}
        return training, {part: float(f"{parts[part]:.4g}") for part in PARTS if parts.get(part)}
