"""`hpcai bench growth`: the law that numbers follow, what a trace says, and the tables; what ranks do is in tests/ranks."""

import json
import math
import os
from pathlib import Path
from typing import Any

import h5py
import pytest

from hpcai.cli import bench
from hpcai.cli.bench import timing
from hpcai.cli.bench.growth import QUANTITIES, _show, ledger, life, rows_of
from hpcai.cli.bench.growth.law import Law, fit, short
from hpcai.cli.bench.growth.life import ACTS, Job, Measured

RANKS = (2, 4, 8, 16, 32)


@pytest.mark.parametrize(("law", "text"), [
    (lambda n: 7, "7"),
    (lambda n: 0, "0"),
    (lambda n: 4 + 3 * n, "4 + 3 n"),
    (lambda n: 2 * n, "2 n"),
    (lambda n: 5 + 2 * math.log2(n), "5 + 2 log n"),
    (lambda n: 100 + 2 * n + 8 * math.log2(n), "100 + 2 n + 8 log n"),
])  # fmt: skip
def test_a_law_is_found_with_its_factors(law: Any, text: str) -> None:
    found = fit(RANKS, [law(n) for n in RANKS], units=1e-6)
    assert found.holds and not found.level
    assert str(found) == text
    assert found.at(16384) == pytest.approx(law(16384), rel=1e-6, abs=1e-6)


def test_the_simplest_law_that_fits_is_taken() -> None:
    noisy = [10.2, 9.9, 10.4, 9.7, 10.1]
    assert str(fit(RANKS, noisy, units=0.5)) == "10.1"
    assert fit(RANKS, noisy, units=0.01).holds is False
    assert str(fit(RANKS, [101, 99, 102, 100, 98], part=0.05, units=0)) == "100"
    assert fit(RANKS, [12.4, 13.6, 16.3, 15.7, 18.5], units=1.5).line == 0, "a logarithm does, with noise"


def test_what_follows_no_law_is_told_so() -> None:
    assert str(fit(RANKS, [4, 9, 4, 9, 30], units=1)).startswith("about ")
    falls = fit(RANKS, [64, 32, 16, 8, 4], units=1)
    assert falls.level and str(falls) == "levels off at 4" and falls.at(2048) == 4
    bounded = fit(RANKS, [8, 10.5, 15.5, 15.5, 15.5], part=0.02, units=1)
    assert bounded.level and str(bounded) == "levels off at 15.5", "eight writers at most"
    square = fit(RANKS, [n * n for n in RANKS], units=1)
    assert not square.holds and square.line > 0


def test_one_number_and_two_are_no_more_than_they_say() -> None:
    assert str(fit([2], [5])) == "5"
    assert fit([2, 4], [5, 9], units=0.1).at(4) == pytest.approx(9)


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (1e-17, "1e-17"), (0.5, "0.5"), (12.345, "12.3"), (1234567.8, "1,234,568")])
def test_numbers_are_short(number: float, text: str) -> None:
    assert short(number) == text


def test_calls_of_a_trace_are_those_between_the_marks() -> None:
    mark = 'access("/hpcai-bench-growth/{}", F_OK) = -1 ENOENT (No such file or directory)'
    lines = [
        'openat(AT_FDCWD, "/before", O_RDONLY) = 3', f"11 {mark.format('start')}", '11 openat(AT_FDCWD, "/a", O_RDONLY) = 3',
        '12 newfstatat(AT_FDCWD, "/b",  <unfinished ...>', '11 unlink("/c") = 0', '12 <... newfstatat resumed>{...}, 0) = 0',
        f"11 {mark.format('none')}", '11 openat(AT_FDCWD, "/proc/self/io", O_RDONLY) = 3', f"11 {mark.format('save')}",
        '11 rename("/d", "/e") = 0',
    ]  # fmt: skip
    assert ledger.traced_calls("\n".join(lines)) == {"start": 3, "save": 1}


def counted(scale: float) -> dict[str, dict[str, float]]:
    return {act: {quantity.of: 100 * scale / quantity.scale for quantity in QUANTITIES} for act in ACTS}


def test_tables_flag_what_grows_on_other_ranks_than_the_first(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    found = {n: Measured(counted(n), counted(1 if n < 8 else n), 1) for n in (1, 2, 4, 8, 16)}
    rows = rows_of("ranks", found)
    assert len(rows) == len(ACTS) * 2 * len(QUANTITIES) and all(row["ahead"].keys() == {"2048", "16384"} for row in rows)
    assert rows[0]["values"] == {"1": 100, "2": 200, "4": 400, "8": 800, "16": 1600}
    assert rows[0]["law"]["line"] == pytest.approx(100) and rows[0]["ahead"]["2048"] == pytest.approx(204800)
    machine = {"bench": "growth", "torch": "2", "device": "cpu", "threads": 1, "load": 0.0, "files_by": "strace"}
    _show(machine, {"ranks": rows, "files": rows_of("files", {10: found[2], 100: found[2], 1000: found[8]})})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("start, by ranks: growth") and sum("by ranks" in line for line in lines) == len(ACTS)
    first, last = (next(line for line in lines if "sockets" in line and f" {rank} " in line) for rank in ("0", "last"))
    assert "204,800" in first and "!" not in first and "!" in last
    assert any("what grows with files" in line for line in lines) and "strace" in lines[-1]


def test_json_has_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Job] = []
    monkeypatch.setattr("hpcai.cli.bench.growth.measured", lambda job, *_: asked.append(job) or Measured(counted(1), counted(1), 1))
    assert bench.main(["growth", "--json", "--quick", "--ranks", "4,1,2", "--steps", "0", "--tensors", "7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"ranks", "files", "tensors", "files_by"} <= found.keys() and "steps" not in found
    assert [job.ranks for job in asked[:3]] == [1, 2, 4] and asked[-1] == Job(tensors=7)


def test_all_benchmarks_leave_it_out() -> None:
    assert "growth" in bench.SHARED and "growth" not in bench._BRIEFLY


def booked(home: Path) -> ledger.Found:
    book = ledger.Ledger()
    book.now("write")
    with h5py.File(home / "a.h5", "w") as file:
        file["x"] = [1, 2]
    (home / "b").write_text("b")
    book.now("ask")
    _ = (home / "b").stat(), os.listdir(home), (home / "c").exists()
    book.now("read", times=2)
    for _ in range(2):
        with book.act("inner"):
            (home / "b").read_text()
    book.now("over")
    return book.close()


def test_a_file_operation_is_counted_once_and_in_its_act(tmp_path: Path) -> None:
    """In a process of its own, where the counters stay."""
    with timing.processes(1, fresh=False) as pool:
        found = pool.submit(booked, tmp_path).result(timeout=60)
    counts = {act: each["file operations"] for act, each in found.items() if act != "over"}
    assert counts == {"write": 2, "ask": 3, "read": 0, "inner": 1}
    assert all(each["messages"] == 0 and each["memory"] > 1e7 for each in found.values())


@pytest.mark.parametrize("job", [Job(ranks=32), Job(files=10, tensors=20), Job(steps=100_000, tensors=4)])
def test_a_job_has_samples_for_its_ranks(job: Job) -> None:
    assert 1 <= job.epoch * job.ranks <= job.files * life._ROWS and job.epoch <= job.steps


def test_a_law_is_data() -> None:
    assert Law(1, 2, 3).at(4) == 1 + 2 * 4 + 3 * 2
