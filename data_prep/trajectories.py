"""Readers of structures with energies and forces, from simulations and the public sets.

    *.extxyz, *.xyz, also .gz, .xz      extended XYZ; if N.txt lies beside N.extxyz.xz, as in OC20, each of its lines is "system
                                        id,frame id,reference energy" of a frame, and the reference is subtracted from its energy
    *.traj                              ASE's trajectories
    *.aselmdb                           ASE rows in LMDB: keys "1", "2", ..., values JSON compressed by zlib
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
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data_prep.frames import Array, Frame, import_ase
from hpcai.data.layout import parse_errors
from hpcai.errors import DataError
from hpcai.lazy import import_optional

Keys = tuple[str | None, str | None]                   # names of energy and forces; None: those of LABEL_KEYS
FrameReader = Callable[[], Frame]                      # reads one frame, or raises DataError with its location
DECOMPRESSORS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
SUFFIXES = (".extxyz", ".xyz", ".traj", ".aselmdb")
ADVICE = "fetch it again"
MAX_BYTES = 1 << 26                               # of a line, or of a decompressed row
MAX_COLUMNS = 1000                             # of one property of extended XYZ: ASE allocates memory for all
UNKNOWN_METHODS = ("None", "unknown", "socketiocalculator")         # of calculators, without a method
LABEL_KEYS = (("energy", "forces"), ("energy", "force"), ("REF_energy", "REF_forces"))     # of ASE, older ones, of MACE
METHODS = {"vasp": "DFT (VASP)", "espresso": "DFT (Quantum ESPRESSO)", "gpaw": "DFT (GPAW)", "emt": "EMT"}
_FORTRAN = re.compile(r"(?<![^\s=\"\[,])([+-]?(?:\d+\.\d*|\.\d+))[dD](?=[+-]?\d{1,3}(?:[\s\"\],]|$))")      # 1.0D+00
_naming = partial(parse_errors, advice=ADVICE, text="cannot be read")          # of a file or a frame, in errors of its parser


def file_format(path: Path) -> str | None:
    """Return the suffix that selects the reader, without that of compression, or None for unsupported files."""
    ending = Path(path.stem).suffix if path.suffix in DECOMPRESSORS else path.suffix
    plain = path.suffix in DECOMPRESSORS and ending not in (".extxyz", ".xyz")
    return ending if ending in SUFFIXES and not plain and not path.name.startswith(".") else None


def frame_readers(path: Path, name: str, keys: Keys = (None, None)) -> Iterator[FrameReader]:
    """Yield a reader for each frame of a file, in its order; call each before the next is requested. ``name``, the path in its set,
    distinguishes its systems from others if they have no ids. Raises DataError for a file that cannot be opened."""
    if path.stat().st_size == 0:
        raise DataError(f"{path}: empty; {ADVICE}")
    readers = {".extxyz": _extxyz, ".xyz": _extxyz, ".traj": _traj, ".aselmdb": _aselmdb}
    return readers[str(file_format(path))](path, name, keys)


def references_path(path: Path) -> Path | None:
    """Return the N.txt beside N.extxyz.xz, or None."""
    references = path.with_name(path.name.split(".")[0] + ".txt")
    return references if file_format(path) in (".extxyz", ".xyz") and references.is_file() else None


def system_ids(path: Path) -> list[int | None]:
    """Return the system of each frame from the N.txt of a file; empty without one."""
    references = references_path(path)
    return [_system_id(line.split(",")[0]) for line in _read_lines(references)] if references else []


# ---- extended XYZ


def _read_lines(references: Path) -> list[str]:
    return [line.strip() for line in references.read_text(encoding="utf-8-sig").splitlines() if line.strip()]


def _extxyz(path: Path, name: str, keys: Keys) -> Iterator[FrameReader]:
    references = references_path(path)
    lines = _read_lines(references) if references else None
    index = -1
    for index, block in enumerate(_read_blocks(path)):
        line = None if lines is None else (lines[index] if index < len(lines) else "")
        yield partial(_parse_block, path, name, keys, index, block, line)
    if lines is not None and index + 1 < len(lines):
        raise DataError(f"{path}: holds {index + 1} frames, {references} has {len(lines)} lines; {ADVICE}")


def _read_blocks(path: Path) -> Iterator[str | DataError]:
    """Yield the lines of each frame. For a truncated frame yield an error, and end."""
    unpack: Callable[..., Any] = DECOMPRESSORS.get(path.suffix, open)
    with unpack(path, "rt", encoding="utf-8-sig") as file:
        for index in count():
            try:
                block = _read_block(file)
            except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as problem:
                yield DataError(f"{path}: frame {index}: {problem or 'the file ends'}; {ADVICE}")
                return
            if block is None:
                return
            yield block


def _read_block(file: TextIO) -> str | None:
    first = file.readline(MAX_BYTES)
    while first and not first.strip():
        first = file.readline(MAX_BYTES)
    if not first:
        return None
    if not first.strip().isdigit():
        raise ValueError(f"begins with {first.strip()[:40]!r}, expected the number of its atoms")
    lines = [first]
    for number in range(int(first) + 1):
        lines.append(file.readline(MAX_BYTES))
        if not lines[-1].strip() and number:
            raise ValueError(f"ends after {number - 1} of its {int(first)} atoms")
    return "".join(lines)


def _parse_block(path: Path, name: str, keys: Keys, index: int, block: str | DataError, line: str | None) -> Frame:
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
            raise DataError(f"{where}: {text}; {ADVICE}") from None
    with _naming(where):
        columns = re.findall(r"(?<=[:=])\w+:[A-Z]:(\d+)", block.split("\n", 2)[1])
        if wide := [number for number in columns if int(number) > MAX_COLUMNS]:
            raise ValueError(f"a property of {wide[0]} columns, expected at most {MAX_COLUMNS}")
        try:
            atoms = import_ase().io.read(io.StringIO(_normalize(block)), format="extxyz", index=0)
        except KeyError as problem:
            raise ValueError(f"ASE does not know {problem}; expected elements as names of atoms") from problem
        return _from_atoms(atoms, name, keys, index, about, reference)


def _normalize(block: str) -> str:
    """Return a frame with E in exponents, where Fortran writes D, and elements for labels of sites, such as Cu1, Fe_a and O1-."""
    count, comment, atoms = block.split("\n", 2)
    columns = re.findall(r"(?:^|:)(\w+):[A-Z]:(\d+)", "".join(re.findall(r"\bProperties=\"?(\S+)", comment)[:1]))
    names = [name for name, number in columns for _ in range(int(number))] or ["species"]
    if "species" in names:
        before = rf"^([ \t]*(?:\S+[ \t]+){{{names.index('species')}}}[A-Z][a-z]?)"
        atoms = re.sub(before + r"[^\sA-Za-z]\S*", r"\1", atoms, flags=re.MULTILINE)
    return "\n".join([count, *(_FORTRAN.sub(r"\1E", text) for text in (comment, atoms))])


# ---- ASE's own


def _traj(path: Path, name: str, keys: Keys) -> Iterator[FrameReader]:
    with _naming(path):
        trajectory = import_ase().io.Trajectory(str(path))

    def read(index: int) -> Frame:
        return _from_atoms(trajectory[index], name, keys, index, {})

    with trajectory:
        for index in range(len(trajectory)):
            yield _naming(f"{path}: frame {index}")(partial(read, index))


def _from_atoms(atoms: Any, name: str, keys: Keys, index: int, about: dict[str, Any], reference: float = 0.0) -> Frame:
    """Return a frame from ASE's Atoms and additional metadata."""
    z, positions, about = atoms.numbers, atoms.positions, {**atoms.info, **about}
    results = atoms.calc.results if atoms.calc else {}
    values = {**about, "tags": None, **atoms.arrays, **results}     # numbers, positions, tags and labels, by the names of the file
    labels = about.get("calculator") or (getattr(atoms.calc, "name", None) if atoms.calc else None)
    pairs = [(keys[0] or energy, keys[1] or forces) for energy, forces in LABEL_KEYS]
    pair = next((pair for pair in pairs if all(values.get(key) is not None for key in pair)), pairs[0])
    energy, forces = map(values.get, pair)
    candidates = tuple(key for key, value in values.items() if isinstance(value, float | np.number)
                       or (isinstance(value, np.ndarray) and value.shape == (len(z), 3) and key != "positions"))  # fmt: skip
    tags, note = _oc20_tags(values.get("tags"), positions)
    notes = (*([f"energies are {pair[0]}, forces {pair[1]}"] if pair == LABEL_KEYS[-1] else []), *([note] if note else []))
    sid, fid = (next((about[key] for key in keys if about.get(key) is not None), None)
                for keys in (("sid", "system_id"), ("fid", "frame_id")))  # fmt: skip
    # Without an id, structures of the same atoms in one file are one system.
    system = _system_id(f"{name} {z.astype(int).tolist()}" if sid is None else sid)
    frame = None if fid is None else _id_number(fid)
    fixed = atoms.arrays.get("fixed", _fixed_atoms(atoms))
    method = None if str(labels) in UNKNOWN_METHODS else METHODS.get(str(labels), str(labels))
    return Frame(
        z, positions, atoms.cell.array, np.asarray(atoms.pbc, np.uint8),
        None if energy is None else float(energy) - reference, None if forces is None else np.asarray(forces, np.float64),
        tags, np.asarray(fixed, np.uint8), system, index if frame is None or frame >= 1 << 31 else frame, labels=method,
        candidates=candidates, notes=notes,
    )  # fmt: skip


