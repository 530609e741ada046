"""Readers of structures with energies and forces, as simulations and the public sets have them.

    *.extxyz, *.xyz, also .gz, .xz      extended XYZ; where N.txt lies beside N.extxyz.xz, as in OC20, each of its lines is "system
                                        id,frame id,reference energy" of a frame, and the reference is taken from its energy
    *.traj                              ASE's trajectories
    *.aselmdb                           ASE rows in LMDB: keys "1", "2", ..., values JSON packed by zlib
"""

import gzip
import hashlib
import io
import json
import lzma
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data_prep.extras import needed
from data_prep.frames import Array, Frame, ase
from hpcai.errors import DataError, MissingExtraError

Item = Callable[[], Frame]                      # reads one frame, or raises DataError that names it
PACKED: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
ENDINGS = (".extxyz", ".xyz", ".traj", ".aselmdb")
AGAIN = "fetch it again, or leave it out with --skip-bad"
LONGEST = 1 << 26                               # bytes of a line, or of a row once it is unpacked
MOST_COLUMNS = 1000                             # of one property of extended XYZ: ASE makes memory for as many
SILENT = ("None", "unknown", "socketiocalculator")         # names that say nothing of a method
METHODS = {"vasp": "DFT (VASP)", "espresso": "DFT (Quantum ESPRESSO)", "gpaw": "DFT (GPAW)", "emt": "EMT"}


def kind(path: Path) -> str | None:
    """The ending that tells how a file is read, without that of packing; None for other files."""
    ending = Path(path.stem).suffix if path.suffix in PACKED else path.suffix
    plain = path.suffix in PACKED and ending not in (".extxyz", ".xyz")
    return ending if ending in ENDINGS and not plain and not path.name.startswith(".") else None


def items(path: Path, name: str) -> Iterator[Item]:
    """The frames of a file, in its order, each to be read by a call before the next is asked for. ``name``, the path in its set,
    tells its systems from others where they have no ids. Raises DataError for a file that cannot be opened."""
    if path.stat().st_size == 0:
        raise DataError(f"{path}: empty; {AGAIN}")
    readers: dict[str, Callable[[Path, str], Iterator[Item]]] = {".extxyz": _extxyz, ".xyz": _extxyz}
    readers |= {".traj": _traj, ".aselmdb": _aselmdb}
    return readers[str(kind(path))](path, name)


def has_references(path: Path) -> Path | None:
    """The N.txt beside N.extxyz.xz, if there is one."""
    listed = path.with_name(path.name.split(".")[0] + ".txt")
    return listed if kind(path) in (".extxyz", ".xyz") and listed.is_file() else None


def systems(path: Path) -> list[int | None]:
    """The systems that the N.txt of a file names, for each frame of it; nothing where there is none."""
    listed = has_references(path)
    return [_system(line.split(",")[0]) for line in _lines(listed)] if listed else []


# ---- extended XYZ


def _lines(listed: Path) -> list[str]:
    return [line.strip() for line in listed.read_text(encoding="utf-8").splitlines() if line.strip()]


def _extxyz(path: Path, name: str) -> Iterator[Item]:
    listed = has_references(path)
    lines = _lines(listed) if listed else None
    index = -1
    for index, block in enumerate(_blocks(path)):
        yield _block(path, name, index, block, None if lines is None else (lines[index] if index < len(lines) else ""))
    if lines is not None and index + 1 < len(lines):
        raise DataError(f"{path}: holds {index + 1} frames, {listed} has {len(lines)} lines; {AGAIN}")


def _blocks(path: Path) -> Iterator[str | DataError]:
    """The lines of each frame; an error in the place of one that is cut off, and then nothing more."""
    unpack: Callable[..., Any] = PACKED.get(path.suffix, open)
    index = 0
    with unpack(path, "rt", encoding="utf-8") as file:
        while True:
            try:
                block = _next(file)
            except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as problem:
                yield DataError(f"{path}: frame {index}: {problem or 'the file ends'}; {AGAIN}")
                return
            if block is None:
                return
            yield block
            index += 1


