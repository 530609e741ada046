"""Rows of raw files by id: direct, cached and mapped reads are equal."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.data.direct import ALIGN, Reader
from hpcai.data.rows_file import RowsFile, hottest
from hpcai.errors import DataError

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.bin"
    path.write_bytes(np.random.default_rng(0).bytes(1 << 20))
    return path


@given(
    st.sampled_from([2, 96, 1024, 2048, 2730, 6144]), st.sampled_from(["direct", "buffered"]), st.sampled_from([4096, 4 << 20]),
    st.integers(0, 300), st.booleans(), st.integers(0, 60), st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=60)
def test_rows_are_those_of_the_file(
    contents: Path, width: int, mode: Any, block: int, number: int, ascending: bool, hot: int, shift: int,
) -> None:  # fmt: skip
    random, full = np.random.default_rng(number), np.fromfile(contents, np.uint16)
    table = full[: full.size // width * width].reshape(-1, width)
    ids = random.integers(-1, len(table), number)
    ids = np.sort(ids) if ascending else ids
    expected = np.where(ids[:, None] < 0, 0, table[ids])
    longest = 0

    def preadv(descriptor: int, views: Any, offset: int) -> int:
        nonlocal longest
        longest = max(longest, len(views[0]))
        return os.preadv(descriptor, views, offset)

    with Reader(mode, threads=3, block=block, preadv=preadv) as reader:
        cached = np.unique(random.integers(0, len(table), hot))
        files = [RowsFile(contents, len(table), width, np.uint16, reader, cached), RowsFile(contents, len(table), width, np.uint16)]
        memory = reader.memory.allocate(2 * (number * width + shift))
        for file in files:
            into = memory.view(np.uint16)[shift:].reshape(number, width)
            file.read(ids, into)
            np.testing.assert_array_equal(into, expected)
        assert files[0].requested == (ids >= 0).sum() and files[0].hits == np.isin(ids, cached).sum()
        assert longest <= block + 2 * (width + ALIGN), "no read is much longer than a block"
        del into, memory


def test_ids_beyond_the_file_and_a_shorter_file_are_named(contents: Path, tmp_path: Path) -> None:
    into = np.zeros((2, 2048), np.uint16)
    with Reader("direct") as reader:
        for file in (RowsFile(contents, 256, 2048, np.uint16, reader), RowsFile(contents, 256, 2048, np.uint16)):
            for wrong in (256, -2):
                with pytest.raises(DataError, match=f"row {wrong} is requested, but there are 256"):
                    file.read(np.array([3, wrong]), into)
        short = tmp_path / "short.bin"
        short.write_bytes(contents.read_bytes()[:-100])
        with pytest.raises(DataError, match="short.bin: ends at byte 1,048,476"):
            RowsFile(short, 256, 2048, np.uint16, reader).read(np.array([3, 255]), into)


def test_the_hottest_rows_fit_the_budget() -> None:
    uses = {"a": np.array([0, 5, 9, 5, 100_000]), "b": np.array([5, 7, 70_000])}
    for rows, expected in ((0, "[] []"), (2, "[4] [2]"), (4, "[2 4] [1 2]"), (6, "[1 2 3 4] [1 2]"), (20, "[0 1 2 3 4] [0 1 2]")):
        assert "{} {}".format(*hottest(uses, rows).values()) == expected
