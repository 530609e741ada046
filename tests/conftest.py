"""Settings of all tests: deterministic Hypothesis examples without deadline, one temporary folder that is removed at the end, and a
summary of skipped tests by reason."""

import contextlib
import ctypes
import gc
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from hpcai.dist.host import ManualGC
from tests.ranks import launch

settings.register_profile("house", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("house")
_BEGAN = time.time()


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests except a run of tests/gpu alone (make gpu), and compute with one thread, as make test does.

    The backward pass lets autograd count devices now: it starts no threads for GPUs, with which no fork could run a backward pass.
    A fake tensor of a CUDA build would later count as a GPU.
    """
    gc.disable()  # nothing that is collected becomes garbage: a quarter of the time of the imports
    if not hasattr(config, "workerinput"):  # killed launchers and processes leave files behind
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="hpcai-")
        config.option.basetemp = config.option.basetemp or f"{tempfile.tempdir}/tests"  # short: paths of sockets are limited
    gpu = Path(__file__).parent / "gpu"
    alone = all(Path(word.partition("::")[0]).resolve().is_relative_to(gpu) for word in config.args)
    if alone and os.environ.get("HPCAI_TEST_DEVICE") != "cpu":
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    torch.ones((), requires_grad=True).backward()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--originals", type=Path, metavar="DIR", help="original files for the tests of readers: tests/data/README.md")


@pytest.fixture(scope="session")
def originals(pytestconfig: pytest.Config) -> Path:
    """Return the folder of original files."""
    folder = pytestconfig.getoption("originals")
    if folder is None:
        pytest.skip("reads original files: make originals FROM=DIR")
    assert isinstance(folder, Path) and folder.is_dir(), f"--originals {folder}: no such folder"
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    if skipped:
        terminalreporter.section(f"not run on this machine: {skipped.total()} tests")
        for reason, count in skipped.most_common():
            terminalreporter.line(f"{count:5}  {reason}")


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection: each run collects at its start."""
    gc.collect()
    gc.freeze()
    gc.enable()
    ManualGC.blocks += 1


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):
        return
    for left in Path("/tmp").glob("hydra_hwloc_xmlfile_*"):  # of killed mpiexec processes of MPICH, which ignore TMPDIR
        with contextlib.suppress(OSError):  # a process that ends now
            if left.stat().st_uid == os.getuid() and left.stat().st_mtime > _BEGAN:
                left.unlink()
    if exitstatus == pytest.ExitCode.OK:  # keep the files of failures
        session.config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def ranks_of_this_file() -> Iterator[None]:
    """End the processes of a test file, and return freed memory to the system: each fork would copy its page tables. Exclude what
    it has imported and cached from garbage collection too: a collection of SymPy and torch's compiler takes a tenth of a second."""
    yield
    launch.end()
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError):  # GNU C library only
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def quiet_hugging_face() -> Iterator[None]:
    """Silence the libraries of Hugging Face that a test file has imported."""
    libraries = [sys.modules[name].logging for name in ("diffusers", "transformers") if name in sys.modules]
    levels = [logging.get_verbosity() for logging in libraries]
    for logging in libraries:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    yield
    for logging, level in zip(libraries, levels):
        logging.set_verbosity(level)
