"""The BERT app from its command line: on one process, on ranks, resumed, with each reader, and with bad input."""

from pathlib import Path
from typing import Any, cast

import h5py
import numpy as np
import pytest

from apps.bert.data import balanced_sampler
from apps.bert.picture import Contacts, draw, finding, read, table
from apps.bert.settings import Config
from hpcai import config
from hpcai.cli.report import theme
from hpcai.models.bert import Bert
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import metric_by_step
from tests.apps.small_apps import BERT as APP


def damage_data(data: Path, kind: str) -> None:
    for path in (data / "train").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            file["lengths"][...] = 0


class TestContract(AppContract):
    damage_data = staticmethod(damage_data)

    def check_config(self, name: str, cfg: Any) -> None:
        if name.startswith("batch"):  # the published settings of the benchmark
            assert (cfg.step.optimizer, cfg.step.eps, cfg.step.clip, cfg.train.target) == ("lamb", 1e-6, 1.0, 0.72)
            assert f"batch{cfg.data.batch}" == name and cfg.step.schedule.length == cfg.train.steps


def test_contacts_and_weights_of_a_run(data: Path) -> None:
    run = APP.cached_run(data)
    contacts = read(run / "contacts.npz")
    assert len(contacts.true) == 1 and contacts.predicted[0].shape == contacts.true[0].shape
    assert 0 <= contacts.precision(0)[0] <= 1 and "%" in finding(contacts).number and len(table(contacts).rows) == 1
    assert len(draw(contacts, theme.LIGHT)) == 1
    for name in (run, run / "model.safetensors"):
        model = Bert.load(name)
        assert (model.cfg.width, model.cfg.nsp, model.cfg.heads) == (16, False, 4)
    perplexity = list(metric_by_step(run, "evaluate", "baseline_perplexity").values())
    assert len(set(perplexity)) == 1, "held-out masks do not change"


class LengthColumn:
    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def column(self, name: str) -> np.ndarray:
        return self.lengths


@pytest.mark.parametrize("balance", ["cost", "sequences"])
def test_ranks_have_even_work(balance: str) -> None:
    """Rows of 512 tokens, with one sequence, two or three, as of MLPerf."""
    lengths = np.random.default_rng(0).permuted(np.repeat([[512, 0, 0], [300, 212, 0], [200, 200, 112]], 96, 0), axis=0)
    lengths = lengths[np.random.default_rng(1).permutation(len(lengths))]
    cfg = config.load(Config, overrides=[f"data.balance={balance}", "data.epoch=192"])
    sampler = balanced_sampler(cfg, cast(Any, LengthColumn(lengths)))
    work = (lengths > 0).sum(1) if balance == "sequences" else (6144 * lengths + lengths.astype(float) ** 2).sum(1)
    order = sampler.order(1)
    assert len(order) == 192
    for batch in order.reshape(4, 48):
        ranks = [batch[sampler.assign(batch, rank, 12)] for rank in range(12)]
        totals = [work[rows].sum() for rows in ranks]
        assert all(len(rows) == 4 for rows in ranks)
        assert max(totals) - min(totals) <= 1 if balance == "sequences" else max(totals) < 1.05 * np.mean(totals)


def test_a_perfect_map_gives_the_contacts() -> None:
    true = (np.random.default_rng(0).random((20, 20)) < 0.4).astype(int)
    assert Contacts(1, [true + 0.0], [true]).precision(0)[0] == 1.0
