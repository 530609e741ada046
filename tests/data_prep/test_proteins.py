"""Simulated proteins: the chemistry of real ones, compact folds, alignments that encode contacts."""

import numpy as np
import pytest

from data_prep import proteins
from hpcai.errors import DataError
from hpcai.models.openfold import residues
from hpcai.models.openfold.residues import ATOM14_NAMES, ATOM_ORDER, GAP, RESTYPES
from hpcai.models.openfold.targets import compute_targets, pseudo_beta

LENGTHS = {0: 64, 1: 72, 9: 80, 11: 72}          # by seed: sheets, and from 9 on helices


@pytest.fixture(scope="module")
def made():
    return [proteins.make_protein(seed, length, 1000) for seed, length in LENGTHS.items()]


def atom(chain, name):
    return chain.positions[:, ATOM_ORDER[name]].astype(float)


def seen(chain):
    """The residues that have atoms: all but some at the ends."""
    return np.flatnonzero(chain.mask[:, ATOM_ORDER["CA"]])


def apart(points):
    return np.linalg.norm(points[:, None] - points, axis=-1)


def beta(chain):
    return pseudo_beta(chain.aatype, chain.positions, chain.mask)[0].astype(float)


def dihedral(a, b, c, d):
    """Degrees, by the definition of IUPAC."""
    one, other = np.cross(b - a, c - b), np.cross(c - b, d - c)
    sine = (np.cross(one, other) * (c - b)).sum(-1) / np.linalg.norm(c - b, axis=-1)
    return np.degrees(np.arctan2(sine, (one * other).sum(-1)))


def helices(chain, phi, psi):
    """First residues of four in a row with the angles of a right-handed helix."""
    inside = (np.abs(phi + 63) < 20) & (np.abs(psi + 42) < 20)
    inside[[0, -1]] = False
    return np.flatnonzero(inside[:-3] & inside[1:-2] & inside[2:-1] & inside[3:])


def angles(chain):
    """Omega before, phi and psi; what has no atoms is NaN."""
    found = compute_targets(chain.aatype, chain.positions, chain.mask)
    sin_cos, known = found["torsion_angles_sin_cos"][:, :3], found["torsion_angles_mask"][:, :3]
    return np.where(known > 0, np.degrees(np.arctan2(sin_cos[..., 0], sin_cos[..., 1])), np.nan).T


# ---- chemistry


def test_bonds_and_angles_are_within_three_deviations(made):
    table = residues.distance_bounds(3.0, 0.0)
    for chain, _ in made:
        found = compute_targets(chain.aatype, chain.positions, chain.mask)
        at, there = found["atom14_gt_positions"].astype(float), found["atom14_gt_exists"] > 0
        distance = np.linalg.norm(at[:, :, None] - at[:, None], axis=-1)
        lower, upper, deviation = (part[chain.aatype] for part in (table.lower, table.upper, table.deviation))
        bonded = (deviation > 0) & there[:, :, None] & there[:, None]
        assert bonded.sum() > 15 * len(seen(chain))
        off = bonded & ((distance < lower - 1e-4) | (distance > upper + 1e-4))
        assert not off.any(), [(ATOM14_NAMES[chain.aatype[n]][i], ATOM14_NAMES[chain.aatype[n]][j]) for n, i, j in np.argwhere(off)]


def test_peptide_bonds_are_trans_and_planar(made):
    for chain, _ in made:
        here = seen(chain)[:-1]
        n, ca, c, o = (atom(chain, name) for name in ("N", "CA", "C", "O"))
        mean, deviation = np.array(residues.C_N_LENGTH)[(chain.aatype[here + 1] == RESTYPES.index("P")).astype(int)].T
        assert (np.abs(np.linalg.norm(n[here + 1] - c[here], axis=1) - mean) < 3 * deviation).all()
        for (one, middle, other), (mean, deviation) in (
            ((ca[here], c[here], n[here + 1]), residues.COS_CA_C_N), ((c[here], n[here + 1], ca[here + 1]), residues.COS_C_N_CA),
        ):  # fmt: skip
            first, second = one - middle, other - middle
            cosine = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
            assert (np.abs(cosine - mean) < 3 * deviation).all()
        omega = angles(chain)[0][here + 1]
        assert np.abs(omega).min() > 160 and np.abs(omega).mean() > 173
        assert np.abs(dihedral(o[here], c[here], n[here + 1], ca[here + 1])).max() < 20


def test_amino_acids_are_left_handed_and_helices_right_handed(made):
    turns: list[float] = []
    for chain, _ in made:
        some = seen(chain)[chain.aatype[seen(chain)] != RESTYPES.index("G")]
        n, ca, c, cb = (atom(chain, name)[some] for name in ("N", "CA", "C", "CB"))
        assert (np.einsum("ni,ni->n", np.cross(n - ca, c - ca), cb - ca) > 2).all()      # L, in cubic angstrom; D is negative
        first, alpha = helices(chain, *angles(chain)[1:]), atom(chain, "CA")
        found = dihedral(*(alpha[first + k] for k in range(4)))
        turns.extend(found)
    assert len(turns) > 20 and min(turns) > 20 and max(turns) < 85 and abs(np.mean(turns) - 50) < 10


# ---- folds


def test_chains_are_compact_and_touch_themselves_without_overlap(made):
    contacts = []
    for chain, _ in made:
        some = seen(chain)
        alpha, length = atom(chain, "CA")[some], len(some)
        radius = np.sqrt(((alpha - alpha.mean(0)) ** 2).sum(1).mean())
        assert radius / (2.2 * length**0.38) == pytest.approx(1.05, abs=0.3)
        assert apart(alpha)[np.triu_indices(length, 2)].min() > 3.6
        contacts.append((apart(beta(chain)[some])[np.triu_indices(length, 6)] < 8).sum() / length)
    assert np.mean(contacts) > 0.8 and min(contacts) > 0.5


