"""Build an image from its definition and run it as a job would, without Apptainer:  make containers

    python -m tests.containers.prove containers/cpu.def --base ROOT --out DIR [--lend PATH ...]

A root file system replaces the base image of a definition (``--base``, made by debootstrap if absent), and a mount namespace
replaces a container. The image then runs as nobody, read-only, without a network: three training steps, a resume, two ranks with
each MPI library. This tests the definition, not Apptainer itself, and needs root.
``--lend``: files of this machine, such as pip's settings or wheels, that the build sees at the same path.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.containers.definition import Stage, read_stages

BASE = "ca-certificates"
LENT = ("/etc/resolv.conf", "/etc/ssl/certs", "/etc/hosts")
NOBODY = "65534:65534"

BUILD = r"""
root=$1; shift
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mount --rbind /sys "$root/sys"
for path in $LENT; do
  [ -e "$path" ] || continue
  if [ -d "$path" ]; then mkdir -p "$root$path"; else mkdir -p "$root$(dirname "$path")"; touch "$root$path"; fi
  mount --bind -o ro "$path" "$root$path"
done
exec chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"
"""
RUN = r"""
root=$1; scratch=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"
mount --bind "$scratch" "$root/mnt"; mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -o remount,bind,ro "$root"
[ -n "${LOOPBACK:-}" ] && ip link set lo up
set -- env -i HOME=/tmp PATH=/usr/bin:/bin TMPDIR=/tmp $PASSED /bin/sh -c 'cd /mnt; exec "$@"' _ "$@"
exec chroot --userspec=65534:65534 "$root" "$@"
"""


def run_isolated(script: str, args: Sequence[str], network: bool, **environment: str) -> str:
    """Run a command in a mount namespace of its own and return its output. Raises SystemExit if it fails."""
    flags = ["--mount", "--fork", *([] if network else ["--net", "--pid"])]
    command = ["unshare", *flags, "bash", "-euo", "pipefail", "-c", script, "_", *args]
    start = time.monotonic()
    result = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"  {time.monotonic() - start:6.1f} s   {shlex.join(args[1:])[-150:]}", flush=True)
    if result.returncode:
        raise SystemExit(f"{result.stdout[-6000:]}\nexit code {result.returncode}")
    return result.stdout


def build(stage: Stage, base: Path, root: Path, roots: dict[str, Path], lent: Sequence[str]) -> None:
    print(f"stage {stage.header['stage']}, of {base} for {stage.header['from']}", flush=True)
    subprocess.run(["cp", "-a", "--reflink=auto", base, root], check=True)
    for line in stage.sections.get("files", "").splitlines():
        if line.strip():
            source, target = line.split()
            within = roots[stage.source] / source.lstrip("/") if stage.source else Path(source)
            (root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", within, root / target.lstrip("/")], check=True)
    meta = root / ".singularity.d"
    (meta / "env").mkdir(parents=True, exist_ok=True)
    environment = stage.sections.get("environment", "")
    (meta / "env/90-environment.sh").write_text(environment)
    for name in ("post", "test", "runscript"):
        head = "#!/bin/sh\nset -e\n" if name == "post" else f"#!/bin/sh\n{environment}\nset -e\n"
        (meta / name).write_text(head + stage.sections.get(name, ""))
        (meta / name).chmod(0o755)
    run_isolated(BUILD, [str(root), "/.singularity.d/post"], True, LENT=" ".join((*LENT, *lent)))


def check_image(root: Path, scratch: Path) -> None:
    """Run an image as nobody, read-only, without a network."""
    scratch.mkdir()
    os.chown(scratch, *map(int, NOBODY.split(":")))

    def run(args: str, loopback: str = "", passed: str = "", script: str = "runscript") -> str:
        command = [str(root), str(scratch), f"/.singularity.d/{script}", *shlex.split(args)]
        return run_isolated(RUN, command, False, LOOPBACK=loopback, PASSED=passed)

    print("as nobody, read-only, without a network", flush=True)
    run("", script="test", loopback="1")
    run("data_prep.cosmoflow simulate data --universes 8 --size 16 --workers 1")
    args = "apps.cosmoflow /opt/hpcai/src/apps/cosmoflow/configs/small.yaml data.directory=data data.batch=2 train.epochs=null"
    args += " model.size=16 model.filters=2 model.blocks=2"
    run(f"{args} report.directory=run train.steps=3")
    output = run(f"{args} report.directory=run train.steps=5")
    assert "step 3" in output or "resum" in output, output
    assert (scratch / "run/model.safetensors").is_file()
    for mpi, options in (("mpich", ""), ("openmpi", "--oversubscribe ")):
        command = f"mpiexec {options}-n 2 python -m {args} report.directory={mpi} train.steps=3"
        run(command, loopback="1", passed=f"HPCAI_MPI={mpi} OMP_NUM_THREADS=1")
        assert '"world": 2' in (scratch / mpi / "metrics.jsonl").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("definition", type=Path)
    parser.add_argument("--base", type=Path, required=True, help="root file system for the image that the definition begins with")
    parser.add_argument("--out", type=Path, required=True, help="folder for the stages, which is emptied")
    parser.add_argument("--lend", nargs="*", default=[], help="files of this machine that the build sees")
    options = parser.parse_args()
    if os.getuid():
        raise SystemExit("this needs root: it mounts and changes roots")
    stages = read_stages(options.definition)
    if not options.base.exists():
        release = stages[0].header["from"].removeprefix("debian:").split("-")[0]
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={BASE}", release, options.base], check=True)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    roots: dict[str, Path] = {}
    for stage in stages:
        roots[stage.header["stage"]] = root = options.out / stage.header["stage"]
        build(stage, options.base.resolve(), root, roots, options.lend)
    size = subprocess.run(["du", "-sm", root], capture_output=True, text=True).stdout.split()[0]
    print(f"the image: {size} MB")
    check_image(root.resolve(), options.out.resolve() / "scratch")
    print("passed")


if __name__ == "__main__":
    sys.exit(main())
