"""Random chains, alignments and features, and chains of the Protein Data Bank from tests/data/proteins."""

from datetime import date, timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpcai.models.openfold import OpenFold, OpenFoldConfig, residues
from hpcai.models.openfold.alignments import Alignment
from hpcai.models.openfold.features import TEMPLATES, FeatureConfig, collate, featurize
from hpcai.models.openfold.geometry import Frames, quat_to_rot, torsion_angles_to_frames
from hpcai.models.openfold.layers import Dropout
from hpcai.models.openfold.structures import Chain
from tests.reference_data import load_arrays

SMALL = FeatureConfig(crop=None, clusters=4, extra=6, templates=2, recycles=1)


def random_chain(length: int, seed: int = 0) -> Chain:
    """Return a chain of ideal residues at random positions in a box; 5 % of the atoms are unresolved."""
    rng = np.random.default_rng(seed)
    aatype = rng.integers(0, 20, length)
    torch.manual_seed(seed)
    quaternion = torch.nn.functional.normalize(torch.randn(length, 4, dtype=torch.float64), dim=-1)
    backbone = Frames(quat_to_rot(quaternion), torch.rand(length, 3, dtype=torch.float64) * 20)
    angles = torch.nn.functional.normalize(torch.randn(length, 7, 2, dtype=torch.float64), dim=-1)
    groups = torsion_angles_to_frames(backbone, angles, torch.tensor(residues.GROUP_FRAME, dtype=torch.float64)[aatype])
    group = torch.tensor(residues.ATOM14_GROUP)[aatype]
    residue = torch.arange(length)[:, None]
    atoms = groups.at(residue, group).apply(torch.tensor(residues.ATOM14_POSITION, dtype=torch.float64)[aatype]).numpy()
    mask = residues.ATOM37_EXISTS[aatype] * (rng.random((length, 37)) > 0.05)
    positions = np.take_along_axis(atoms, residues.ATOM37_TO_14[aatype][..., None], 1) * mask[..., None]
    sequence = "".join(residues.RESTYPES[i] for i in aatype)
    positions, mask = positions.astype(np.float32), mask.astype(np.float32)
    return Chain(f"made_{seed}", sequence, aatype, positions, mask, mask.copy(), 1.5, None, "none")


def random_alignment(chain: Chain, rows: int, seed: int = 0) -> Alignment:
    rng = np.random.default_rng([seed, 1])
    msa = np.where(rng.random((rows, len(chain.aatype))) < 0.3, rng.integers(0, 22, (rows, len(chain.aatype))), chain.aatype)
    msa[0] = chain.aatype
    deletions = rng.poisson(0.1, msa.shape)
    deletions[0] = 0
    return Alignment(msa.astype(np.int8), deletions.astype(np.int32), [f"row {i}" for i in range(rows)])


def random_batch(
    lengths: list[int], cfg: FeatureConfig = SMALL, dtype: torch.dtype = torch.float64, passes: int = 2
) -> dict[str, Tensor]:
    samples = []
    for seed, length in enumerate(lengths):
        chain, other = random_chain(length, seed), random_chain(length, seed + 100)
        arrays = other.aatype, other.positions, other.mask, np.ones(1, np.float32)
        templates = {name: array[None] for name, array in zip(TEMPLATES, arrays)}
        samples.append(featurize(chain, random_alignment(chain, 9, seed), templates, cfg, index=seed, passes=passes))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in collate(samples).items()}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def random_network(dtype: torch.dtype = torch.float64, **changes: Any) -> OpenFold:
    """Return a tiny network with random last layers of branches, which a new network initializes to 0."""
    torch.manual_seed(0)
    model = OpenFold(OpenFoldConfig.preset("tiny", **changes))
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def without_dropout(model: OpenFold) -> OpenFold:
    for layer in model.modules():
        if isinstance(layer, Dropout):
            layer.rate = 0.0
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


def pdb_chain(name: str) -> Chain:
    """Return a chain of the Protein Data Bank."""
    stored = load_arrays(f"proteins/{name}")
    sequence, mask = stored["sequence"].tobytes().decode(), stored["mask"]
    positions, bfactors = np.zeros((*mask.shape, 3), np.float32), np.zeros(mask.shape, np.float32)
    positions[mask], bfactors[mask] = stored["positions"], stored["bfactors"]
    release = date(1970, 1, 1) + timedelta(int(stored["release"]))
    aatype = np.array([residues.RESTYPES.index(letter) for letter in sequence])
    return Chain(name, sequence, aatype, positions, mask.astype(np.float32), bfactors, float(stored["resolution"]), release,
                 str(stored["method"]))  # fmt: skip


def pdb_alignment(name: str) -> Alignment:
    """Return the alignment of a chain; names of rows are not stored."""
    stored = load_arrays(f"proteins/{name}")
    return Alignment(stored["msa"], stored["deletions"].astype(np.int32), [""] * len(stored["msa"]))
