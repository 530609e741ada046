"""Simulated proteins have the chemistry of real ones, compact folds, and alignments that encode contacts."""

import numpy as np
import pytest

from data_prep import proteins
from hpcai.models.openfold import residues
from hpcai.models.openfold.residues import ATOM14_NAMES, ATOM_ORDER, GAP, RESTYPES
from hpcai.models.openfold.targets import compute_targets, pseudo_beta

LENGTHS = {0: 64, 1: 72, 9: 80, 11: 72}          # by seed: sheets, and from 9 on helices


@pytest.fixture(scope="module")
def samples():
    return [proteins.make_family(seed, 1, length, 1000)[0] for seed, length in LENGTHS.items()]


def atom(chain, name):
    return chain.positions[:, ATOM_ORDER[name]].astype(float)


def resolved(chain):
    """Return the indices of residues with atoms: all but some at the ends."""
    return np.flatnonzero(chain.mask[:, ATOM_ORDER["CA"]])


def distances(points):
    return np.linalg.norm(points[:, None] - points, axis=-1)


def beta(chain):
    return pseudo_beta(chain.aatype, chain.positions, chain.mask)[0].astype(float)


def dihedral(a, b, c, d):
    """Return dihedral angles in degrees, by the definition of IUPAC."""
    first, second = np.cross(b - a, c - b), np.cross(c - b, d - c)
    sine = (np.cross(first, second) * (c - b)).sum(-1) / np.linalg.norm(c - b, axis=-1)
    return np.degrees(np.arctan2(sine, (first * second).sum(-1)))


def helices(chain, phi, psi):
    """Return the first residues of all runs of four with the angles of a right-handed helix."""
    inside = (np.abs(phi + 63) < 20) & (np.abs(psi + 42) < 20)
    inside[[0, -1]] = False
    return np.flatnonzero(inside[:-3] & inside[1:-2] & inside[2:-1] & inside[3:])


def angles(chain):
    """Return omega of the bond before each residue, phi and psi; NaN if atoms are missing."""
    targets = compute_targets(chain.aatype, chain.positions, chain.mask)
    sin_cos, mask = targets["torsion_angles_sin_cos"][:, :3], targets["torsion_angles_mask"][:, :3]
    return np.where(mask > 0, np.degrees(np.arctan2(sin_cos[..., 0], sin_cos[..., 1])), np.nan).T


# ---- chemistry


def test_bonds_and_angles_are_within_three_deviations(samples):
    table = residues.distance_bounds(3.0, 0.0)
    for chain, _ in samples:
        targets = compute_targets(chain.aatype, chain.positions, chain.mask)
        positions, exists = targets["atom14_gt_positions"].astype(float), targets["atom14_gt_exists"] > 0
        distance = np.linalg.norm(positions[:, :, None] - positions[:, None], axis=-1)
        lower, upper, deviation = (part[chain.aatype] for part in (table.lower, table.upper, table.deviation))
        bonded = (deviation > 0) & exists[:, :, None] & exists[:, None]
        assert bonded.sum() > 15 * len(resolved(chain))
        off = bonded & ((distance < lower - 1e-4) | (distance > upper + 1e-4))
        assert not off.any(), [(ATOM14_NAMES[chain.aatype[n]][i], ATOM14_NAMES[chain.aatype[n]][j]) for n, i, j in np.argwhere(off)]


def test_peptide_bonds_are_trans_and_planar(samples):
    for chain, _ in samples:
        bond = resolved(chain)[:-1]
        n, ca, c, o = (atom(chain, name) for name in ("N", "CA", "C", "O"))
        mean, deviation = np.array(residues.C_N_LENGTH)[(chain.aatype[bond + 1] == RESTYPES.index("P")).astype(int)].T
        assert (np.abs(np.linalg.norm(n[bond + 1] - c[bond], axis=1) - mean) < 3 * deviation).all()
        for (before, middle, after), (mean, deviation) in (
            ((ca[bond], c[bond], n[bond + 1]), residues.COS_CA_C_N), ((c[bond], n[bond + 1], ca[bond + 1]), residues.COS_C_N_CA),
        ):  # fmt: skip
            first, second = before - middle, after - middle
            cosine = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
            assert (np.abs(cosine - mean) < 3 * deviation).all()
        omega = angles(chain)[0][bond + 1]
        assert np.abs(omega).min() > 160 and np.abs(omega).mean() > 173
        assert np.abs(dihedral(o[bond], c[bond], n[bond + 1], ca[bond + 1])).max() < 20


def test_amino_acids_are_left_handed_and_helices_right_handed(samples):
    turns: list[float] = []
    for chain, _ in samples:
        index = resolved(chain)[chain.aatype[resolved(chain)] != RESTYPES.index("G")]
        n, ca, c, cb = (atom(chain, name)[index] for name in ("N", "CA", "C", "CB"))
        assert (np.einsum("ni,ni->n", np.cross(n - ca, c - ca), cb - ca) > 2).all()      # L, in cubic angstrom; D is negative
        first, alpha = helices(chain, *angles(chain)[1:]), atom(chain, "CA")
        twist = dihedral(*(alpha[first + k] for k in range(4)))
        turns.extend(twist)
    assert len(turns) > 20 and min(turns) > 20 and max(turns) < 85 and abs(np.mean(turns) - 50) < 10


# ---- folds


