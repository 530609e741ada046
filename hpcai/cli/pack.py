"""``hpcai environment pack FILE.tar``: the Python that runs it, with all that is installed for it, as one archive.

    hpcai environment pack /scratch/mine.tar
    hpcai job cosmoflow CONFIG.yaml --site generic --nodes 16 --environment /scratch/mine.tar

It works wherever it is unpacked, on machines of this kind. A virtual environment brings along the interpreter that it was made
from, without that one's own packages unless it sees them; a conda environment or an installed Python goes as it is. hpcai, apps and
data_prep go along from a checkout, too. Left out: tests and editors of the standard library, and Python's static library.
Shared libraries from elsewhere (a module's, the system's) stay where they are, and nodes load them from there.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import marshal
import mmap
import os
import platform
import re
import site
import stat
import struct
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import hpcai
from hpcai.dist.relay import MANIFEST, ROOM, check
from hpcai.errors import ConfigError, DataError
from hpcai.programs import SUITE

_LEFT_OUT = {"test", "idlelib", "turtledemo", "ensurepip", "lib2to3"}  # of the standard library
_PROGRAM = b"""#!/bin/sh
'''exec' "$(dirname -- "$(realpath -- "$0")")/python" "$0" "$@"
' '''
"""  # sh starts the Python beside it; Python reads a text


@dataclass
class _Archive:
    """What goes where: names in the archive with a file, bytes, or a link's target each."""

    entries: dict[str, Path | bytes] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    venv: str | None = None


def main(argv: Sequence[str]) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="hpcai environment pack", description=__doc__, formatter_class=form)
    parser.add_argument("file", type=Path, metavar="FILE.tar", help="on a file system that all nodes see")
    file = parser.parse_args(argv).file
    about, notes = pack(file)
    for note in notes:
        print(f"hpcai environment pack: {note}", file=sys.stderr)
    print(f"{file}: {about['size'] / 1e9:.2f} GB, {about['files']:,} files, Python {about['python']}, SHA-256 {about['digest']}")
    return 0


