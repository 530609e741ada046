"""Tables of amino acids agree with one another, and with the targets of residues that are built from them."""

from typing import Any

import numpy as np
import pytest

from hpcai.errors import DataError
from hpcai.models.openfold import residues as table
from hpcai.models.openfold.targets import compute_targets
from tests import proteins

RING = ("N", "CG"), ("N", "CD"), ("CA", "CD")  # of proline: closed at few angles only


def test_atom_swap_is_an_involution() -> None:
    assert np.array_equal(np.take_along_axis(table.ATOM14_SWAP, table.ATOM14_SWAP, 1), np.tile(np.arange(14), (21, 1)))
    assert table.ATOM14_EXISTS.sum() == table.ATOM37_EXISTS.sum() == 167 and table.ATOM14_AMBIGUOUS.sum() == 12


def random_residues(count: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return types, positions and masks of residues at random positions, without some atoms."""
    chain = proteins.random_chain(count, seed)
    return chain.aatype, chain.positions, chain.mask


def test_ideal_residues_have_the_lengths_and_angles_of_the_table() -> None:
    """All are within 2 deviations at all torsion angles (histidine's CD2 - NE2 is the farthest), except in the ring of proline."""
    aatype, positions, mask = random_residues(1000)
    assert set(aatype) == set(range(20))
    bounds, proline = table.distance_bounds(2.0, 1.5), table.RESNAMES.index("PRO")
    deviation = bounds.deviation > 0
    for pair in RING:
        i, j = map(table.ATOM14_NAMES[proline].index, pair)
        assert deviation[proline, i, j]
        deviation[proline, [i, j], [j, i]] = False
    index = table.ATOM14_TO_37[aatype]
    atoms, present = np.take_along_axis(positions, index[..., None], 1), np.take_along_axis(mask, index, 1) > 0
    distances = np.linalg.norm(atoms[:, :, None] - atoms[:, None], axis=-1)
    checked = deviation[aatype] & present[:, :, None] & present[:, None]
    outside = checked & ~((bounds.lower[aatype] - 1e-4 <= distances) & (distances <= bounds.upper[aatype] + 1e-4))
    assert checked.any() and not outside.any(), np.argwhere(outside)[:5]


def test_missing_atoms_are_masked_and_never_nan() -> None:
    aatype, positions, mask = random_residues()
    aatype[7], aatype[8] = table.UNKNOWN, table.RESTYPES.index("G")
    mask[7:9, [table.ATOM_ORDER[name] for name in ("N", "CA", "C", "CB")]] = 1
    targets = compute_targets(aatype, np.where(mask[..., None] > 0, positions, np.nan), mask)
    assert all(np.isfinite(array).all() for array in targets.values())
    assert not targets["torsion_angles_sin_cos"][targets["torsion_angles_mask"] == 0].any()
    assert targets["backbone_rigid_mask"][7] and not targets["atom14_gt_exists"][7].any() and not targets["chi_mask"][7].any()
    beta = [positions[7, table.ATOM_ORDER["CB"]], positions[8, table.ATOM_ORDER["CA"]]]
    assert np.array_equal(targets["pseudo_beta"][[7, 8]], beta)
    assert not targets["torsion_angles_mask"][0, :2].any()


@pytest.mark.parametrize(("broken", "message"), [
    ({"aatype": np.full(60, 21)}, "chain: residue types from 21 to 21; expected 0 to 20"),
    ({"mask": np.full((60, 37), 0.5)}, "other than 0 and 1"),
    ({"positions": np.where(np.arange(60 * 111).reshape(60, 37, 3) == 4 * 111 + 3, np.inf, 0), "mask": np.ones((60, 37))},
     "CA of residue 4 has no finite position"),
])  # fmt: skip
def test_invalid_arrays_raise(broken: dict[str, Any], message: str) -> None:
    arrays = dict(zip(("aatype", "positions", "mask"), random_residues())) | broken
    with pytest.raises(DataError, match=message):
        compute_targets(**arrays, where="chain")
