"""For the tests of data sets: no launcher's environment, and workers that are forks, which have loaded everything."""

import multiprocessing

import pytest

from data_prep import store


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store, "get_context", lambda kind: multiprocessing.get_context("fork"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls and "more" in metafunc.fixturenames:
        metafunc.parametrize("more", metafunc.cls.wrong)