def pack(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Writes the archive; what it says of itself, and what a person should know. Raises ConfigError where something would be
    missing."""
    if file.suffix != ".tar":
        raise ConfigError(f"{file}: expected a name that ends in .tar; it is not compressed, which would take longer")
    _refuse_what_lies_elsewhere()
    archive = _collect()
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("w+b") as target:
            about = _write(archive, target)
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return about, archive.notes


def _refuse_what_lies_elsewhere() -> None:
    """Raises ConfigError, one line for each place from which this Python imports that would not be in the archive."""
    root, found = Path(hpcai.__file__).resolve().parents[1], []
    for text in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if Path(text).is_dir() and Path(text).resolve() not in (root, SUITE.resolve()):
            found.append(f"PYTHONPATH names {text}, no part of the environment; install what is there, or unset PYTHONPATH")
    if site.ENABLE_USER_SITE and site.getusersitepackages() in sys.path:
        found.append(
            f"this Python sees {site.getusersitepackages()}, which is no part of the environment; install what you need of it "
            "into the environment, and set PYTHONNOUSERSITE=1"
        )
    for package in importlib.metadata.distributions():
        url = json.loads(package.read_text("direct_url.json") or "{}")
        if url.get("dir_info", {}).get("editable") and package.name != "hpcai-suite":
            found.append(f"{package.name} is installed as editable from {url['url']}; install it whole: pip install DIR")
    if Path(sys.prefix) == Path("/usr"):
        found.append("this is the system's own Python; make an environment: python3 -m venv DIR")
    if found:
        raise ConfigError("\n".join(found))


# ---- What goes along ------------------------------------------------------------------------------------------------------------


def _collect() -> _Archive:
    archive, prefix, base = _Archive(), Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()
    packages = os.path.relpath(sysconfig.get_path("purelib"), sys.prefix)
    if prefix == base:
        for path in sorted(prefix.iterdir()):
            if path.name not in ("pkgs", "envs", "__pycache__"):  # conda's downloads and other environments
                _add(archive, path, path.name, prefix)
        _link_program(archive, Path(os.path.realpath(sys.executable)).relative_to(prefix).name, "")
        library = Path(sysconfig.get_path("stdlib")).resolve().relative_to(prefix)
        for name in list(archive.entries):
            if Path(name).is_relative_to(library) and name.split("/")[len(library.parts)] in _LEFT_OUT:
                del archive.entries[name]
    else:
        _add_interpreter(archive, base, _sees_base(prefix))
        _add_venv(archive, prefix)
    _add_hpcai(archive, packages)
    _compile(archive)
    return archive


def _link_program(archive: _Archive, program: str, under: str) -> None:
    for link in ("python", "python3", f"python{sys.version_info[0]}.{sys.version_info[1]}"):
        if f"bin/{link}" not in archive.entries:
            archive.links[f"bin/{link}"] = f"../{under}bin/{program}" if under else program


def _add_interpreter(archive: _Archive, base: Path, with_packages: bool) -> None:
    """The interpreter below ``base``, its library, the standard library, and the headers that compilers of kernels read."""
    program = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    archive.entries[f"base/bin/{program.name}"] = program
    _link_program(archive, program.name, "base/")
    loaded = re.search(r" (/\S*/libpython\d\S*)$", Path("/proc/self/maps").read_text(), re.M)
    if loaded:
        library = Path(loaded[1])
        if library.is_relative_to(base):
            archive.entries[f"base/{library.relative_to(base)}"] = library
        else:
            archive.notes.append(f"nodes load {library} from there: it is no part of {base}")
    places = {"base": str(base), "platbase": str(base), "installed_base": str(base), "installed_platbase": str(base)}
    paths = [Path(sysconfig.get_path(name, vars=places)) for name in ("stdlib", "platstdlib", "include")]
    paths += map(Path, site.getsitepackages([str(base)]) if with_packages else [])
    for path in dict.fromkeys(path.resolve() for path in paths):
        if path.is_relative_to(base) and path.is_dir():
            _add(archive, path, f"base/{path.relative_to(base)}", base, {*_LEFT_OUT, "site-packages", "dist-packages"})


def _sees_base(prefix: Path) -> bool:
    return bool(re.search(r"include-system-site-packages\s*=\s*true", (prefix / "pyvenv.cfg").read_text(), re.I))


def _add_venv(archive: _Archive, prefix: Path) -> None:
    for path in sorted(prefix.iterdir()):
        if path.name not in ("pyvenv.cfg", "bin", "__pycache__"):
            _add(archive, path, path.name, prefix)
    for path in sorted((prefix / "bin").iterdir()):
        if not re.fullmatch(r"python[\d.]*|[Aa]ctivate.*|__pycache__", path.name):
            _add(archive, path, f"bin/{path.name}", prefix)
    seen = str(_sees_base(prefix)).lower()
    archive.venv = f"home = @HERE@/base/bin\ninclude-system-site-packages = {seen}\nversion = {platform.python_version()}\n"


def _add(archive: _Archive, path: Path, name: str, root: Path, skip: set[str] | frozenset[str] = frozenset()) -> None:
    """``path`` and all below it as ``name``; links that stay below ``root`` as links, others as what they lead to."""
    if path.is_symlink():
        to = Path(os.path.abspath(path.parent / os.readlink(path)))
        if to.is_relative_to(root) and to.exists():
            archive.links.setdefault(name, os.path.relpath(to, path.parent))
            return
        if not path.is_file():
            archive.notes.append(f"left out: {path}, a link to {os.readlink(path)}")
            return
    if path.is_dir():
        for inner in sorted(path.iterdir()):
            if inner.name != "__pycache__" and inner.name not in skip:
                _add(archive, inner, f"{name}/{inner.name}", root)
    elif path.is_file() and not re.fullmatch(r"libpython.*\.a", path.name) and name not in archive.links:
        archive.entries.setdefault(name, path)


def _add_hpcai(archive: _Archive, packages: str) -> None:
    """hpcai, apps, data_prep and slurm where a checkout has them; what an editable install left is dropped."""
    root = Path(hpcai.__file__).resolve().parents[1]
    if SUITE.is_dir():
        archive.entries[f"{packages}/hpcai_suite.pth"] = b"hpcai/suite\n"
        return
    for name in [name for name in archive.entries if re.match(re.escape(packages) + r"/__editable__.*hpcai_suite", name)]:
        del archive.entries[name]
    for name in ("hpcai", "apps", "data_prep", "slurm"):
        _add(archive, root / name, f"{packages}/{name}", root)


def _compile(archive: _Archive) -> None:
    """The compiled code of each module beside it: that which is there and fits, or made now, by its content."""
    for name, path in list(archive.entries.items()):
        if name.endswith(".py") and isinstance(path, Path) and "/python" in name:
            folder, _, file = name.rpartition("/")
            cached = Path(importlib.util.cache_from_source(str(path)))
            found: Path | bytes | None = cached if _fits(cached, path) else _compiled(path)
            if found is not None:
                archive.entries[f"{folder}/__pycache__/{file[:-3]}.{sys.implementation.cache_tag}.pyc"] = found


def _fits(cached: Path, source: Path) -> bool:
    try:
        with cached.open("rb") as opened:
            head = opened.read(16)
        found = source.stat()
    except OSError:
        return False
    marks = struct.pack("<III", 0, int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF)
    return head == importlib.util.MAGIC_NUMBER + marks


def _compiled(source: Path) -> bytes | None:
    text = source.read_bytes()
    try:
        code = compile(text, source.name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):  # templates, and modules of other versions
        return None
    return importlib.util.MAGIC_NUMBER + struct.pack("<I", 1) + importlib.util.source_hash(text) + marshal.dumps(code)


# ---- The archive ----------------------------------------------------------------------------------------------------------------


class _Hashed(io.RawIOBase):
    """A file that is written once, with the SHA-256 of what was."""

    def __init__(self, target: BinaryIO) -> None:
        self.target, self.sha, self.size = target, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.sha.update(data)
        self.size += len(data)
        return self.target.write(data)

    def tell(self) -> int:
        return self.size


def _write(archive: _Archive, target: BinaryIO) -> dict[str, Any]:
    """The members in the order of their names, and, when all is known, the manifest before them."""
    target.write(bytes(tarfile.BLOCKSIZE + ROOM))
    hashed, files, size, links = _Hashed(target), 0, 0, set[str]()
    with tarfile.open(fileobj=hashed, mode="w", format=tarfile.GNU_FORMAT, copybufsize=1 << 20) as tar:  # type: ignore[call-overload]
        for name in sorted({*archive.entries, *archive.links}):
            tar.members = []
            info = tarfile.TarInfo(name)
            if name in archive.links:
                info.type, info.linkname = tarfile.SYMTYPE, archive.links[name]
                check(info, links)
                tar.addfile(info)
                continue
            with _opened(archive.entries[name], name, info) as source:
                check(info, links)
                tar.addfile(info, source)
            files, size = files + 1, size + info.size
    about = {
        "python": platform.python_version(),
        "torch": _version("torch"),
        "hpcai": hpcai.__version__,
        "machine": f"{platform.machine()} {' '.join(platform.libc_ver())}".strip(),
        "files": files,
        "bytes": size,
        "size": tarfile.BLOCKSIZE + ROOM + hashed.size,
        "digest": hashed.sha.hexdigest(),
        "venv": archive.venv,
    }
    head = tarfile.TarInfo(MANIFEST)
    head.size = ROOM
    target.seek(0)
    target.write(head.tobuf(tarfile.GNU_FORMAT) + json.dumps(about).encode().ljust(ROOM))
    return about


def _opened(what: Path | bytes, name: str, info: tarfile.TarInfo) -> Any:
    """A file to read, with what moves along changed in it: the first line of programs, the paths of libraries."""
    if isinstance(what, bytes):
        info.size, info.mode = len(what), 0o644
        return io.BytesIO(what)
    found = what.stat()
    info.mtime, info.size = int(found.st_mtime), found.st_size
    info.mode = 0o755 if found.st_mode & stat.S_IXUSR else 0o644
    if name.startswith("bin/") and what.read_bytes()[:2] == b"#!":
        info.mode, text = 0o755, what.read_bytes()
        line, _, rest = text.partition(b"\n")
        if line[2:].strip().startswith(os.path.join(sys.prefix, "bin", "python").encode()):
            info.size = len(_PROGRAM + rest)
            return io.BytesIO(_PROGRAM + rest)
    source = what.open("rb")
    if source.read(4) == b"\x7fELF":
        patches = list(_moved(source, what))
        if patches:
            data = bytearray(what.read_bytes())
            for at, new in patches:
                data[at : at + len(new)] = new
            source.close()
            return io.BytesIO(data)
    source.seek(0)
    return source


def _moved(source: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    """Where an ELF file of 64 bits looks for libraries by paths that move with it: places of these texts, and texts of the same
    length with paths from the file itself. Raises DataError where there is no room."""
    with mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[4:6] != b"\x02\x01":  # 64 bits, little-endian
            return
        (at,), (size, count) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
        segments = [struct.unpack_from("<IIQQQQQQ", data, at + size * number) for number in range(count)]
        loaded = [(to, start, length) for kind, _, start, to, _, length, _, _ in segments if kind == 1]
        for kind, _, start, _, _, length, _, _ in segments:
            if kind != 2:
                continue
            table = [struct.unpack_from("<QQ", data, start + 16 * number) for number in range(length // 16)]
            text = next((value for tag, value in table if tag == 5), 0)
            texts = next((start + text - to for to, start, length in loaded if to <= text < to + length), None)
            for tag, value in table:
                if tag in (15, 29) and texts is not None:  # RPATH, RUNPATH
                    end = data.find(b"\0", texts + value)
                    old = data[texts + value : end]
                    new = ":".join(_from(path, part) for part in old.decode().split(":")).encode()
                    if len(new) > len(old):
                        raise DataError(f"{path}: looks for libraries in {old.decode()}, which has no room for {new.decode()}")
                    if new != old:
                        yield texts + value, new.ljust(len(old), b"\0")


def _from(path: Path, part: str) -> str:
    """A path that the file ``path`` names, from that file where both move together."""
    roots = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    root = next((root for root in roots if path.is_relative_to(root)), None)
    if root and part.startswith("/") and Path(part).is_relative_to(root):
        return "$ORIGIN/" + os.path.relpath(part, path.parent)
    return part


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
