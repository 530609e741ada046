"""No socket to a network: not at the import of any module, and not in a run of one process, which test_repository.py makes."""

from pathlib import Path

import pytest

from tests.offline import REFUSED, run_offline

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = """
import importlib, pkgutil
import apps, data_prep, hpcai
count = 0
for package in hpcai, apps, data_prep:
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        count += 1
print(count)
"""


@pytest.mark.parametrize(
    "code",
    [
        "socket.socket()",
        "socket.socket(socket.AF_INET6)",
        "socket.create_connection(('localhost', 1))",
        "socket.gethostbyname('localhost')",
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import socket; socket.socket()']))",
    ],
)
def test_a_child_that_uses_a_network_is_ended(code: str, tmp_path: Path) -> None:
    done = run_offline(f"import socket\ntry:\n    {code}\nexcept Exception:\n    pass", cwd=tmp_path, path=ROOT)
    assert done.returncode == REFUSED and "File " in done.stderr


def test_no_module_opens_a_socket_when_it_is_imported(tmp_path: Path) -> None:
    done = run_offline(IMPORTS, cwd=tmp_path, path=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 200
