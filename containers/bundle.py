"""`make bundle OUT=DIR`: a folder from which a machine without a network installs all, for the Python and the machine that make it.

DIR/wheels has hpcai's own wheel, what requirements.lock names, downloaded by its hashes, and the torch of this environment with the
parts of CUDA that it asks for, if any. DIR/requirements.txt names each of them by its hash, DIR/SHA256SUMS every file, and
DIR/install.sh installs from the folder alone.
"""

import argparse
import hashlib
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="DIR", help="an empty or a new folder")
    out = parser.parse_args(argv).out
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out}: is not empty; name a new folder")
    wheels = out / "wheels"
    wheels.mkdir(parents=True)
    collect(wheels, metadata.version("torch"))
    finish(out)
    count, size = len(list(wheels.iterdir())), sum(file.stat().st_size for file in wheels.iterdir())
    print(f"{out}: {count} wheels, {size / 1e6:,.0f} MB, for {target()}; bash {out}/install.sh FOLDER installs them")
    return 0


def collect(wheels: Path, torch: str) -> None:
    """Put the wheels there. Torch's own needs take the versions of the lock."""
    lock = ROOT / "requirements.lock"
    quiet = ("-qq", "--disable-pip-version-check")
    print("== hpcai's own wheel", flush=True)
    run(*PIP, "wheel", *quiet, "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT))
    print("== what requirements.lock names, by hash", flush=True)
    run(*PIP, "download", *quiet, "--no-deps", "--only-binary=:all:", "--require-hashes", "--dest", str(wheels), "-r", str(lock))
    print(f"== torch {torch}", flush=True)
    pins = [line.partition("\\")[0].strip() for line in lock.read_text().splitlines() if re.match(r"\w", line)]
    constraints = wheels.parent / "constraints.txt"
    constraints.write_text("\n".join([*pins, ""]))
    run(*PIP, "download", *quiet, "--only-binary=:all:", "--dest", str(wheels), "--find-links", str(wheels), "-c", str(constraints),
        f"torch=={torch}", advice="torch's builds for CPUs have an index of their own: name it in PIP_EXTRA_INDEX_URL")  # fmt: skip
    constraints.unlink()


def finish(out: Path) -> None:
    """Write what names the wheels: requirements.txt, SHA256SUMS and what installs by them."""
    lines = [f"# Of {target()}; made by make bundle"]
    for wheel in sorted((out / "wheels").glob("*.whl")):
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name.replace('_', '-')}=={version} --hash=sha256:{digest(wheel)}")
    (out / "requirements.txt").write_text("\n".join([*lines, ""]))
    text = (Path(__file__).with_name("install.sh")).read_text()
    (out / "install.sh").write_text(text.replace("@TARGET@", target()))
    (out / "install.sh").chmod(0o755)
    shutil.copy(ROOT / "LICENSE", out)
    files = sorted(file for file in out.rglob("*") if file.is_file() and file.name != "SHA256SUMS")
    (out / "SHA256SUMS").write_text("".join(f"{digest(file)}  {file.relative_to(out)}\n" for file in files))


def target() -> str:
    return f"Python {sys.version_info.major}.{sys.version_info.minor}, {platform.system()} {platform.machine()}"


def digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def run(*command: str, advice: str = "") -> None:
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed" + (f"; {advice}" if advice else ""))


if __name__ == "__main__":
    sys.exit(main())
