"""Feature dictionaries of the data pipelines of AlphaFold and OpenFold (``features.pkl``), of a chain, its alignment and
templates.   N residues, S rows of the alignment, K templates"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcai.errors import DataError
from hpcai.models.openfold.alignments import Alignment
from hpcai.models.openfold.features import TEMPLATES
from hpcai.models.openfold.residues import GAP, RESTYPES, UNKNOWN
from hpcai.models.openfold.structures import Chain

Array = NDArray[Any]

_HHBLITS = "ACDEFGHIKLMNPQRSTVWY"  # the order of letters in raw alignments and templates, before X and the gap
_TO_OURS = np.array([*(RESTYPES.index(letter) for letter in _HHBLITS), UNKNOWN, GAP])
_ALIASES = {"template_all_atom_masks": "template_all_atom_mask", "deletion_matrix": "deletion_matrix_int"}

_RAW = {
    "aatype": "N 21", "residue_index": "N", "between_segment_residues": "N", "msa": "S N", "deletion_matrix_int": "S N",
    "template_aatype": "K N 22", "template_all_atom_positions": "K N 37 3", "template_all_atom_mask": "K N 37",
    "template_sum_probs": "K 1", "all_atom_positions": "N 37 3", "all_atom_mask": "N 37", "resolution": "1",
}  # fmt: skip


class FeaturizeArgs(NamedTuple):
    """The arguments of ``featurize``: ``featurize(*args)``."""

    chain: Chain | str
    alignment: Alignment
    templates: dict[str, Array] | None


def parse_features(raw: Mapping[str, Any], name: str = "features") -> FeaturizeArgs:
    """Parse the raw dictionary of one chain, a sequence without ``all_atom_positions``, and its templates or None.

    Raises DataError for a field that is missing or of a wrong shape, and for several chains in one.
    """
    raw = {_ALIASES[key]: raw[key] for key in raw if key in _ALIASES} | dict(raw)
    required = ["aatype", "msa", "deletion_matrix_int", *(TEMPLATES if "template_aatype" in raw else ())]
    required += ["all_atom_mask"] if "all_atom_positions" in raw else []
    arrays = {key: np.asarray(value) for key, value in raw.items() if key in _RAW}
    if (sum_probs := arrays.get("template_sum_probs")) is not None and sum_probs.ndim == 1:
        arrays["template_sum_probs"] = sum_probs[:, None]  # AlphaFold omits the last dim
    _check_shapes(arrays, required, name)
    aatype, residues = arrays["aatype"].argmax(-1), arrays.get("residue_index", np.zeros(0))
    if (np.diff(residues) != 1).any() or arrays.get("between_segment_residues", residues[:0]).any():
        raise DataError(f"{name}: residue_index jumps or between_segment_residues is not 0; expected one chain without breaks")
    msa = _reorder_letters(arrays["msa"], f"{name}: msa")
    templates = {key: arrays[key] for key in TEMPLATES} if "template_aatype" in arrays else None
    if templates is not None:
        templates["template_aatype"] = _reorder_letters(templates["template_aatype"].argmax(-1), f"{name}: template_aatype")
    alignment = Alignment(msa.astype(np.int8), arrays["deletion_matrix_int"].astype(np.int32), [])
    sequence = "".join((RESTYPES + "X")[kind] for kind in aatype)
    if "all_atom_positions" not in arrays:
        return FeaturizeArgs(sequence, alignment, templates)
    domain_name = np.asarray(raw.get("domain_name", name)).reshape(-1)[0]
    mask, resolution = arrays["all_atom_mask"], float(arrays.get("resolution", np.zeros(1))[0])
    text = domain_name.decode() if isinstance(domain_name, bytes) else str(domain_name)
    chain = Chain(text, sequence, aatype, arrays["all_atom_positions"], mask, np.zeros_like(mask), resolution or None, None, "")
    return FeaturizeArgs(chain, alignment, templates)


def _reorder_letters(letters: Array, where: str) -> Array:
    low, high = letters.min(initial=0), letters.max(initial=0)
    if letters.dtype.kind not in "iu" or low < 0 or high > GAP:
        raise DataError(f"{where}: {letters.dtype} from {low} to {high}, expected integers from 0 to {GAP}")
    return _TO_OURS[letters]


def _check_shapes(arrays: Mapping[str, Array], required: list[str], name: str) -> None:
    """Raise DataError if a required field is missing, or sizes of one letter differ from those of the first field with it."""
    missing = [key for key in required if key not in arrays]
    if missing:
        raise DataError(f"{name}: no {', '.join(missing)}; expected {', '.join(required)}, the names of AlphaFold and OpenFold")
    sizes: dict[str, tuple[int, str]] = {}
    for key in (*required, *arrays):
        shape, dims = arrays[key].shape, _RAW[key].split()
        if len(shape) == len(dims):
            for letter, size in zip(dims, shape):
                sizes.setdefault(letter, (size, key))
        expected = [int(dim) if dim.isdigit() else sizes[dim][0] if dim in sizes else dim for dim in dims]
        if list(shape) != expected:
            known_sizes = ", ".join(f"{dim} {sizes[dim][0]} of {sizes[dim][1]}" for dim in dims if dim in sizes)
            raise DataError(f"{name}: {key} has shape {list(shape)}, expected [{', '.join(dims)}]: {known_sizes}")
