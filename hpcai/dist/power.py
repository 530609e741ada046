"""A limit on what a GPU may draw, for the time of a run (NVML)."""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch

from hpcai.dist.host import nvml_gpu
from hpcai.errors import ConfigError

logger = logging.getLogger(__name__)

_SETTLES = 2.0  # seconds in which a new limit is enforced
_KEEPER = """
import signal, sys
for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1:
    signal.signal(number, signal.SIG_IGN)
import pynvml as nvml
nvml.nvmlInit()
gpu = nvml.nvmlDeviceGetHandleByUUID(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
nvml.nvmlDeviceSetPowerManagementLimit(gpu, int(sys.argv[2]))
"""


class Limit:
    """The limit on the power of the GPU ``device``. Once it is changed a process of its own waits to set the former one again: at
    ``close``, or when this process has died, of whatever. Raises ConfigError where there is no GPU that NVML knows.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            self._nvml, self._gpu, self.name = nvml_gpu(device)
        except Exception as problem:  # no GPU, no package, no driver, or a GPU that is not NVIDIA's
            raise ConfigError(
                f"a cap on power is set by NVML, which cannot be used here: {problem}; it needs an NVIDIA GPU, its driver and "
                "pip install 'hpcai-suite[gpu]'; or ask for no cap"
            ) from None
        self.former = self.enforced
        self._keeper: subprocess.Popen[str] | None = None
        self._held: float | None = None

    @property
    def enforced(self) -> float:
        """Watts, whoever has set them. Raises ConfigError where the GPU does not tell."""
        return float(self._ask("EnforcedPowerLimit")) / 1e3

    @property
    def range(self) -> tuple[float, float]:
        """Watts that the GPU takes as a limit. Raises ConfigError where it takes none."""
        low, high = self._ask("PowerManagementLimitConstraints")
        return low / 1e3, high / 1e3

    def hold(self, watts: float) -> None:
        """Have the GPU draw at most ``watts``. What the scheduler, or another process, has set so already is left as it is.

        Raises ConfigError, with NVML's own words, where it is refused or another limit is enforced.
        """
        self._held = None
        if self._enforces(watts):
            self._held = watts
            return
        low, high = self.range
        if not low <= watts <= high:
            raise ConfigError(f"a cap of {watts:g} W: {self.name} takes {low:g} to {high:g} W; choose among these")
        self._keep()
        try:
            self._nvml.nvmlDeviceSetPowerManagementLimit(self._gpu, round(watts * 1e3))
        except Exception as problem:
            raise ConfigError(
                f"a cap of {watts:g} W was refused by NVML for {self.name}, whose limit is {self.enforced:g} W: {problem}; most "
                "systems let root alone change it: take the scheduler's own option (docs/cluster.md), or ask for no cap"
            ) from None
        end = time.monotonic() + _SETTLES
        while not self._enforces(watts):
            if time.monotonic() > end:
                raise ConfigError(
                    f"a cap of {watts:g} W was set, but {self.name} enforces {self.enforced:g} W: something else limits it; choose "
                    "a smaller cap, or ask who runs the machine"
                )
            time.sleep(0.05)
        self._held = watts

    def close(self) -> None:
        """Set the former limit again, if it was changed; what went wrong with either is told."""
        if self._held is not None and not self._enforces(self._held):
            logger.warning("%s was to be held at %g W, but ends at %g W: something else changed its limit in the meantime, and "
                           "what was measured is not of that cap", self.name, self._held, self.enforced)  # fmt: skip
        self._held = None
        if self._keeper is not None:
            _, said = self._keeper.communicate("\n", timeout=30)
            if self._keeper.returncode and not self._enforces(self.former):
                logger.warning("the limit of %s is still %g W, and could not be set to %g W again: %s",
                               self.name, self.enforced, self.former, said.strip().rpartition("\n")[2])  # fmt: skip
            self._keeper = None

    def _enforces(self, watts: float) -> bool:
        return abs(self.enforced - watts) < 0.5

    def _keep(self) -> None:
        if self._keeper is not None:
            return
        words = [sys.executable, "-c", _KEEPER, self.name, str(self._ask("PowerManagementLimit"))]
        pipe: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        keeper = subprocess.Popen(words, start_new_session=True, **pipe)  # no signal that ends this process ends that one
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "ready\n":
            reason = keeper.communicate()[1].strip().rpartition("\n")[2]
            raise ConfigError(f"a cap on power: the process that is to set the limit of {self.name} again did not start: {reason}")
        self._keeper = keeper

    def _ask(self, what: str) -> Any:
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{what}")(self._gpu)
        except Exception as problem:
            text = f"a cap on power: NVML does not tell the {what} of {self.name}: {problem}; of a slice (MIG) it cannot"
            raise ConfigError(text) from None


@contextmanager
def capped(device: torch.device, watts: float | None) -> Iterator[None]:
    """Within it the GPU ``device`` draws at most ``watts``, and afterwards what it might before; None leaves it alone.

    Raises ConfigError where there is no GPU, or the cap is refused, or does not hold.
    """
    if watts is None:
        yield
        return
    with closing(Limit(device)) as limit:
        limit.hold(watts)
        yield
