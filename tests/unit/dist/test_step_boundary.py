"""All ranks stop at the same pass of a boundary, and say nothing before one of them asks."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as torch_dist

from hpcai.dist import watchdog
from hpcai.dist.step_boundary import StepBoundary
from hpcai.dist.watchdog import Watchdog
from hpcai.errors import LaunchError


@contextmanager
def joined(world: int) -> Iterator[list[Watchdog]]:
    """Ranks of one process, which share a hub."""
    store, ranks = torch_dist.HashStore(), []
    for rank in range(world):
        ranks.append(Watchdog(rank, world, "127.0.0.1", store, os._exit))
    try:
        yield ranks
    finally:
        for one in reversed(ranks):
            one._leave(None)


def stops(world: int, ranks: list[Watchdog], asks: dict[int, int], work: Callable[[int, int], None]) -> list[int | None]:
    """Every rank passes its next boundary after each of 200 steps -> after which step it stopped. ``asks``: rank to step."""
    found: list[int | None] = [None] * world

    def run(rank: int) -> None:
        boundary = ranks[rank].next_boundary()
        for step in range(1, 201):
            work(rank, step)
            if boundary.should_stop("SIGTERM" if step >= asks.get(rank, 1000) else None):
                found[rank] = step
                break
        boundary.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank waits for ever"
    return found


@pytest.mark.parametrize("seed", range(8))
def test_all_stop_after_the_same_step_wherever_they_are(seed: int) -> None:
    """They meet in each step, as in a sum of gradients: the fastest is one step ahead at most."""
    rng, world = random.Random(seed), 5
    asks = {rank: rng.randrange(1, 20) for rank in rng.sample(range(world), rng.randrange(1, 4))}
    naps = [[rng.random() * 2e-3 for _ in range(201)] for _ in range(world)]
    meeting = threading.Barrier(world, timeout=30)

    def work(rank: int, step: int) -> None:
        meeting.wait()
        time.sleep(naps[rank][step])

    with joined(world) as ranks:
        for _ in range(2):  # a second run in the same processes begins anew
            found = stops(world, ranks, asks, work)
            first = min(asks.values())
            assert len(set(found)) == 1 and found[0] is not None, found
            assert first <= found[0] <= first + 50


def test_a_rank_that_comes_late_and_one_that_has_left_are_waited_for_no_longer_than_they_answer() -> None:
    with joined(3) as ranks:
        ahead, behind, gone = (rank.next_boundary() for rank in ranks)
        for _ in range(4):
            assert not ahead.should_stop(None)
        gone.leave()
        assert not ahead.should_stop("SIGUSR1")
        assert not any(ahead.should_stop(None) for _ in range(20)), "who has left for good was past every place"
        assert not any(behind.should_stop(None) for _ in range(30))
        before, late, other = (rank.next_boundary() for rank in (*ranks[:2], ranks[2]))
        while not before.should_stop("SIGUSR1"):
            pass
        passed = before._steps
        assert not any(one.should_stop(None) for one in (late, other) for _ in range(passed - 1))
        assert late.should_stop(None) and other.should_stop(None)
        assert late.reason.startswith("SIGUSR1 on rank 0 on ")


def test_nothing_is_said_until_one_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    said, send = [], watchdog._send
    monkeypatch.setattr(watchdog, "_send", lambda line, **words: (said.append(words), send(line, **words)))
    with joined(4) as ranks:
        before = len(said)
        assert stops(4, ranks, {}, lambda rank, step: None) == [None] * 4
        assert said[before:] == []
        assert stops(4, ranks, {2: 3}, lambda rank, step: time.sleep(0.001))[0] is not None
        assert len(said) - before == 1 + 4 + 4 + 4, "one asks, four are asked, answer and are told"


def test_alone_it_stops_where_it_is_asked_to() -> None:
    boundary = watchdog.next_step_boundary(1)
    assert not boundary.should_stop(None) and boundary.should_stop("SIGTERM") and boundary.reason == "SIGTERM"


def test_ranks_that_have_not_met_through_us_cannot_agree() -> None:
    boundary = watchdog.next_step_boundary(2)
    assert not boundary.should_stop(None)
    with pytest.raises(LaunchError, match=r"SIGTERM asks this rank to stop, and no other rank hears of it.*hpcai\.dist\.start"):
        boundary.should_stop("SIGTERM")


def test_a_rank_holds_until_it_hears_where() -> None:
    boundary, found = StepBoundary(lambda **_: None, alone=False), []
    assert not boundary.should_stop(None) and boundary.hold() == 1
    thread = threading.Thread(target=lambda: found.append(boundary.should_stop(None)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not found
    boundary.set_stop(2, "SIGTERM on rank 1")
    thread.join(10)
    assert found == [True]
