"""Pipeline stages on paper: each passes one micro-batch forward and backward, and a schedule says how often and when.

    act = OneByOne(paper, pipeline, sent)        # in place of the pipeline, in the step that is recorded
    passes(orders, rank_of, seconds, hop)        # when each rank has done all of its passes
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hpcai.parallel.pipeline import Pipeline
from hpcai.plan.step_trace import StepTracer, Trace

Pass = tuple[str, int, int]
"""kind (F, B, I, W: ``Pipeline.order``), stage, micro-batch"""


@dataclass
class StageTrace:
    """One micro-batch in one stage, which has seen another before."""

    forward: Trace
    backward: Trace
    saved_bytes: int
    """bytes from the forward pass to the end of the backward one"""
    gradient_bytes: int
    """bytes that the first micro-batch leaves, such as gradients"""
    input_bytes: int
    """bytes of a hidden state that comes in, and of its gradient"""
    output_bytes: int
    """bytes of the one that goes out"""


@dataclass
class SequentialStages:
    """Acts as ``pipeline`` (``train.step.ForwardBackward``) on the stages of one rank, one after another. ``sent``: size and type
    of what every stage but the last sends; None: what the first one of this rank does."""

    tracer: StepTracer
    pipeline: Pipeline
    hidden: tuple[torch.Size, torch.dtype] | None = None
    stages: list[StageTrace] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.pipeline.model

    @property
    def source(self) -> int:
        return self.pipeline.source

    def backward(self, measure: Any, parts: Sequence[Any], around: Any) -> list[Any]:
        run = self.pipeline.stage_runner(measure, parts[0], around)
        for stage in self.pipeline.stages.local_stages:
            with self.tracer.record():  # gradients have no memory yet
                before = self.tracer.bytes
                self._trace_stage(run, stage)
                gradient_bytes = self.tracer.bytes - before
            traced = self._trace_stage(run, stage)
            self.stages.append(StageTrace(*traced[:3], gradient_bytes, *traced[3:]))
        return [{}]

    def forward(self, function: Any, batch: Any, around: Any) -> Any:
        raise NotImplementedError("a plan does not evaluate")

    def _trace_stage(self, run: Callable[[int, Any], Tensor], stage: int) -> tuple[Trace, Trace, int, int, int]:
        last = stage == self.pipeline.count - 1
        hidden = torch.empty(self.hidden[0], dtype=self.hidden[1], requires_grad=True) if stage and self.hidden is not None else None
        with self.tracer.record() as forward:
            output = run(stage, hidden)
        saved_bytes = self.tracer.bytes - forward.before
        if self.hidden is None:
            self.hidden = output.shape, output.dtype
        gradient = None if last else torch.empty_like(output)
        with self.tracer.record() as backward:
            output.backward(gradient)
        return forward, backward, saved_bytes, 0 if hidden is None else hidden.nbytes, 0 if last else output.nbytes


def simulate_schedule(
    orders: Sequence[Sequence[Pass]], last: int, seconds: Callable[[str, int], float], hop: Callable[[int, int], float],
) -> list[float]:  # fmt: skip
    """When each rank is ready that makes its passes in this order, of which one takes ``seconds(kind, stage)``.
    ``last``: the last stage. ``hop``: seconds of a message from one stage to another. Raises ValueError where ranks wait for
    one another."""
    done: dict[Pass, float] = {}
    ends, positions = [0.0] * len(orders), [0] * len(orders)
    while any(position < len(order) for position, order in zip(positions, orders)):
        before = list(positions)
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                kind, stage, micro = order[positions[rank]]
                dependency = _dependency(kind, stage, last)
                if dependency is None:
                    start = ends[rank]
                else:
                    ready = next((done[k, dependency[1], micro] for k in dependency[0] if (k, dependency[1], micro) in done), None)
                    if ready is None:
                        break
                    start = max(ends[rank], ready + hop(dependency[1], stage))
                ends[rank] = done[kind, stage, micro] = start + seconds(kind, stage)
                positions[rank] += 1
        if positions == before:
            raise ValueError(f"a schedule in which {len(orders)} ranks wait for one another, at passes {positions}")
    return ends


def _dependency(kind: str, stage: int, last: int) -> tuple[str, int] | None:
    """Passes of which one has to be over, and their stage."""
    if kind == "F" and stage:
        return "F", stage - 1
    return ("BI", stage + 1) if kind in "BI" and stage < last else None


def peak_memory(order: Sequence[Pass], stages: Mapping[int, Sequence[float]]) -> float:
    """The most bytes at a time beside what is there between steps, from those of each stage: what a forward pass and a backward
    pass make, what stays from the one to the other (``kept``), and from the first backward pass on (``stays``)."""
    used = peak = 0.0
    seen = set()
    for kind, stage, _ in order:
        forward, backward, saved, gradients = stages[stage]
        peak = max(peak, used + (forward if kind == "F" else backward))
        used += {"F": saved, "B": -saved, "W": -saved}.get(kind, 0.0)
        if kind in "BI" and stage not in seen:
            seen.add(stage)
            used += gradients
    return max(peak, used)
