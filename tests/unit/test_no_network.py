"""No module opens a network socket at import. test_repository.py asserts this of a run of one process."""

from pathlib import Path

import pytest

from tests.offline import REFUSED, run_offline
from tests.reference_data import ROOT, load_json

IMPORTS = """
import importlib, pkgutil
import apps, data_prep, hpcai
from hpcai.errors import MissingExtraError
count = 0
for package in hpcai, apps, data_prep:
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except MissingExtraError:
            print(module.name, "needs a package that is not installed")
        count += 1
print(count)
"""


@pytest.mark.parametrize("code", load_json("refused/sockets"))
def test_a_child_that_uses_a_network_is_ended(code: str, tmp_path: Path) -> None:
    process = run_offline(f"import socket\ntry:\n    {code}\nexcept Exception:\n    pass", cwd=tmp_path, path=ROOT)
    assert process.returncode == REFUSED and "File " in process.stderr


@pytest.mark.slow
def test_no_module_opens_a_socket_when_it_is_imported(tmp_path: Path) -> None:
    process = run_offline(IMPORTS, cwd=tmp_path, path=ROOT)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout.split()[-1]) > 200
