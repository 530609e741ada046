"""The notebooks: files in a reviewable form, whose cells run in order, in a short form within seconds and in full as a claim. Cells
are executed without a kernel; figures are drawn but not shown."""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from tests.apps.app_runs import ROOT

FOLDER = ROOT / "docs/notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
APPS = sorted(path.parent.name for path in (ROOT / "apps").glob("*/README.md"))
Names = dict[str, Any]

# Constants of the first cell in the short form.
SHORT: dict[str, Names] = {
    "align": {"PROMPTS": 8, "HELD_OUT": 4, "FIRST_STEPS": 2, "STEPS": 2, "BATCH": 2, "GROUP": 2, "WIDTH": 16},
    "bert": {"FAMILIES": 2, "SEQUENCES": 20, "STEPS": 2, "BATCH": 2, "WIDTH": 16},
    "cosmoflow": {"UNIVERSES": 8, "HELD_OUT": 0.25, "STEPS": 2, "BATCH": 4},
    "deepcam": {"MAPS": 8, "HELD_OUT": 0.5, "STEPS": 2, "BATCH": 2},
    "diffusion": {"MAPS": 24, "HELD_OUT": 0.5, "STEPS": 2, "BATCH": 4, "CHANNELS": (8, 16), "MEMBERS": 2, "NOISE_STEPS": 2},
    "llm": {"FILES": 3, "HELD_OUT": 1, "VOCABULARY": 400, "STEPS": 2, "BATCH": 2, "TOKENS": 64, "WIDTH": 32},
    "opencatalyst": {"TRAINING": 8, "HELD_OUT": 4, "STEPS": 2, "BATCH": 4, "WIDTH": 16, "GRID": 2, "RELAX": 2},
    "openfold": {"RELATIVES": 2, "RESIDUES": 24, "ROWS": 16, "STEPS": 2},
    "resnet": {"GALAXIES": 16, "HELD_OUT": 0.5, "STEPS": 2, "BATCH": 4},
    "dlrm": {"READS": 400, "PASSES": 1, "BATCH": 8, "DIM": 4},
    "retinanet": {"IMAGES": 8, "HELD_OUT": 0.5, "STEPS": 2, "BATCH": 2},
    "rgat": {"PAPERS": 600, "STEPS": 2, "BATCH": 8, "WIDTH": 8},
    "unet3d": {"PATIENTS": 5, "HELD_OUT": 0.4, "STEPS": 2, "BATCH": 1, "FILTERS": (4, 6, 8)},
}

# Whether a model is trained: bounds on its scores after a full run, some relative to baselines that the notebook prints.
IS_TRAINED: dict[str, Callable[[Names], bool]] = {
    "align": lambda names: names["before"] < 0.25 and names["after"] > 0.7,
    "bert": lambda names: names["scores"]["perplexity"] < names["scores"]["baseline_perplexity"]
    and np.mean(names["found"]) > 2.5 * np.mean(names["all_pairs"]),
    "cosmoflow": lambda names: names["ratios"]["Omega_m"] > 4 and names["ratios"]["sigma_8"] > 3,
    "deepcam": lambda names: names["scores"]["iou"] > names["baseline"] + 0.08 and names["scores"]["recall_tropical_cyclone"] > 0.8,
    "diffusion": lambda names: names["metrics"]["crps"] < min(0.97 * names["dressed_crps"], 0.68 * names["smooth_mae"]),
    "llm": lambda names: names["bits"]["this model"] < 0.75 * names["bits"]["tokens by their frequency"] and names["correct"] >= 4,
    "opencatalyst": lambda names: names["scores"]["force_mae"] < 0.4 * names["scores"]["force_zero"] and names["correlation"] > 0.9,
    "openfold": lambda names: names["lddt_after"] > 0.6 > 0.2 > names["lddt_before"],
    "resnet": lambda names: names["scores"]["accuracy"] > 0.7 and max(names["errors"].values()) < 0.12,
    "dlrm": lambda names: names["areas"]["network"] > max(names["areas"]["logistic regression"] + 0.006, 0.9),
    "retinanet": lambda names: names["scores"]["ap50"] > 0.33 and names["scores"]["ap50_star"] > 0.7 and len(names["boxes"]) > 0,
    "rgat": lambda names: names["scores"]["accuracy"] > 0.9 and names["correlation"] > 0.6,
    "unet3d": lambda names: names["scores"]["dice_kidney"] > 0.7 and names["scores"]["dice_tumour"] > 0.2 > names["baseline"],
}


