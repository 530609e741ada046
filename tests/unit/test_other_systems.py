"""Defaults need nothing that only Linux has, by a stand-in for a Mac, with its start of child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apps.universes import write_universes

ROOT = Path(__file__).resolve().parents[2]
MAC = """
import builtins, fcntl, io, mmap, multiprocessing, os, resource, socket, time
ABSENT = {
    os: "memfd_create pipe2 posix_fadvise posix_fallocate fdatasync sched_getaffinity sched_setaffinity copy_file_range getrandom "
        "sendfile eventfd pidfd_open splice O_DIRECT O_PATH O_TMPFILE O_NOATIME POSIX_FADV_DONTNEED POSIX_FADV_WILLNEED",
    fcntl: "F_SETSIG F_GETSIG F_SETPIPE_SZ F_ADD_SEALS F_OFD_SETLK", mmap: "MADV_HUGEPAGE MAP_POPULATE",
    socket: "AF_NETLINK AF_PACKET SO_BINDTODEVICE SO_PEERCRED TCP_KEEPIDLE TCP_USER_TIMEOUT", time: "CLOCK_BOOTTIME",
}
for module, names in ABSENT.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
def without(function, condition, error):
    def call(first, *args, **kwargs):
        if condition(first):
            raise error(2, "not on a Mac", first)
        return function(first, *args, **kwargs)
    return call
def is_linux(path):
    return isinstance(path, (str, os.PathLike)) and str(path).startswith(("/proc", "/sys", "/dev/shm"))
for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "listdir"), (os, "scandir")):
    setattr(module, name, without(getattr(module, name), is_linux, FileNotFoundError))
resource.setrlimit = without(resource.setrlimit, resource.RLIMIT_AS.__eq__, ValueError)
os.confstr = without(os.confstr, "CS_GNU_LIBC_VERSION".__eq__, ValueError)
os.sysconf = without(os.sysconf, "SC_AVPHYS_PAGES".__eq__, ValueError)
multiprocessing.set_start_method("spawn")
"""
WORK = """
import runpy, sys
def run(module, *words):
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        print("==", module, *words[:1], end.code, flush=True)
if __name__ == "__main__":
    run("data_prep.cosmoflow", "simulate", "out", "--universes", "2", "--size", "8", "--cut", "2", "--workers", "2",
        "--validation", "0")
    run("apps.cosmoflow", "SMALL", "data.directory=universes", "data.batch=2", "report.directory=run",
        "train.epochs=1", "model.filters=1")
    run("hpcai.cli", "report", "run")
    import torch
    from hpcai.cli import doctor
    from hpcai.cli.bench.timing import peak_mb
    from hpcai.cli.check.disk import evict
    from hpcai.data.workers import _create_shared
    doctor.PROBES = {"HDF5": doctor.PROBES["HDF5"]}
    run("hpcai.cli", "doctor")
    evict("run/model.safetensors")
    print("== memory", peak_mb() > 0, len(_create_shared(5000, "worker")[1]))
    from hpcai.models.cosmoflow import CosmoFlow
    model = CosmoFlow.load("run/model.safetensors")
    print("== predicted", *model.predict(torch.ones(1, 32, 32, 32, 4)))
"""


@pytest.mark.claim
def test_a_stand_in_for_a_mac_simulates_trains_draws_and_predicts(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MAC)
    (tmp_path / "work.py").write_text(WORK.replace("SMALL", small := str(ROOT / "apps/cosmoflow/configs/small.yaml")))
    write_universes(tmp_path / "universes", train=2, validation=1)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/no/programs", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run([sys.executable, "work.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert [line for line in process.stdout.splitlines() if line.startswith("== ")] == [
        "== data_prep.cosmoflow simulate 0", f"== apps.cosmoflow {small} 0", "== hpcai.cli report 0", "== hpcai.cli doctor 0",
        "== memory True 8192", "== predicted Omega_m sigma_8 n_s H_0",
    ], process.stdout + process.stderr  # fmt: skip
    assert process.returncode == 0 and "Traceback" not in process.stderr