def _fixed_atoms(atoms: Any) -> Array:
    """Return 1 for each atom that cannot move along any direction."""
    fixed = np.zeros(len(atoms), np.uint8)
    for each in atoms.constraints:
        constraint = each.todict()
        arguments = constraint["kwargs"]
        if constraint["name"] == "FixAtoms":
            fixed[np.asarray(arguments["indices"], int)] = 1
        elif constraint["name"] == "FixCartesian" and np.all(arguments.get("mask", True)):
            fixed[np.asarray(arguments["a"], int)] = 1
    return fixed


def _oc20_tags(tags: Any, positions: Array) -> tuple[Array, str]:
    """Return the tags of OC20, and a note if those of the file are others. ASE numbers the layers of a slab from 1 at its top, and
    gives 0 to an adsorbate; other programs have meanings of their own."""
    given = np.zeros(len(positions)) if tags is None else np.asarray(tags)
    present = np.unique(given).tolist()
    heights, layers = [positions[given == tag, 2].mean() for tag in present], {0, *present}
    if layers == {*range(len(layers))} and len(layers) > 2 and (np.diff(heights) < 0).all():
        note = "tags are layers, as ASE numbers them: 0 is taken as adsorbate, 1 as surface, others as below it"
        return np.where(given == 0, 2, given == 1).astype(np.uint8), note
    if layers <= {0, 1, 2}:
        return given.astype(np.uint8), ""
    return np.zeros(len(positions), np.uint8), "tags are neither OC20's nor ASE's layers, and are left out"


