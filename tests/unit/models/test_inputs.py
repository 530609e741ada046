"""Inputs of trained models in another unit or another order of dims are warned of or refused; simulated ones are not."""

import re
import tomllib
from functools import cache
from typing import Any

import ase.build
import numpy as np
import pytest
import torch

from data_prep import cosmoflow, deepcam, kits19, scenes
from hpcai.errors import DataError
from hpcai.models.cosmoflow import CosmoFlow, CosmoFlowConfig
from hpcai.models.deepcam import VARIABLES, DeepCamConfig
from hpcai.models.deepcam.fields import stack_fields
from hpcai.models.diffusion import Condition
from hpcai.models.dimenet import build_structure
from hpcai.models.openfold import OpenFold
from hpcai.models.openfold.folding import prepare_features
from hpcai.models.unet3d.volume import check_likeness
from tests.reference_data import DATA
from tests.unit.models.diffusion.test_model import FIELDS, new_model
from tests.unit.test_readme import TINY

scan = cache(kits19.Recipe(1, (9.6, 7.2, 7.2), (8, 32, 32), None, 0.2, 0.0).scan)
REGION = deepcam.Recipe(1, 96, 144, 0.5, 8.0, 0.0, False, 16, 0.1, 0.1)
maps = cache(lambda index: scenes.sample(REGION.grid(), REGION.generator(1, index)).astype(np.float64))
RANGES = (0.2, 0.7, 0.9, 65.0), (0.4, 0.9, 1.0, 75.0)
BOX = cosmoflow.Recipe(1, 16, 1, 8.0, (0.0, 0.5, 1.5, 3.0), 2, 16.0, 0.045, *RANGES, 0.1, 0.0)
counts = cache(lambda index: cosmoflow.simulate_counts(BOX, index)[0])


def segment(index: int, change: Any, other: Any) -> None:
    check_likeness(change(scan(index).image), other(scan(index).spacing_mm))


def detect(index: int, change: Any, other: Any) -> None:
    low, high = (tuple(end(np.stack([maps(0), maps(1)]), axis=(0, 1, 2)).tolist()) for end in (np.min, np.max))
    stack_fields(dict(zip(VARIABLES, np.moveaxis(change(maps(index)), -1, 0))), DeepCamConfig(low=low, high=high))


def infer(index: int, change: Any, other: Any) -> None:
    cells = np.log1p(np.concatenate([counts(n).reshape(-1, 4) for n in (0, 1)]))
    values, vectors = np.linalg.eigh(np.cov(cells.T))
    statistics = {"mean": tuple(cells.mean(0).tolist()), "mix": tuple(map(tuple, (vectors / values**0.5 @ vectors.T).tolist()))}
    cfg = CosmoFlowConfig(size=16, blocks=2, filters=2, low=BOX.low, high=BOX.high, **(statistics if other(True) else {}))
    CosmoFlow(cfg).predict(change(counts(index)))


def refine(index: int, change: Any, other: Any) -> None:
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in FIELDS.items()}
    model = new_model(size=(1, 8, 8), fields=fields)
    field = torch.from_numpy(change(counts(index)[..., 0].mean(0) / 16))[None, None]
    model.sample(Condition(field=model.standardize(field) if other(True) else field.float()))


def build(index: int, change: Any, other: Any) -> None:
    atoms = (ase.build.fcc111("Cu", (2, 2, 3), vacuum=8.0, periodic=True), ase.build.molecule("CO"))[index]
    build_structure(atoms.numbers, change(atoms.positions), change(atoms.cell.array), atoms.pbc, cutoff=5.0, most=50)


def fold(index: int, change: Any, other: Any) -> None:
    prepare_features(OpenFold(TINY), change("MKVLATTQGACDEFGHIKLMNP"))


@pytest.mark.parametrize("case", tomllib.loads((DATA / "inputs.toml").read_text())["case"], ids=str)
def test_a_wrong_unit_or_layout_is_named_and_no_other(case: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    names = {"np": np, "v": np.array(VARIABLES)}
    change, other = (eval(f"lambda {name}: {case.get(key, name)}", names) for key, name in (("change", "x"), ("other", "s")))
    try:
        globals()[case["call"]](case.get("index", 0), change, other)
        messages = caplog.messages
    except DataError as problem:
        messages = [str(problem)]
    assert len(messages) == int("message" in case), messages
    assert not messages or re.search(case["message"], messages[0]), messages
