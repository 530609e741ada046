"""The notebooks: files that a person can review, and cells that run from top to bottom, made small in seconds and as they are as a
claim. A cell is run here as a kernel would, but for what a kernel shows."""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from tests.apps.app_runs import ROOT

FOLDER = ROOT / "docs/notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
APPS = sorted(path.parent.name for path in (ROOT / "apps").glob("*/README.md"))
Names = dict[str, Any]

# What the first cell sets, made small.
SHORT: dict[str, Names] = {
    "cosmoflow": {"UNIVERSES": 8, "HELD_OUT": 0.25, "STEPS": 2, "BATCH": 4},
    "deepcam": {"MAPS": 8, "HELD_OUT": 0.5, "STEPS": 2, "BATCH": 2},
    "diffusion": {"MAPS": 24, "HELD_OUT": 0.5, "STEPS": 2, "BATCH": 4, "CHANNELS": (8, 16), "MEMBERS": 2, "NOISE_STEPS": 2},
    "llm": {"FILES": 3, "HELD_OUT": 1, "VOCABULARY": 400, "STEPS": 2, "BATCH": 2, "TOKENS": 64, "WIDTH": 32},
    "opencatalyst": {"TRAINING": 8, "HELD_OUT": 4, "STEPS": 2, "BATCH": 4, "WIDTH": 16, "GRID": 2, "RELAX": 2},
    "openfold": {"RELATIVES": 2, "RESIDUES": 24, "ROWS": 16, "STEPS": 2},
    "unet3d": {"PATIENTS": 5, "HELD_OUT": 0.4, "STEPS": 2, "BATCH": 1, "FILTERS": (4, 6, 8)},
}

# What has been learnt when the cells have run as they are, beside what is had for nothing, which the notebook prints.
LEARNT: dict[str, Callable[[Names], bool]] = {
    "cosmoflow": lambda names: names["ratios"]["Omega_m"] > 4 and names["ratios"]["sigma_8"] > 3,
    "deepcam": lambda names: names["scores"]["iou"] > names["baseline"] + 0.08 and names["scores"]["recall_tropical_cyclone"] > 0.8,
    "diffusion": lambda names: names["metrics"]["crps"] < min(0.97 * names["dressed_crps"], 0.68 * names["smooth_mae"]),
    "llm": lambda names: names["bits"]["this model"] < 0.75 * names["bits"]["tokens by their frequency"] and names["correct"] >= 4,
    "opencatalyst": lambda names: names["scores"]["force_mae"] < 0.4 * names["scores"]["force_zero"] and names["correlation"] > 0.9,
    "openfold": lambda names: names["lddt_after"] > 0.6 > 0.2 > names["lddt_before"],
    "unet3d": lambda names: names["scores"]["dice_kidney"] > 0.7 and names["scores"]["dice_tumour"] > 0.2 > names["baseline"],
}


def read(name: str) -> Names:
    found: Names = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return found


def codes(name: str) -> list[str]:
    return ["".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] == "code"]


def with_values(cell: str, values: Names) -> str:
    """The first cell, which assigns numbers and texts to names and does nothing else, with other values."""
    known = {}
    for statement in ast.parse(cell).body:
        assert isinstance(statement, ast.Assign), "the first cell sets constants alone"
        (target,) = statement.targets
        assert isinstance(target, ast.Name)
        known[target.id] = ast.literal_eval(statement.value)
    assert set(values) <= set(known), "the short form sets what the first cell does not have"
    return "\n".join(f"{name} = {value!r}" for name, value in (known | values).items())


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[Path]:
    """An empty folder to run in, which is empty again at the end, and pictures that nobody looks at."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plt.switch_backend("agg")
    with torch.random.fork_rng():
        yield tmp_path
    plt.close("all")
    assert not any(tmp_path.iterdir()), "a notebook leaves nothing where it runs"


def run(name: str, values: Names) -> Names:
    """What is defined when all cells have run."""
    names: Names = {"__name__": "__main__"}
    cells = codes(name)
    for number, cell in enumerate([with_values(cells[0], values), *cells[1:]]):
        exec(compile(cell, f"{name}.ipynb, code cell {number}", "exec"), names)
        for figure in map(plt.figure, plt.get_fignums()):
            figure.canvas.draw()
        plt.close("all")
    assert not Path(names["folder"].name).exists(), "a notebook clears its folder away"
    return names


def test_each_science_has_one() -> None:
    assert NAMES == APPS == sorted(SHORT) == sorted(LEARNT)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_a_file_to_review(name: str) -> None:
    """nbformat 4.5, in the form in which Jupyter writes it, without outputs; whatever else a cell may hold is not there."""
    found = read(name)
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    assert set(found) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert set(found["metadata"]) == {"kernelspec", "language_info"}
    marks = [cell["id"] for cell in found["cells"]]
    assert len({*marks}) == len(marks) and all(re.fullmatch(r"[\w-]{1,64}", mark, re.A) for mark in marks)
    assert [cell["cell_type"] for cell in found["cells"][:2]] == ["markdown", "code"]
    for cell in found["cells"]:
        code = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        assert cell == {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": {}, "source": cell["source"], **code}
        assert cell["cell_type"] in ("code", "markdown") and all(isinstance(line, str) for line in cell["source"])
        assert all(line.endswith("\n") for line in cell["source"][:-1]) and not cell["source"][-1].endswith("\n")
    assert (FOLDER / f"{name}.ipynb").read_text() == json.dumps(found, indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_named_where_it_is_looked_for(name: str) -> None:
    assert len(re.findall(rf"^\| \[{name}\]\({name}\.ipynb\) \| .+ \| .+ \|$", (FOLDER / "README.md").read_text(), re.M)) == 1
    assert f"(../../docs/notebooks/{name}.ipynb)" in (ROOT / f"apps/{name}/README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_in_its_short_form(name: str, away: Path) -> None:
    """Two steps teach nothing that would pass for learnt."""
    assert not LEARNT[name](run(name, SHORT[name]))


@pytest.mark.claim
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_learns_what_it_shows(name: str, away: Path) -> None:
    assert LEARNT[name](run(name, {}))
