"""The DeepCAM app from its command line: on one process, on ranks, resumed, with each reader, and with bad input."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcai.models.deepcam import CLASSES, DeepCam
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import metric_by_step
from tests.apps.small_apps import DEEPCAM as APP


def damage_data(data: Path, kind: str) -> None:
    statistics, index = data / "statistics.json", data / "train/index.json"
    if kind == "names":
        index.write_text(index.read_text().replace('"TMQ"', '"PWAT"'))
    elif kind == "statistics":
        statistics.unlink()
    elif kind == "empty class":
        content = json.loads(statistics.read_text())
        content["splits"]["train"]["mask"]["frequency"] = [0.9, 0.0, 0.1]
        statistics.write_text(json.dumps(content))
    elif kind == "size":
        for split in ("train", "validation"):
            (data / split / "index.json").unlink()
            for path in (data / split).glob("*.h5"):
                with h5py.File(path, "r+") as file:
                    for name in ("fields", "mask"):
                        values = file[name][:, :40]
                        del file[name]
                        file[name] = values


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        assert cfg.train.better == "higher"
        if name.startswith("batch"):  # the published settings of the benchmark
            assert (cfg.step.optimizer, cfg.step.eps, cfg.step.weight_decay, cfg.step.clip) == ("lamb", 1e-6, 0.01, 1.0)
            assert f"batch{cfg.data.batch}" == name and cfg.train.target == 0.82 and cfg.step.decay_names == ("*",)


def test_maps_are_those_of_the_data_and_of_the_saved_weights(data: Path) -> None:
    run = APP.cached_run(data)
    maps = np.load(run / "maps.npz", allow_pickle=False)
    assert maps["fields"].shape == (2, 64, 96, 16) and maps["true"].shape == maps["predicted"].shape == (2, 64, 96)
    with h5py.File(data / "validation/samples_000000.h5") as file:
        fields, mask = file["fields"][:2], file["mask"][:2]
    assert np.array_equal(maps["fields"], fields) and np.array_equal(maps["true"], mask)
    assert set(metric_by_step(run, "evaluate", "iou")) and 0 < metric_by_step(run, "evaluate", "iou").popitem()[1] <= 1

    model = DeepCam.load(run / "model.safetensors")
    statistics = json.loads((data / "statistics.json").read_text())["splits"]["train"]["fields"]
    assert list(model.cfg.low or ()) == statistics["minimum"] and list(model.cfg.high or ()) == statistics["maximum"]
    masks = model.segment({name: fields[0, ..., i] for i, name in enumerate(model.cfg.variables)})
    assert (np.stack([masks[name] for name in CLASSES]).argmax(0) == maps["predicted"][0]).mean() > 0.999
