"""The files of the repository, as git lists them."""

import shutil
import subprocess

import pytest

from tests.reference_data import ROOT


def tracked_files(*folders: str) -> list[str]:
    """Return the names of the files that exist. Skip the test in a copy without history, or on a machine without git."""
    git = shutil.which("git") or "false"
    process = subprocess.run([git, "-C", str(ROOT), "ls-files", "-z", "--", *folders], capture_output=True, text=True)
    if process.returncode:
        pytest.skip("this copy has no history, so no list of its files")
    return [name for name in process.stdout.split("\0") if name and (ROOT / name).is_file()]
