"""Violations: bonds, angles and clashes of atoms at impossible positions."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hpcai.models.openfold import residues, violations
from hpcai.models.openfold.violations import bond_violations, clash_overlap


def atoms(length: int, seed: int = 0, spread: float = 4.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return residues close to one another, with a gap in the chain before residue 4."""
    rng = np.random.default_rng(seed)
    aatype = torch.from_numpy(rng.integers(0, 20, (2, length)))
    aatype[:, :2] = residues.RESTYPES.index("C")  # two cysteines may be bridged
    positions = torch.from_numpy(rng.normal(0, spread, (2, length, 14, 3)))
    index = torch.arange(length).repeat(2, 1)
    index[:, 4:] += 3
    return positions, torch.tensor(residues.ATOM14_EXISTS, dtype=torch.float64)[aatype], aatype, index


def test_clashes_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    positions, *rest = atoms(6)
    results = []
    for size in (1, 1 << 24):
        monkeypatch.setattr(violations, "_CPU", size)
        x = positions.clone().requires_grad_()
        out = clash_overlap(x, *rest)
        results.append((out, torch.autograd.grad((out * torch.tensor([1.0, -2.0])).sum(), [x])[0]))
    assert results[1][0].min() > 1
    for chunked, full in zip(*results):
        torch.testing.assert_close(chunked, full, rtol=1e-6, atol=1e-6)


def test_a_stretched_bond_is_a_violation_and_a_gap_is_none() -> None:
    """N, CA and C along a line of ideal bonds; angles are wrong all over, lengths where they are stretched."""
    count = 6
    positions = torch.zeros(1, count, 14, 3, dtype=torch.float64)
    step = torch.tensor([0.0, 1.459, 2.984])
    positions[0, :, :3, 0] = step + torch.arange(count)[:, None] * (2.984 + 1.329)
    exists = torch.zeros(1, count, 14, dtype=torch.float64)
    exists[..., :3] = 1
    aatype, index = torch.zeros(1, count, dtype=torch.int64), torch.arange(count)[None]
    assert bond_violations(positions, exists, aatype, index).lengths == 0
    stretched = positions.clone()
    stretched[0, 3:, :, 0] += 1.0
    result = bond_violations(stretched, exists, aatype, index)
    assert result.lengths.item() == pytest.approx((1.0 - 12 * 0.014) / 5, rel=1e-3)
    apart = index.clone()
    apart[0, 3:] += 5
    assert bond_violations(stretched, exists, aatype, apart).lengths == 0
    aatype[0, 3] = residues.RESTYPES.index("P")
    longer = bond_violations(stretched, exists, aatype, index)
    assert longer.lengths.item() == pytest.approx((1.0 - 0.012 - 12 * 0.016) / 5, rel=1e-3)


@pytest.mark.parametrize("names, clash", [(("SG", "SG"), False), (("CB", "SG"), True), (("C", "N"), False), (("CA", "N"), True)])
def test_bridges_and_bonds_are_no_clashes(names: tuple[str, str], clash: bool) -> None:
    """Place one atom each of two adjacent cysteines 1.3 angstrom apart."""
    aatype = torch.full((1, 2), residues.RESTYPES.index("C"))
    exists, positions = torch.zeros(1, 2, 14, dtype=torch.float64), torch.zeros(1, 2, 14, 3, dtype=torch.float64)
    for residue, name in enumerate(names):
        atom = residues.ATOM14_NAMES[aatype[0, 0]].index(name)
        exists[0, residue, atom], positions[0, residue, atom, 0] = 1, 1.3 * residue
    assert bool(clash_overlap(positions, exists, aatype, torch.arange(2)[None]) > 0) == clash