def _next(file: TextIO) -> str | None:
    first = file.readline(LONGEST)
    while first and not first.strip():
        first = file.readline(LONGEST)
    if not first:
        return None
    if not first.strip().isdigit():
        raise ValueError(f"begins with {first.strip()[:40]!r}, expected the number of its atoms")
    lines = [first]
    for number in range(int(first) + 1):
        lines.append(file.readline(LONGEST))
        if not lines[-1].strip() and number:
            raise ValueError(f"ends after {number - 1} of its {int(first)} atoms")
    return "".join(lines)


def _block(path: Path, name: str, index: int, block: str | DataError, line: str | None) -> Item:
    def read() -> Frame:
        if isinstance(block, DataError):
            raise block
        where = f"{path}: frame {index}"
        reference, about = 0.0, {}
        if line is not None:
            parts = line.split(",")
            try:
                about, reference = {"sid": parts[0], "fid": parts[1]}, float(parts[2])
            except (IndexError, ValueError):
                text = f"its line in {path.name.split('.')[0]}.txt is {line[:60]!r}, expected system id,frame id,reference energy"
                raise DataError(f"{where}: {text}; {AGAIN}") from None
        with _told(where):
            columns = re.findall(r"(?<=[:=])\w+:[A-Z]:(\d+)", block.split("\n", 2)[1])
            if wide := [count for count in columns if int(count) > MOST_COLUMNS]:
                raise ValueError(f"a property of {wide[0]} columns, expected at most {MOST_COLUMNS}")
            return _of_atoms(ase().io.read(io.StringIO(block), format="extxyz", index=0), name, index, about, reference)
    return read


# ---- ASE's own


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Turns whatever a parser raises for a damaged file into one error that names it."""
    try:
        yield
    except (DataError, MissingExtraError):
        raise
    except Exception as problem:
        raise DataError(f"{where}: cannot be read ({type(problem).__name__}: {problem}); {AGAIN}") from None


def _traj(path: Path, name: str) -> Iterator[Item]:
    with _told(str(path)):
        trajectory = ase().io.Trajectory(str(path))

    def read(index: int) -> Frame:
        return _of_atoms(trajectory[index], name, index, {})

    with trajectory:
        for index in range(len(trajectory)):
            yield _row(f"{path}: frame {index}", partial(read, index))


def _row(where: str, take: Callable[[], Frame]) -> Item:
    def read() -> Frame:
        with _told(where):
            return take()
    return read


def _of_atoms(
    atoms: Any, name: str, index: int, about: dict[str, Any], reference: float = 0.0
) -> Frame:
    """A frame from ASE's Atoms, with what else is known about it."""
    found, about = (atoms.calc.results if atoms.calc else {}), {**atoms.info, **about}
    energy, forces = found.get("energy"), found.get("forces", atoms.arrays.get("force"))
    told = about.get("calculator") or (getattr(atoms.calc, "name", None) if atoms.calc else None)
    return _frame(
        name, index, about, atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, energy, forces, atoms.arrays.get("tags"),
        atoms.arrays.get("fixed", _held(len(atoms), [each.todict() for each in atoms.constraints])), reference, told,
    )  # fmt: skip


def _held(atoms: int, constraints: list[dict[str, Any]]) -> Array:
    """1 for the atoms that cannot move along any direction."""
    held = np.zeros(atoms, np.uint8)
    for each in constraints:
        how = each.get("kwargs", {})
        if each.get("name") == "FixAtoms":
            held[np.asarray(how["indices"], int)] = 1
        elif each.get("name") == "FixCartesian" and np.all(how.get("mask", True)):
            held[np.asarray(how["a"], int)] = 1
    return held


