"""Feature dictionaries of AlphaFold and of the OpenFold package: what their data pipelines make of files (``features.pkl``) of a
chain, its alignment and templates.   N residues, S rows of the alignment, K templates
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcai.errors import DataError
from hpcai.models.openfold.alignments import Alignment
from hpcai.models.openfold.features import TEMPLATES
from hpcai.models.openfold.residues import GAP, LETTERS, UNKNOWN
from hpcai.models.openfold.structures import Chain

Array = NDArray[Any]

_HHBLITS = "ACDEFGHIKLMNPQRSTVWY"  # the order of letters in raw alignments and templates, before X and the gap
_TO_OURS = np.array([*(LETTERS.index(letter) for letter in _HHBLITS), UNKNOWN, GAP])
_ALIASES = {"template_all_atom_masks": "template_all_atom_mask", "deletion_matrix": "deletion_matrix_int"}

_RAW = {
    "aatype": "N 21", "residue_index": "N", "between_segment_residues": "N", "msa": "S N", "deletion_matrix_int": "S N",
    "template_aatype": "K N 22", "template_all_atom_positions": "K N 37 3", "template_all_atom_mask": "K N 37",
    "template_sum_probs": "K 1", "all_atom_positions": "N 37 3", "all_atom_mask": "N 37", "resolution": "1",
}  # fmt: skip


class Parts(NamedTuple):
    """The arguments of ``featurize``: ``featurize(*parts)``."""

    chain: Chain | str
    alignment: Alignment
    templates: dict[str, Array] | None


def parts_of(raw: Mapping[str, Any], name: str = "features") -> Parts:
    """The parts of a raw dictionary of one chain. Without ``all_atom_positions`` the chain is its sequence; without templates there
    are none. Raises DataError for a field that is missing or of another shape, and for several chains in one."""
    raw = {_ALIASES[key]: raw[key] for key in raw if key in _ALIASES} | dict(raw)
    needed = ["aatype", "msa", "deletion_matrix_int", *(TEMPLATES if "template_aatype" in raw else ())]
    needed += ["all_atom_mask"] if "all_atom_positions" in raw else []
    given = {key: np.asarray(value) for key, value in raw.items() if key in _RAW}
    if (sums := given.get("template_sum_probs")) is not None and sums.ndim == 1:
        given["template_sum_probs"] = sums[:, None]  # AlphaFold has them without the last dim
    _fit(given, needed, name)
    aatype, residues = given["aatype"].argmax(-1), given.get("residue_index", np.zeros(0))
    if (np.diff(residues) != 1).any() or given.get("between_segment_residues", residues[:0]).any():
        raise DataError(f"{name}: residue_index jumps or between_segment_residues is not 0; expected one chain without breaks")
    msa = _letters(given["msa"], f"{name}: msa")
    templates = {key: given[key] for key in TEMPLATES} if "template_aatype" in given else None
    if templates is not None:
        templates["template_aatype"] = _letters(templates["template_aatype"].argmax(-1), f"{name}: template_aatype")
    alignment = Alignment(msa.astype(np.int8), given["deletion_matrix_int"].astype(np.int32), [])
    return Parts(_chain(raw, given, aatype, name), alignment, templates)


def _chain(raw: Mapping[str, Any], given: Mapping[str, Array], aatype: Array, name: str) -> Chain | str:
    sequence = "".join((LETTERS + "X")[kind] for kind in aatype)
    if "all_atom_positions" not in given:
        return sequence
    told = np.asarray(raw.get("domain_name", name)).reshape(-1)[0]
    mask, resolution = given["all_atom_mask"], float(given.get("resolution", np.zeros(1))[0])
    named = told.decode() if isinstance(told, bytes) else str(told)
    return Chain(named, sequence, aatype, given["all_atom_positions"], mask, np.zeros_like(mask), resolution or None, None, "")


def _letters(theirs: Array, where: str) -> Array:
    low, high = theirs.min(initial=0), theirs.max(initial=0)
    if theirs.dtype.kind not in "iu" or low < 0 or high > GAP:
        raise DataError(f"{where}: {theirs.dtype} from {low} to {high}, expected integers from 0 to {GAP}")
    return _TO_OURS[theirs]


def _fit(given: Mapping[str, Array], needed: list[str], name: str) -> None:
    """Raises DataError unless every field that is needed is there and a letter stands for one size in all: that of the first field
    which has it."""
    missing = [key for key in needed if key not in given]
    if missing:
        raise DataError(f"{name}: no {', '.join(missing)}; expected {', '.join(needed)}, as AlphaFold and OpenFold name them")
    sizes: dict[str, tuple[int, str]] = {}
    for key in (*needed, *given):
        found, dims = given[key].shape, _RAW[key].split()
        if len(found) == len(dims):
            for letter, size in zip(dims, found):
                sizes.setdefault(letter, (size, key))
        wanted = [int(each) if each.isdigit() else sizes[each][0] if each in sizes else each for each in dims]
        if list(found) != wanted:
            from_others = ", ".join(f"{each} {sizes[each][0]} of {sizes[each][1]}" for each in dims if each in sizes)
            raise DataError(f"{name}: {key} has shape {list(found)}, expected [{', '.join(dims)}]: {from_others}")
