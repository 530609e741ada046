"""Feature dictionaries of AlphaFold and of the OpenFold package, to and from those of this package.

There are two kinds. Raw ones are what their data pipelines make of files (``features.pkl``): a chain, its alignment, templates.
Processed ones are what their networks read, which ours reads under the same names.
N residues, S rows of the alignment, K templates, C clusters, E extra rows, T templates of a batch, B batch, P passes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcai.errors import DataError
from hpcai.models.openfold.alignments import Alignment, encode
from hpcai.models.openfold.features import TEMPLATES
from hpcai.models.openfold.residues import GAP, LETTERS, UNKNOWN
from hpcai.models.openfold.structures import Chain

Array = NDArray[Any]

_HHBLITS = "ACDEFGHIKLMNPQRSTVWY"  # the order of letters in raw alignments and templates, before X and the gap
_TO_OURS = np.array([*(LETTERS.index(letter) for letter in _HHBLITS), UNKNOWN, GAP])
_TARGET = 22  # numbers of target_feat
_ALIASES = {"template_all_atom_masks": "template_all_atom_mask", "deletion_matrix": "deletion_matrix_int"}

_RAW = {
    "aatype": "N 21", "residue_index": "N", "between_segment_residues": "N", "msa": "S N", "deletion_matrix_int": "S N",
    "template_aatype": "K N 22", "template_all_atom_positions": "K N 37 3", "template_all_atom_mask": "K N 37",
    "template_sum_probs": "K 1", "all_atom_positions": "N 37 3", "all_atom_mask": "N 37", "resolution": "1",
}  # fmt: skip


def _shapes(table: str) -> dict[str, str]:
    """Names by the shape before them."""
    lines = (line.split(":") for line in table.strip().splitlines())
    return {name: shape.strip() for shape, names in lines for name in names.split()}


_READ = _shapes("""
    N:          aatype residue_index seq_mask
    N 22:       target_feat
    C N 49:     msa_feat
    C N:        msa_mask
    E N:        extra_msa extra_has_deletion extra_deletion_value extra_msa_mask
    N 37:       residx_atom37_to_atom14 atom37_atom_exists
""")  # every network reads these
_READ_OF_TEMPLATES = _shapes("""
    T:          template_mask
    T N:        template_aatype template_pseudo_beta_mask
    T N 3:      template_pseudo_beta
    T N 37:     template_all_atom_mask
    T N 7 2:    template_torsion_angles_sin_cos template_alt_torsion_angles_sin_cos
    T N 7:      template_torsion_angles_mask
""")
_READ_BY_LOSSES = _shapes("""
    C N:        true_msa bert_mask
    C:          msa_row_mask
    E:          extra_msa_row_mask
    T 1:        template_sum_probs
    T N 37 3:   template_all_atom_positions
    N 37 3:     all_atom_positions
    N 37:       all_atom_mask
    N 14 3:     atom14_gt_positions atom14_alt_gt_positions
    N 14:       atom14_gt_exists atom14_alt_gt_exists atom14_atom_exists atom14_atom_is_ambiguous residx_atom14_to_atom37
    N 8 4 4:    rigidgroups_gt_frames rigidgroups_alt_gt_frames
    N 8:        rigidgroups_gt_exists rigidgroups_group_exists rigidgroups_group_is_ambiguous
    N 4 4:      backbone_rigid_tensor
    N 4 2:      chi_angles_sin_cos
    N 4:        chi_mask
    N 3:        pseudo_beta
    N:          pseudo_beta_mask backbone_rigid_mask
    :           seq_length resolution is_distillation use_clamped_fape
