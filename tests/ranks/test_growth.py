"""Work grows with the number of ranks on the first rank only. Messages and file operations grow with files and tensors on no rank.
Both are counted in complete runs of small processes."""

import math
from pathlib import Path

import pytest

from tests.ranks.counting import PHASES, PhaseCounts, RunCounts, count_run, write_split

RANKS = (1, 2, 8)
VARIATION = 8  # file operations that differ between equal runs: the first reader of a sample, a folder that exists already
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_split(tmp_path_factory.mktemp("growth"), 10)


@pytest.fixture(scope="module")
def by_ranks(split: Path) -> dict[int, RunCounts]:
    return {ranks: count_run(ranks, split) for ranks in RANKS}


def by_phase(counts: PhaseCounts, kind: str) -> dict[str, float]:
    return {phase: counts[phase][kind] for phase in PHASES}


def test_one_process_sends_no_messages_and_opens_no_sockets(by_ranks: dict[int, RunCounts]) -> None:
    alone = by_ranks[1].last
    assert alone == by_ranks[1].first and set(PHASES) <= set(alone)
    assert set(by_phase(alone, "messages").values()) == {0.0} and set(by_phase(alone, "sockets").values()) == {0}


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_a_step_sends_gradient_all_reduces_and_nothing_else(by_ranks: dict[int, RunCounts], ranks: int) -> None:
    counts = by_ranks[ranks]
    assert counts.all_reduces > 0
    assert counts.first["step"]["messages"] == counts.last["step"]["messages"] == counts.all_reduces


def test_messages_of_a_rank_do_not_grow_with_the_ranks(by_ranks: dict[int, RunCounts]) -> None:
    few, many = (by_phase(by_ranks[ranks].last, "messages") for ranks in (2, 8))
    assert many.pop("resume") - few.pop("resume") <= 8 - 2  # one for each file, of which there are eight at most
    assert many == few


def test_messages_to_the_first_rank_grow_with_the_writers_only(by_ranks: dict[int, RunCounts]) -> None:
    """Eight ranks write. Each sends its list of tensors once, and in each save its result: a size and the content, each time.
    The hub of the first rank sends each rank one message at the start: all are connected."""
    few, many = (by_phase(by_ranks[ranks].first, "messages") for ranks in (2, 8))
    assert 0 < many.pop("save") - few.pop("save") <= 3 * (8 - 2) and many.pop("resume") - few.pop("resume") <= 8 - 2
    assert many.pop("start") - few.pop("start") == 8 - 2
    assert many == few


def test_a_rank_connects_to_few_others(by_ranks: dict[int, RunCounts]) -> None:
    few, many = (max(by_phase(by_ranks[ranks].last, "sockets").values()) for ranks in (2, 8))
    assert many - few <= 2 * math.log2(8 / 2) + 2, "those of trees"


@pytest.mark.claim
def test_a_rank_of_32_has_8_sockets_more_than_one_of_2(by_ranks: dict[int, RunCounts], split: Path) -> None:
    many = count_run(32, split)
    few = max(by_phase(by_ranks[2].last, "sockets").values())
    assert max(by_phase(many.last, "sockets").values()) <= few + 8
    assert many.first["save"]["messages"] == by_ranks[8].first["save"]["messages"]


def test_file_operations_of_a_rank_do_not_grow_with_the_ranks(by_ranks: dict[int, RunCounts]) -> None:
    few, many = (by_phase(by_ranks[ranks].last, "file operations") for ranks in (2, 8))
    assert all(many[phase] <= few[phase] + VARIATION for phase in PHASES), (few, many)


def test_messages_and_file_operations_do_not_grow_with_files_or_tensors(by_ranks: dict[int, RunCounts], tmp_path: Path) -> None:
    few, many = by_ranks[2].last, count_run(2, write_split(tmp_path, 300), tensors=400).last
    assert by_phase(many, "messages") == by_phase(few, "messages") and by_phase(many, "sockets") == by_phase(few, "sockets")
    before, after = by_phase(few, "file operations"), by_phase(many, "file operations")
    assert all(after[phase] <= before[phase] + VARIATION for phase in PHASES), (before, after)
