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
from hpcai.plan.paper import Paper, Record

Pass = tuple[str, int, int]
"""kind (F, B, I, W: ``Pipeline.order``), stage, micro-batch"""


@dataclass
class Stage:
    """One micro-batch in one stage, which has seen another before."""

    forward: Record
    backward: Record
    kept: int
    """bytes from the forward pass to the end of the backward one"""
    stays: int
    """bytes that the first micro-batch leaves, such as gradients"""
    given: int
    """bytes of a hidden state that comes in, and of its gradient"""
    sent: int
    """bytes of the one that goes out"""


@dataclass
class OneByOne:
    """Acts as ``pipeline`` (``hpcai.train.step.Act``) on the stages of one rank, one after another. ``sent``: size and type of
    what every stage but the last sends; None: what the first one of this rank does."""

    paper: Paper
    pipeline: Pipeline
    sent: tuple[torch.Size, torch.dtype] | None = None
    stages: list[Stage] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return self.pipeline.model

    @property
    def source(self) -> int:
        return self.pipeline.source

    def backward(self, measure: Any, parts: Sequence[Any], around: Any) -> list[Any]:
        run = self.pipeline.stage_runner(measure, parts[0], around)
        for stage in self.pipeline.stages.local_stages:
            with self.paper.recording():  # gradients have no memory yet
                before = self.paper.bytes
                self._pass(run, stage)
                stays = self.paper.bytes - before
            found = self._pass(run, stage)
            self.stages.append(Stage(*found[:3], stays, *found[3:]))
        return [{}]

    def forward(self, function: Any, batch: Any, around: Any) -> Any:
        raise NotImplementedError("a plan does not evaluate")

    def _pass(self, run: Callable[[int, Any], Tensor], stage: int) -> tuple[Record, Record, int, int, int]:
        last = stage == self.pipeline.count - 1
        hidden = torch.empty(self.sent[0], dtype=self.sent[1], requires_grad=True) if stage and self.sent is not None else None
        with self.paper.recording() as forward:
            output = run(stage, hidden)
        kept = self.paper.bytes - forward.before
        if self.sent is None:
            self.sent = output.shape, output.dtype
        gradient = None if last else torch.empty_like(output)
        with self.paper.recording() as backward:
            output.backward(gradient)
        return forward, backward, kept, 0 if hidden is None else hidden.nbytes, 0 if last else output.nbytes


def passes(
    orders: Sequence[Sequence[Pass]], last: int, seconds: Callable[[str, int], float], hop: Callable[[int, int], float],
) -> list[float]:  # fmt: skip
    """When each rank is ready that makes its passes in this order, of which one takes ``seconds(kind, stage)``.
    ``last``: the last stage. ``hop``: seconds of a message from one stage to another. Raises ValueError where ranks wait for
    one another."""
    done: dict[Pass, float] = {}
    free, places = [0.0] * len(orders), [0] * len(orders)
    while any(place < len(order) for place, order in zip(places, orders)):
        before = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, stage, micro = order[places[rank]]
                known = _needed(kind, stage, last)
                if known is None:
                    start = free[rank]
                else:
                    found = next((done[k, known[1], micro] for k in known[0] if (k, known[1], micro) in done), None)
                    if found is None:
                        break
                    start = max(free[rank], found + hop(known[1], stage))
                free[rank] = done[kind, stage, micro] = start + seconds(kind, stage)
                places[rank] += 1
        if places == before:
            raise ValueError(f"a schedule in which {len(orders)} ranks wait for one another, at passes {places}")
    return free


def _needed(kind: str, stage: int, last: int) -> tuple[str, int] | None:
    """Passes of which one has to be over, and their stage."""
    if kind == "F" and stage:
        return "F", stage - 1
    return ("BI", stage + 1) if kind in "BI" and stage < last else None


def most(order: Sequence[Pass], stages: Mapping[int, Sequence[float]]) -> float:
    """The most bytes at a time beside what is there between steps, from those of each stage: what a forward pass and a backward
    pass make, what stays from the one to the other (``kept``), and from the first backward pass on (``stays``)."""
    held = peak = 0.0
    seen = set()
    for kind, stage, _ in order:
        forward, backward, kept, stays = stages[stage]
        peak = max(peak, held + (forward if kind == "F" else backward))
        held += {"F": kept, "B": -kept, "W": -kept}.get(kind, 0.0)
        if kind in "BI" and stage not in seen:
            seen.add(stage)
            held += stays
    return max(peak, held)
