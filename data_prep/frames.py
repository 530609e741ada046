"""Structures with energies and forces: files of many frames, and their statistics.

R frames   A atoms, of all frames, concatenated   energies eV   lengths angstrom   forces eV/angstrom"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import moments, store
from data_prep.store import Field
from hpcai.errors import DataError
from hpcai.lazy import import_optional
from hpcai.models.dimenet import periodic

Array = NDArray[Any]
ELEMENTS = 119                                  # atomic numbers from 0
FIELDS = {
    "atoms": Field("int32", (), 1), "edges": Field("int32", (), 1), "triplets": Field("int64"),
    "energy": Field("float64", unit="eV"), "cell": Field("float64", (3, 3), unit="angstrom"), "pbc": Field("uint8", (3,), 0, 1),
    "system": Field("int64"), "frame": Field("int32"), "source": Field("int16"),
    "positions": Field("float32", ("atoms", 3), unit="angstrom"), "forces": Field("float32", ("atoms", 3), unit="eV/angstrom"),
    "numbers": Field("uint8", ("atoms",), 1, ELEMENTS - 1), "tags": Field("uint8", ("atoms",), 0, 2),
    "fixed": Field("uint8", ("atoms",), 0, 1),
}  # fmt: skip


def import_ase() -> Any:
    """Return the package, with the submodules that this module and the readers use."""
    parts = ("build", "calculators.emt", "constraints", "data", "db.row", "io", "optimize", "units")
    for part in parts:
        import_optional(f"ase.{part}", "reading and making of structures needs", "opencatalyst")
    return import_optional("ase", "reading and making of structures needs", "opencatalyst")


@dataclass
class Frame:
    """One structure with its labels."""

    numbers: Array                              # [A]
    positions: Array                            # [A, 3]
    cell: Array                                 # [3, 3], the rows are its vectors
    pbc: Array                                  # [3]
    energy: float | None                        # eV, the target of training
    forces: Array | None                        # raw, also of fixed atoms   [A, 3]
    tags: Array                                 # 0 below the surface, 1 surface, 2 adsorbate   [A]
    fixed: Array                                # 1 for fixed atoms   [A]
    system: int = 0
    frame: int = 0
    source: int = 0
    labels: str | None = None                   # method of the labels, if known
    candidates: tuple[str, ...] = ()            # names of values in the file that may be energies or forces
    notes: tuple[str, ...] = ()                 # how values of the file were understood, if not by the usual names


def check_labels(frame: Frame, where: str) -> None:
    """Raise DataError, which begins with ``where``, for a frame without energy and forces, or with invalid ones."""
    if frame.energy is None or frame.forces is None:
        names = ", ".join(frame.candidates)
        keys = f" (it has {names}: name them by --energy-key and --forces-key)" if names else ""
        raise DataError(f"{where}: has no {'energy' if frame.energy is None else 'forces'}{keys}; compute it")
    for name, values, shape in (("energy", np.asarray(frame.energy), ()), ("forces", frame.forces, (len(frame.numbers), 3))):
        if values.shape != shape:
            raise DataError(f"{where}: {name} has shape {list(values.shape)}, expected {list(shape)}; compute it")
        if not np.isfinite(values).all():
            raise DataError(f"{where}: {name} holds NaN or infinity; compute it")


def count_graph(frame: Frame, cutoff: float, most: int, where: str) -> tuple[int, int]:
    """Return the edges and triplets of a frame at its stored precision. Raises DataError, which begins with ``where``, for a frame
    without a valid graph or labels."""
    check_labels(frame, where)
    stored = np.asarray(frame.positions).astype(np.float32)
    _, positions, cell, pbc = periodic.check_atoms(frame.numbers, stored, frame.cell, frame.pbc, where)
    neighbours = periodic.neighbour_list(positions, cell, pbc, cutoff, most)
    if not len(neighbours.centre):
        raise DataError(f"{where}: no two atoms are within {cutoff:g} angstrom; raise --cutoff")
    return len(neighbours.centre), periodic.count_triplets(neighbours, len(positions))


def write(path: Path, frames: Sequence[Frame], counts: Sequence[tuple[int, int]], attributes: dict[str, Any]) -> None:
    """Write a file of frames, with the edges and triplets of each."""
    rows = [{**vars(frame), "atoms": len(frame.numbers), "edges": edges, "triplets": triplets}
            for frame, (edges, triplets) in zip(frames, counts)]  # fmt: skip
    store.write_rows(path, FIELDS, rows, attributes)


def read(file: h5py.File, row: int) -> tuple[Frame, tuple[int, int]]:
    """Return a frame of a file, and its edges and triplets."""
    (values,) = store.read_rows(file, FIELDS, row, row + 1)
    _, edges, triplets = (int(values.pop(name)) for name in ("atoms", "edges", "triplets"))
    return Frame(**values), (edges, triplets)


# ---- contents of the files


def header(sources: Sequence[dict[str, str]], label: str, cutoff: float, most: int) -> dict[str, Any]:
    units = {"energy": "eV", "length": "angstrom", "force": "eV/angstrom"}
    return {"cutoff": cutoff, "most": most, "sources": list(sources), "label": label, "units": units}


def _sums(file: h5py.File) -> dict[str, Any]:
    free = file["forces"][...][file["fixed"][...] == 0].astype(np.float64)
    return {
        **{name: moments.compute(file[name][...][:, None]) for name in ("energy", "atoms", "edges", "triplets")},
        "systems": np.unique(file["system"][...]).tolist(),
        "elements": np.bincount(file["numbers"][...], minlength=ELEMENTS).tolist(),
        "free": len(free), "square": float((free**2).sum()), "absolute": float(np.abs(free).sum()),
        "largest": float(np.sqrt((free**2).sum(1).max(initial=0.0))),
    }  # fmt: skip


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    chemical_symbols = import_ase().data.chemical_symbols
    sums = [record["sums"] for record in records]
    parts = {}
    for name in ("energy", "atoms", "edges", "triplets"):
        total = moments.summarize(each[name] for each in sums)
        parts[name] = {key: total[key][0] for key in ("mean", "minimum", "maximum", "deviation")[: 4 if name == "energy" else 3]}
    elements = np.sum([each["elements"] for each in sums], axis=0)
    free, square, absolute = (sum(each[name] for each in sums) for name in ("free", "square", "absolute"))
    forces = {
        "rms": float(np.sqrt(square / (3 * free))) if free else None, "zero_mae": absolute / (3 * free) if free else None,
        "largest": max(each["largest"] for each in sums), "free_atoms": free,
    }  # fmt: skip
    return {
        "frames": sum(record["rows"] for record in records),
        "systems": len({number for each in sums for number in each["systems"]}),
        "atoms": int(elements.sum()),
        "elements": {chemical_symbols[z]: int(elements[z]) for z in np.flatnonzero(elements)},
        "energy": parts["energy"],
        "forces": forces,                       # of free atoms; zero_mae: mean |component|, the error of predicting zero
        **{f"{name}_per_frame": parts[name] for name in ("atoms", "edges", "triplets")},
    }


CONTENTS = store.Contents(FIELDS, _sums, _merge)
