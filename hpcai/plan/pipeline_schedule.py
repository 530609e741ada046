"""Traces of pipeline stages, one micro-batch forward and backward in each, and the simulation of a pipeline schedule with them.

    act = SequentialStages(tracer, pipeline, hidden)            # replaces the pipeline in the traced step
    simulate_schedule(orders, last, seconds, hop)               # end of the last pass of each rank
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
    """The trace of a micro-batch in a stage, after a first one."""

    forward: Trace
    backward: Trace
    saved_bytes: int
    """bytes saved from the forward pass to the end of the backward pass"""
    gradient_bytes: int
    """bytes that the first micro-batch allocates for good, such as gradients"""
    input_bytes: int
    """bytes of the input hidden state, and of its gradient"""
    output_bytes: int
    """bytes of the output hidden state"""


@dataclass
class SequentialStages:
    """Traces the stages of a rank in turn, in place of ``pipeline`` (``train.step.SingleStage``). ``hidden``: shape and dtype
    of the output of all stages but the last; None: those of the first stage of this rank."""

    tracer: StepTracer
    pipeline: Pipeline
    hidden: tuple[torch.Size, torch.dtype] | None = None
    stages: list[StageTrace] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model, self.source = self.pipeline.model, self.pipeline.source

    def backward(self, measure: Any, parts: Sequence[Any], around: Any) -> list[Any]:
        run = self.pipeline.stage_runner(measure, parts[0], around)
        for stage in self.pipeline.stages.local_stages:
            with self.tracer.record():  # gradients are not allocated yet
                before = self.tracer.bytes
                self._trace_stage(run, stage)
                gradient_bytes = self.tracer.bytes - before
            traced = self._trace_stage(run, stage)
            self.stages.append(StageTrace(*traced[:3], gradient_bytes, *traced[3:]))
        return [{}]

    def _trace_stage(self, run: Callable[[int, Any], Tensor], stage: int) -> tuple[Trace, Trace, int, int, int]:
        last = stage == self.pipeline.count - 1
        state = torch.empty(self.hidden[0], dtype=self.hidden[1], requires_grad=True) if stage and self.hidden is not None else None
        with self.tracer.record() as forward:
            output = run(stage, state)
        saved_bytes = self.tracer.bytes - forward.before
        if self.hidden is None:
            self.hidden = output.shape, output.dtype
        gradient = None if last else torch.empty_like(output)
        with self.tracer.record() as backward:
            output.backward(gradient)
        return forward, backward, saved_bytes, 0 if state is None else state.nbytes, 0 if last else output.nbytes


def simulate_schedule(
    orders: Sequence[Sequence[Pass]], last: int, seconds: Callable[[str, int], float], hop: Callable[[int, int], float],
) -> list[float]:  # fmt: skip
    """Return the time at which each rank ends its passes in the given order, with ``seconds(kind, stage)`` for each. ``last``: The
    last stage. ``hop``: Seconds of a message between two stages. Raises ValueError for a deadlock."""
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
    """Return kinds of passes, one of which must precede this one, and their stage; None if there is no dependency."""
    if kind == "F" and stage:
        return "F", stage - 1
    return ("BI", stage + 1) if kind in "BI" and stage < last else None


def peak_memory(order: Sequence[Pass], stages: Mapping[int, Sequence[float]]) -> float:
    """Return the peak bytes in addition to those between steps. ``stages``: Bytes allocated by a forward pass and by a backward
    pass, saved between them, and kept from the first backward pass on (gradients), for each stage."""
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
