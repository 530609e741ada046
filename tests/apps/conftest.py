"""The app of a test module, and data for it that all tests of the module share."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.apps.app_contract", "tests.apps.app_runs")

from tests.apps.app_runs import App  # noqa: E402
from tests.reference_data import load_json  # noqa: E402


@pytest.fixture(scope="module")
def app(request: pytest.FixtureRequest) -> App:
    return request.module.APP


@pytest.fixture(scope="module")
def data(app: App, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(app.name) / "data"
    app.make_data(folder)
    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the tests of a contract by the lists of the class, data settings, jobs and logs, and by the app's refusals."""
    for name, attribute in (("data_setting", "data_settings"), ("job", "jobs"), ("log", "logs")):
        if name in metafunc.fixturenames and metafunc.cls:
            metafunc.parametrize(name, getattr(metafunc.cls, attribute), ids=lambda case: case if isinstance(case, str) else None)
    if "refusal" in metafunc.fixturenames:
        metafunc.parametrize("refusal", load_json("refused/apps")[metafunc.module.APP.name])
