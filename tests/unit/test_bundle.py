"""A bundle installs its contents and nothing else. Here the code of `make bundle` packs a wheel of a few lines."""

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from containers import bundle
from tests.offline import no_network_prefix

FILES = {
    "tiny.py": "import sys\ndef main():\n    print('doctor says', *sys.argv[1:])\n",
    "{}.dist-info/METADATA": "Metadata-Version: 2.1\nName: hpcai-suite\nVersion: 0.1.0\n",
    "{}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "{}.dist-info/entry_points.txt": "[console_scripts]\nhpcai = tiny:main\n",
}


@pytest.fixture
def bundle_folder(tmp_path: Path) -> Path:
    """Pack a bundle whose only wheel has a command `hpcai`."""
    (tmp_path / "bundle/wheels").mkdir(parents=True)
    record = ""
    with zipfile.ZipFile(tmp_path / "bundle/wheels/hpcai_suite-0.1.0-py3-none-any.whl", "w") as wheel:
        for name, text in FILES.items():
            path = name.format("hpcai_suite-0.1.0")
            wheel.writestr(path, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
            record += f"{path},sha256={digest},{len(text)}\n"
        wheel.writestr("hpcai_suite-0.1.0.dist-info/RECORD", record + "hpcai_suite-0.1.0.dist-info/RECORD,,\n")
    bundle.finish(tmp_path / "bundle")
    return tmp_path / "bundle"


def install(bundle_folder: Path, folder: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHON": python}
    command = [*no_network_prefix(), "bash", str(bundle_folder / "install.sh"), str(folder)]
    return subprocess.run(command, env=environ, cwd=bundle_folder.parent, capture_output=True, text=True, check=False)


def test_a_bundle_installs_from_its_folder_alone(bundle_folder: Path, tmp_path: Path) -> None:
    process = install(bundle_folder, tmp_path / "made")
    assert process.returncode == 0, process.stderr
    assert "doctor says doctor" in process.stdout and (tmp_path / "made/bin/hpcai").is_file()
    second = install(bundle_folder, tmp_path / "made")
    assert second.returncode == 1 and "made is there; name a folder that is not" in second.stderr


@pytest.mark.parametrize("change", ["a wheel", "the list of wheels", "a wheel is gone", "another Python"])
def test_a_changed_bundle_or_one_for_another_python_installs_nothing(bundle_folder: Path, tmp_path: Path, change: str) -> None:
    wheel, python, expected = next((bundle_folder / "wheels").iterdir()), sys.executable, "are not those that were packed"
    if change == "a wheel":
        content = bytearray(wheel.read_bytes())
        content[40] ^= 1
        wheel.write_bytes(content)
    elif change == "the list of wheels":
        (bundle_folder / "requirements.txt").write_text("hpcai-suite==0.1.0\n")
    elif change == "a wheel is gone":
        wheel.unlink()
    else:
        other = tmp_path / "python"
        other.write_text("#!/bin/sh\necho 'Python 3.9, Linux riscv64'\n")
        other.chmod(0o755)
        python, expected = str(other), "and " + str(other) + " is Python 3.9, Linux riscv64"
    process = install(bundle_folder, tmp_path / "made", python)
    assert process.returncode == 1 and expected in process.stderr
    assert not (tmp_path / "made").exists()


def test_a_bundle_lists_each_wheel_by_its_hash_and_refuses_a_folder_with_files(bundle_folder: Path) -> None:
    lines = (bundle_folder / "requirements.txt").read_text().splitlines()[1:]
    assert [line.partition(" --hash=sha256:")[0] for line in lines] == ["hpcai-suite==0.1.0"]
    summed = {line.split("  ")[1] for line in (bundle_folder / "SHA256SUMS").read_text().splitlines()}
    assert summed == {"LICENSE", "install.sh", "requirements.txt", "wheels/hpcai_suite-0.1.0-py3-none-any.whl"}
    with pytest.raises(SystemExit, match="is not empty"):
        bundle.main([str(bundle_folder)])
