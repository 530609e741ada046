"""What a test of data leaves behind."""

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest


def held() -> Counter[str]:
    """Files that this process has open, and its threads."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if os.path.lexists(link)]  # the listing itself is gone
    return Counter([target for target in targets if target.startswith("/")] + [thread.name for thread in threading.enumerate()])


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """No open file and no thread outlives a test, however it ended."""
    before = held()
    yield
    until = time.monotonic() + 3
    while held() - before and time.monotonic() < until:  # the thread of a progress bar is told to end, not awaited
        time.sleep(0.02)
    assert not held() - before
