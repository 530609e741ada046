"""Run Python without network access.

An audit hook ends the child, and every Python process started by it, at each internet socket or address lookup. The hook does not
see C libraries: if the system allows `unshare`, the child also runs in an empty network namespace, without loopback.
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
def no_network_prefix() -> tuple[str, ...]:
    """Return the command prefix that runs a process in an empty network namespace; empty if the system does not allow it."""
    for prefix in (("unshare", "--user", "--map-root-user", "--net"), ("unshare", "--net")):
        if shutil.which(prefix[0]) and subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix
    return ()


def run_offline(code: str, *args: str, cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code args`` in ``cwd``, with the modules of ``path`` and without network access."""
    hook = cwd / "hook/sitecustomize.py"  # imported by every interpreter at startup
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(HOOK)
    environ = os.environ | {"PYTHONPATH": f"{hook.parent}{os.pathsep}{path}", "OMP_NUM_THREADS": "1"}
    command = [*no_network_prefix(), sys.executable, "-P", "-c", code, *args]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
