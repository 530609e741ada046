"""Data of the app that a test module is about, made once for all of its tests."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.apps.app_contract", "tests.apps.app_runs")

from tests.apps.app_runs import App  # noqa: E402


@pytest.fixture(scope="module")
def app(request: pytest.FixtureRequest) -> App:
    return request.module.APP


@pytest.fixture(scope="module")
def data(app: App, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(app.name) / "data"
    app.make(folder)
    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The rows of a class that promises: its ways to read, its jobs of several processes, its logs and what it refuses."""
    for name, rows in (("way", "ways"), ("job", "jobs"), ("log", "logs"), ("wrong", "refused")):
        if name in metafunc.fixturenames and metafunc.cls:
            metafunc.parametrize(name, getattr(metafunc.cls, rows), ids=lambda row: row if isinstance(row, str) else None)
