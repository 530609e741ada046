"""Clocks, links and sums of a job, measured by its ranks together: over gloo between hosts, over NCCL between GPUs.

A link is measured by a pair of ranks. In a round of a tournament every rank has one partner, so n ranks need n - 1 rounds, and all
links of a round are busy at once. Pairs talk through the process group that is there; none is made for a pair.
"""

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as torch_dist

PLAYERS = 64
"""Ranks that play a tournament: all ranks of a job, or of a larger one the first of each node."""
ROUNDS = 63
"""At most so many rounds: a tournament of more ranks is played in part, evenly spread over its rounds."""
SIZES = (8, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
"""Bytes of the sums that are timed."""
_PINGS, _SWAPS, _SWAPPED = 20, 3, 4 << 20
_EXCHANGES = 8  # of clocks, of which the fastest counts


@dataclass(frozen=True)
class Link:
    """What one pair has measured: seconds one way of 8 bytes, and bytes a second of each of two messages that pass each other."""

    one: int
    other: int
    latency: float
    rate: float


@dataclass(frozen=True)
class Pace:
    """What a rank does alone: multiplications a second (of a product of matrices), the share of its threads' time that it got, and
    seconds of a sum of 8 bytes."""

    rate: float
    share: float
    small: float = 0.0


@dataclass
class Network:
    """``clocks``: seconds by which a rank's clock is ahead of rank 0's, and how far that may be off. ``sums``: seconds by bytes, of
    the slowest rank. ``played`` of ``rounds`` rounds were measured in time."""

    backend: str = ""
    clocks: dict[int, tuple[float, float]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    sums: dict[int, float] = field(default_factory=dict)
    paces: dict[int, Pace] = field(default_factory=dict)
    rounds: int = 0
    played: int = 0


# ---- who plays whom


def players(nodes: Sequence[str]) -> list[int]:
    """The ranks that play, by the node of every rank."""
    return list(range(len(nodes))) if len(nodes) <= PLAYERS else firsts(nodes)


def firsts(nodes: Sequence[str]) -> list[int]:
    """The first rank of each node."""
    return sorted({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values())


def partner(place: int, turn: int, count: int) -> int | None:
    """The partner of player ``place`` of ``count`` in round ``turn`` (circle method); None for who sits out."""
    even = count + count % 2
    if place == even - 1:
        other = turn
    elif place == turn:
        other = even - 1
    else:
        other = (2 * turn - place) % (even - 1)
    return other if other < count else None


def rounds(count: int, most: int = ROUNDS) -> list[int]:
    """The rounds that ``count`` players play."""
    every = count + count % 2 - 1 if count > 1 else 0
    return list(range(every)) if every <= most else sorted({i * every // most for i in range(most)})


def schedule(rank: int, nodes: Sequence[str]) -> Iterator[int | None]:
    """The partners of ``rank``, one for each round. Where not all ranks play, each also meets its neighbours of the same node."""
    those = players(nodes)
    for turn in rounds(len(those)):
        other = partner(those.index(rank), turn, len(those)) if rank in those else None
        yield None if other is None else those[other]
    if len(those) < len(nodes):
        own = [other for other, node in enumerate(nodes) if node == nodes[rank]]
        place = own.index(rank)
        for turn in (0, 1):
            other = place + (1 if (place + turn) % 2 == 0 else -1)
            yield own[other] if 0 <= other < len(own) else None


# ---- measuring


class Wire:
    """Messages of ``device`` through ``group``; ``hosts`` is the group between hosts."""

    def __init__(self, device: torch.device, group: Any, hosts: Any) -> None:
        self.device, self.group, self.hosts = device, group, hosts

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def send(self, value: torch.Tensor, to: int) -> None:
        self._do(torch_dist.P2POp(torch_dist.isend, value, to, self.group))

    def receive(self, value: torch.Tensor, source: int) -> None:
        self._do(torch_dist.P2POp(torch_dist.irecv, value, source, self.group))

    def swap(self, out: torch.Tensor, into: torch.Tensor, other: int) -> None:
        out_op = torch_dist.P2POp(torch_dist.isend, out, other, self.group)
        self._do(out_op, torch_dist.P2POp(torch_dist.irecv, into, other, self.group))

    def _do(self, *operations: Any) -> None:
        for work in torch_dist.batch_isend_irecv(list(operations)):
            work.wait()
        self.wait()

    def sum(self, value: torch.Tensor) -> None:
        torch_dist.all_reduce(value, group=self.group)
        self.wait()

    def meet(self) -> None:
        """Wait for all ranks."""
        torch_dist.all_reduce(torch.zeros(1), group=self.hosts)

    def most(self, value: float) -> float:
        """The largest ``value`` of all ranks, alike on all of them."""
        told = torch.tensor([value], dtype=torch.float64)
        torch_dist.all_reduce(told, torch_dist.ReduceOp.MAX, group=self.hosts)
        return float(told)


def skew(wire: Wire, rank: int, ranks: Sequence[int], clock: Callable[[], float] = time.time) -> tuple[float, float]:
    """Seconds by which the clock of this rank, one of ``ranks``, is ahead of that of their first, and half the round trip by which
    that may be off. Of several exchanges the fastest counts (Cristian 1989)."""
    best, told = (0.0, float("inf")), torch.zeros(1, dtype=torch.float64)
    if rank != ranks[0]:
        for _ in range(_EXCHANGES):
            began = clock()
            torch_dist.send(told, ranks[0], group=wire.hosts)
            torch_dist.recv(told, ranks[0], group=wire.hosts)
            ended = clock()
            best = min(best, ((began + ended) / 2 - float(told), (ended - began) / 2), key=lambda found: found[1])
        return best
    for other in ranks[1:]:
        for _ in range(_EXCHANGES):
            torch_dist.recv(told, other, group=wire.hosts)
            told[0] = clock()
            torch_dist.send(told, other, group=wire.hosts)
    return 0.0, 0.0


def links(wire: Wire, rank: int, nodes: Sequence[str], seconds: float) -> tuple[list[Link], int]:
    """The links that this rank has measured as the lower of two, and in how many rounds. Once the ``seconds`` of one of a pair are
    over, the two only tell each other so."""
    found, played, until = [], 0, time.monotonic() + seconds
    for other in schedule(rank, nodes):
        if other is None:
            played += 1
            continue
        go, theirs = torch.tensor([time.monotonic() < until]), torch.tensor([False])
        hosts = Wire(torch.device("cpu"), wire.hosts, wire.hosts)
        hosts.swap(go.byte(), into := theirs.byte(), other)
        if go and into:
            played += 1
            latency, rate = measure_link(wire, rank < other, other)
            found += [Link(rank, other, latency, rate)] if rank < other else []
    return found, played


def measure_link(wire: Wire, begins: bool, other: int) -> tuple[float, float]:
    """Seconds one way, the median; and bytes a second each way, the best: other programs make it less, and nothing more."""
    word, times = torch.zeros(8, dtype=torch.uint8, device=wire.device), []
    for number in range(_PINGS + 3):
        began = time.perf_counter()
        for act in (wire.send, wire.receive) if begins else (wire.receive, wire.send):
            act(word, other)
        times += [time.perf_counter() - began] if number >= 3 else []
    out, into = (torch.zeros(_SWAPPED, dtype=torch.uint8, device=wire.device) for _ in range(2))
    swaps = []
    for _ in range(_SWAPS + 1):
        began = time.perf_counter()
        wire.swap(out, into, other)
        swaps.append(time.perf_counter() - began)
    return statistics.median(times) / 2, _SWAPPED / min(swaps[1:])


def sums(wire: Wire, seconds: float, repeats: int = 5) -> dict[int, float]:
    """Seconds of a sum over all ranks by its bytes: the median of ``repeats``, of the slowest rank. A size that would not fit into
    ``seconds`` is left out, on all ranks alike."""
    found: dict[int, float] = {}
    spent = 0.0
    for size, after in zip(SIZES, (*SIZES[1:], 0)):
        value = torch.zeros(size // 4, device=wire.device)
        wire.sum(value)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            wire.sum(value)
            times.append(time.perf_counter() - began)
        found[size] = wire.most(statistics.median(times))
        spent += found[size] * (repeats + 1)
        grows = after / size if size >= 1 << 16 else 10  # below, latency counts
        if spent + found[size] * grows * (repeats + 1) > seconds:
            break
    return found


def small_sum(wire: Wire, repeats: int = 20) -> float:
    """Seconds of a sum of 8 bytes as this rank sees it. Who comes late to each waits least."""
    value, times = torch.zeros(2, device=wire.device), []
    wire.meet()
    for _ in range(repeats):
        began = time.perf_counter()
        wire.sum(value)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def pace(device: torch.device, seconds: float = 0.4) -> Pace:
    """How fast this rank multiplies matrices, in float32 on a CPU and bfloat16 on a GPU."""
    on_gpu = device.type == "cuda"
    size, kind = (4096, torch.bfloat16) if on_gpu else (384, torch.float32)
    matrix, times = torch.ones(size, size, dtype=kind, device=device), []
    wire = Wire(device, None, None)
    matrix @ matrix
    wire.wait()
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        start = time.perf_counter()
        matrix @ matrix
        wire.wait()
        times.append(time.perf_counter() - start)
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu
    share = 1.0 if on_gpu else min(1.0, cpu / spent / torch.get_num_threads())
    return Pace(2 * size**3 / statistics.median(times), share)


# ---- who is slow


def slow(values: Mapping[Any, float], factor: float, least: int = 3) -> list[Any]:
    """Who of ``values`` (times: more is worse) is slow: above the median of the others by more than ``factor`` times, and by more
    than five of their standard deviations (1.4826 x median absolute deviation). With fewer than ``least`` others nobody is."""
    order, found = sorted(values.values()), []
    if len(order) - 1 < least:
        return []
    for name, value in values.items():
        place = bisect_left(order, value)
        middle = _median_without(order, place)
        if value > factor * middle:  # of few, in a job of thousands
            spread = 1.4826 * statistics.median(abs(other - middle) for i, other in enumerate(order) if i != place)
            found += [name] if value > middle + 5 * spread else []
    return found


def _median_without(order: Sequence[float], place: int) -> float:
    """The median of an ordered list but for what is at ``place``."""
    low, high = (len(order) - 2) // 2, (len(order) - 1) // 2
    return (order[low + (low >= place)] + order[high + (high >= place)]) / 2


def slow_ranks(times: Mapping[tuple[int, int], float], factor: float = 2.0) -> tuple[list[int], list[tuple[int, int]]]:
    """The ranks all of whose links are slow, and the links that are slow between others. ``times`` by pair: more is worse.

    A rank counts by the lower median of its links, so that one slow partner does not make it slow.
    """
    of_rank: dict[int, list[float]] = {}
    for pair, value in times.items():
        for rank in pair:
            of_rank.setdefault(rank, []).append(value)
    ranks = slow({rank: statistics.median_low(each) for rank, each in of_rank.items()}, factor)
    rest = {pair: value for pair, value in times.items() if not set(pair) & set(ranks)}
    return sorted(ranks), sorted(slow(rest, factor))