""")
_PROCESSED = _READ | _READ_OF_TEMPLATES | _READ_BY_LOSSES
_WHOLE = {"aatype", "residue_index", "extra_msa", "true_msa", "template_aatype", "seq_length"}  # int64, as is residx_*


class Parts(NamedTuple):
    """The arguments of ``featurize``: ``featurize(*parts)``."""

    chain: Chain | str
    alignment: Alignment
    templates: dict[str, Array] | None


# ---- raw


def parts_of(raw: Mapping[str, Any], name: str = "features") -> Parts:
    """The parts of a raw dictionary of one chain. Without ``all_atom_positions`` the chain is its sequence; without templates there
    are none. Raises DataError for a field that is missing or of another shape, and for several chains in one."""
    raw = _renamed(raw)
    needed = ["aatype", "msa", "deletion_matrix_int", *(TEMPLATES if "template_aatype" in raw else ())]
    needed += ["all_atom_mask"] if "all_atom_positions" in raw else []
    given = {key: np.asarray(value) for key, value in raw.items() if key in _RAW}
    if (sums := given.get("template_sum_probs")) is not None and sums.ndim == 1:
        given["template_sum_probs"] = sums[:, None]  # AlphaFold has them without the last dim
    _fit(given, needed, _RAW, name)
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


def raw_of(chain: Chain | str, alignment: Alignment, templates: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """The raw dictionary of the parts, as both packages read it."""
    sequence, named, aatype = (chain, "", encode(chain)) if isinstance(chain, str) else (chain.sequence, chain.name, chain.aatype)
    length, back = len(aatype), np.argsort(_TO_OURS)
    found: dict[str, Array] = {
        "aatype": np.eye(UNKNOWN + 1, dtype=np.float32)[aatype], "residue_index": np.arange(length, dtype=np.int32),
        "between_segment_residues": np.zeros(length, np.int32), "seq_length": np.full(length, length, np.int32),
        "num_alignments": np.full(length, len(alignment), np.int32), "msa": back[alignment.msa].astype(np.int32),
        "deletion_matrix_int": alignment.deletions.astype(np.int32),
        "sequence": np.array([sequence.encode()], object), "domain_name": np.array([named.encode()], object),
    }  # fmt: skip
    if templates is not None:
        found |= {key: np.asarray(templates[key], np.float32) for key in TEMPLATES[1:]}
        found["template_aatype"] = np.eye(GAP + 1, dtype=np.float32)[back[templates["template_aatype"]]]
        found["template_all_atom_masks"] = found["template_all_atom_mask"]  # AlphaFold's name; OpenFold's has no s
    if isinstance(chain, Chain):
        found |= {
            "all_atom_positions": chain.positions, "all_atom_mask": chain.mask, "is_distillation": np.zeros((), np.float32),
            "resolution": np.array([chain.resolution or 0], np.float32),
        }  # fmt: skip
    return found


def _letters(theirs: Array, where: str) -> Array:
    low, high = theirs.min(initial=0), theirs.max(initial=0)
    if theirs.dtype.kind not in "iu" or low < 0 or high > GAP:
        raise DataError(f"{where}: {theirs.dtype} from {low} to {high}, expected integers from 0 to {GAP}")
    return _TO_OURS[theirs]


# ---- processed


def batch_of(features: Mapping[str, Any], name: str = "features") -> dict[str, Tensor]:
    """A processed dictionary, of arrays or tensors, as the network and its losses read it: with a batch dim in front and passes at
    the end, either of which it may lack. (AlphaFold's JAX code has passes in front: move them.) Other fields are left out.
    Raises DataError for a field that is missing, of another shape, or no numbers."""
    try:
        given = {key: torch.as_tensor(value) for key, value in _renamed(features).items() if key in _PROCESSED}
    except (TypeError, ValueError, RuntimeError) as problem:
        raise DataError(f"{name}: {problem}; expected arrays or tensors of numbers") from problem
    needed = [*_READ, *(_READ_OF_TEMPLATES if given.keys() & _READ_OF_TEMPLATES.keys() else ())]
    target = given["target_feat"].shape if "target_feat" in given else ()
    passes = target[-2:-1] == (_TARGET,)
    if len(target) - passes == len(_READ["target_feat"].split()):
        given = {key: value[None] for key, value in given.items()}
    if not passes:
        given = {key: value[..., None] for key, value in given.items()}
    _fit(given, needed, {key: f"B {dims} P" for key, dims in _PROCESSED.items()}, name)
    whole = {key for key in given if key in _WHOLE or key.startswith("residx_")}
    return {key: x.long() if key in whole else x if x.is_floating_point() else x.float() for key, x in given.items()}


def processed_of(batch: Mapping[str, Any]) -> dict[str, Array]:
    """Arrays as the OpenFold package reads them, from what ``featurize`` or ``collate`` made or from a batch of tensors; and with
    them ``no_recycling_iters``, how often it recycles. Its inference has no batch dim, as ``featurize`` has none."""
    found = {key: value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value) for key, value in batch.items()}
    recycles = found["aatype"].shape[-1] - 1
    return found | {"no_recycling_iters": np.full(found["seq_length"].shape, recycles, np.float32)}


def _renamed(features: Mapping[str, Any]) -> dict[str, Any]:
    return {_ALIASES[key]: features[key] for key in features if key in _ALIASES} | dict(features)


def _fit(given: Mapping[str, Any], needed: list[str], shapes: Mapping[str, str], name: str) -> None:
    """Raises DataError unless every field that is needed is there and a letter stands for one size in all: that of the first field
    which has it."""
    missing = [key for key in needed if key not in given]
    if missing:
        raise DataError(f"{name}: no {', '.join(missing)}; expected {', '.join(needed)}, as AlphaFold and OpenFold name them")
    sizes: dict[str, tuple[int, str]] = {}
    for key in (*needed, *given):
        found, dims = tuple(given[key].shape), shapes[key].split()
        if len(found) == len(dims):
            for letter, size in zip(dims, found):
                sizes.setdefault(letter, (size, key))
        wanted = [int(each) if each.isdigit() else sizes[each][0] if each in sizes else each for each in dims]
        if list(found) != wanted:
            from_others = ", ".join(f"{each} {sizes[each][0]} of {sizes[each][1]}" for each in dims if each in sizes)
            raise DataError(f"{name}: {key} has shape {list(found)}, expected [{', '.join(dims)}]: {from_others}")
