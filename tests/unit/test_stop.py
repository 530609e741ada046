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
from tests.reference_data import ROOT, load_json

CASES = load_json("interruptions")
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


def run(sleeps: list[float], *states: str) -> int:
    program = [sys.executable, "-c", RUN.replace("SLEEP", repr(sleeps))]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        for _ in range(states.count(line.strip())):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
    return process.wait(30)


@pytest.mark.parametrize(("sleeps", "states", "code"), CASES["exit codes"].values(), ids=CASES["exit codes"])
def test_exit_codes_after_signals(sleeps: list[float], states: list[str], code: int) -> None:
    assert run(sleeps, *states) == code


def test_an_ignored_hangup_stays_ignored() -> None:
    """As nohup starts a program."""
    before, received = signal.signal(signal.SIGHUP, signal.SIG_IGN), []
    try:
        with stop.on_signal(received.append):
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


SITE = """
import os, signal, sys
class Interruption:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
if " ".join(sys.orig_argv[1:3]) == os.environ["PROGRAM"]:  # not in its children
    sys.meta_path.insert(0, Interruption())
    signal.signal(signal.SIGINT, signal.default_int_handler)  # instead of an ignored one, as below nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
SMALL = str(ROOT / "apps/cosmoflow/configs/small.yaml")


def interrupt_at(folder: Path, text: str, module: str, number: int = signal.SIGINT) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command that gets a signal when it begins to import a module."""
    (folder / "sitecustomize.py").write_text(SITE)
    words, path = text.split(), f"{folder}:{ROOT}"
    own = {"AT": module, "NUMBER": f"{number:d}", "PROGRAM": f"-m {words[0]}", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command, environment = [sys.executable, "-m", *words], {**os.environ, **own}
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=60)
    return process.returncode, process.stdout, process.stderr


@pytest.mark.parametrize(("command", "module", "line"), CASES["during imports"])
def test_ctrl_c_during_imports_ends_a_command_in_one_line(tmp_path: Path, command: str, module: str, line: str) -> None:
    assert interrupt_at(tmp_path, command.replace("SMALL", SMALL), module) == (130, "", f"{line}\n")


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        (signal.SIGTERM, 143, "interrupted by SIGTERM"), (signal.SIGHUP, 129, "interrupted by SIGHUP"),
        (signal.SIGUSR1, 2, "there is no app 'nothing'; "), (signal.SIGUSR2, 2, "there is no app 'nothing'; "),
    ],
)  # fmt: skip
def test_signals_of_a_scheduler_to_a_command_that_does_not_train(tmp_path: Path, number: int, code: int, line: str) -> None:
    end = interrupt_at(tmp_path, "hpcai.cli job nothing --site generic --nodes 1", "hpcai.config", number)
    assert end[:2] == (code, "") and end[2].startswith(f"hpcai job: {line}") and end[2].count("\n") == 1, end


PROGRAM = """
import os, signal, sys, time, weakref
from hpcai.stop import end_in_one_line
class Resource: pass
def swallow(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)
with end_in_one_line("program", "nothing is lost"):
    {body}
"""


@pytest.mark.parametrize(("body", "line"), CASES["bodies"].values(), ids=CASES["bodies"])
def test_an_interruption_is_one_line_wherever_it_occurs(body: str, line: str) -> None:
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + PROGRAM.format(body=body)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    expected = f"program: interrupted by Ctrl-C; {line}\n"
    assert (process.returncode, process.stdout, process.stderr) == (130, "", expected)