def _frame(
    name: str, index: int, about: dict[str, Any], numbers: Any, positions: Any, cell: Any, pbc: Any, energy: Any, forces: Any,
    tags: Any, fixed: Any, reference: float, labels: str | None,
) -> Frame:  # fmt: skip
    z = np.asarray(numbers)
    sid, fid = (next((about[key] for key in keys if about.get(key) is not None), None)
                for keys in (("sid", "system_id"), ("fid", "frame_id")))  # fmt: skip
    # Without an id, structures of the same atoms in one file are one system.
    system = _system(f"{name} {z.astype(int).tolist()}" if sid is None else sid)
    frame = None if fid is None else _number(fid)
    method = None if str(labels) in SILENT else METHODS.get(str(labels), str(labels))
    if tags is not None and not np.isin(tags, (0, 1, 2)).all():
        raise ValueError(f"tags {np.unique(tags)[:6].tolist()}, expected 0 below the surface, 1 surface, 2 adsorbate")
    return Frame(
        z, np.asarray(positions, np.float64), np.asarray(cell, np.float64).reshape(3, 3), np.asarray(pbc, np.uint8),
        None if energy is None else float(energy) - reference, None if forces is None else np.asarray(forces, np.float64),
        np.zeros(len(z), np.uint8) if tags is None else np.asarray(tags, np.uint8), np.asarray(fixed, np.uint8), system,
        index if frame is None or frame >= 1 << 31 else frame, labels=method,
    )  # fmt: skip


def _number(value: Any) -> int | None:
    """The number in an id such as 1447590, "random1447590" or "frame12"."""
    found = re.fullmatch(r"\D*?(\d{1,18})(\.0)?", str(np.asarray(value).reshape(-1)[0]))
    return int(found[1]) if found else None


def _system(value: Any) -> int:
    """The number of an id, or one made from its text."""
    number = _number(value)
    return int.from_bytes(hashlib.sha256(str(value).encode()).digest()[:7]) if number is None else number


# ---- LMDB


# Sends each value with a number for its key, in the order of the numbers: key and length in 8 bytes each, then the value.
_CHILD = """
import lmdb, os, struct, sys
path = sys.argv[1]
with lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False, meminit=False, create=False) as environment:
    least = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if os.path.getsize(path) < least:
        sys.exit(f"{os.path.getsize(path):,} bytes, its pages need {least:,}")
    with environment.begin() as transaction:
        for key in sorted(int(key) for key, _ in transaction.cursor() if bytes(key).isdigit()):
            value = transaction.get(str(key).encode())
            sys.stdout.buffer.write(struct.pack("<QQ", key, len(value)) + value)
"""


def _lmdb(path: Path, take: Callable[[bytes, int], Frame]) -> Iterator[Item]:
    """Frames out of the values with numbers for keys. LMDB maps the file, and a damaged one may end the process that reads it: a
    child does."""
    needed("lmdb", "reading LMDB files", "opencatalyst")
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    with child:
        try:
            index = 0
            while len(head := child.stdout.read(16)) == 16:
                key, length = struct.unpack("<QQ", head)
                value = child.stdout.read(length)
                if len(value) < length:
                    break
                yield _row(f"{path}: frame {index} (row {key})", partial(take, value, index))
                index += 1
            told, code = child.stderr.read().decode(errors="replace").strip().splitlines(), child.wait()
        finally:
            child.kill()
    if code or head:
        raise DataError(f"{path}: {told[-1] if told else f'it ended the process that read it ({code})'}; {AGAIN}")


def _aselmdb(path: Path, name: str) -> Iterator[Item]:
    def take(value: bytes, index: int) -> Frame:
        unpacker = zlib.decompressobj()
        row = _decoded(json.loads(unpacker.decompress(value, LONGEST)))
        about = {**row.get("key_value_pairs", {}), **row.get("data", {})}
        fixed = _held(len(row["numbers"]), row.get("constraints", []))
        return _frame(name, index, about, row["numbers"], row["positions"], row["cell"], row["pbc"], row.get("energy"),
                      row.get("forces"), row.get("tags"), fixed, 0.0, row.get("calculator"))  # fmt: skip

    return _lmdb(path, take)


def _decoded(value: Any) -> Any:
    """Arrays out of {"__ndarray__": [shape, dtype, values]}."""
    if isinstance(value, dict) and "__ndarray__" in value:
        shape, dtype, flat = value["__ndarray__"]
        if np.dtype(dtype).kind not in "biuf":
            raise ValueError(f"an array of {dtype}")
        return np.array(flat, dtype).reshape(shape)
    if isinstance(value, dict):
        return {key: _decoded(each) for key, each in value.items()}
    return [_decoded(each) for each in value] if isinstance(value, list) else value
