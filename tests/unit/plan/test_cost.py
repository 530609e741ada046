"""Costs of recorded steps equal sums computed by hand."""

from dataclasses import replace

import pytest

from hpcai.errors import ConfigError
from hpcai.plan.cost import estimate_cost
from hpcai.plan.machines import MACHINES, Link, Machine, find_machine
from hpcai.plan.step_trace import Communication, Kernel, Wait

RANKS = (0, 1, 2, 3)
# Per second 100 FLOP in 16 bits and 10 bytes of memory; a transfer within a node of 4 GPUs takes 1 s and 1 s per 4 bytes.
MACHINE = Machine("round", {2: 100.0, 4: 50.0, 8: 10.0}, 10.0, 1e9, 4, Link(1.0, 4.0), Link(2.0, 1.0), kernel_overhead=0.5)


def test_kernels_take_the_longer_of_memory_traffic_and_flop() -> None:
    cost = estimate_cost([Kernel("moves", 100, 40, 2), Kernel("multiplies", 300, 10, 2), Kernel("wide", 100, 10, 4)], MACHINE)
    assert (cost.memory_bound, cost.compute_bound, cost.launches) == (4.0, 3.0 + 2.0, 1.5) and cost.seconds == 10.5
    assert estimate_cost([Kernel("moves", 0, 40, 2)], replace(MACHINE, slowdown=3.0)).seconds == 12.5


def test_communication_overlaps_with_kernels() -> None:
    send, run = Communication("all-to-all", 16, RANKS, 1), Kernel("moves", 0, 15, 2)  # 1 + 16 * 3/4 / 4 = 4 seconds; 1.5 + 0.5
    assert estimate_cost([send, Wait(1), run], MACHINE).exposed_communication == 4.0
    hidden = estimate_cost([send, run, Wait(1), run], MACHINE)
    assert (hidden.exposed_communication, hidden.seconds, hidden.sent, hidden.messages) == (2.0, 6.0, 12.0, 1)


def test_communication_is_ordered_within_a_group_only() -> None:
    first, second, other = (Communication("broadcast", 4, ranks, n) for n, ranks in ((1, RANKS), (2, RANKS), (3, (0, 1))))
    assert estimate_cost([first, second, Wait(1), Wait(2)], MACHINE).seconds == 4.0
    assert estimate_cost([first, other, Wait(1), Wait(3)], MACHINE).seconds == 2.0


@pytest.mark.parametrize(
    ("name", "bytes", "ranks", "seconds"),
    [
        ("all-reduce", 8, RANKS, 1 + 2 * 3 / 4 * 8 / 4), ("all-gather", 8, RANKS, 1 + 3 * 8 / 4),
        ("reduce-scatter", 8, RANKS, 1 + 3 * 8 / 4), ("all-to-all", 8, RANKS, 1 + 3 / 4 * 8 / 4), ("send", 8, (0, 1), 1 + 8 / 4),
        ("receive", 8, (0, 1), 1.0),
        # Over two nodes the latency is twice 2 s; a ring has the bandwidth of four links.
        ("all-reduce", 8, tuple(range(8)), 4 + 2 * 7 / 8 * 8 / 4), ("all-to-all", 8, tuple(range(8)), 4 + 7 / 8 * 8 / 1),
        ("all-reduce", 8, (0, 4), 4 + 2 * 1 / 2 * 8 / 1),
    ],
)  # fmt: skip
def test_communication_takes_latency_and_bytes(name: str, bytes: int, ranks: tuple[int, ...], seconds: float) -> None:
    assert MACHINE.communication_time(name, bytes, ranks)[0] == pytest.approx(seconds)


def test_machines_are_found_by_name() -> None:
    assert find_machine("h200").bandwidth > find_machine("h100").bandwidth and set(MACHINES) >= {"a100", "h100", "h200", "b200"}
    with pytest.raises(ConfigError, match="no machine 'h1000'; expected one of a100-40, a100"):
        find_machine("h1000")
