"""For all tests: the same examples every time, no time limit on one example, nothing written beside the tests."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
