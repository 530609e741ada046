"""For the tests of data sets: no launcher's environment, workers that are forks, which have loaded everything, and a small set."""

import multiprocessing
from pathlib import Path

import pytest

from data_prep import store


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store, "get_context", lambda kind: multiprocessing.get_context("fork"))


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small set of a module."""
    out = tmp_path_factory.mktemp("made") / "alone"
    assert request.module.run("simulate", out, *request.module.SMALL) == 0
    return out


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls and "more" in metafunc.fixturenames:
        metafunc.parametrize("more", metafunc.cls.wrong)
