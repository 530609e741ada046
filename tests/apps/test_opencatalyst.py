"""The OpenCatalyst app on simulated frames."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from apps.opencatalyst.data import FIELDS, Frames, smallest_bucket
from hpcai import log
from hpcai.data import Rows
from hpcai.models.dimenet import DimeNet, DimeNetConfig
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import damage
from tests.apps.small_apps import OPENCATALYST as APP


def damage_data(data: Path, kind: str) -> None:
    def expand(file: h5py.File) -> None:
        file["positions"][...] *= 40
        file["cell"][...] *= 40

    damage(data, kind, {
        "element": lambda file: file["numbers"].__setitem__(..., 97), "apart": expand,
        "counts": lambda file: file["atoms"].__setitem__(0, file["atoms"][0] + 1),
    })  # fmt: skip
    if kind == "statistics":
        (data / "statistics.json").unlink()


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        assert (cfg.train.target == 0.036) == (name in ("batch2048", "node")) == (cfg.model.angles == "detached")


def test_pairs_are_those_of_the_data_and_of_the_saved_weights(data: Path) -> None:
    run = APP.cached_run(data)
    pairs = np.load(run / "pairs.npz", allow_pickle=False)
    assert pairs["energy"].shape == (6, 2) and pairs["forces"].shape == (len(pairs["numbers"]), 2, 3)
    rows = Rows(data / "validation", FIELDS)
    values = [rows.read(index) for index in range(6)]
    free = np.concatenate([v["fixed"] == 0 for v in values])
    np.testing.assert_array_equal(pairs["forces"][:, 0], np.concatenate([v["forces"] for v in values])[free])
    np.testing.assert_array_equal(pairs["energy"][:, 0], [v["energy"] for v in values])
    statistics = json.loads((data / "statistics.json").read_text())["splits"]
    model = DimeNet.load(run / "model.safetensors")
    assert model.mean == pytest.approx(statistics["train"]["energy"]["mean"])
    assert model.scale == pytest.approx(statistics["train"]["forces"]["rms"])
    last = [e for e in log.read_metrics(run / "metrics.jsonl") if e["kind"] == "evaluate"][-1]
    assert last["force_zero"] == pytest.approx(statistics["validation"]["forces"]["zero_mae"], rel=1e-6)
    energy, forces = model.energy_and_forces(Frames(rows, model.cfg).sample(0, 0).structure)
    assert energy == pytest.approx(pairs["energy"][0, 1], rel=1e-5) and len(forces) == len(values[0]["numbers"])


def test_batches_have_few_shapes(data: Path) -> None:
    rows, model = Rows(data / "train", FIELDS), DimeNetConfig(cutoff=4.0, most=None)
    frames = Frames(rows, model, bucket=smallest_bucket(rows, 4, None))
    samples = [[frames.sample((k * 5 + i * 3) % len(rows), 0) for i in range(4)] for k in range(8)]
    shapes = {tuple(tuple(t.shape) for t in frames.collate(batch).graph) for batch in samples}
    edges = {sum(len(sample.structure.centre) for sample in batch) for batch in samples}
    assert len(shapes) <= 3 < len(edges)
