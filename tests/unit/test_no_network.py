"""No socket to a network: neither at the import of any module, nor in a run of one process.

A hook of Python's audit events ends a child, and any Python that it starts, when it makes, binds or connects one, or asks for an
address. What libraries in C do is not seen by it: where the system lets us (`unshare`), the child has no network at all, not even
a loopback, and runs all the same.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.apps.smallest import COSMOFLOW

ROOT = Path(__file__).resolve().parents[2]
REFUSED = 97
HOOK = f"""
import os, socket, sys, traceback
def refuse(event, values):
    if event == "socket.__new__":
        bad = values[1] in (socket.AF_INET, socket.AF_INET6)
    elif event in ("socket.connect", "socket.bind", "socket.sendto"):
        bad = not isinstance(values[1], (str, bytes))
    else:
        bad = event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr", "socket.getnameinfo")
    if bad:
        sys.stderr.write(f"{{event}} {{values}}\\n" + "".join(traceback.format_stack()))
        sys.stderr.flush()
        os._exit({REFUSED})
sys.addaudithook(refuse)
"""
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
RUN = """
import sys
from hpcai.cli import main
sys.exit(main(sys.argv[1:]))
"""


@functools.cache
def without_a_network() -> tuple[str, ...]:
    """What starts a process that has no network; nothing where the system does not allow it."""
    for words in (("unshare", "--user", "--map-root-user", "--net"), ("unshare", "--net")):
        if shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
            return words
    return ()


def child(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "hook").mkdir()
    (cwd / "hook/sitecustomize.py").write_text(HOOK)  # which every Python imports at its start
    environ = os.environ | {"PYTHONPATH": f"{cwd / 'hook'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [*without_a_network(), sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "code",
    [
        "socket.socket()",
        "socket.socket(socket.AF_INET6)",
        "socket.create_connection(('localhost', 1))",
        "import urllib.request; urllib.request.urlopen('http://localhost:1')",
        "socket.gethostbyname('localhost')",
    ],
)
def test_the_hook_ends_a_child_that_uses_a_network(code: str, tmp_path: Path) -> None:
    done = child(f"import socket\ntry:\n    {code}\nexcept BaseException:\n    pass", cwd=tmp_path)
    assert done.returncode == REFUSED and "File " in done.stderr


def test_a_child_has_no_network_where_the_system_allows_that(tmp_path: Path) -> None:
    if not without_a_network():
        pytest.skip("needs unshare with network namespaces")
    done = child("print(open('/proc/net/dev').read(), open('/proc/net/route').read())", cwd=tmp_path)
    names = [line.partition(":")[0].strip() for line in done.stdout.splitlines() if ":" in line]
    assert set(names) <= {"lo", "sit0", "tunl0", "ip6tnl0", "ip6_vti0", "ip_vti0", "gre0", "gretap0", "erspan0", "ip6gre0"}, names
    assert "00000000" not in done.stdout.partition("Iface")[2]


def test_no_module_opens_a_socket_when_it_is_imported(tmp_path: Path) -> None:
    done = child(IMPORTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 200


def test_a_run_opens_no_socket(tmp_path: Path) -> None:
    COSMOFLOW.make(tmp_path / "data")
    done = child(RUN, "run", COSMOFLOW.name, *COSMOFLOW.words(tmp_path / "data", tmp_path / "run", "data.workers=1"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/model.safetensors").is_file()