def read_notebook(name: str) -> Names:
    notebook: Names = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return notebook


def replace_constants(cell: str, values: Names) -> str:
    """Return the first cell, which only assigns constants, with other values."""
    constants = {}
    for statement in ast.parse(cell).body:
        assert isinstance(statement, ast.Assign), "the first cell only sets constants"
        (target,) = statement.targets
        assert isinstance(target, ast.Name)
        constants[target.id] = ast.literal_eval(statement.value)
    assert set(values) <= set(constants), "the short form sets a constant that the first cell lacks"
    return "\n".join(f"{name} = {value!r}" for name, value in (constants | values).items())


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, which must be empty at the end, and figures that are not shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plt.switch_backend("agg")
    with torch.random.fork_rng():
        yield tmp_path
    plt.close("all")
    assert not any(tmp_path.iterdir()), "a notebook leaves no files in its working directory"


def run_notebook(name: str, values: Names) -> Names:
    """Run all cells and return the names that they define."""
    if name == "retinanet":
        pytest.importorskip("faster_coco_eval", reason="faster-coco-eval is missing: pip install 'hpcai-suite[detection]'")
    names: Names = {"__name__": "__main__"}
    cells = ["".join(cell["source"]) for cell in read_notebook(name)["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate([replace_constants(cells[0], values), *cells[1:]]):
        exec(compile(cell, f"{name}.ipynb, code cell {number}", "exec"), names)
        for figure in map(plt.figure, plt.get_fignums()):
            figure.canvas.draw()
        plt.close("all")
    assert not Path(names["folder"].name).exists(), "a notebook removes its temporary folder"
    return names


def test_each_app_has_a_notebook() -> None:
    assert NAMES == APPS == sorted(SHORT) == sorted(IS_TRAINED)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_in_reviewable_form(name: str) -> None:
    """nbformat 4.5 as Jupyter writes it, without outputs and optional keys."""
    notebook = read_notebook(name)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len({*ids}) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", cell_id, re.A) for cell_id in ids)
    assert [cell["cell_type"] for cell in notebook["cells"][:2]] == ["markdown", "code"]
    for cell in notebook["cells"]:
        code = {"execution_count": None, "outputs": []} if cell["cell_type"] == "code" else {}
        assert cell == {"cell_type": cell["cell_type"], "id": cell["id"], "metadata": {}, "source": cell["source"], **code}
        assert cell["cell_type"] in ("code", "markdown") and all(isinstance(line, str) for line in cell["source"])
        assert all(line.endswith("\n") for line in cell["source"][:-1]) and not cell["source"][-1].endswith("\n")
    assert (FOLDER / f"{name}.ipynb").read_text() == json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_linked_from_the_index_and_its_app(name: str) -> None:
    assert len(re.findall(rf"^\| \[{name}\]\({name}\.ipynb\) \| .+ \| .+ \|$", (FOLDER / "README.md").read_text(), re.M)) == 1
    assert f"(../../docs/notebooks/{name}.ipynb)" in (ROOT / f"apps/{name}/README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_in_its_short_form(name: str, empty_folder: Path) -> None:
    """Two steps do not meet the bounds of a full run."""
    names = run_notebook(name, SHORT[name])
    assert not IS_TRAINED[name](names)
    assert name != "openfold" or np.isnan(names["distances"](np.zeros((1, 37, 3)), np.zeros((1, 37)))).all(), "masked: not drawn"


@pytest.mark.claim
@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_trains_its_model(name: str, empty_folder: Path) -> None:
    assert IS_TRAINED[name](run_notebook(name, {}))