def test_few_atoms_clash(made):
    """Heavy atoms of two residues, not of neighbours, nearer than their radii less 1 angstrom."""
    for chain, _ in made:
        number, place = np.nonzero(chain.mask)
        radius = np.array([residues.VAN_DER_WAALS[residues.ATOM_TYPES[k][0]] for k in place])
        strangers = np.triu(np.abs(number[:, None] - number) > 1)
        overlap = np.where(strangers, radius[:, None] + radius - apart(chain.positions[number, place].astype(float)), 0)
        assert (overlap > 1).sum() < 0.015 * len(number) and (overlap > 1.5).sum() <= 2


# ---- alignments


def test_the_first_row_is_the_sequence_and_others_are_near_and_far(made):
    for (chain, alignment), length in zip(made, LENGTHS.values()):
        msa, deletions = alignment.msa, alignment.deletions
        assert (msa.shape, deletions.shape, len(alignment.names)) == ((1000, length), (1000, length), 1000)
        assert (msa[0] == chain.aatype).all() and not deletions[0].any() and ((msa < 20) | (msa == GAP)).all()
        assert 0.01 < (msa == GAP).mean() < 0.2 and 0.001 < (deletions > 0).mean() < 0.1 and (deletions >= 0).all()
        same = (msa[1:] == msa[0]).sum(1) / (msa[1:] != GAP).sum(1)
        assert same.min() < 0.25 < np.median(same) + 0.1 and same.max() > 0.8 and (np.diff(same) <= 0).all()
        assert len(np.unique(msa, axis=0)) > 900


def test_contacts_can_be_read_from_the_alignment(made):
    """By mutual information of columns less what their averages explain (Dunn and others, 2008), gaps left out."""
    precision, chance = [], []
    for chain, alignment in made:
        length = len(chain.aatype)
        letters = np.eye(22, dtype=np.float32)[alignment.msa][..., :20].reshape(len(alignment), -1)
        pair = (letters.T @ letters).reshape(length, 20, length, 20) + 0.05
        pair /= pair.sum((1, 3), keepdims=True)
        information = (pair * np.log(pair / pair.sum(1, keepdims=True) / pair.sum(3, keepdims=True))).sum((1, 3))
        np.fill_diagonal(information, 0)
        information -= information.mean(0) * information.mean(1)[:, None] / information.mean()
        far = tuple(index for index in np.triu_indices(length, 6))
        known = np.isin(far, seen(chain)).all(0)
        touching = (apart(beta(chain))[far] < 8)[known]
        best = np.argsort(-information[far][known])[: length // 2]
        precision.append(touching[best].mean())
        chance.append(touching.mean())
    assert np.mean(precision) > 0.4 and min(np.array(precision) / chance) > 4


# ---- records


def test_a_protein_is_a_pure_function_of_its_arguments():
    def content(chain, alignment):
        arrays = chain.positions, chain.mask, chain.bfactors, chain.aatype, alignment.msa, alignment.deletions
        return chain.name, chain.sequence, chain.resolution, chain.release, alignment.names, [array.tobytes() for array in arrays]

    one = proteins.make_protein(7, 40, 30)
    assert content(*one) == content(*proteins.make_protein(7, 40, 30)) == content(*proteins.make_family(7, 2, 40, 30)[0])
    other = proteins.make_protein(8, 40, 30)[0]
    assert one[0].sequence != other.sequence and one[0].name != other.name and not (one[0].positions == other.positions).all()


def test_relatives_share_a_fold_and_not_a_sequence():
    """Most of them: rounding, which is another on each processor, now and then decides between two folds."""
    families = [[chain for chain, _ in proteins.make_family(seed, 3, 48, 2)] for seed in (1, 2, 3)]
    assert len({chain.name for family in families for chain in family}) == 9

    def difference(one, other):
        """Root mean square, over distances between CA."""
        both = np.intersect1d(seen(one), seen(other))
        return np.sqrt(((apart(atom(one, "CA")[both]) - apart(atom(other, "CA")[both])) ** 2).mean())

    pairs = [(family[0], chain) for family in families for chain in family[1:]]
    assert all(0.2 < (chain.aatype == first.aatype).mean() < 0.95 for first, chain in pairs)
    near = np.array([difference(*pair) for pair in pairs])
    assert near.min() > 0.1 and (near < 2.5).sum() >= 5
    strange = [difference(families[k][0], families[k - 1][0]) for k in range(3)]
    assert min(strange) > 1.5 * np.median(near)


def test_minimum_length_and_a_single_row():
    for length in (proteins.MIN_LENGTH, 23):
        for seed in range(2):
            chain, alignment = proteins.make_protein(seed, length, 1)
            assert len(chain.sequence) == length and alignment.msa.shape == (1, length) and np.isfinite(chain.positions).all()


@pytest.mark.parametrize("words, text", [
    ((0, 1, 15, 4), "length 15, expected 16"), ((0, 1, 16, 0), "rows 0, expected 1"), ((0, 0, 16, 1), "members 0, expected 1"),
    ((-1, 1, 16, 1), "seed -1, expected 0"),
])  # fmt: skip
def test_values_below_the_minimum_are_refused(words, text):
    with pytest.raises(DataError, match=text):
        proteins.make_family(*words)
