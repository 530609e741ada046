"""The DLRM app from its command line: on one process, on ranks with each plan, resumed, and with bad input."""

import json
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.dlrm import data as app_data
from apps.dlrm import picture
from hpcai import config, dist
from hpcai.cli.report.theme import LIGHT
from hpcai.data.direct import Reader
from hpcai.data.events import EventTable
from hpcai.errors import ConfigError, DataError
from hpcai.models.dlrm import DLRM, DLRMConfig
from hpcai.parallel.embedding_plan import plan_shards
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
        first = 1 + header["dense"]
        column, value = {"label": (0, 2), "number": (1, 0x7FC00000), "id": (first, 4096), "negative": (width - 1, -2)}[kind]
        rows[100, column] = value


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        assert (cfg.train.better, cfg.train.metric, cfg.step.optimizer, cfg.step.eps) == ("higher", "auc", "adagrad", 1e-8)
        if name != "small":  # the published settings of the benchmark
            assert cfg.train.target == 0.80275 and cfg.model == type(cfg.model)()
            assert abs(cfg.data.epoch / 4_195_197_692 - 0.05) < 0.0001 and cfg.data.epoch % cfg.data.batch == 0


def test_predictions_cover_the_first_validation_events_once(data: Path) -> None:
    run, table = APP.cached_run(data), EventTable(data)
    content = np.load(run / "events.npz", allow_pickle=False)
    assert sorted(content["row"].tolist()) == [*range(28)] and content["truth_organism"].shape == (72,)
    dense, ids, label = table.check(np.array(table.mapped("validation")), data)
    model = DLRM.load(run / "model.safetensors")
    with torch.no_grad():
        expected = model(*(torch.from_numpy(np.array(x))[torch.from_numpy(content["row"])] for x in (dense, ids)))
    np.testing.assert_allclose(content["logit"], expected, rtol=1e-4, atol=1e-5)
    assert (content["label"] == label[content["row"]]).all() and model.cfg.rows == table.rows


def test_epochs_shorter_than_a_pass_cover_all_whole_blocks(data: Path) -> None:
    overrides = ["data.epoch=54", "data.rows=9", "data.batch=9", "data.evaluation_batch=9"]
    cfg, mesh = config.load(APP.settings, APP.small_config, [*APP.overrides(data, data)[1:], *overrides]), dist.single_process()
    with closing(Reader("auto")) as reader:
        source = app_data.Blocks(EventTable(data), "train", 9, reader, drop_last=True)
        source = pickle.loads(pickle.dumps(source))  # as with data.processes  # noqa: S301
        with app_data.training_loader(source, cfg, mesh, None) as loader:
            batches = [batch for epoch in range(3) for batch in loader.epoch(epoch)]
        rest = app_data.Blocks(EventTable(data), "validation", 25, reader)
        assert [len(rest.sample(k, 0)[0]) for k in range(len(rest))] == [25, 25, 22] and loader.dataset_size == source.events == 162
        expected = source.collate([source.sample(k, 0) for k in range(18)]).dense
    seen = torch.cat([batch.dense for batch in batches])
    assert torch.equal(seen.sort(0).values, expected.sort(0).values) and not torch.equal(seen, expected)


def test_the_figure_compares_relatives_and_teachers(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    organism = random.integers(0, 4, 2000)
    label, kept = (organism == 0).astype(np.float32), np.arange(2000)[::-1]
    logit = 3 * label + random.standard_normal(2000) - 1.5 * (organism == 3)
    arrays: Any = {"row": kept, "logit": logit[kept], "label": label[kept]}
    truth = {"organism": organism, "abundance": np.array([0.4, 0.1, 0.2, 0.3]), "distance": np.array([0, 0.01, 0.02, 0.2])}
    np.savez(tmp_path / picture.FILE, **arrays, **{f"truth_{name}": values for name, values in truth.items()})
    results = picture.read(tmp_path / picture.FILE)
    by_organism = results.by_organism()
    assert by_organism.keys() == {1, 2, 3} and by_organism[3] > max(by_organism[1], by_organism[2]) > 0.9
    assert "against the rarest strain, with 10.0% of the reads" in picture.finding(results).sentence
    assert len(picture.draw(results, LIGHT)) == 3
    assert picture.table(results).rows[-1][1] == "400"
    np.savez(tmp_path / picture.FILE, **arrays, truth_logit=3 * label)
    results = picture.read(tmp_path / picture.FILE)
    assert "that of the teacher is 1.0000" in picture.finding(results).sentence and len(picture.draw(results, LIGHT)) == 2
    np.savez(tmp_path / picture.FILE, **{**arrays, "label": 0 * label})
    with pytest.raises(DataError, match="of which 0 are positive"):
        picture.read(tmp_path / picture.FILE)


def test_tables_are_planned_within_the_memory_of_a_rank() -> None:
    cfg, mesh = config.load(APP.settings, APP.small_config, ["tables.memory=0.2"]), dist.single_process()
    model = DLRMConfig(rows=(1000, 100_000, 50), hotness=(2, 20, 1), dim=128, bottom=(128,))
    assert app_data.plan_tables(cfg, model, mesh).replicated == (0, 1, 2)
    with pytest.raises(ConfigError, match="2 ranks would hold them"):
        app_data.plan_tables(config.load(APP.settings, APP.small_config, ["tables.memory=0.06"]), model, mesh)
    plan = plan_shards(model.rows, model.hotness, model.dim, ranks=2, memory=0.2e9, batch=1024)
    text = app_data.describe_plan(plan, 1024)
    assert text.startswith("3 tables: 1 replicated, 1 on one rank, 1 sharded; ") and "the slowest rank takes" in text
