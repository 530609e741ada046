"""All ranks stop after the same step, without communication before a request."""

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
def watchdogs(world: int) -> Iterator[list[Watchdog]]:
    store = torch_dist.HashStore()
    ranks = [Watchdog(rank, world, "127.0.0.1", store, os._exit) for rank in range(world)]
    try:
        yield ranks
    finally:
        for member in reversed(ranks):
            member._leave(None)


def run_steps(world: int, ranks: list[Watchdog], requests: dict[int, int], work: Callable[[int, int], None]) -> list[int | None]:
    """Return the step after which each rank stopped, of 200 steps. ``requests``: rank to step."""
    stopped: list[int | None] = [None] * world

    def run(rank: int) -> None:
        boundary = ranks[rank].next_boundary()
        for step in range(1, 201):
            work(rank, step)
            if step >= requests.get(rank, 1000):
                boundary.request_stop("SIGTERM")
            if boundary.should_stop():
                stopped[rank] = step
                break
        boundary.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return stopped


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_stop_after_the_same_step(seed: int) -> None:
    """A barrier in each step acts as the all-reduce of gradients: the fastest rank is one step ahead at most."""
    rng, world = random.Random(seed), 5
    requests = {rank: rng.randrange(1, 20) for rank in rng.sample(range(world), rng.randrange(1, 4))}
    delays = [[rng.random() * 2e-3 for _ in range(201)] for _ in range(world)]
    barrier = threading.Barrier(world, timeout=30)

    def work(rank: int, step: int) -> None:
        barrier.wait()
        time.sleep(delays[rank][step])

    with watchdogs(world) as ranks:
        for _ in range(2):  # a second run in the same processes
            stopped = run_steps(world, ranks, requests, work)
            first = min(requests.values())
            assert len(set(stopped)) == 1 and stopped[0] is not None, stopped
            assert first <= stopped[0] <= first + 50


def test_a_straggler_and_a_rank_that_has_left_block_no_other_rank() -> None:
    with watchdogs(3) as ranks:
        ahead, behind, gone = (rank.next_boundary() for rank in ranks)
        for _ in range(4):
            assert not ahead.should_stop()
        gone.leave()
        ahead.request_stop("SIGUSR1")
        assert not any(ahead.should_stop() for _ in range(20)), "a rank that has left counts as past every step"
        assert not any(behind.should_stop() for _ in range(30))
        requester, second, third = (rank.next_boundary() for rank in (*ranks[:2], ranks[2]))
        requester.request_stop("SIGUSR1")
        while not requester.should_stop():
            pass
        passed = requester._steps
        assert not any(boundary.should_stop() for boundary in (second, third) for _ in range(passed - 1))
        assert second.should_stop() and third.should_stop()
        assert second.reason.startswith("SIGUSR1 on rank 0 on ")


def test_no_message_is_sent_before_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, send = [], watchdog._send
    monkeypatch.setattr(watchdog, "_send", lambda write, **message: (
        sent.append(message) if not {"token", "joined"} & message.keys() else None, send(write, **message)))
    with watchdogs(4) as ranks:
        assert run_steps(4, ranks, {}, lambda rank, step: None) == [None] * 4
        assert sent == []
        assert run_steps(4, ranks, {2: 3}, lambda rank, step: time.sleep(0.001))[0] is not None
        assert len(sent) == 1 + 4 + 4 + 4, "one request, four queries, four answers, four stops"


def test_a_single_process_stops_at_its_request() -> None:
    boundary = watchdog.next_step_boundary(1)
    assert not boundary.should_stop()
    boundary.request_stop("SIGTERM")
    assert boundary.should_stop() and boundary.reason == "SIGTERM"


def test_ranks_without_a_watchdog_cannot_stop_together() -> None:
    boundary = watchdog.next_step_boundary(2)
    assert not boundary.should_stop()
    boundary.request_stop("SIGTERM")
    with pytest.raises(LaunchError, match=r"SIGTERM stops this rank, .* without a watchdog; .*hpcai\.dist\.start"):
        boundary.should_stop()


def test_a_rank_holds_until_the_step_is_set() -> None:
    boundary, results = StepBoundary(lambda **_: None, alone=False), []
    assert not boundary.should_stop() and boundary.hold() == 1
    thread = threading.Thread(target=lambda: results.append(boundary.should_stop()))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and not results
    boundary.set_stop(2, "SIGTERM on rank 1")
    thread.join(10)
    assert results == [True]
