"""Links and sums of a job, measured by its ranks together: over gloo between hosts, over NCCL between GPUs.

A link is measured by a pair of ranks. In a round of a tournament every rank has one partner, so n ranks need n - 1 rounds, and all
links of a round are busy at once. Pairs talk through the process group that is there; none is made for a pair.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as torch_dist

MAX_PLAYERS = 64
"""Ranks that play a tournament, and its rounds at most: all ranks of a job, or of a larger one the first of each node."""
SIZES = (8, 1 << 20, 1 << 26)
"""Bytes of the sums that are timed."""
_PINGS, _EXCHANGES, _EXCHANGE_BYTES = 20, 3, 4 << 20


@dataclass(frozen=True)
class Link:
    """One pair: seconds one way of 8 bytes, and bytes a second of each of two messages that pass each other."""

    one: int
    other: int
    latency: float
    rate: float


@dataclass(frozen=True)
class Pace:
    """One rank alone: floating-point operations a second of a product of matrices, and the share of its threads' time that it
    got."""

    rate: float
    share: float


@dataclass
class Network:
    """``sums``: seconds by bytes, of the slowest rank."""

    backend: str = ""
    links: list[Link] = field(default_factory=list)
    sums: dict[int, float] = field(default_factory=dict)
    paces: dict[int, Pace] = field(default_factory=dict)


# ---- the tournament


def first_ranks(nodes: Sequence[str]) -> list[int]:
    """Return the first rank of each node, from the node of every rank."""
    return sorted({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values())


def partner(place: int, turn: int, count: int) -> int | None:
    """Return the partner of player ``place`` of ``count`` in round ``turn`` (circle method), None where it sits out."""
    even = count + count % 2
    if place == even - 1:
        other = turn
    elif place == turn:
        other = even - 1
    else:
        other = (2 * turn - place) % (even - 1)
    return other if other < count else None


def schedule(rank: int, nodes: Sequence[str]) -> list[int | None]:
    """Return the partners of ``rank``, one for each round."""
    players = list(range(len(nodes))) if len(nodes) <= MAX_PLAYERS else first_ranks(nodes)
    count = len(players)
    if rank not in players:
        return []
    rounds = max(count + count % 2 - 1, 0)
    turns = range(rounds) if rounds < MAX_PLAYERS else sorted({i * rounds // MAX_PLAYERS for i in range(MAX_PLAYERS)})
    found = (partner(players.index(rank), turn, count) for turn in turns)
    return [None if other is None else players[other] for other in found]


# ---- measuring


class Channel:
    """Messages of ``device`` through ``group``; ``hosts`` is the group between hosts."""

    def __init__(self, device: torch.device, group: Any, hosts: Any) -> None:
        self.device, self.group, self.host_group = device, group, hosts

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def exchange(self, other: int, send: torch.Tensor | None = None, receive: torch.Tensor | None = None) -> None:
        """Send and receive one tensor, or do either of them."""
        acts = (torch_dist.isend, send), (torch_dist.irecv, receive)
        for work in torch_dist.batch_isend_irecv([torch_dist.P2POp(a, t, other, self.group) for a, t in acts if t is not None]):
            work.wait()
        self.synchronize()

    def all_reduce(self, value: torch.Tensor) -> None:
        torch_dist.all_reduce(value, group=self.group)
        self.synchronize()

    def all_reduce_max(self, value: float = 0.0) -> float:
        """The largest ``value`` of all ranks, alike on all of them, once all are here."""
        told = torch.tensor([value], dtype=torch.float64)
        torch_dist.all_reduce(told, torch_dist.ReduceOp.MAX, group=self.host_group)
        return float(told)


def measure_links(wire: Channel, rank: int, nodes: Sequence[str], seconds: float) -> list[Link]:
    """Return the links that this rank has measured as the lower of two. Once the ``seconds`` of one of a pair are over, the two
    only tell each other so."""
    found, until = [], time.monotonic() + seconds
    for other in schedule(rank, nodes):
        if other is None:
            continue
        go, theirs = torch.tensor([time.monotonic() < until]).byte(), torch.zeros(1, dtype=torch.uint8)
        Channel(torch.device("cpu"), wire.host_group, wire.host_group).exchange(other, go, theirs)
        if go and theirs:
            latency, rate = measure_link(wire, rank < other, other)
            found += [Link(rank, other, latency, rate)] if rank < other else []
    return found


def measure_link(wire: Channel, begins: bool, other: int) -> tuple[float, float]:
    """Return seconds one way, the median; and bytes a second each way, the best: other programs make it less, and nothing more."""
    word, times, swaps = torch.zeros(8, dtype=torch.uint8, device=wire.device), list[float](), list[float]()
    for _ in range(_PINGS + 3):
        began = time.perf_counter()
        for sends in (begins, not begins):
            wire.exchange(other, **{"send" if sends else "receive": word})
        times.append(time.perf_counter() - began)
    out, into = (torch.zeros(_EXCHANGE_BYTES, dtype=torch.uint8, device=wire.device) for _ in range(2))
    for _ in range(_EXCHANGES + 1):
        began = time.perf_counter()
        wire.exchange(other, out, into)
        swaps.append(time.perf_counter() - began)
    return statistics.median(times[3:]) / 2, _EXCHANGE_BYTES / min(swaps[1:])


def measure_all_reduce(wire: Channel, seconds: float, repeats: int = 5) -> dict[int, float]:
    """Return seconds of an all-reduce over all ranks by its bytes: the median of ``repeats``, of the slowest rank. Once a tenth of
    ``seconds`` is spent no larger size follows."""
    found, spent = dict[int, float](), 0.0
    for size in SIZES:
        if spent > seconds / 10:
            break
        value, times = torch.zeros(size // 4, device=wire.device), []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            wire.all_reduce(value)
            times.append(time.perf_counter() - began)
        found[size] = wire.all_reduce_max(statistics.median(times[1:]))
        spent += found[size] * repeats
    return found


def measure_pace(device: torch.device, seconds: float = 0.4) -> Pace:
    """Measure how fast this rank multiplies matrices, in float32 on a CPU and bfloat16 on a GPU."""
    on_gpu = device.type == "cuda"
    size, kind = (4096, torch.bfloat16) if on_gpu else (384, torch.float32)
    matrix, times = torch.ones(size, size, dtype=kind, device=device), []
    wire = Channel(device, None, None)
    matrix @ matrix
    wire.synchronize()
    began, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < began + seconds:
        start = time.perf_counter()
        matrix @ matrix
        wire.synchronize()
        times.append(time.perf_counter() - start)
    spent, cpu = time.perf_counter() - began, time.process_time() - cpu
    share = 1.0 if on_gpu else min(1.0, cpu / spent / torch.get_num_threads())
    return Pace(2 * size**3 / statistics.median(times), share)


# ---- who is slow


def slow_outliers(values: Mapping[Any, float], factor: float) -> list[Any]:
    """Return the keys of the slow ``values`` (times: more is worse): above the median by more than ``factor`` times, and by more
    than five standard deviations (1.4826 x median absolute deviation). Of fewer than four none is."""
    if len(values) < 4:
        return []
    middle = statistics.median(values.values())
    spread = 1.4826 * statistics.median(abs(value - middle) for value in values.values())
    return [name for name, value in values.items() if value > factor * middle and value > middle + 5 * spread]


def slow_ranks(times: Mapping[tuple[int, int], float], factor: float = 2.0) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ranks all of whose links are slow, and the links that are slow between others. ``times`` by pair: more is worse.

    A rank counts by the lower median of its links, so that one slow partner does not make it slow.
    """
    of_rank: dict[int, list[float]] = {}
    for pair, value in times.items():
        for rank in pair:
            of_rank.setdefault(rank, []).append(value)
    ranks = slow_outliers({rank: statistics.median_low(each) for rank, each in of_rank.items()}, factor)
    rest = {pair: value for pair, value in times.items() if not set(pair) & set(ranks)}
    return sorted(ranks), sorted(slow_outliers(rest, factor))
