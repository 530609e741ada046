"""The cost of a traced step on a machine: its time, by causes."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcai.plan.machines import Machine
from hpcai.plan.step_trace import Communication, Event, Kernel


@dataclass(frozen=True)
class Cost:
    """Seconds of a step on one rank. The parts add up to ``seconds``."""

    seconds: float = 0.0
    compute_bound: float = 0.0
    """of kernels that are bound by FLOP"""
    memory_bound: float = 0.0
    """of kernels that are bound by memory bandwidth"""
    launches: float = 0.0
    """in addition: launches of kernels"""
    exposed_communication: float = 0.0
    """of communication that is not overlapped with computation"""
    sent: float = 0.0
    """bytes"""
    messages: float = 0.0
    idle: float = 0.0
    """of pipeline bubbles"""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def __rmul__(self, factor: float) -> "Cost":
        return Cost(*(factor * value for value in vars(self).values()))


def estimate_cost(events: Sequence[Event], machine: Machine) -> Cost:
    """Return the cost of ``events`` in order, with kernels on one stream and one stream for the communication of each group, which
    starts when it is requested and the previous one has ended."""
    now = compute = memory = launches = exposed = sent = messages = 0.0
    stream_free: dict[tuple[str, tuple[int, ...]], float] = {}  # when the next message of a group can begin
    arrival: dict[int, float] = {}
    for event in events:
        if isinstance(event, Kernel):
            width = max(min(machine.flops), min(8, event.element_bytes))
            multiply, move = event.flops / machine.flops[width], event.bytes / machine.bandwidth
            duration = machine.slowdown * max(multiply, move)
            now += duration + machine.kernel_overhead
            launches += machine.kernel_overhead
            compute, memory = (compute + duration, memory) if multiply > move else (compute, memory + duration)
        elif isinstance(event, Communication):
            stream = ("in" if event.name == "receive" else "out", event.ranks)
            start = max(now, stream_free.get(stream, 0.0))
            duration, bytes = machine.communication_time(event.name, event.bytes, event.ranks)
            arrival[event.number] = stream_free[stream] = start + duration
            sent, messages = sent + bytes, messages + 1
        else:
            wait = max(0.0, arrival.get(event.number, now) - now)  # without an arrival, it was started before these events
            now, exposed = now + wait, exposed + wait
    return Cost(now, compute, memory, launches, exposed, sent, messages)
