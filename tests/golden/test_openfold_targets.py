"""Atoms, frames and torsion angles against those of the reference implementation (tests/data/openfold)."""

import numpy as np
import pytest

from hpcai.models.openfold.targets import compute_targets
from tests.reference_data import load_arrays

# Where an atom is missing the reference fills torsion angles with noise, of rounding, scaled to unit length; here they are 0.
DEFINED = {
    "torsion_angles_sin_cos": "torsion_angles_mask",
    "alt_torsion_angles_sin_cos": "torsion_angles_mask",
    "chi_angles_sin_cos": "chi_mask",
}


@pytest.mark.parametrize("chain", ["5zyh_A", "2q2k_A"])
def test_targets_of_a_chain(chain: str) -> None:
    """All else everywhere, frames of missing groups too. The reference computes in float32: its angles are off by up to 7e-6."""
    stored = load_arrays(f"openfold/features/{chain}")
    wanted = {name.removeprefix("det."): array for name, array in stored.items() if name.startswith("det.")}
    found = compute_targets(wanted["aatype"], wanted["all_atom_positions"], wanted["all_atom_mask"], chain)
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
