"""A Python without a network.

A hook of Python's audit events ends a child, and any Python that it starts, when it makes, binds or connects a socket to one, or
asks for an address. What libraries in C do is not seen by it: where the system lets us (`unshare`), the child has no network,
not even a loopback, and must do its work all the same.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


@functools.cache
def without_a_network() -> tuple[str, ...]:
    """What starts a process that has no network; nothing where the system does not allow it."""
    for words in (("unshare", "--user", "--map-root-user", "--net"), ("unshare", "--net")):
        if shutil.which(words[0]) and subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
            return words
    return ()


def child(code: str, *words: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """``python -c code words`` in ``cwd``, with the modules of ``path`` and without a network."""
    hook = cwd / "hook/sitecustomize.py"  # which every Python imports at its start
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(HOOK)
    environ = os.environ | {"PYTHONPATH": f"{hook.parent}{os.pathsep}{path}", "OMP_NUM_THREADS": "1"}
    command = [*without_a_network(), sys.executable, "-P", "-c", code, *words]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
