"""Predict a structure with its confidence from a sequence and an alignment, in one call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpcai.arrays import warn
from hpcai.errors import DataError
from hpcai.models.openfold.alignments import Alignment, encode, read_alignments
from hpcai.models.openfold.features import FeatureConfig, collate, featurize
from hpcai.models.openfold.heads import plddt
from hpcai.models.openfold.structures import write_structure


@dataclass(frozen=True, slots=True, repr=False)
class Fold:
    """The predicted structure of a chain of N residues."""

    sequence: str
    aatype: NDArray[np.int64]  # [N]
    positions: NDArray[np.float32]  # [N, 37, 3] angstrom
    mask: NDArray[np.float32]  # [N, 37] 1 for atoms of the residue type
    plddt: NDArray[np.float32]  # [N] expected lDDT-Calpha, 0 to 100

    def write(self, path: str | Path, name: str = "model") -> None:
        """Write a .cif or .pdb file, with the confidence of residues as B-factors."""
        write_structure(Path(path), self.aatype, self.positions, self.mask, self.plddt, name=name)

    def __repr__(self) -> str:
        shown = self.sequence if len(self.sequence) <= 24 else f"{self.sequence[:12]}...{self.sequence[-9:]}"
        return f"Fold({shown}, {len(self.sequence):,} residues, mean pLDDT {self.plddt.mean():.1f})"


def prepare_features(
    model: Any, sequence: str, alignments: Alignment | str | Path | Sequence[str | Path] | None = None,
    templates: Mapping[str, Any] | None = None, *, recycles: int = 3, seed: int = 0, cfg: FeatureConfig | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """The first half of ``OpenFold.fold``: return the features on the device of the model, from the ``alignments`` of a sequence,
    their folder or files, or None, and the ``templates`` of ``featurize``. ``cfg`` sets the numbers of rows; the default is MLPerf
    HPC's evaluation. Each process of a sharded model calls it independently. Raises DataError for a sequence with invalid
    characters, and an alignment of another sequence."""
    aatype, cfg = encode(sequence), cfg or FeatureConfig(crop=None)
    if len(sequence) >= 20 and len(letters := {*sequence.upper()}) > 2 and letters <= {*"ACGTUN"}:
        warn("the sequence has only letters of nucleotides, %s; expected residues; translate it", ", ".join(sorted(letters)))
    if model.cfg.template is None:
        cfg = cfg.model_copy(update={"templates": 0})
    if alignments is None:
        alignments = Alignment(aatype[None], np.zeros((1, len(aatype)), np.int32), ["query"])
    elif not isinstance(alignments, Alignment):
        alignments = read_alignments(alignments, sequence)
    arrays = featurize(sequence, alignments, templates, cfg, seed=seed, passes=recycles + 1, training=False)
    weight = model.to_single.weight
    batch = {name: torch.from_numpy(np.ascontiguousarray(array)).to(weight.device) for name, array in collate([arrays]).items()}
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in batch.items()}


def predict(model: Any, sequence: str, features: Mapping[str, Tensor]) -> Fold:
    """The second half, for all processes of a sharded model together. Raises DataError for a chain that exceeds the memory."""
    weight, was_training = model.to_single.weight, model.training
    with torch.no_grad():
        try:
            *_, atoms, positions = model.eval().run_passes(features)
            logits = model.heads.plddt(atoms.states[-1].to(torch.promote_types(weight.dtype, torch.float32)))
        except RuntimeError as problem:
            if not isinstance(problem, torch.OutOfMemoryError) and "can't allocate memory" not in str(problem):
                raise
            rows = f"{features['msa_feat'].shape[1]} clusters and {features['extra_msa'].shape[1]} extra rows"
            raise DataError(
                f"a chain of {len(sequence)} residues with {rows} does not fit into the memory of {weight.device}: pass a cfg with "
                f"fewer rows, split the chain into domains, or use a device with more memory ({str(problem).splitlines()[0]})"
            ) from problem
        finally:
            model.train(was_training)
    return Fold(
        sequence, encode(sequence).astype(np.int64), positions[0].float().cpu().numpy(),
        features["atom37_atom_exists"][0, ..., -1].float().cpu().numpy(), plddt(logits)[0].float().cpu().numpy(),
    )  # fmt: skip
