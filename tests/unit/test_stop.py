"""Signals of a scheduler during a run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from hpcai import stop

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, time
from hpcai import config, stop
received = []
def main(settings):
    print("starting", flush=True)
    time.sleep(SLEEP[0])
    with stop.on_signal(received.append):
        print("training", flush=True)
        end = time.monotonic() + SLEEP[1]
        while not received and time.monotonic() < end:
            time.sleep(0.01)
    print("ending", flush=True)
    end = time.monotonic() + SLEEP[2]
    while time.monotonic() < end:
        time.sleep(0.01)
    raise SystemExit(stop.REQUEUE if received else 0)
config.run(config.Settings, main)
"""


def run(sleeps: tuple[float, float, float], *states: str) -> int:
    program = [sys.executable, "-c", RUN.replace("SLEEP", repr(sleeps))]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        for _ in range(states.count(line.strip())):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
    return process.wait(30)


@pytest.mark.parametrize(
    ("sleeps", "states", "code"),
    [
        ((9, 0, 0), ["starting"], 85),
        ((0, 9, 0), ["training"], 85),
        ((0, 9, 0.3), ["training", "ending"], 85),
        ((0, 0, 0.3), ["ending"], 0),
        ((0, 0, 0), [], 0),
    ],
    ids=["while it starts", "while it trains", "again after the stop", "once training is over", "never"],
)
def test_exit_codes_after_signals(sleeps: tuple[float, float, float], states: list[str], code: int) -> None:
    assert run(sleeps, *states) == code


def test_an_ignored_hangup_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nohup starts a program."""
    before, received = signal.signal(signal.SIGHUP, signal.SIG_IGN), []
    try:
        with stop.on_signal(received.append), stop.interrupt_on_signal():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not received and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"])
def test_signals_of_schedulers_are_received_and_previous_handlers_restored(name: str) -> None:
    number, received, previous = signal.Signals[name], [], Mock()
    before = signal.signal(number, previous)
    try:
        with stop.on_signal(received.append):
            os.kill(os.getpid(), number)
        assert received == [name] and not previous.called and signal.getsignal(number) is previous
    finally:
        signal.signal(number, before)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Restore the default handler of Ctrl-C, which a worker of pytest-xdist changes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_a_first_interrupt_is_deferred_and_a_second_one_is_not() -> None:
    completed = []
    with pytest.raises(KeyboardInterrupt), stop.defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        completed.append("complete")
    assert completed == ["complete"]
    with pytest.raises(KeyboardInterrupt), stop.defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        completed.append("never")
    assert completed == ["complete"]
