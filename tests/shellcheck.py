"""ShellCheck of the extra ``dev`` or of the machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = shutil.which("shellcheck", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))))


def shellcheck_warnings(script: str, *options: str) -> str:
    """Return the warnings and errors of a script; empty if ShellCheck is not installed."""
    if PROGRAM is None:
        return ""
    command = [PROGRAM, "--severity=warning", *options, "-"]
    return subprocess.run(command, input=script, text=True, capture_output=True, check=False).stdout.strip()
