"""A driver with one GPU, as a module in a folder: other processes find it there too, and its limit and its meter outlive them."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

CODE = '''
import time
from pathlib import Path
HERE = Path(__file__).parent
def said(name, otherwise):
    return (HERE / name).read_text() if (HERE / name).exists() else otherwise
def keep(name, text):
    (HERE / (name + ".new")).write_text(text)
    (HERE / (name + ".new")).replace(HERE / name)  # read by others meanwhile
class NVMLError(Exception):
    pass
def nvmlInit():
    if said("init", ""):
        raise NVMLError(said("init", ""))
def nvmlDeviceGetHandleByUUID(name):
    if name != "GPU-aaaa-bbbb":
        raise NVMLError("Not Found")
    return "handle"
def nvmlDeviceGetPowerManagementLimit(gpu):
    return int(said("limit", "700000"))
def nvmlDeviceGetEnforcedPowerLimit(gpu):
    return min(int(said("limit", "700000")), int(said("outside", "700000")))
def nvmlDeviceGetPowerManagementLimitConstraints(gpu):
    return 200000, 700000
def nvmlDeviceSetPowerManagementLimit(gpu, limit):
    if said("refuses", ""):
        raise NVMLError(said("refuses", ""))
    nvmlDeviceGetTotalEnergyConsumption(gpu)
    keep("limit", str(limit))
def nvmlDeviceGetTotalEnergyConsumption(gpu):
    """Always as much power as is allowed."""
    now, (then, joules) = time.time(), map(float, said("meter", f"{time.time()} 0").split())
    joules += (now - then) * nvmlDeviceGetEnforcedPowerLimit(gpu)
    keep("meter", f"{now} {joules}")
    return joules
'''


class Driver:
    """The folder of a driver: what is written to ``refuses``, ``init``, ``outside`` (mW, by others) and ``limit`` (mW) counts."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "pynvml.py").write_text(CODE)
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder))
        patch.delitem(sys.modules, "pynvml", raising=False)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="aaaa-bbbb"))

    def __setitem__(self, name: str, text: Any) -> None:
        (self.folder / name).write_text(str(text))

    @property
    def watts(self) -> float:
        file = self.folder / "limit"
        return int(file.read_text()) / 1e3 if file.exists() else 700.0
