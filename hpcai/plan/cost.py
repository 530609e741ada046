"""The price of a step that was recorded on paper: seconds on a machine, and what they go to."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcai.plan.machines import Machine
from hpcai.plan.step_trace import Communication, Event, Kernel


@dataclass(frozen=True)
class Cost:
    """Seconds of a step of one process. The parts add up to ``seconds``."""

    seconds: float
    compute_bound: float
    """of kernels that products hold up"""
    memory_bound: float
    """of kernels that what they read and write holds up"""
    launches: float
    """beside both: a kernel's start, and waiting for the host where nothing is captured"""
    exposed_communication: float
    """in which messages are not hidden behind computation"""
    sent: float
    """bytes"""
    messages: float
    idle: float = 0.0
    """in which a stage of a pipeline has nothing to do"""

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def scaled(self, factor: float) -> "Cost":
        return Cost(*(factor * value for value in vars(self).values()))


def estimate_cost(events: Sequence[Event], machine: Machine, captured: bool = True) -> Cost:
    """What ``events`` take, one after another: kernels on one stream, the messages of each group of ranks on one of its own, where
    one begins when it is asked for and those before it have come.
    """
    now = host = compute_bound = memory_bound = launches = exposed = sent = messages = 0.0
    stream_free: dict[tuple[str, tuple[int, ...]], float] = {}  # when the next message of a group can begin
    arrival: dict[int, float] = {}
    for event in events:
        if isinstance(event, Kernel):
            width = max(min(machine.flops), min(8, event.element_bytes))
            multiply, move = event.flops / machine.flops[width], event.bytes / machine.bandwidth
            duration, overhead = machine.slowdown * max(multiply, move), machine.kernel_overhead
            if not captured:
                host += machine.host_launch
                overhead += max(0.0, host - now)
            now += duration + overhead
            launches += overhead
            compute_bound, memory_bound = (compute_bound + duration, memory_bound) if multiply > move else (compute_bound, memory_bound + duration)
        elif isinstance(event, Communication):
            stream = ("in" if event.name == "receive" else "out", event.ranks)
            start = max(now, stream_free.get(stream, 0.0))
            duration, bytes = machine.communication_time(event.name, event.bytes, event.ranks)
            arrival[event.number] = stream_free[stream] = start + duration
            sent, messages = sent + bytes, messages + 1
        else:
            wait = max(0.0, arrival.get(event.number, now) - now)  # or it was sent before these events
            now, exposed = now + wait, exposed + wait
    return Cost(now, compute_bound, memory_bound, launches, exposed, sent, messages)
