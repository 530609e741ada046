"""A substitute for ``apptainer exec``, with those of its flags that scripts of hpcai may pass:

    apptainer exec [--nv] [--rocm] [--fakeroot] [--bind SOURCE[:TARGET[:ro]],...] [--env A=B,...] [--pwd FOLDER]
                   [--cleanenv] [--contain] [--containall] IMAGE COMMAND ...

The command has a read-only root of its own: the image's files, this machine's /proc, /sys and /dev, the working directory, and
paths bound by --bind or APPTAINER_BIND. Homes and /tmp are not mounted, as an apptainer.conf may specify, so that a path that a
script does not bind is missing here. It needs root for mount namespaces; it tests hpcai's scripts, not Apptainer.

IMAGE is a JSON file: ``root``, the folder of an unpacked image (such as ``make containers`` leaves); ``mounts``, pairs of source
and target for other files of this machine; ``hidden``, files that are masked.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SHELL = 'for file in /.singularity.d/env/*.sh; do . "$file"; done; cd "$1" || exit; shift; exec "$@"'
PASSED_VARIABLES = ("HOME", "TERM", "LANG")


def fatal(text: str) -> int:
    print(f"FATAL:   {text}", file=sys.stderr)
    return 255


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the arguments. Any other flag is an error: Apptainer lacks it, or this program does not implement it."""
    parser = argparse.ArgumentParser(prog="apptainer", allow_abbrev=False)
    exec_ = parser.add_subparsers(required=True).add_parser("exec", allow_abbrev=False)
    for flags in ("--nv", "--rocm", "-f --fakeroot", "-e --cleanenv", "-c --contain", "-C --containall"):
        exec_.add_argument(*flags.split(), action="store_true")
    exec_.add_argument("-B", "--bind", action="append", default=[])
    exec_.add_argument("--env", action="append", default=[])
    exec_.add_argument("--pwd", "--cwd")
    exec_.add_argument("image")
    exec_.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def mount_script(root: str, image: dict, binds: list[tuple[str, str, str]]) -> str:
    """Return a shell script that mounts the files of an image at the folder ``root`` and runs a command there."""
    lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(root)}", f"cd {shlex.quote(root)}"]
    lines += [f"mkdir {name}; mount --rbind /{name} {name}" for name in ("proc", "sys", "dev")]
    lines += ["mkdir tmp; mount -t tmpfs -o mode=1777 tmpfs tmp"]
    entries = sorted(Path(image["root"]).iterdir()) if "root" in image else []
    files = [(str(path), f"/{path.name}") for path in entries if path.name not in ("proc", "sys", "dev", "tmp")]
    for source, target in [*files, *image.get("mounts", [])]:
        if Path(source).is_symlink():
            lines.append(f"ln -s {shlex.quote(os.readlink(source))} {shlex.quote('.' + target)}")
        else:
            lines += bind_commands(source, target, "ro")
    lines += [f"mount --bind /dev/null {shlex.quote('.' + path)}" for path in image.get("hidden", [])]
    for source, target, mode in binds:
        lines += bind_commands(source, target, mode)
    return "\n".join([*lines, "mount -o remount,ro .", 'exec chroot . /bin/sh -c "$@"'])


def bind_commands(source: str, target: str, mode: str) -> list[str]:
    outside, inside = shlex.quote(source), shlex.quote("." + target)
    create = f"mkdir -p {inside}" if Path(source).is_dir() else f'mkdir -p "$(dirname {inside})"; touch {inside}'
    lines = [f"[ -e {inside} ] || {{ {create}; }}", f"mount --bind {outside} {inside}"]
    return [*lines, f"mount -o remount,bind,ro {inside}"] if mode == "ro" else lines


def read_binds(args: argparse.Namespace, folder: str) -> list[tuple[str, str, str]]:
    """Return source, target and mode of each bind. Commas separate binds, colons their parts, without escapes."""
    binds = [] if args.contain or args.containall else [(folder, folder, "rw")]
    for text in ",".join([*args.bind, os.environ.get("APPTAINER_BIND", "")]).split(","):
        if text:
            source, target, mode = [*text.split(":"), "", ""][:3]
            binds.append((source, target or source, mode or "rw"))
    return binds


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    if os.geteuid():
        return fatal("the substitute for apptainer mounts, which needs root")
    if not Path(args.image).is_file():
        return fatal(f"could not open image {args.image}: failed to retrieve path for {args.image}: no such file or directory")
    folder = args.pwd or os.getcwd()
    binds = read_binds(args, os.getcwd())
    for source, target, _ in binds:
        if not Path(source).exists():
            return fatal(f"container creation failed: mount {source}->{target} error: mount source {source} doesn't exist")
    for flag, device in (("nv", "/dev/nvidiactl"), ("rocm", "/dev/kfd")):
        if getattr(args, flag) and not Path(device).exists():
            print(f"WARNING: Could not find any {flag} files on this host!", file=sys.stderr)
    root = tempfile.mkdtemp()
    try:
        script = mount_script(root, json.loads(Path(args.image).read_text()), binds)
        return run(["unshare", "--mount", "/bin/sh", "-euc", script, "_", SHELL, "_", folder, *args.command], make_environ(args))
    finally:
        os.rmdir(root)


def make_environ(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the caller without variables that depend on its file system."""
    clean = args.cleanenv or args.containall
    variables = {name: value for name, value in os.environ.items() if not clean or name in PASSED_VARIABLES}
    variables.pop("LD_LIBRARY_PATH", None)
    variables |= {k.removeprefix("APPTAINERENV_"): v for k, v in os.environ.items() if k.startswith("APPTAINERENV_")}
    variables |= dict(pair.split("=", 1) for text in args.env for pair in text.split(","))
    return variables | {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "APPTAINER_CONTAINER": args.image}


def run(command: list[str], environ: dict[str, str]) -> int:
    """Run a command that receives all signals and open files (also those of PMI) of this program; return its exit code."""
    child = subprocess.Popen(command, env=environ, close_fds=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
