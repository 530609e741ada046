"""docs/parallel.md is true: its example trains alone and on ranks alike, and each goes on from the other's checkpoint."""

import re
from pathlib import Path

import pytest

from tests.ranks.test_launch_mpi import mpich, run

PAGE = (Path(__file__).parents[2] / "docs/parallel.md").read_text()

pytestmark = pytest.mark.mpi


def numbers(text: str) -> tuple[int, float, int]:
    step, loss, count = re.findall(r"step (\d+): loss ([\d.]+), (\d+) numbers", text)[0]
    return int(step), float(loss), int(count)


def test_the_example_of_the_page(tmp_path: Path) -> None:
    program = tmp_path / "cut.py"
    program.write_text(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0])
    step, loss, held = numbers(run(mpich(2), str(program), str(tmp_path / "two"), "2").out)
    assert step == 20 and held == (64 * 256 + 256) // 2 + 64 * 128 + 64
    alone = numbers(run([], str(program), str(tmp_path / "one"), "1").out)
    assert alone == (20, pytest.approx(loss, abs=1e-4), 64 * 256 + 256 + 256 * 64 + 64)
    _, loss, _ = numbers(run(mpich(2), str(program), str(tmp_path / "one"), "2").out)
    assert numbers(run([], str(program), str(tmp_path / "two"), "1").out) == (40, pytest.approx(loss, abs=1e-4), alone[2])
