"""ShellCheck, as the extra ``dev`` or the machine has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAM = shutil.which("shellcheck", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))))


def complaints(script: str, *options: str) -> str:
    """Warnings and errors in a script; none without the program."""
    if PROGRAM is None:
        return ""
    command = [PROGRAM, "--severity=warning", *options, "-"]
    return subprocess.run(command, input=script, text=True, capture_output=True, check=False).stdout.strip()
