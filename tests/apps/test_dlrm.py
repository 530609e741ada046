"""The DLRM app from its command line: on one process, on ranks with each plan, resumed, and with bad input."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.apps.app_contract import AppContract
from tests.apps.small_apps import DLRM as APP


def damage_data(data: Path, kind: str) -> None:
    path, header = data / "train.bin", json.loads((data / "table.json").read_text())
    width = 1 + header["dense"] + sum(table["hotness"] for table in header["tables"])
    if kind == "size":
        path.write_bytes(path.read_bytes()[:-4])
    elif kind == "rows":
        path.write_bytes(path.read_bytes()[: -4 * width])
    elif kind == "header":
        (data / "table.json").write_text("{")
    else:
        rows = np.memmap(path, "<i4", "r+").reshape(-1, width)
        column, value = {"label": (0, 2), "number": (1, 0x7FC00000), "id": (1 + header["dense"], 4096), "negative": (width - 1, -2)}[kind]
        rows[100, column] = value


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        assert cfg.train.better == "higher" and cfg.train.metric == "auc" and cfg.step.optimizer == "adagrad" and cfg.step.eps == 1e-8
        if name != "small":  # the published settings of the benchmark
            assert cfg.train.target == 0.80275 and cfg.model == type(cfg.model)()
            assert abs(cfg.data.epoch / 4_195_197_692 - 0.05) < 0.0001 and cfg.data.epoch % cfg.data.batch == 0
