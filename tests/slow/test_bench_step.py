"""What docs/benchmarks.md claims of the fast step, measured here."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.slow.trying import bench, until

pytestmark = pytest.mark.timing
Rows = list[dict[str, Any]]


def tries(part: str, good: Callable[[Rows], bool], *words: str) -> None:
    until(good, lambda: bench("step", part, *words)[part])


def test_update_and_average_in_one_pass_are_twice_as_fast_as_one_after_the_other() -> None:
    tries("optimizer", lambda rows: rows[0]["ratio"] >= 2.0)


def test_a_divided_update_takes_a_third_of_the_time_on_four_ranks_and_sends_what_an_all_reduce_would() -> None:
    tries("sharded", lambda rows: rows[0]["ratio"] <= 0.35 and abs(rows[0]["sent_over_parameters"] - 1.5) < 0.03)


def test_auto_precision_is_no_slower_than_a_plain_loop() -> None:
    tries("precision", lambda rows: all(row["auto_over_plain"] >= 1.0 for row in rows), "--repeats", "3")


def test_steps_are_as_long_as_without_any_evaluation() -> None:
    def good(rows: Rows) -> bool:
        return all(row["over_none"] <= 1.02 for row in rows if row["evaluation"] != "wait")

    tries("evaluation", good)
