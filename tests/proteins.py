"""Proteins for tests: chains and features that are nowhere, and real ones from tests/data/proteins."""

from datetime import date, timedelta

import numpy as np
import torch
from torch import Tensor

from hpcai.models.openfold import residues
from hpcai.models.openfold.alignments import Alignment
from hpcai.models.openfold.evoformer import Masks
from hpcai.models.openfold.features import TEMPLATES, FeatureConfig, collate, featurize
from hpcai.models.openfold.geometry import Frames, quat_to_rot, torsion_angles_to_frames
from hpcai.models.openfold.structures import Chain
from tests.stored import arrays

SMALL = FeatureConfig(crop=None, clusters=4, extra=6, templates=2, recycles=1)


def chain(length: int, seed: int = 0) -> Chain:
    """A chain with ideal residues anywhere in a box, some atoms of which nobody has seen."""
    draw = np.random.default_rng(seed)
    aatype = draw.integers(0, 20, length)
    torch.manual_seed(seed)
    quaternion = torch.nn.functional.normalize(torch.randn(length, 4, dtype=torch.float64), dim=-1)
    backbone = Frames(quat_to_rot(quaternion), torch.rand(length, 3, dtype=torch.float64) * 20)
    angles = torch.nn.functional.normalize(torch.randn(length, 7, 2, dtype=torch.float64), dim=-1)
    groups = torsion_angles_to_frames(backbone, angles, torch.tensor(residues.GROUP_FRAME, dtype=torch.float64)[aatype])
    of = torch.tensor(residues.ATOM14_GROUP)[aatype]
    place = torch.arange(length)[:, None]
    atoms = groups.at(place, of).apply(torch.tensor(residues.ATOM14_POSITION, dtype=torch.float64)[aatype]).numpy()
    mask = residues.ATOM37_EXISTS[aatype] * (draw.random((length, 37)) > 0.05)
    positions = np.take_along_axis(atoms, residues.ATOM37_TO_14[aatype][..., None], 1) * mask[..., None]
    sequence = "".join(residues.RESTYPES[i] for i in aatype)
    kind = np.float32
    return Chain(f"made_{seed}", sequence, aatype, positions.astype(kind), mask.astype(kind), mask.astype(kind), 1.5, None, "none")


def alignment(of: Chain, rows: int, seed: int = 0) -> Alignment:
    draw = np.random.default_rng([seed, 1])
    msa = np.where(draw.random((rows, len(of.aatype))) < 0.3, draw.integers(0, 22, (rows, len(of.aatype))), of.aatype)
    msa[0] = of.aatype
    deletions = draw.poisson(0.1, msa.shape)
    deletions[0] = 0
    return Alignment(msa.astype(np.int8), deletions.astype(np.int32), [f"row {i}" for i in range(rows)])


def batch(lengths: list[int], cfg: FeatureConfig = SMALL, dtype: torch.dtype = torch.float64, passes: int = 2) -> dict[str, Tensor]:
    found = []
    for seed, length in enumerate(lengths):
        made, other = chain(length, seed), chain(length, seed + 100)
        arrays = other.aatype, other.positions, other.mask, np.ones(1, np.float32)
        templates = {name: array[None] for name, array in zip(TEMPLATES, arrays)}
        found.append(featurize(made, alignment(made, 9, seed), templates, cfg, index=seed, passes=passes))
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in collate(found).items()}
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def masks(msa: Tensor, pair: Tensor) -> Masks:
    """Those of a block of one process.   [B, S, R], [B, R, R]"""
    return Masks(msa, msa, pair, msa.transpose(1, 2) @ msa, (msa.shape[1], msa.shape[2]))


def real(name: str) -> Chain:
    """A chain of the Protein Data Bank."""
    stored = arrays(f"proteins/{name}")
    sequence, mask = stored["sequence"].tobytes().decode(), stored["mask"]
    positions, bfactors = np.zeros((*mask.shape, 3), np.float32), np.zeros(mask.shape, np.float32)
    positions[mask], bfactors[mask] = stored["positions"], stored["bfactors"]
    release = date(1970, 1, 1) + timedelta(int(stored["release"]))
    aatype = np.array([residues.RESTYPES.index(letter) for letter in sequence])
    return Chain(name, sequence, aatype, positions, mask.astype(np.float32), bfactors, float(stored["resolution"]), release,
                 str(stored["method"]))  # fmt: skip


def real_alignment(name: str) -> Alignment:
    """The rows that were found for a chain. Their names are not kept."""
    stored = arrays(f"proteins/{name}")
    return Alignment(stored["msa"], stored["deletions"].astype(np.int32), [""] * len(stored["msa"]))
