"""Atoms, frames and torsion angles equal those of the reference implementation (tests/data/openfold)."""

import numpy as np
import pytest

from hpcai.models.openfold.targets import compute_targets
from tests.reference_data import load_arrays

# With a missing atom the reference's torsion angles are rounding noise scaled to unit length; hpcai's are 0.
DEFINED = {
    "torsion_angles_sin_cos": "torsion_angles_mask", "alt_torsion_angles_sin_cos": "torsion_angles_mask",
    "chi_angles_sin_cos": "chi_mask",
}  # fmt: skip


@pytest.mark.parametrize("chain", ["5zyh_A", "2q2k_A"])
def test_targets_of_a_chain(chain: str) -> None:
    """Other features are compared everywhere, also frames of missing groups. The reference's float32 angles are off by 7e-6."""
    stored = load_arrays(f"openfold/features/{chain}")
    expected = {name.removeprefix("det."): array for name, array in stored.items() if name.startswith("det.")}
    targets = compute_targets(expected["aatype"], expected["all_atom_positions"], expected["all_atom_mask"], chain)
    assert len(targets) == 23
    for name, array in targets.items():
        assert array.shape == expected[name].shape and array.dtype.kind == expected[name].dtype.kind, name
        error = np.abs(array - expected[name])
        if name in DEFINED:
            defined = expected[DEFINED[name]] > 0
            assert error[defined].max() < 1e-5 and not array[~defined].any(), name
        else:
            assert error.max() < 1e-6, name
    assert 0 < targets["backbone_rigid_mask"].mean() < 1 and targets["torsion_angles_mask"][:, 3:].any(0).all()
