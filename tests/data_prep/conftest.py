"""Fixtures of data preparation: no environment of a launcher, forked workers, checks in this process, the data set of a module."""

import multiprocessing
from functools import partial
from pathlib import Path

import pytest

from data_prep import store
from hpcai.cli.check import examination, pool
from tests.inline_worker import InlineWorker
from tests.reference_data import load_json


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store, "get_context", lambda kind: multiprocessing.get_context("fork"))
    monkeypatch.setattr("hpcai.cli.check.findings.Options", partial(examination.Options, threads=1))
    monkeypatch.setattr(pool, "Worker", InlineWorker)


@pytest.fixture(scope="module")
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "dataset"
    assert request.module.run("simulate", out, *request.module.SMALL) == 0
    return out


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "message" in metafunc.fixturenames and metafunc.cls:
        module = metafunc.module.__name__.rpartition("test_")[2]
        metafunc.parametrize(("options", "message"), load_json("refused/data_prep_options")[module].items())
