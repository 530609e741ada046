"""A cap on the power of a GPU that is not there, by a driver that is a module: it holds, it is refused, it is taken back."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from hpcai.dist.power import Limit, capped
from hpcai.errors import ConfigError
from tests.nvml import Driver

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PROGRAM = """
import sys, time, types
import torch
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="aaaa-bbbb")
from hpcai.dist.power import Limit, capped
with capped(torch.device("cuda", 0), 300):
    print("in", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    yield Driver(tmp_path / "driver", monkeypatch)
    sys.modules.pop("pynvml", None)


def test_a_cap_holds_within_its_block_and_the_former_limit_is_set_again(driver: Driver) -> None:
    driver["limit"] = 650_000
    with capped(CUDA, 300):
        assert driver.watts == 300.0
    assert driver.watts == 650.0
    with pytest.raises(KeyError), capped(CUDA, 250):
        assert driver.watts == 250.0
        raise KeyError
    assert driver.watts == 650.0
    with capped(CUDA, None):
        assert driver.watts == 650.0


def test_what_the_scheduler_has_set_is_left_as_it_is(driver: Driver) -> None:
    driver["limit"] = 300_000
    driver["refuses"] = "Insufficient Permissions"
    with capped(CUDA, 300):
        assert driver.watts == 300.0
    assert driver.watts == 300.0


def test_what_is_refused_is_named_and_nothing_runs(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    def refused(watts: float, device: torch.device = CUDA) -> str:
        with pytest.raises(ConfigError) as found, capped(device, watts):
            pytest.fail("it ran without the cap")
        return str(found.value)

    assert "cannot be used here: this process computes on cpu; it needs an NVIDIA GPU" in refused(300, CPU)
    assert "a cap of 100 W: GPU-aaaa-bbbb takes 200 to 700 W" in refused(100)
    driver["refuses"] = "Insufficient Permissions"
    assert refused(300).startswith(
        "a cap of 300 W was refused by NVML for GPU-aaaa-bbbb, whose limit is 700 W: Insufficient Permissions; most systems"
    )
    driver["refuses"] = ""
    driver["outside"] = 250_000
    assert "300 W was set, but GPU-aaaa-bbbb enforces 250 W: something else limits it" in refused(300)
    assert driver.watts == 700.0, "set again"
    assert not caplog.text
    driver["init"] = "Driver Not Loaded"
    assert "set by NVML, which cannot be used here: Driver Not Loaded; it needs an NVIDIA GPU" in refused(300)


def test_a_limit_that_others_change_meanwhile_is_told(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    with capped(CUDA, 300):
        driver["limit"] = 500_000
    assert "GPU-aaaa-bbbb was to be held at 300 W, but ends at 500 W" in caplog.text and driver.watts == 700.0
    caplog.clear()
    with capped(CUDA, 300):
        driver["refuses"] = "GPU is lost"
    assert "GPU-aaaa-bbbb is still 300 W, and could not be set to 700 W again: pynvml.NVMLError: GPU is lost" in caplog.text


def test_a_run_that_is_killed_leaves_no_cap(driver: Driver) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "in\n" and driver.watts == 300.0
        run.kill()
    end = time.monotonic() + 10
    while driver.watts != 700.0 and time.monotonic() < end:
        time.sleep(0.02)
    assert driver.watts == 700.0


def test_signals_of_a_scheduler_to_all_processes_of_a_job_do_not_end_the_one_that_sets_the_limit_again(driver: Driver) -> None:
    with closing(Limit(CUDA)) as limit:
        limit.hold(300)
        assert limit._keeper is not None
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            limit._keeper.send_signal(number)
        limit.hold(250)
        assert driver.watts == 250.0
    assert driver.watts == 700.0
