"""No rank but the first has work that grows with the ranks of a job, and none has messages or file operations that grow with files
or tensors: counts of light ranks that live through whole runs."""

import math
from pathlib import Path

import pytest

from tests.ranks.counting import ACTS, Found, Measured, make_data, measured

RANKS = (1, 2, 8)
FEW = 8  # file operations of a run that differ from one to the next: who reads a sample first, whose folder is there already
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("growth"), 10)


@pytest.fixture(scope="module")
def by_ranks(split: Path) -> dict[int, Measured]:
    return {ranks: measured(ranks, split) for ranks in RANKS}


def numbers(found: Found, what: str) -> dict[str, float]:
    return {act: found[act][what] for act in ACTS}


def sockets_more(ranks: int) -> float:
    """Than one of two ranks has: those of trees."""
    return 2 * math.log2(ranks / 2) + 2


def test_one_process_has_nobody_to_talk_to(by_ranks: dict[int, Measured]) -> None:
    alone = by_ranks[1].last
    assert alone == by_ranks[1].first and set(ACTS) <= set(alone)
    assert set(numbers(alone, "messages").values()) == {0.0} and set(numbers(alone, "sockets").values()) == {0}


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_a_step_sends_sums_of_gradients_and_nothing_else(by_ranks: dict[int, Measured], ranks: int) -> None:
    found = by_ranks[ranks]
    assert found.sums > 0
    assert found.first["step"]["messages"] == found.last["step"]["messages"] == found.sums


def test_messages_of_a_rank_are_as_many_whatever_the_ranks(by_ranks: dict[int, Measured]) -> None:
    few, many = (numbers(by_ranks[ranks].last, "messages") for ranks in (2, 8))
    assert many.pop("resume") - few.pop("resume") <= 8 - 2  # one for each file, and of these there are eight at most
    assert many == few


def test_of_messages_to_the_first_rank_there_are_as_many_as_writers(by_ranks: dict[int, Measured]) -> None:
    """Eight write. The first hears once what each has, and in each save how it went: a size and the words, each time."""
    few, many = (numbers(by_ranks[ranks].first, "messages") for ranks in (2, 8))
    assert 0 < many.pop("save") - few.pop("save") <= 3 * (8 - 2) and many.pop("resume") - few.pop("resume") <= 8 - 2
    assert many == few


def test_a_rank_connects_to_few_others(by_ranks: dict[int, Measured]) -> None:
    few, many = (max(numbers(by_ranks[ranks].last, "sockets").values()) for ranks in (2, 8))
    assert many - few <= sockets_more(8)


@pytest.mark.claim
def test_a_rank_of_32_has_8_sockets_more_than_one_of_2(by_ranks: dict[int, Measured], split: Path) -> None:
    many = measured(32, split)
    few = max(numbers(by_ranks[2].last, "sockets").values())
    assert max(numbers(many.last, "sockets").values()) <= few + 8
    assert many.first["save"]["messages"] == by_ranks[8].first["save"]["messages"]


def test_file_operations_of_a_rank_are_as_many_whatever_the_ranks(by_ranks: dict[int, Measured]) -> None:
    few, many = (numbers(by_ranks[ranks].last, "file operations") for ranks in (2, 8))
    assert all(many[act] <= few[act] + FEW for act in ACTS), (few, many)


def test_neither_files_nor_tensors_make_a_rank_do_more(by_ranks: dict[int, Measured], tmp_path: Path) -> None:
    few, many = by_ranks[2].last, measured(2, make_data(tmp_path, 300), tensors=400).last
    assert numbers(many, "messages") == numbers(few, "messages") and numbers(many, "sockets") == numbers(few, "sockets")
    before, after = numbers(few, "file operations"), numbers(many, "file operations")
    assert all(after[act] <= before[act] + FEW for act in ACTS), (before, after)
