"""Atoms, frames and torsion angles against those of the reference implementation (tests/data/openfold)."""

import numpy as np
import pytest

from hpcai.models.openfold import residues
from hpcai.models.openfold.truth import pseudo_beta, torsions, truth_of
from tests.stored import arrays

# Where an atom is missing the reference fills torsion angles with noise, of rounding, scaled to unit length; here they are 0.
DEFINED = {
    "torsion_angles_sin_cos": "torsion_angles_mask",
    "alt_torsion_angles_sin_cos": "torsion_angles_mask",
    "chi_angles_sin_cos": "chi_mask",
}


@pytest.mark.parametrize("chain", ["5zyh_A", "2q2k_A"])
def test_the_truth_of_a_chain(chain: str) -> None:
    """All else everywhere, frames of missing groups too. The reference computes in float32: its angles are off by up to 7e-6."""
    stored = arrays(f"openfold/features/{chain}")
    wanted = {name.removeprefix("det."): array for name, array in stored.items() if name.startswith("det.")}
    found = truth_of(wanted["aatype"], wanted["all_atom_positions"], wanted["all_atom_mask"], chain)
    assert len(found) == 23
    for name, array in found.items():
        assert array.shape == wanted[name].shape and array.dtype.kind == wanted[name].dtype.kind, name
        off = np.abs(array - wanted[name])
        if name in DEFINED:
            known = wanted[DEFINED[name]] > 0
            assert off[known].max() < 1e-5 and not array[~known].any(), name
        else:
            assert off.max() < 1e-6, name
    assert 0 < found["backbone_rigid_mask"].mean() < 1 and found["torsion_angles_mask"][:, 3:].any(0).all()


def test_atoms_of_a_chain_lie_in_their_groups_where_the_table_has_them() -> None:
    """A branch on the wrong side would be 2 angstrom away; the largest bend is 0.4."""
    stored = arrays("openfold/features/5zyh_A")
    aatype, positions, mask = (stored[f"det.{name}"] for name in ("aatype", "all_atom_positions", "all_atom_mask"))
    found = truth_of(aatype, positions, mask)
    group = residues.ATOM14_GROUP[aatype]
    frames = np.take_along_axis(found["rigidgroups_gt_frames"], group[..., None, None], 1).astype(float)
    exists = found["atom14_gt_exists"] * np.take_along_axis(found["rigidgroups_gt_exists"], group, 1) > 0
    at = np.einsum("nalk,nal->nak", frames[..., :3, :3], found["atom14_gt_positions"] - frames[..., :3, 3])
    off = np.linalg.norm(at - residues.ATOM14_POSITION[aatype], axis=-1)[exists]
    assert set(aatype[exists.any(1)]) == set(range(20))
    assert np.median(off) < 0.05 and off.max() < 0.5


def test_the_templates_of_the_small_batch() -> None:
    """Both passes at once. Residues that a template lacks are gaps."""
    stored = arrays("openfold/network/batch")
    batch = {name.removeprefix("template_"): np.moveaxis(array, -1, 0) for name, array in stored.items() if "template" in name}
    given = batch["aatype"], batch["all_atom_positions"], batch["all_atom_mask"]
    assert given[0].max() == 21
    sin_cos, other, known = torsions(*given)
    assert np.array_equal(known, batch["torsion_angles_mask"])
    for array, name in ((sin_cos, "torsion_angles_sin_cos"), (other, "alt_torsion_angles_sin_cos")):
        assert np.abs(array - batch[name])[known > 0].max() < 1e-5
    beta, beta_mask = pseudo_beta(*given)
    assert np.array_equal(beta, batch["pseudo_beta"]) and np.array_equal(beta_mask, batch["pseudo_beta_mask"])
