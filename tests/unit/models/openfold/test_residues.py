"""The tables of the amino acids agree with one another, and with what is read from residues that are built of them."""

from typing import Any

import numpy as np
import pytest

from hpcai.errors import DataError
from hpcai.models.openfold import residues as table
from hpcai.models.openfold.truth import pseudo_beta, torsions, truth_of

ALL = np.arange(20)
RING = ("N", "CG"), ("N", "CD"), ("CA", "CD")  # of proline: closed at few angles only


def built(aatype: Any, angles: Any, backbone: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Residues of ideal geometry at torsion angles, and their groups.   [N], [N, 7] -> [N, 14, 3], [N, 8, 4, 4]"""
    turn = np.tile(np.eye(4), (len(aatype), 8, 1, 1))
    cos, sin = np.cos(angles), np.sin(angles)
    turn[:, 1:, 1, 1], turn[:, 1:, 1, 2], turn[:, 1:, 2, 1], turn[:, 1:, 2, 2] = cos, -sin, sin, cos
    frames = table.GROUP_FRAME[aatype].astype(float) @ turn
    for group in (5, 6, 7):
        frames[:, group] = frames[:, group - 1] @ frames[:, group]
    if backbone is not None:
        frames = backbone[:, None] @ frames
    own = np.take_along_axis(frames, table.ATOM14_GROUP[aatype][..., None, None], 1)
    return np.einsum("nakl,nal->nak", own[..., :3, :3], table.ATOM14_POSITION[aatype]) + own[..., :3, 3], frames


def spread(aatype: Any, atoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N, 14, 3] -> [N, 37, 3] and the mask of all atoms that there can be"""
    mask = table.ATOM37_EXISTS[aatype]
    return np.take_along_axis(atoms, table.ATOM37_TO_14[aatype][..., None], 1) * mask[..., None], mask


def random_frames(rng: np.random.Generator, count: int) -> np.ndarray:
    rotation, _ = np.linalg.qr(rng.normal(size=(count, 3, 3)))
    frames = np.tile(np.eye(4), (count, 1, 1))
    frames[:, :3, :3] = rotation * np.linalg.det(rotation)[:, None, None]
    frames[:, :3, 3] = rng.uniform(-40, 40, (count, 3))
    return frames


def structure(seed: int = 0, missing: float = 0.1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sixty residues here and there, without some atoms."""
    rng = np.random.default_rng(seed)
    aatype = rng.permutation(np.tile(ALL, 3))
    atoms, _ = built(aatype, rng.uniform(-np.pi, np.pi, (60, 7)), random_frames(rng, 60))
    positions, mask = spread(aatype, atoms)
    mask = mask * (rng.uniform(size=mask.shape) > missing)
    return aatype, (positions * mask[..., None]).astype(np.float32), mask.astype(np.float32)


def test_exchanging_names_twice_changes_nothing() -> None:
    assert np.array_equal(np.take_along_axis(table.ATOM14_SWAP, table.ATOM14_SWAP, 1), np.tile(np.arange(14), (21, 1)))
    assert table.ATOM14_EXISTS.sum() == table.ATOM37_EXISTS.sum() == 167 and table.ATOM14_AMBIGUOUS.sum() == 12


def test_half_a_turn_of_an_ambiguous_angle_exchanges_the_names() -> None:
    """They agree to 0.03 angstrom: the figures are not exactly symmetric."""
    rng = np.random.default_rng(1)
    angles = rng.uniform(-np.pi, np.pi, (20, 7))
    turned = angles.copy()
    turned[:, 3:] += np.pi * table.CHI_PERIODIC[ALL]
    one, other = (truth_of(ALL, *spread(ALL, built(ALL, a)[0])) for a in (angles, turned))
    assert np.abs(one["atom14_gt_positions"] - other["atom14_alt_gt_positions"]).max() < 0.03
    assert np.abs(one["rigidgroups_gt_frames"] - other["rigidgroups_alt_gt_frames"]).max() < 1e-5
    assert np.abs(one["torsion_angles_sin_cos"] - other["alt_torsion_angles_sin_cos"])[:, 2:].max() < 1e-5
    assert np.array_equal(one["atom14_atom_is_ambiguous"].any(1), one["rigidgroups_group_is_ambiguous"].any(1))
    assert "".join(np.array([*table.LETTERS])[one["atom14_atom_is_ambiguous"].any(1)]) == "DEFY"


def test_ideal_residues_have_the_lengths_and_angles_of_the_table() -> None:
    """All are within 2 deviations at all torsion angles (histidine's CD2 - NE2 is farthest off), but for the ring of proline."""
    found, deviation = table.bounds(2.0, 1.5), table.bounds(2.0, 1.5).deviation[:20] > 0
    proline = table.NAMES.index("PRO")
    for pair in RING:
        i, j = map(table.ATOM14_NAMES[proline].index, pair)
        assert deviation[proline, i, j]
        deviation[proline, [i, j], [j, i]] = False
    for angles in np.random.default_rng(2).uniform(-np.pi, np.pi, (40, 20, 7)):
        atoms, _ = built(ALL, angles)
        apart = np.linalg.norm(atoms[:, :, None] - atoms[:, None], axis=-1)
        wrong = deviation & ~((found.lower[:20] <= apart) & (apart <= found.upper[:20]))
        assert not wrong.any(), [(table.NAMES[r], *(table.ATOM14_NAMES[r][place] for place in ij)) for r, *ij in np.argwhere(wrong)]


def test_a_built_residue_has_the_angles_and_frames_it_was_built_with() -> None:
    rng = np.random.default_rng(3)
    aatype = np.tile(ALL, 5)
    angles = rng.uniform(-np.pi, np.pi, (100, 7))
    atoms, frames = built(aatype, angles, random_frames(rng, 100))
    found = truth_of(aatype, *spread(aatype, atoms))
    known = found["torsion_angles_mask"] * (0, 0, 1, 1, 1, 1, 1) > 0
    assert known.sum() == 5 * (20 + table.CHI_EXISTS.sum())
    assert np.abs(found["torsion_angles_sin_cos"] - np.stack([np.sin(angles), np.cos(angles)], -1))[known].max() < 2e-5
    exists = found["rigidgroups_gt_exists"] > 0
    assert np.array_equal(exists, found["rigidgroups_group_exists"] > 0)
    assert np.abs(found["rigidgroups_gt_frames"] - frames)[exists].max() < 1e-3  # figures have three decimals
    assert np.abs(found["backbone_rigid_tensor"] - frames[:, 0]).max() < 1e-3


def test_moving_a_structure_moves_its_frames_and_leaves_its_angles() -> None:
    aatype, positions, mask = structure()
    move = random_frames(np.random.default_rng(0), 1)[0]
    moved = (positions @ move[:3, :3].T + move[:3, 3]) * mask[..., None]
    here, there = truth_of(aatype, positions, mask), truth_of(aatype, moved, mask)
    for name, wanted in here.items():
        if name.endswith(("frames", "tensor")):
            exists = here["backbone_rigid_mask" if "backbone" in name else "rigidgroups_gt_exists"] > 0
            assert np.abs(there[name] - move @ wanted)[exists].max() < 1e-4, name
        elif name.endswith("positions") or name == "pseudo_beta":
            exists = np.abs(wanted).max(-1) > 0
            assert np.abs(there[name] - wanted @ move[:3, :3].T - move[:3, 3])[exists].max() < 1e-4, name
        else:
            assert np.abs(there[name] - wanted).max() < 1e-4, name


def test_what_is_missing_is_masked_and_never_nan() -> None:
    aatype, positions, mask = structure(missing=0.3)
    aatype[7], aatype[8] = table.UNKNOWN, table.LETTERS.index("G")
    mask[7:9, [table.PLACE[name] for name in ("N", "CA", "C", "CB")]] = 1
    found = truth_of(aatype, np.where(mask[..., None] > 0, positions, np.nan), mask)
    assert all(np.isfinite(array).all() for array in found.values())
    assert not found["torsion_angles_sin_cos"][found["torsion_angles_mask"] == 0].any()
    assert found["backbone_rigid_mask"][7] and not found["atom14_gt_exists"][7].any() and not found["chi_mask"][7].any()
    assert np.array_equal(found["pseudo_beta"][[7, 8]], [positions[7, table.PLACE["CB"]], positions[8, table.PLACE["CA"]]])
    assert not found["torsion_angles_mask"][0, :2].any()


def test_templates_side_by_side_give_what_each_gives_alone() -> None:
    alone = [structure(seed) for seed in (1, 2)]
    alone[0][0][3] = table.GAP
    together = [np.stack(arrays)[None] for arrays in zip(*alone)]
    for function in (torsions, pseudo_beta):
        each = zip(*(function(*one) for one in alone))
        assert all(np.array_equal(got[0], np.stack(wanted)) for got, wanted in zip(function(*together), each))


@pytest.mark.parametrize(("broken", "says"), [
    ({"aatype": np.full(60, 21)}, "chain: residue types from 21 to 21; expected 0 to 20"),
    ({"aatype": np.zeros(60)}, "float64; expected integers"),
    ({"positions": np.zeros((59, 37, 3))}, r"positions \(59, 37, 3\)"),
    ({"mask": np.ones((60, 14))}, r"mask \(60, 14\)"),
    ({"mask": np.full((60, 37), 0.5)}, "other than 0 and 1"),
    ({"positions": np.where(np.arange(60 * 111).reshape(60, 37, 3) == 4 * 111 + 3, np.inf, 0), "mask": np.ones((60, 37))},
     "CA of residue 4 has no finite position"),
])  # fmt: skip
def test_what_cannot_be_is_refused(broken: dict[str, Any], says: str) -> None:
    given = dict(zip(("aatype", "positions", "mask"), structure())) | broken
    with pytest.raises(DataError, match=says):
        truth_of(**given, where="chain")
