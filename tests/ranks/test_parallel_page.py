"""docs/parallel.md is true: its example trains alone and on ranks alike, and each goes on from the other's checkpoint."""

import re
from pathlib import Path

import pytest

from tests.ranks.test_launch_mpi import run_forked

PAGE = (Path(__file__).parents[2] / "docs/parallel.md").read_text()


def test_the_example_of_the_page(tmp_path: Path) -> None:
    program = tmp_path / "cut.py"
    program.write_text(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0])

    def trained(ranks: int, folder: str) -> tuple[int, float, int]:
        said = run_forked(ranks, str(program), str(tmp_path / folder), str(ranks))[0].out
        step, loss, count = re.findall(r"step (\d+): loss ([\d.]+), (\d+) numbers", said)[0]
        return int(step), float(loss), int(count)

    whole = 64 * 256 + 256 + 256 * 64 + 64
    step, loss, held = trained(2, "two")
    assert step == 20 and held == (64 * 256 + 256) // 2 + 64 * 128 + 64
    assert trained(1, "one") == (20, pytest.approx(loss, abs=1e-4), whole)
    _, loss, _ = trained(2, "one")
    assert trained(1, "two") == (40, pytest.approx(loss, abs=1e-4), whole)
