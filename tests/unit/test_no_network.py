"""No socket to a network: not at the import of any module, and not in a run of one process, which test_repository.py makes."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offline import REFUSED, child, without_a_network

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
    done = child(f"import socket\ntry:\n    {code}\nexcept Exception:\n    pass", cwd=tmp_path, path=ROOT)
    assert done.returncode == REFUSED and "File " in done.stderr


def test_where_the_system_allows_it_not_even_this_machine_is_reached() -> None:
    if not without_a_network():
        pytest.skip("needs unshare with network namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)"
        codes = [subprocess.run([*words, sys.executable, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode
                 for words in ((), without_a_network())]  # fmt: skip
    assert codes == [0, 1]


def test_no_module_opens_a_socket_when_it_is_imported(tmp_path: Path) -> None:
    done = child(IMPORTS, cwd=tmp_path, path=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 200
