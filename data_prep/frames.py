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
from hpcai.errors import DataError, MissingExtraError
from hpcai.models.dimenet import periodic

Array = NDArray[Any]
ELEMENTS = 119                                  # atomic numbers from 0
PER_FRAME: dict[str, tuple[str, tuple[int, ...]]] = {
    "atoms": ("int32", ()), "edges": ("int32", ()), "triplets": ("int64", ()), "energy": ("float64", ()),
    "cell": ("float64", (3, 3)), "pbc": ("uint8", (3,)), "system": ("int64", ()), "frame": ("int32", ()), "source": ("int16", ()),
}  # fmt: skip
PER_ATOM: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "positions": ("float32", ("atoms", 3)), "forces": ("float32", ("atoms", 3)), "numbers": ("uint8", ("atoms",)),
    "tags": ("uint8", ("atoms",)), "fixed": ("uint8", ("atoms",)),
}  # fmt: skip
RANGES = {"atoms": (1, None), "edges": (1, None), "numbers": (1, ELEMENTS - 1), "tags": (0, 2), "fixed": (0, 1), "pbc": (0, 1)}


def ase() -> Any:
    """The package, with the parts that are used here and by the readers."""
    try:
        import ase
        import ase.build
        import ase.calculators.emt
        import ase.constraints
        import ase.data
        import ase.data.colors
        import ase.db
        import ase.io
        import ase.optimize
        import ase.units
    except ImportError as problem:
        raise MissingExtraError("slabs and trajectories need ASE: pip install 'hpcai-suite[opencatalyst]'") from problem
    return ase


@dataclass
class Frame:
    """One structure with its labels."""

    numbers: Array                              # [A]
    positions: Array                            # [A, 3]
    cell: Array                                 # [3, 3], the rows are its vectors
    pbc: Array                                  # [3]
    energy: float | None                        # of the target
    forces: Array | None                        # raw, of held atoms too   [A, 3]
    tags: Array                                 # 0 below the surface, 1 surface, 2 adsorbate   [A]
    fixed: Array                                # 1 for atoms that are held   [A]
    system: int = 0
    frame: int = 0
    source: int = 0
    labels: str | None = None                   # what computed them, where it is stated


def count(frame: Frame, cutoff: float, most: int, where: str) -> tuple[int, int]:
    """Edges and triplets of a frame as it is stored. Raises DataError, ``where`` in front, for one that cannot be learnt from."""
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
    atoms = np.array([len(frame.numbers) for frame in frames])
    rows = {"atoms": atoms, "edges": [edges for edges, _ in counts], "triplets": [triplets for _, triplets in counts]}
    with store.rows_file(path, len(frames), {**PER_FRAME, **PER_ATOM}, about, {"atoms": int(atoms.sum())}) as file:
        for name in PER_FRAME:
            file[name][...] = rows[name] if name in rows else np.array([getattr(frame, name) for frame in frames])
        for name in PER_ATOM:
            file[name][...] = np.concatenate([getattr(frame, name) for frame in frames])


def read(file: h5py.File, row: int) -> Frame:
    """A frame of a file."""
    end = int(file["atoms"][: row + 1].sum())
    part = slice(end - int(file["atoms"][row]), end)
    one = {name: file[name][row] for name in ("cell", "pbc", "energy", "system", "frame", "source")}
    return Frame(**{name: file[name][part] for name in PER_ATOM}, **one)


# ---- what the files hold


def header(sources: Sequence[dict[str, str]], label: str, cutoff: float, most: int) -> dict[str, Any]:
    units = {"energy": "eV", "length": "angstrom", "force": "eV/angstrom"}
    return {"cutoff": cutoff, "most": most, "sources": list(sources), "label": label, "units": units}


def _sums(file: h5py.File) -> dict[str, Any]:
    free = file["forces"][...][file["fixed"][...] == 0].astype(np.float64)
    sums: dict[str, Any] = {
        name: dict(zip(moments.NAMES, (float(np.asarray(value).item()) for value in moments.measure(file[name][...][:, None]))))
        for name in ("energy", "atoms", "edges", "triplets")
    }
    return {
        **sums,
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
        frames, least, most, mean, square = moments.join(
            [tuple(np.atleast_1d(each[name][key]) if key != "cells" else each[name][key] for key in moments.NAMES) for each in sums]
        )
        parts[name] = {"mean": float(mean[0]), "minimum": float(least[0]), "maximum": float(most[0])}
        if name == "energy":
            parts[name]["deviation"] = float(np.sqrt(square[0] / frames))
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
    """What the energies of training say beforehand: their mean, or a sum over atoms of an energy for each element; and how far that
    is from the energies of each split. Where sources are mixed, each has an offset besides."""
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


FIELDS = store.fields_of({**PER_FRAME, **PER_ATOM}, RANGES)
CONTENTS = store.Contents("atoms", FIELDS, _sums, _merge, parts=("atoms",), across=_across)
