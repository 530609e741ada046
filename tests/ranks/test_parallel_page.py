"""docs/parallel.md: its example trains alike on one rank and on two, and each resumes the checkpoint of the other."""

import re
from pathlib import Path

import pytest

from tests.ranks.test_launch_mpi import run_forked

PAGE = (Path(__file__).parents[2] / "docs/parallel.md").read_text()


def test_the_example_of_the_page(tmp_path: Path) -> None:
    program = tmp_path / "cut.py"
    program.write_text(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0])

    def train(ranks: int, folder: str) -> tuple[int, float, int]:
        stdout = run_forked(ranks, str(program), str(tmp_path / folder), str(ranks))[0].stdout
        step, loss, count = re.findall(r"step (\d+): loss ([\d.]+), (\d+) numbers", stdout)[0]
        return int(step), float(loss), int(count)

    full = 64 * 256 + 256 + 256 * 64 + 64
    step, loss, local = train(2, "two")
    assert step == 20 and local == (64 * 256 + 256) // 2 + 64 * 128 + 64
    assert train(1, "one") == (20, pytest.approx(loss, abs=1e-4), full)
    _, loss, _ = train(2, "one")
    assert train(1, "two") == (40, pytest.approx(loss, abs=1e-4), full)
