"""The price of a step that was recorded on paper: seconds on a machine, and what they go to."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpcai.plan.machines import Machine
from hpcai.plan.paper import Event, Run, Send


@dataclass(frozen=True)
class Price:
    """Seconds of a step of one process. The parts add up to ``seconds``."""

    seconds: float
    products: float
    """of kernels that products hold up"""
    memory: float
    """of kernels that what they read and write holds up"""
    launches: float
    """beside both: a kernel's start, and waiting for the host where nothing is captured"""
    waiting: float
    """in which messages are not hidden behind computation"""
    sent: float
    """bytes"""
    messages: float
    idle: float = 0.0
    """in which a stage of a pipeline has nothing to do"""

    def __add__(self, other: "Price") -> "Price":
        return Price(*(a + b for a, b in zip(vars(self).values(), vars(other).values())))

    def times(self, factor: float) -> "Price":
        return Price(*(factor * value for value in vars(self).values()))


def price(events: Sequence[Event], machine: Machine, captured: bool = True) -> Price:
    """What ``events`` take, one after another: kernels on one stream, the messages of each group of ranks on one of its own, where
    one begins when it is asked for and those before it have come.
    """
    now = host = products = memory = launches = waiting = sent = messages = 0.0
    free: dict[tuple[str, tuple[int, ...]], float] = {}  # when the next message of a group can begin
    there: dict[int, float] = {}
    for event in events:
        if isinstance(event, Run):
            width = max(min(machine.products), min(8, event.width))
            multiply, move = event.products / machine.products[width], event.bytes / machine.memory
            took, beside = machine.slower * max(multiply, move), machine.launch
            if not captured:
                host += machine.host
                beside += max(0.0, host - now)
            now += took + beside
            launches += beside
            products, memory = (products + took, memory) if multiply > move else (products, memory + took)
        elif isinstance(event, Send):
            way = ("in" if event.name == "receive" else "out", event.ranks)
            start = max(now, free.get(way, 0.0))
            took, bytes = machine.message(event.name, event.bytes, event.ranks)
            there[event.number] = free[way] = start + took
            sent, messages = sent + bytes, messages + 1
        else:
            late = max(0.0, there.get(event.number, now) - now)  # or it was sent before these events
            now, waiting = now + late, waiting + late
    return Price(now, products, memory, launches, waiting, sent, messages)
