"""Links and all-reduces of a job, measured by its ranks: over gloo between hosts, over NCCL between GPUs.

A link is measured by a pair of ranks. In each round of a round-robin tournament every rank has one partner, so n ranks need n - 1
rounds, and all links of a round are busy at once. Pairs communicate over the existing process group.
"""

import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist

from hpcai.dist.collectives import all_gather_object
from hpcai.dist.mesh import Axis

MAX_PLAYERS = 64
"""Maximum number of ranks in a tournament, and of its rounds: all ranks of a job, or of a larger one the first of each node."""
SIZES = (8, 1 << 20, 1 << 26)
"""Bytes of the timed all-reduces and all-to-alls."""
_PINGS, _EXCHANGES, _EXCHANGE_BYTES = 20, 3, 4 << 20


@dataclass(frozen=True)
class Link:
    """A pair of ranks: latency of 8 bytes one way in seconds, and bytes per second each way of a bidirectional exchange."""

    one: int
    other: int
    latency: float
    rate: float


@dataclass(frozen=True)
class Pace:
    """The compute rate of one rank: FLOP/s of a matrix product, and the share of its threads' time that it got."""

    rate: float
    share: float


@dataclass
class Network:
    """The measurements; ``sums`` and ``all_to_all`` map bytes of a rank to seconds of the collective on the slowest rank."""

    backend: str = ""
    links: list[Link] = field(default_factory=list)
    sums: dict[int, float] = field(default_factory=dict)
    all_to_all: dict[int, float] = field(default_factory=dict)
    paces: dict[int, Pace] = field(default_factory=dict)


def first_ranks(nodes: Sequence[str]) -> list[int]:
    """Return the first rank of each node, given the node of every rank."""
    return sorted({node: rank for rank, node in reversed(list(enumerate(nodes)))}.values())


def partner(place: int, turn: int, count: int) -> int | None:
    """Return the partner of player ``place`` of ``count`` in round ``turn`` (circle method), or None for a bye."""
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
    partners = (partner(players.index(rank), turn, count) for turn in turns)
    return [None if other is None else players[other] for other in partners]


class Channel:
    """Communication of tensors on ``device`` through ``group``; ``job`` has a group of CPUs."""

    def __init__(self, device: torch.device, group: Any, job: Axis) -> None:
        self.device, self.group, self.job = device, group, job

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def exchange(self, other: int, send: torch.Tensor | None = None, receive: torch.Tensor | None = None) -> None:
        ops = (torch_dist.isend, send), (torch_dist.irecv, receive)
        for work in torch_dist.batch_isend_irecv([torch_dist.P2POp(op, x, other, self.group) for op, x in ops if x is not None]):
            work.wait()
        self.synchronize()

    def all_reduce(self, value: torch.Tensor) -> None:
        torch_dist.all_reduce(value, group=self.group)
        self.synchronize()

    def all_to_all(self, value: torch.Tensor) -> None:
        rows = value[: len(value) // self.job.size * self.job.size]  # of equal size for each rank
        torch_dist.all_to_all_single(torch.empty_like(rows), rows, group=self.group)
        self.synchronize()


def measure_links(channel: Channel, rank: int, nodes: Sequence[str], seconds: float) -> list[Link]:
    """Return the links measured by this rank as the lower of the pair. After ``seconds`` on either rank, the pair is skipped."""
    results, deadline = [], time.monotonic() + seconds
    for other in schedule(rank, nodes):
        if other is None:
            continue
        has_time, partner_has_time = torch.tensor([time.monotonic() < deadline]).byte(), torch.zeros(1, dtype=torch.uint8)
        Channel(torch.device("cpu"), channel.job.group, channel.job).exchange(other, has_time, partner_has_time)
        if has_time and partner_has_time:
            latency, rate = measure_link(channel, rank < other, other)
            results += [Link(rank, other, latency, rate)] if rank < other else []
    return results


def measure_link(channel: Channel, sends_first: bool, other: int) -> tuple[float, float]:
    """Return the median one-way latency in seconds, and the best rate per direction in bytes per second: other programs on the
    network can only lower a rate."""
    message = torch.zeros(8, dtype=torch.uint8, device=channel.device)
    out, into = (torch.zeros(_EXCHANGE_BYTES, dtype=torch.uint8, device=channel.device) for _ in range(2))

    def ping() -> None:
        for sends in (sends_first, not sends_first):
            channel.exchange(other, **{"send" if sends else "receive": message})

    times = timeit.repeat(ping, repeat=_PINGS + 3, number=1)
    exchanges = timeit.repeat(lambda: channel.exchange(other, out, into), repeat=_EXCHANGES + 1, number=1)
    return statistics.median(times[3:]) / 2, _EXCHANGE_BYTES / min(exchanges[1:])


def measure_collective(channel: Channel, run: Callable[[torch.Tensor], None], seconds: float, repeats: int = 5) -> dict[int, float]:
    """Return the seconds of a collective over all ranks by the bytes of a rank: the median of ``repeats`` on the slowest rank.
    Larger sizes are skipped once a tenth of ``seconds`` is spent."""
    results, spent = dict[int, float](), 0.0
    for size in SIZES:
        if spent > seconds / 10:
            break
        value = torch.zeros(size // 4, device=channel.device)
        times = timeit.repeat(partial(run, value), repeat=repeats + 1, number=1)
        results[size] = max(all_gather_object(statistics.median(times[1:]), channel.job))
        spent += results[size] * repeats
    return results


def measure_pace(device: torch.device, seconds: float = 0.4) -> Pace:
    """Measure the matrix multiplication rate of this rank, in float32 on a CPU and bfloat16 on a GPU."""
    on_gpu = device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_gpu else (384, torch.float32)
    matrix, times = torch.ones(size, size, dtype=dtype, device=device), []
    channel = Channel(device, None, Axis("alone"))
    matrix @ matrix
    channel.synchronize()
    begin, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < begin + seconds:
        start = time.perf_counter()
        matrix @ matrix
        channel.synchronize()
        times.append(time.perf_counter() - start)
    elapsed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    share = 1.0 if on_gpu else min(1.0, cpu / elapsed / torch.get_num_threads())
    return Pace(2 * size**3 / statistics.median(times), share)


def slow_outliers(values: Mapping[Any, float], factor: float) -> list[Any]:
    """Return the keys of the outliers among ``values`` (times): above ``factor`` times the median, and above it by more than five
    standard deviations (1.4826 x median absolute deviation). Fewer than four values have none."""
    if len(values) < 4:
        return []
    median = statistics.median(values.values())
    deviation = 1.4826 * statistics.median(abs(value - median) for value in values.values())
    return [name for name, value in values.items() if value > factor * median and value > median + 5 * deviation]


def slow_ranks(times: Mapping[tuple[int, int], float], factor: float = 2.0) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ranks whose links are all slow, and the slow links between other ranks. ``times`` by pair.

    A rank is judged by the lower median of its links, so that one slow partner does not make it slow.
    """
    of_rank: dict[int, list[float]] = {}
    for pair, value in times.items():
        for rank in pair:
            of_rank.setdefault(rank, []).append(value)
    ranks = slow_outliers({rank: statistics.median_low(own) for rank, own in of_rank.items()}, factor)
    remaining = {pair: value for pair, value in times.items() if not set(pair) & set(ranks)}
    return sorted(ranks), sorted(slow_outliers(remaining, factor))