def _id_number(value: Any) -> int | None:
    """Return the number in an id such as 1447590, "random1447590" or "frame12"."""
    match = re.fullmatch(r"\D*?(\d{1,18})(\.0)?", str(np.asarray(value).reshape(-1)[0]))
    return int(match[1]) if match else None


def _system_id(value: Any) -> int:
    """Return the number of an id, or a hash of its text."""
    number = _id_number(value)
    return int.from_bytes(hashlib.sha256(str(value).encode()).digest()[:7]) if number is None else number


# ---- LMDB


# Writes each value with a number for its key, in the order of the numbers: key and length in 8 bytes each, then the value.
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


def _aselmdb(path: Path, name: str, keys: Keys) -> Iterator[FrameReader]:
    """Yield a reader for each value with a number for its key. LMDB maps the file, and a damaged one may crash the process that
    reads it: therefore a child process does."""
    import_optional("lmdb", "reading LMDB files needs", "opencatalyst")
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
                yield _naming(f"{path}: frame {index} (row {key})")(partial(_parse_row, value, name, keys, index))
                index += 1
            errors, code = child.stderr.read().decode(errors="replace").strip().splitlines(), child.wait()
        finally:
            child.kill()
    if code or head:
        raise DataError(f"{path}: {errors[-1] if errors else f'the process that read it crashed ({code})'}; {ADVICE}")


def _parse_row(value: bytes, name: str, keys: Keys, index: int) -> Frame:
    row = import_ase().db.row.AtomsRow(json.loads(zlib.decompressobj().decompress(value, MAX_BYTES), object_hook=_decode_array))
    return _from_atoms(row.toatoms(), name, keys, index, {"calculator": row.get("calculator"), **row.key_value_pairs, **row.data})


def _decode_array(value: dict[str, Any]) -> Any:
    """Decode an array from {"__ndarray__": [shape, dtype, values]}; return other objects as they are."""
    if "__ndarray__" not in value:
        return value
    shape, dtype, flat = value["__ndarray__"]
    if np.dtype(dtype).kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    return np.array(flat, dtype).reshape(shape)