def test_chains_are_compact_and_touch_themselves_without_overlap(samples):
    contacts = []
    for chain, _ in samples:
        index = resolved(chain)
        alpha, length = atom(chain, "CA")[index], len(index)
        radius = np.sqrt(((alpha - alpha.mean(0)) ** 2).sum(1).mean())
        assert radius / (2.2 * length**0.38) == pytest.approx(1.05, abs=0.3)
        assert distances(alpha)[np.triu_indices(length, 2)].min() > 3.6
        contacts.append((distances(beta(chain)[index])[np.triu_indices(length, 6)] < 8).sum() / length)
    assert np.mean(contacts) > 0.8 and min(contacts) > 0.5


def test_few_atoms_clash(samples):
    """Heavy atoms of non-adjacent residues rarely overlap by more than 1 angstrom."""
    for chain, _ in samples:
        residue, kind = np.nonzero(chain.mask)
        radius = np.array([residues.VAN_DER_WAALS[residues.ATOM_TYPES[k][0]] for k in kind])
        separate = np.triu(np.abs(residue[:, None] - residue) > 1)
        overlap = np.where(separate, radius[:, None] + radius - distances(chain.positions[residue, kind].astype(float)), 0)
        assert (overlap > 1).sum() < 0.015 * len(residue) and (overlap > 1.5).sum() <= 2


# ---- alignments


def test_the_first_row_is_the_sequence_and_others_are_near_and_far(samples):
    for (chain, alignment), length in zip(samples, LENGTHS.values()):
        msa, deletions = alignment.msa, alignment.deletions
        assert (msa.shape, deletions.shape, len(alignment.names)) == ((1000, length), (1000, length), 1000)
        assert (msa[0] == chain.aatype).all() and not deletions[0].any() and ((msa < 20) | (msa == GAP)).all()
        assert 0.01 < (msa == GAP).mean() < 0.2 and 0.001 < (deletions > 0).mean() < 0.1 and (deletions >= 0).all()
        identity = (msa[1:] == msa[0]).sum(1) / (msa[1:] != GAP).sum(1)
        assert identity.min() < 0.25 < np.median(identity) + 0.1 and identity.max() > 0.8 and (np.diff(identity) <= 0).all()
        assert len(np.unique(msa, axis=0)) > 900


def test_contacts_can_be_read_from_the_alignment(samples):
    """The predictor is mutual information of columns with average product correction (Dunn et al. 2008), without gaps."""
    precision, chance = [], []
    for chain, alignment in samples:
        length = len(chain.aatype)
        letters = np.eye(22, dtype=np.float32)[alignment.msa][..., :20].reshape(len(alignment), -1)
        pair = (letters.T @ letters).reshape(length, 20, length, 20) + 0.05
        pair /= pair.sum((1, 3), keepdims=True)
        information = (pair * np.log(pair / pair.sum(1, keepdims=True) / pair.sum(3, keepdims=True))).sum((1, 3))
        np.fill_diagonal(information, 0)
        information -= information.mean(0) * information.mean(1)[:, None] / information.mean()
        far = tuple(index for index in np.triu_indices(length, 6))
        resolved_pairs = np.isin(far, resolved(chain)).all(0)
        touching = (distances(beta(chain))[far] < 8)[resolved_pairs]
        best = np.argsort(-information[far][resolved_pairs])[: length // 2]
        precision.append(touching[best].mean())
        chance.append(touching.mean())
    assert np.mean(precision) > 0.4 and min(np.array(precision) / chance) > 4


# ---- records


def test_a_protein_is_a_pure_function_of_its_arguments():
    def content(chain, alignment):
        arrays = chain.positions, chain.mask, chain.bfactors, chain.aatype, alignment.msa, alignment.deletions
        return chain.name, chain.sequence, chain.resolution, chain.release, alignment.names, [array.tobytes() for array in arrays]

    pair = proteins.make_family(7, 1, 40, 30)[0]
    assert content(*pair) == content(*proteins.make_family(7, 1, 40, 30)[0]) == content(*proteins.make_family(7, 2, 40, 30)[0])
    other = proteins.make_family(8, 1, 40, 30)[0][0]
    assert pair[0].sequence != other.sequence and pair[0].name != other.name and not (pair[0].positions == other.positions).all()


def test_relatives_share_a_fold_and_not_a_sequence():
    """At least 5 of 6 do: rounding, which differs between processors, occasionally selects another fold."""
    families = [[chain for chain, _ in proteins.make_family(seed, 3, 48, 2)] for seed in (1, 2, 3)]
    assert len({chain.name for family in families for chain in family}) == 9

    def difference(first, second):
        """Return the root mean square difference of the distances between CA atoms."""
        common = np.intersect1d(resolved(first), resolved(second))
        return np.sqrt(((distances(atom(first, "CA")[common]) - distances(atom(second, "CA")[common])) ** 2).mean())

    pairs = [(family[0], chain) for family in families for chain in family[1:]]
    assert all(0.2 < (chain.aatype == first.aatype).mean() < 0.95 for first, chain in pairs)
    near = np.array([difference(*pair) for pair in pairs])
    assert near.min() > 0.1 and (near < 2.5).sum() >= 5
    unrelated = [difference(families[k][0], families[k - 1][0]) for k in range(3)]
    assert min(unrelated) > 1.5 * np.median(near)


def test_minimum_length_and_a_single_row():
    for length in (proteins.MIN_LENGTH, 23):
        for seed in range(2):
            chain, alignment = proteins.make_family(seed, 1, length, 1)[0]
            assert len(chain.sequence) == length and alignment.msa.shape == (1, length) and np.isfinite(chain.positions).all()
