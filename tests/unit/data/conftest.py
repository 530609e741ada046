"""A fixture that detects leaks of files and threads."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest


def open_resources() -> Counter[str]:
    """Return the paths of open files and the names of threads, with their counts; the thread of waits remains by design."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]  # the descriptor of the listing is closed
    threads = [thread.name for thread in threading.enumerate() if thread.name != "hpcai-waits"]  # one for the whole process
    return Counter([target for target in targets if target.startswith("/")] + threads)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Assert that no open file and no thread outlives the test, also after a failure."""
    before = open_resources()
    yield
    deadline = time.monotonic() + 3
    while open_resources() - before and time.monotonic() < deadline:  # the thread of a progress bar is not joined
        time.sleep(0.02)
    assert not open_resources() - before
