"""For all tests: the same examples every time, no time limit on one example, one folder of temporary files that goes with them, and
at the end what this machine could not run."""

import contextlib
import ctypes
import gc
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.ranks import launch

settings.register_profile("house", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("house")
_BEGAN = time.time()


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from all tests but those of tests/gpu, run by themselves (make gpu). Autograd then counts no GPU, and starts no
    threads for GPUs: no fork could run a backward pass beside them. Later, a fake tensor of a CUDA build would count as one."""
    if not hasattr(config, "workerinput"):  # launchers and processes that are killed leave files behind
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="hpcai-")
        config.option.basetemp = config.option.basetemp or f"{tempfile.tempdir}/tests"  # short: there are sockets below it
    gpu = Path(__file__).parent / "gpu"
    alone = all(Path(word.partition("::")[0]).resolve().is_relative_to(gpu) for word in config.args)
    if alone and os.environ.get("HPCAI_TEST_DEVICE") != "cpu":
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.ones((), requires_grad=True).backward()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--originals", type=Path, metavar="DIR", help="original files for the tests of readers: tests/data/README.md")


@pytest.fixture(scope="session")
def originals(pytestconfig: pytest.Config) -> Path:
    """The folder of original files."""
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
    """What is imported by now stays: a run collects garbage at its start, which would look at all of it again in each test."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):
        return
    for left in Path("/tmp").glob("hydra_hwloc_xmlfile_*"):  # of each mpiexec of MPICH that was killed, which takes no other folder
        with contextlib.suppress(OSError):  # one that ends now
            if left.stat().st_uid == os.getuid() and left.stat().st_mtime > _BEGAN:
                left.unlink()
    if exitstatus == pytest.ExitCode.OK:  # otherwise there is something to look at
        session.config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def ranks_of_this_file() -> Iterator[None]:
    """Its processes end with it, and memory that it has freed goes back: each fork would copy the tables of its pages."""
    yield
    launch.end()
    with contextlib.suppress(AttributeError):  # the GNU C library has it
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
