"""Stands in for ``apptainer exec`` where there is none, and does what those of its flags mean that our scripts may give:

    apptainer exec [--nv] [--rocm] [--fakeroot] [--bind SOURCE[:TARGET[:ro]],...] [--env A=B,...] [--pwd FOLDER]
                   [--cleanenv] [--contain] [--containall] IMAGE COMMAND ...

The command sees a root of its own, read-only: the image's files, this machine's /proc, /sys and /dev, the folder that it is started
in, and what was bound with --bind or APPTAINER_BIND. Homes and /tmp stay outside, as an apptainer.conf can have it, so that a path
that a script forgot to bind is missed here. It needs root, for namespaces of mounts; it proves our scripts, not Apptainer.

IMAGE is a file of JSON: ``root``, the folder of an unpacked image (such as ``make containers`` leaves), and ``lent``, what else of
this machine stands in for the image's own files: [from, to] each. Files named in ``hidden`` are there for nobody.
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
PASSED = ("HOME", "TERM", "LANG")


def fatal(text: str) -> int:
    print(f"FATAL:   {text}", file=sys.stderr)
    return 255


def parsed(words: list[str]) -> argparse.Namespace:
    """Any other flag ends the program: Apptainer has none of that name, or this program does not do what it means."""
    parser = argparse.ArgumentParser(prog="apptainer", allow_abbrev=False)
    exec_ = parser.add_subparsers(required=True).add_parser("exec", allow_abbrev=False)
    for flags in ("--nv", "--rocm", "-f --fakeroot", "-e --cleanenv", "-c --contain", "-C --containall"):
        exec_.add_argument(*flags.split(), action="store_true")
    exec_.add_argument("-B", "--bind", action="append", default=[])
    exec_.add_argument("--env", action="append", default=[])
    exec_.add_argument("--pwd", "--cwd")
    exec_.add_argument("image")
    exec_.add_argument("command", nargs=argparse.REMAINDER)
    return parser.parse_args(words)


def mounts(root: str, image: dict, binds: list[tuple[str, str, str]]) -> str:
    """The shell lines that fill the folder ``root``, in a namespace of their own, and go there."""
    lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(root)}", f"cd {shlex.quote(root)}"]
    lines += [f"mkdir {name}; mount --rbind /{name} {name}" for name in ("proc", "sys", "dev")]
    lines += ["mkdir tmp; mount -t tmpfs -o mode=1777 tmpfs tmp"]
    own = sorted(Path(image["root"]).iterdir()) if "root" in image else []
    files = [(str(path), f"/{path.name}") for path in own if path.name not in ("proc", "sys", "dev", "tmp")]
    for source, target in [*files, *image.get("lent", [])]:
        if Path(source).is_symlink():
            lines.append(f"ln -s {shlex.quote(os.readlink(source))} {shlex.quote('.' + target)}")
        else:
            lines += bind(source, target, "ro")
    lines += [f"mount --bind /dev/null {shlex.quote('.' + path)}" for path in image.get("hidden", [])]
    for source, target, how in binds:
        lines += bind(source, target, how)
    return "\n".join([*lines, "mount -o remount,ro .", 'exec chroot . /bin/sh -c "$@"'])


def bind(source: str, target: str, how: str) -> list[str]:
    outside, inside = shlex.quote(source), shlex.quote("." + target)
    made = f"mkdir -p {inside}" if Path(source).is_dir() else f'mkdir -p "$(dirname {inside})"; touch {inside}'
    lines = [f"[ -e {inside} ] || {{ {made}; }}", f"mount --bind {outside} {inside}"]
    return [*lines, f"mount -o remount,bind,ro {inside}"] if how == "ro" else lines


def bound(asked: argparse.Namespace, folder: str) -> list[tuple[str, str, str]]:
    """What is bound: from, to and how. Commas part them, colons what belongs to one, and nothing escapes either."""
    found = [] if asked.contain or asked.containall else [(folder, folder, "rw")]
    for text in ",".join([*asked.bind, os.environ.get("APPTAINER_BIND", "")]).split(","):
        if text:
            source, target, how = [*text.split(":"), "", ""][:3]
            found.append((source, target or source, how or "rw"))
    return found


def main(words: list[str]) -> int:
    asked = parsed(words)
    if os.geteuid():
        return fatal("the stand-in for apptainer mounts, and needs root")
    if not Path(asked.image).is_file():
        return fatal(f"could not open image {asked.image}: failed to retrieve path for {asked.image}: no such file or directory")
    folder = asked.pwd or os.getcwd()
    binds = bound(asked, os.getcwd())
    for source, target, _ in binds:
        if not Path(source).exists():
            return fatal(f"container creation failed: mount {source}->{target} error: mount source {source} doesn't exist")
    for flag, device in (("nv", "/dev/nvidiactl"), ("rocm", "/dev/kfd")):
        if getattr(asked, flag) and not Path(device).exists():
            print(f"WARNING: Could not find any {flag} files on this host!", file=sys.stderr)
    root = tempfile.mkdtemp()
    try:
        script = mounts(root, json.loads(Path(asked.image).read_text()), binds)
        return run(["unshare", "--mount", "/bin/sh", "-euc", script, "_", SHELL, "_", folder, *asked.command], environment(asked))
    finally:
        os.rmdir(root)


def environment(asked: argparse.Namespace) -> dict[str, str]:
    """That of the caller, but for what belongs to its own file system."""
    clean = asked.cleanenv or asked.containall
    found = {name: value for name, value in os.environ.items() if not clean or name in PASSED}
    found.pop("LD_LIBRARY_PATH", None)
    found |= {k.removeprefix("APPTAINERENV_"): v for k, v in os.environ.items() if k.startswith("APPTAINERENV_")}
    found |= dict(pair.split("=", 1) for text in asked.env for pair in text.split(","))
    return found | {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "APPTAINER_CONTAINER": asked.image}


def run(command: list[str], environment: dict[str, str]) -> int:
    """The exit code of a command that gets every signal, and the open files (those of PMI, too) of this program."""
    child = subprocess.Popen(command, env=environment, close_fds=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
