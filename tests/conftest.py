"""For all tests: the same examples every time, no time limit on one example, nothing written beside the tests."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.ranks import launch

settings.register_profile("house", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("house")


def pytest_collection_finish() -> None:
    """What is imported by now stays: a run collects garbage at its start, which would look at all of it again in each test."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(scope="module", autouse=True)
def ranks_of_this_file() -> Iterator[None]:
    yield
    launch.end()


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
