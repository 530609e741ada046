"""Read the arrays of PyTorch Geometric's ``Data`` and ASE's ``Atoms``, under all their usual names and shapes.

B structures, N atoms. Neither package is imported: objects are recognised by their attributes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcai.errors import DataError

Floats = NDArray[np.float64]

# Field -> names in fairchem, Open Catalyst and PyTorch Geometric (the first one is written), and shape.
NAMES: dict[str, tuple[tuple[str, ...], tuple[int | str, ...]]] = {
    "numbers": (("atomic_numbers", "z"), ("N",)), "positions": (("pos",), ("N", 3)), "cell": (("cell",), ("B", 3, 3)),
    "pbc": (("pbc",), ("B", 3)), "fixed": (("fixed",), ("N",)), "energy": (("energy", "y"), ("B",)),
    "forces": (("forces", "force"), ("N", 3)),
}  # fmt: skip
_CHECK_FINITE = {"fixed", "energy", "forces"}  # atoms and cells are checked in ``periodic.check_atoms``
_EXPECTED_TYPES = "PyTorch Geometric's Data with pos and atomic_numbers or z, ASE's Atoms, or a sequence of them"


class Fields(NamedTuple):
    """The arrays of one structure. Shapes and labels are checked, atoms and cell are not yet."""

    where: str
    numbers: Floats  # [N]
    positions: Floats  # [N, 3] angstrom
    cell: Floats  # [3, 3] angstrom, 0 without a cell
    pbc: Floats  # [3]
    fixed: Floats  # [N] 1: fixed
    energy: float | None  # eV
    forces: Floats | None  # [N, 3] eV/angstrom


def read_fields(source: Any, where: str = "atoms", labels: bool = True) -> list[Fields]:
    """Return copies of the structures in ``source``: PyTorch Geometric's ``Data`` or ``Batch``, ASE's ``Atoms``, or a sequence of
    them.

    Without ``pbc`` a structure is periodic if it has a cell. ASE's labels are read if its calculator has already computed them, and
    only with ``labels``. Raises DataError, with ``where`` and the name of a field, if a field is missing, has a wrong shape, or a
    label is not finite.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        return [structure for k, item in enumerate(source) for structure in read_fields(item, f"{where}[{k}]", labels)]
    if hasattr(source, "numbers") and hasattr(source, "get_pbc"):
        fixed = np.zeros(len(source))
        for constraint in source.constraints:
            if type(constraint).__name__ == "FixAtoms":
                fixed[constraint.index] = 1
        values: dict[str, Any] = {"energy": None, "forces": None}
        if labels and (calc := source.calc) is not None:
            values = {name: None if calc.calculation_required(source, [name]) else calc.results[name] for name in values}
        values |= {"numbers": source.numbers, "positions": source.positions, "cell": source.cell.array, "pbc": source.pbc}
        return _split_structures(values | {"fixed": fixed}, [len(source)], where)
    if getattr(source, "pos", None) is None:
        raise DataError(f"{where}: {type(source).__name__} without pos; expected {_EXPECTED_TYPES}")
    values = {}
    for name, (aliases, _) in NAMES.items():
        candidates = [getattr(source, alias, None) for alias in aliases]
        values[name] = next((value for value in candidates if value is not None), None)
    if not labels:
        values |= {"energy": None, "forces": None}
    if values["numbers"] is None:
        raise DataError(f"{where}: no atomic_numbers and no z; expected {_EXPECTED_TYPES}")
    atoms, natoms, batch = len(values["positions"]), getattr(source, "natoms", None), getattr(source, "batch", None)
    if natoms is None and batch is not None:
        batch = _to_array(batch, "batch", where)
        if batch.shape != (atoms,) or (np.diff(batch) < 0).any():
            raise DataError(f"{where}: batch has shape {list(batch.shape)} or descends, expected ascending [{atoms}]")
        natoms = np.bincount(batch.astype(int))
    counts = [atoms] if natoms is None else _to_array(natoms, "natoms", where).reshape(-1).astype(int).tolist()
    if sum(counts) != atoms or min(counts, default=0) < 1:
        raise DataError(f"{where}: natoms is {counts[:5]}, {sum(counts)} in all, expected one or more each, and {atoms} as in pos")
    return _split_structures(values, counts, where)


def _to_array(values: Any, name: str, where: str) -> Floats:
    values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    try:
        return np.array(values, np.float64)
    except (TypeError, ValueError) as problem:
        raise DataError(f"{where}: {name}: {problem}; expected numeric arrays") from problem


def _split_structures(values: dict[str, Any], counts: list[int], where: str) -> list[Fields]:
    """Split the arrays of all structures into one ``Fields`` for each."""
    sizes = {"N": sum(counts), "B": len(counts)}
    arrays = {name: None if values[name] is None else _check_shape(values[name], name, sizes, where) for name in NAMES}
    defaults = {
        "pbc": np.full((len(counts), 3), float(arrays["cell"] is not None)), "cell": np.zeros((len(counts), 3, 3)),
        "fixed": np.zeros(sizes["N"]),
    }  # fmt: skip
    arrays |= {name: array for name, array in defaults.items() if arrays[name] is None}
    structures, first = [], 0
    for k, count in enumerate(counts):
        kwargs: dict[str, Any] = {}
        for name, array in arrays.items():
            kwargs[name] = array if array is None else array[first : first + count] if NAMES[name][1][0] == "N" else array[k]
        kwargs["energy"] = None if kwargs["energy"] is None else float(kwargs["energy"])
        structures.append(Fields(where if len(counts) == 1 else f"{where}: structure {k}", **kwargs))
        first += count
    return structures


def _check_shape(values: Any, name: str, sizes: dict[str, int], where: str) -> Floats:
    aliases, shape = NAMES[name]
    array, expected = _to_array(values, name, where), tuple(size if isinstance(size, int) else sizes[size] for size in shape)
    if shape[0] == "B" and array.size == math.prod(expected):
        array = array.reshape(expected)  # [3, 3] of one cell, [B, 1] of energies, [3 * B] of joined pbc
    if array.shape != expected:
        fault = f"{where}: {' or '.join(aliases)} has shape {list(array.shape)}"
        raise DataError(f"{fault}, expected {list(expected)} for {sizes['B']} structures of {sizes['N']} atoms in all")
    if name in _CHECK_FINITE:
        for index in np.argwhere(~np.isfinite(array))[:1].tolist():
            raise DataError(f"{where}: {' or '.join(aliases)} {index} is {array[tuple(index)]}, expected a finite number")
    return array
