"""Structures with energies and forces, in files of many of them, and what is measured of them.

R frames   A atoms, of all frames one after the other   energies eV   lengths angstrom   forces eV/angstrom
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from data_prep import moments, store
from data_prep.extras import needed
from hpcai.errors import DataError
from hpcai.models.dimenet import periodic

Array = NDArray[Any]
ELEMENTS = 119                                  # atomic numbers from 0
LAYOUTS: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "atoms": ("int32", ()), "edges": ("int32", ()), "triplets": ("int64", ()), "energy": ("float64", ()),
    "cell": ("float64", (3, 3)), "pbc": ("uint8", (3,)), "system": ("int64", ()), "frame": ("int32", ()), "source": ("int16", ()),
    "positions": ("float32", ("atoms", 3)), "forces": ("float32", ("atoms", 3)), "numbers": ("uint8", ("atoms",)),
    "tags": ("uint8", ("atoms",)), "fixed": ("uint8", ("atoms",)),
}  # fmt: skip
RANGES = {"atoms": (1, None), "edges": (1, None), "numbers": (1, ELEMENTS - 1), "tags": (0, 2), "fixed": (0, 1), "pbc": (0, 1)}


def ase() -> Any:
    """The package, with the parts that are used here and by the readers."""
    parts = ("build", "calculators.emt", "constraints", "data", "data.colors", "db", "io", "optimize", "units")
    for part in parts:
        needed(f"ase.{part}", "reading and making of structures", "opencatalyst")
    return needed("ase", "reading and making of structures", "opencatalyst")


@dataclass
class Frame:
    """One structure with its labels."""

    numbers: Array                              # [A]
    positions: Array                            # [A, 3]
    cell: Array                                 # [3, 3], the rows are its vectors
    pbc: Array                                  # [3]
    energy: float | None                        # eV, as it is to be learnt
    forces: Array | None                        # raw, of held atoms too   [A, 3]
    tags: Array                                 # 0 below the surface, 1 surface, 2 adsorbate   [A]
    fixed: Array                                # 1 for atoms that are held   [A]
    system: int = 0
    frame: int = 0
    source: int = 0
    labels: str | None = None                   # what computed them, where it is stated


def count(frame: Frame, cutoff: float, most: int, where: str) -> tuple[int, int]:
    """Edges and triplets of a frame as it is stored. Raises DataError, which begins with ``where``, for others."""
    again = "compute it, or leave such frames out with --skip-bad"
    if frame.energy is None or frame.forces is None:
        raise DataError(f"{where}: has no {'energy' if frame.energy is None else 'forces'}; {again}")
    for name, values, shape in (("energy", np.asarray(frame.energy), ()), ("forces", frame.forces, (len(frame.numbers), 3))):
        if values.shape != shape:
            raise DataError(f"{where}: {name} has shape {list(values.shape)}, expected {list(shape)}; {again}")
        if not np.isfinite(values).all():
            raise DataError(f"{where}: {name} holds NaN or infinity; {again}")
    stored = np.asarray(frame.positions).astype(np.float32)
    _, positions, cell, pbc = periodic.check(frame.numbers, stored, frame.cell, frame.pbc, where)
    found = periodic.neighbours(positions, cell, pbc, cutoff, most)
    if not len(found.centre):
        raise DataError(f"{where}: no two atoms are within {cutoff:g} angstrom; raise --cutoff, or leave such frames out with "
                        "--skip-bad")  # fmt: skip
    return len(found.centre), periodic.count_triplets(found, len(positions))


def write(path: Path, frames: Sequence[Frame], counts: Sequence[tuple[int, int]], about: dict[str, Any]) -> None:
    """A file of frames, with the edges and triplets of each."""
    rows = [{**vars(frame), "atoms": len(frame.numbers), "edges": edges, "triplets": triplets}
            for frame, (edges, triplets) in zip(frames, counts)]  # fmt: skip
    store.write_rows(path, LAYOUTS, rows, about)


def read(file: h5py.File, row: int) -> tuple[Frame, tuple[int, int]]:
    """A frame of a file, and its edges and triplets."""
    (found,) = store.read_rows(file, LAYOUTS, row, row + 1)
    _, edges, triplets = (int(found.pop(name)) for name in ("atoms", "edges", "triplets"))
    return Frame(**found), (edges, triplets)


# ---- what the files hold


def header(sources: Sequence[dict[str, str]], label: str, cutoff: float, most: int) -> dict[str, Any]:
    units = {"energy": "eV", "length": "angstrom", "force": "eV/angstrom"}
    return {"cutoff": cutoff, "most": most, "sources": list(sources), "label": label, "units": units}


def _sums(file: h5py.File) -> dict[str, Any]:
    free = file["forces"][...][file["fixed"][...] == 0].astype(np.float64)
    return {
        **{name: moments.measure(file[name][...][:, None]) for name in ("energy", "atoms", "edges", "triplets")},
        "systems": np.unique(file["system"][...]).tolist(),
        "elements": np.bincount(file["numbers"][...], minlength=ELEMENTS).tolist(),
        "free": len(free), "square": float((free**2).sum()), "absolute": float(np.abs(free).sum()),
        "largest": float(np.sqrt((free**2).sum(1).max(initial=0.0))),
        "sources": np.bincount(file["source"][...]).tolist(),
        "skipped": int(file.attrs.get("skipped", 0)),
    }  # fmt: skip


def _merge(records: Sequence[store.Record]) -> dict[str, Any]:
    chemical_symbols = ase().data.chemical_symbols
    sums = [record["sums"] for record in records]
    parts = {}
    for name in ("energy", "atoms", "edges", "triplets"):
        found = moments.summary(each[name] for each in sums)
        parts[name] = {key: found[key][0] for key in ("mean", "minimum", "maximum", "deviation")[: 4 if name == "energy" else 3]}
    elements = np.sum([each["elements"] for each in sums], axis=0)
    free, square, absolute = (sum(each[name] for each in sums) for name in ("free", "square", "absolute"))
    named = {
        "rms": float(np.sqrt(square / (3 * free))) if free else None, "zero_mae": absolute / (3 * free) if free else None,
        "largest": max(each["largest"] for each in sums), "free_atoms": free,
    }  # fmt: skip
    return {
        "frames": sum(record["rows"] for record in records),
        "systems": len({number for each in sums for number in each["systems"]}),
        "atoms": int(elements.sum()),
        "elements": {chemical_symbols[z]: int(elements[z]) for z in np.flatnonzero(elements)},
        "energy": parts["energy"],
        "forces": named,                        # of free atoms; zero_mae: mean |component|, the error of a model that says zero
        **{f"{name}_per_frame": parts[name] for name in ("atoms", "edges", "triplets")},
        "skipped": sum(each["skipped"] for each in sums),
    }


def _across(out: Path, indexes: dict[str, Any], statistics: dict[str, Any]) -> None:
    """Adds how far the energies of each split are from what training tells without a network: their mean, or a sum over atoms of an
    energy for each element. Where sources are mixed, each has an offset besides."""
    chemical_symbols = ase().data.chemical_symbols

    def parts(split: str) -> Iterator[tuple[Array, Array, Array]]:
        """Atoms of each element [R, ELEMENTS], energy [R], source [R] of each file."""
        for entry in indexes[split]["files"]:
            with h5py.File(out / split / entry["name"], "r") as file:
                atoms, numbers = file["atoms"][...], file["numbers"][...].astype(np.int64)
                frame = np.repeat(np.arange(len(atoms)), atoms)
                counts = np.bincount(frame * ELEMENTS + numbers, minlength=len(atoms) * ELEMENTS).reshape(-1, ELEMENTS)
                yield counts, file["energy"][...], file["source"][...]

    training, names = statistics["splits"]["train"], indexes["train"]["sources"]
    many = len(names) if len(names) > 1 and statistics["settings"].get("mix") else 0
    known = [chemical_symbols.index(symbol) for symbol in training["elements"]]

    def columns(counts: Array, source: Array) -> Array:
        return np.hstack([counts[:, known], np.eye(many)[source][:, :many] if many else counts[:, :0]])

    triangle, seen = np.zeros((0, len(known) + many + 1)), set[int]()
    for counts, energy, source in parts("train"):           # QR in parts: the digits of a direct solution, the memory of one file
        seen |= set(np.unique(source).tolist())
        below = np.column_stack([columns(counts, source), energy])
        triangle = np.asarray(np.linalg.qr(np.vstack([triangle, below]), mode="r"))
    solution = np.linalg.lstsq(triangle[:, :-1], triangle[:, -1], rcond=1e-10)[0]
    mean = training["energy"]["mean"]
    for split, about in statistics["splits"].items():
        off, linear, frames = 0.0, 0.0, about["frames"]
        for counts, energy, source in parts(split):
            off += float(np.abs(energy - mean).sum())
            linear += float(np.abs(energy - columns(counts, source) @ solution).sum())
        about["baselines"] = {"energy_of_mean": off / frames, "energy_of_linear_reference": linear / frames,
                              "forces_of_zero": about["forces"]["zero_mae"]}  # fmt: skip
    statistics["normaliser"] = {"energy_mean": mean, "energy_deviation": training["energy"]["deviation"],
                                "force_rms": training["forces"]["rms"]}  # fmt: skip
    elements = {chemical_symbols[z]: float(value) for z, value in zip(known, solution)}
    residual = training["baselines"]["energy_of_linear_reference"]
    statistics["linear_reference"] = {"energy": elements, "residual_mae": residual}
    if many:
        offsets = [float(offset) if n in seen else None for n, offset in enumerate(solution[len(known) :])]
        statistics["offsets"] = [{**name, "energy": offset} for name, offset in zip(names, offsets)]


CONTENTS = store.Contents("atoms", store.fields_of(LAYOUTS, RANGES), _sums, _merge, parts=("atoms",), across=_across)
