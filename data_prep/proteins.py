"""Proteins that are nowhere but could be, with alignments that carry their structure: real geometry without a download.

A chain is folded as NMR structures are computed, by annealing of torsion angles (Guntert et al., J. Mol. Biol. 1997), from a
drawn plan of helices, hairpins and loops; lengths and angles of bonds are ideal. Residues follow their surroundings, and the rows
of the alignment evolve along a tree under a Potts model whose pair terms join residues in contact. No figure is fitted to data:
folds lack the handed crossovers of parallel sheets, cofactors and function, and nothing learnt here transfers as it is.

N residues   S rows   lengths angstrom   angles degrees in tables and radians in code
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.errors import DataError
from hpcai.models.openfold import residues
from hpcai.models.openfold.alignments import Alignment
from hpcai.models.openfold.residues import GAP, RESTYPES
from hpcai.models.openfold.structures import Chain

Array = NDArray[Any]
Draw = np.random.Generator

SHORTEST = 16
CONTACT = 8.0                                   # between CB, or where glycine's would be
FIRST_DAY, DAYS = date(1990, 1, 1), 12418       # to the end of 2023
ATTEMPTS = 4                                    # at a compact fold
DOMAIN = 120                                    # residues at most that become compact by themselves
STEPS, AGAIN = 450, 150                         # steps of annealing: from the plan, from a relative
A, N, C, G, P = (RESTYPES.index(letter) for letter in "ANCGP")

# In the order of LETTERS, A R N D C Q E G H I L K M F P S T W Y V.
# Propensities for helix, strand and turn: Chou and Fasman, Adv. Enzymol. 1978.
_PROPENSITY = np.log([
    [1.42, .98, .67, 1.01, .70, 1.11, 1.51, .57, 1.00, 1.08, 1.21, 1.16, 1.45, 1.13, .57, .77, .83, 1.08, .69, 1.06],
    [.83, .93, .89, .54, 1.19, 1.10, .37, .75, .87, 1.60, 1.30, .74, 1.05, 1.38, .55, .75, 1.19, 1.37, 1.47, 1.70],
    [.66, .95, 1.56, 1.46, 1.19, .98, .74, 1.56, .95, .47, .59, 1.01, .60, .60, 1.52, 1.43, .96, .96, 1.14, .50],
])  # fmt: skip
HELIX, STRAND, LOOP = range(3)
_SHARE = np.log([8.3, 5.5, 4.1, 5.5, 1.4, 3.9, 6.7, 7.1, 2.3, 5.9, 9.7, 5.8, 2.4, 3.9, 4.7, 6.7, 5.4, 1.1, 2.9, 6.9])   # UniProt
_HYDROPATHY = np.array(                         # Kyte and Doolittle, J. Mol. Biol. 1982
    [1.8, -4.5, -3.5, -3.5, 2.5, -3.5, -3.5, -.4, -3.2, 4.5, 3.8, -3.9, 1.9, 2.8, -1.6, -.8, -.7, -.9, -1.3, 4.2]) / 3  # fmt: skip
_VOLUME = np.array([                            # cubic angstrom: Zamyatnin, Prog. Biophys. 1972
    88.6, 173.4, 114.1, 111.1, 108.5, 143.8, 138.4, 60.1, 153.2, 166.7, 166.7, 168.6, 162.9, 189.9, 112.7, 89, 116.1, 227.8, 193.6,
    140])  # fmt: skip
_BULK = np.clip((_VOLUME - 137) / 42, -1.3, 1.3)
_CHARGE = np.array([0, 1, 0, -1, 0, 0, -1, 0, .3, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])


def _centred(table: Array) -> Array:
    """A table of pairs less what either residue prefers by itself."""
    share = np.exp(_SHARE) / np.exp(_SHARE).sum()
    return np.asarray(table - table @ share - (share @ table)[:, None] + share @ table @ share)


# What pairs in contact gain, in units of kT: one large and one small, opposite charges, two cysteines. With strengths 1.5 times
# these, or more pairs that are coupled, rows freeze, and tell less of contacts.
_FILLING = _centred(-1.2 * _BULK[:, None] * _BULK)
_SALT = _centred(-2.2 * _CHARGE[:, None] * _CHARGE + 0.5 * _HYDROPATHY[:, None] * _HYDROPATHY)
_SULFUR = np.zeros((20, 20))
_SULFUR[C], _SULFUR[:, C], _SULFUR[C, C] = -1, -1, 5
COUPLED, COUPLED_NEAR = 0.5, 0.1                # shares of the pairs in contact; near in the sequence, up to 5 apart

# Angles phi, psi of loops and how often: right helix, strand, polyproline, left helix (which is for glycine).
_BASINS, _OFTEN = np.radians([[-65, -35], [-110, 130], [-68, 145], [58, 40]]), [0.33, 0.3, 0.29, 0.08]
_IDEAL = np.radians([[-63, -42], [-120, 130]])
_TURNS = np.radians([[[55, 38], [80, 10]], [[60, -120], [-80, 0]]])         # of hairpins: types I' and II'
_IN_TURNS = (N, G), (G, -1)
# Choices for chi1, chi2 ... Proline's two rows are the puckers that close its ring.
_STAGGERED = (-65, 180, 62)
_ROTAMERS: dict[str, list[tuple[float, ...]]] = {
    "A": [()], "G": [()], "P": [(-27, 24), (27, -24)], "L": [(-65, 175), (180, 65), (-85, 65)],
}  # fmt: skip
_GRIDS: dict[str, list[tuple[float, ...]]] = {
    "CSTV": [_STAGGERED], "I": [_STAGGERED, (170, -60, 65)], "FY": [_STAGGERED, (90, 75, -75)], "WH": [_STAGGERED, (90, -90, 165)],
    "ND": [_STAGGERED, (-20, 30, 80)], "QE": [_STAGGERED, (180, 65, -65), (0, 60, -60)], "M": [_STAGGERED] * 3,
    "K": [_STAGGERED, _STAGGERED, (180,), (180,)], "R": [_STAGGERED, (180, -65), _STAGGERED, (180, 85, -85)],
}  # fmt: skip
_ROTAMERS |= {letter: list(product(*_GRIDS[letters])) for letters in _GRIDS for letter in letters}

# Least distances between atoms that stand for a residue while it folds: N, CA, C, O, and the middle of a side chain.
_LEAST = np.array([
    [3.1, 3.4, 3.3, 2.8, 3.6],
    [3.4, 3.9, 3.7, 3.2, 4.0],
    [3.3, 3.7, 3.6, 3.2, 4.0],
    [2.8, 3.2, 3.2, 3.0, 3.5],
    [3.6, 4.0, 4.0, 3.5, 4.4],
])  # fmt: skip
_CB = np.array([-0.525, -0.777, -1.208])        # seen from CA, in the frame of the backbone
_MIDDLE = _CB * (2.4 / 1.53)
_TO_O = 1.23 * np.array([-0.543, -0.840, 0])    # seen from C, x to the next N


@dataclass(frozen=True)
class _Plan:
    kind: Array                                 # [N] helix, strand or loop
    angle: Array                                # [N, 3] phi, psi, and omega to the next residue
    spread: Array                               # [N, 3] that folding may use
    given: Array                                # [N] glycine, proline and asparagine where angles ask for them, otherwise -1
    ties: Array                                 # [K, 2] of sites whose distance is known
    tie: Array                                  # [K, 2] the distance and the strength of its pull
    inner: Array                                # [N] 1 on the side that is to be buried


# ---- plans


def _plan(draw: Draw, length: int) -> _Plan:
    kind: list[int] = []
    rows: list[Array] = []
    given: list[int] = []
    inner: list[float] = []
    bonded: list[tuple[int, int]] = []

    def loop(count: int) -> None:
        for _ in range(count):
            basin = int(draw.choice(4, p=_OFTEN))
            rows.append(_BASINS[basin])
            given.append(G if basin == 3 or draw.random() < 0.04 else P if basin == 2 and draw.random() < 0.4 else -1)
            if given[-1] == P and len(given) > 1 and kind[-1] == LOOP and given[-2] < 0:
                rows[-2] = _BASINS[1]           # a right helix before proline has its atoms too near
            kind.append(LOOP)
            inner.append(0.0)

    def element(what: int, count: int) -> None:
        phase = draw.uniform(0, 2 * np.pi)
        step, phase = (np.radians(100), phase) if what == HELIX else (np.pi, np.pi * (phase > np.pi))
        rows.extend(np.tile(_IDEAL[what], (count, 1)))
        kind.extend([what] * count)
        given.extend([-1] * count)
        inner.extend((np.cos(phase + step * np.arange(count)) > 0.1).astype(float))

    helical = draw.choice([0.95, 0.7, 0.3])
    loop(int(draw.integers(2, 4)))
    while len(kind) < length:
        if draw.random() < helical:
            element(HELIX, int(draw.integers(9, 19)))
        else:
            count = int(draw.integers(4, 8))
            element(STRAND, count)
            for _ in range(int(draw.integers(1, 4))):
                last = len(kind) - 1
                turn = int(draw.integers(2))
                rows.extend(_TURNS[turn])
                kind.extend([LOOP] * 2)
                given.extend(_IN_TURNS[turn])
                inner.extend([0.0] * 2)
                element(STRAND, count)
                bonded += [(last - k, last + 3 + k) for k in range(0, count, 2)]
                # Opposite residues are on one side of the sheet.
                inner[-count:] = inner[last - count + 1 : last + 1][::-1]
        loop(int(draw.integers(2, 6)))
    angle = np.full((length, 3), np.pi)
    angle[:, :2] = rows[:length]
    what, fixed = np.array(kind[:length]), np.array(given[:length])
    angle[fixed == P, 0] = np.radians(-65)
    spread = np.radians(np.array([[5, 5, 3], [11, 11, 3], [14, 28, 3]]))[what]
    spread[fixed == P, 0] = np.radians(6)
    angle[:, :2] += np.clip(draw.standard_normal((length, 2)), -2, 2) * np.radians(np.where(what == LOOP, 10, 4))[:, None]
    angle[:, 2] += np.clip(draw.standard_normal(length), -2, 2) * np.radians(2.5)
    i, j = np.array([pair for pair in bonded if pair[1] < length], int).reshape(-1, 2).T
    ties = np.stack([5 * np.append(i, j), 5 * np.append(j, i) + 3], 1)      # from N to O: hydrogen bonds
    return _Plan(what, angle, spread, fixed, ties, np.tile([2.9, 6.0], (len(ties), 1)), np.array(inner[:length]))


def _relative(plan: _Plan, angle: Array, draw: Draw) -> _Plan:
    """A target that folds into nearly the same chain: distances of CA up to 12 angstrom are kept within 10 %."""
    alpha = _Backbone(plan.given)(angle)[0][:, 1]
    i, j = np.nonzero(np.triu(_apart(alpha) < 12, 4))
    length = _apart(alpha)[i, j] * (1 + 0.1 * np.clip(draw.standard_normal(len(i)), -2, 2))
    ties, tie = np.stack([5 * i + 1, 5 * j + 1], 1), np.stack([length, np.full(len(i), 0.7)], 1)
    bent = angle + 0.35 * plan.spread * draw.standard_normal(angle.shape)
    return replace(plan, angle=bent, ties=np.concatenate([plan.ties, ties]), tie=np.concatenate([plan.tie, tie]))


# ---- folding


def _turned(angle: Array, axis: int) -> Array:
    """Rotations about x (0) or z (2).   [...] -> [..., 3, 3]"""
    found = np.zeros((*angle.shape, 3, 3))
    one, other = (1, 2) if axis == 0 else (0, 1)
    found[..., axis, axis] = 1
    found[..., one, one] = found[..., other, other] = np.cos(angle)
    found[..., other, one] = np.sin(angle)
    found[..., one, other] = -found[..., other, one]
    return found


class _Backbone:
    """Ideal bonds of a chain; glycine and proline have their own where they are given."""

    def __init__(self, given: Array) -> None:
        types = np.where(np.isin(given, (G, P)), given, A)
        n, c = residues.ATOM14_POSITION[types, 0].astype(float), residues.ATOM14_POSITION[types, 2].astype(float)
        next_n = np.where(np.append(types[1:], A) == P, residues.C_N_LENGTH[1][0], residues.C_N_LENGTH[0][0])
        self.lengths = np.stack([np.linalg.norm(n, axis=1), c[:, 0], next_n], 1).ravel()
        ends = np.full(len(types), np.arccos(residues.COS_C_N_CA[0])), np.full(len(types), np.arccos(residues.COS_CA_C_N[0]))
        bends = np.stack([ends[0], np.arctan2(n[:, 1], n[:, 0]), ends[1]], 1).ravel()
        self.bend = _turned(np.pi - bends, 2)

    def __call__(self, angle: Array) -> tuple[Array, Array]:
        """[N, 3] -> N, CA and C [N, 3, 3] and their frames [N, 3, 3, 3]: x along the bond to the next atom, the last atom at y > 0.

        A frame is the product of all turns before it; products of twice as many are made in each round.
        """
        turns = np.empty_like(self.bend)
        turns[0] = np.eye(3)
        turns[1:] = np.einsum("nij,njk->nik", _turned(angle.ravel()[:-1], 0), self.bend[1:])
        reach = 1
        while reach < len(turns):
            turns[reach:] = np.einsum("nij,njk->nik", turns[:-reach], turns[reach:])
            reach *= 2
        atoms = np.cumsum(turns[:, :, 0] * self.lengths[:, None], 0)
        atoms = np.concatenate([np.zeros((1, 3)), atoms[:-1]])
        return atoms.reshape(-1, 3, 3), turns.reshape(-1, 3, 3, 3)


def _sites(atoms: Array, frames: Array) -> Array:
    """The sites of _LEAST.   [N, 5, 3]"""
    oxygen, side = atoms[:, 2] + frames[:, 2] @ _TO_O, atoms[:, 1] + frames[:, 1] @ _MIDDLE
    return np.concatenate([atoms, oxygen[:, None], side[:, None]], 1)


def _target(length: int) -> float:
    """Radius of gyration of folded proteins: Skolnick and others, 2.2 N^0.38."""
    return float(2.2 * length**0.38)


def _radius(points: Array) -> float:
    return float(np.sqrt(((points - points.mean(0)) ** 2).sum(1).mean()))


def _fold(plan: _Plan, draw: Draw, start: Array, steps: int, heat: float) -> Array:
    """Angles after annealing from ``heat``, 1 at most. Steps are those of Adam, with noise, because gradients about an axis in the
    middle of a chain are far larger than those at its ends.   [N, 3] -> [N, 3]"""
    backbone, length, angle = _Backbone(plan.given), len(start), start.copy()
    first, second = np.zeros_like(angle), np.zeros_like(angle)
    one, other = np.triu_indices(length, 3)
    liked = plan.inner[one] * plan.inner[other] > 0
    lasting_i, lasting_j = (np.append(5 * index[liked] + 4, ties) for index, ties in zip((one, other), plan.ties.T))
    wanted, pulls = plan.tie.T
    cuts = np.linspace(0, length, 1 + -(-length // DOMAIN)).round().astype(int)
    parts = [(slice(*ends), 1.5) for ends in pairwise(cuts)] + [(slice(None), 0.1)] * (len(cuts) > 2)
    for step in range(steps):
        hot = heat * (1 - step / steps)
        atoms, frames = backbone(angle)
        sites = _sites(atoms, frames)
        flat = sites.reshape(-1, 3)
        if step % 10 == 0:
            near_i, near_j, least = _near(sites)
            all_i, all_j = np.append(near_i, lasting_i), np.append(near_j, lasting_j)
            ends = (3 * np.append(all_i, all_j)[:, None] + np.arange(3)).ravel()
        away = flat[all_i] - flat[all_j]
        far = np.sqrt((away**2).sum(1) + 1e-6)
        bad, good, tie = np.split(far, [len(near_i), len(near_i) + int(liked.sum())])
        beyond = np.maximum(good - 5.2, 0) / 3
        # At first chains may pass through one another.
        overlaps = 0.6 * 60 ** (1 - hot) * np.minimum(bad - least, 0)
        slope = np.concatenate([overlaps, beyond * np.exp(-(beyond**2)) / 3, pulls * np.clip(tie - wanted, -1, 2)])
        pull = away * (slope / far)[:, None]
        gradient = np.bincount(ends, np.concatenate([pull, -pull]).ravel(), flat.size).reshape(length, 5, 3)
        for part, strength in parts:
            alpha = sites[part, 1] - sites[part, 1].mean(0)
            radius = _radius(alpha)
            gradient[part, 1] += strength * max(radius - 0.97 * _target(len(alpha)), 0) / radius * alpha
        turning = _about_bonds(gradient, sites, frames)
        bent = (np.remainder(angle - plan.angle + np.pi, 2 * np.pi) - np.pi) / plan.spread
        turning += (bent + bent**3 / 9) / plan.spread
        first, second = 0.8 * first + 0.2 * turning, 0.95 * second + 0.05 * turning**2
        move = first / (1 - 0.8 ** (step + 1)) / np.sqrt(second / (1 - 0.95 ** (step + 1)) + 1e-6)
        noise = (hot**2 if hot > 0.3 else 0) * draw.standard_normal(angle.shape)
        angle -= plan.spread * (0.02 + 0.25 * hot) * (move + noise)
    return angle


def _near(sites: Array) -> tuple[Array, Array, Array]:
    """Pairs, by their places in the flat list, that may overlap in the next ten steps, and their least distances.   3 x [K]"""
    one, other = np.triu_indices(len(sites), 2)
    some = ((sites[one, 1] - sites[other, 1]) ** 2).sum(1) < 11**2
    i, j = (5 * index[some][:, None] + place for index, place in zip((one, other), np.divmod(np.arange(25), 5)))
    i, j = i.ravel(), j.ravel()
    least = _LEAST[i % 5, j % 5]
    flat = sites.reshape(-1, 3)
    close = ((flat[i] - flat[j]) ** 2).sum(1) < (least + 2) ** 2
    return i[close], j[close], least[close]


def _about_bonds(gradient: Array, sites: Array, frames: Array) -> Array:
    """The gradient in the torsion angles: the torque, about each bond, on all that turns with it.   [N, 5, 3] -> [N, 3]

    An atom turns with the bonds before the one that ends at it: O with the next N, the side chain with C.
    """
    length = len(sites)
    both = np.concatenate([gradient, np.cross(sites, gradient)], 2)
    total = np.zeros((length + 1, 3, 6))
    total[:-1] = both[:, :3]
    total[:-1, 2] += both[:, 4]
    total[1:, 0] += both[:, 3]
    beyond = np.cumsum(total.reshape(-1, 6)[::-1], 0)[::-1][2:-1].reshape(length, 3, 6)
    force, torque = np.split(beyond, 2, axis=2)
    return np.asarray((frames[..., 0] * (torque - np.cross(sites[:, :3], force))).sum(2))


def _best(tries: Iterable[tuple[_Plan, Array]]) -> tuple[_Plan, Array]:
    """The first without faults, or the one of least: a phi that is for glycine, CA too near, a chain too wide, few contacts."""
    found: list[tuple[float, int, _Plan, Array]] = []
    for plan, angle in tries:
        atoms, frames = _Backbone(plan.given)(angle)
        length, beta = len(angle), _beta(atoms, frames)
        least = _apart(atoms[:, 1])[np.triu_indices(length, 2)].min()
        contacts = (_apart(beta)[np.triu_indices(length, 6)] < CONTACT).sum() / length
        left = ((np.sin(angle[1:, 0]) > 0) & ~np.isin(plan.given[1:], (G, N))).sum()
        fault = left + max(3.75 - least, 0) + max(_radius(atoms[:, 1]) / _target(length) - 1.25, 0) + max(0.6 - contacts, 0)
        if not fault:
            return plan, angle
        found.append((fault, len(found), plan, angle))
    _, _, plan, angle = min(found, key=lambda one: one[:2])
    return plan, angle


# ---- residues in their surroundings


@dataclass(frozen=True)
class _Model:
    """A Potts model: what a residue likes at its place, and beside others in contact."""

    field: Array                                # [N, 20]
    partners: list[Array]                       # [N] of [K]: residues in contact
    tables: list[Array]                         # [N] of [K, 20, 20]: letters of the partner, letters here


def _beta(atoms: Array, frames: Array) -> Array:
    """CB, and where it would be in glycine.   [N, 3]"""
    return np.asarray(atoms[:, 1] + frames[:, 1] @ _CB)


def _apart(points: Array) -> Array:
    """Distances between all points.   [N, 3] -> [N, N]"""
    return np.sqrt(((points[:, None] - points) ** 2).sum(-1))


def _buried(beta: Array) -> Array:
    """How buried each residue is, from its neighbours within 10 angstrom, with mean 0 and deviation 1.   [N]"""
    count = (_apart(beta) < 10).sum(1)
    return np.asarray((count - count.mean()) / (count.std() + 1e-6))


def _model(plan: _Plan, beta: Array, draw: Draw) -> _Model:
    """Hydropathy follows burial. Some pairs in contact are coupled: by charge in the open, by the volume that the two fill together
    where they are buried, a few as cysteines."""
    length, buried, distance = len(beta), _buried(beta), _apart(beta)
    field = _SHARE + 1.6 * _PROPENSITY[plan.kind] + 0.6 * buried[:, None] * _HYDROPATHY
    field[:, P] -= 3
    field[np.arange(length), plan.given] += np.where(plan.given >= 0, 7, 0)
    chosen, strength, sulfur = draw.random((3, length, length))             # for all pairs, so that relatives have the same
    free = plan.given < 0
    step = np.subtract.outer(np.arange(length), np.arange(length)).T
    joined = (distance < CONTACT) & (step > 2) & free & free[:, None] & (chosen < np.where(step > 5, COUPLED, COUPLED_NEAR))
    partners: list[list[int]] = [[] for _ in beta]
    tables: list[list[Array]] = [[] for _ in beta]
    for i, j in np.argwhere(joined):
        inside = 1 / (1 + np.exp(-1.5 * (buried[i] + buried[j])))
        table = (0.7 + 0.6 * strength[i, j]) * (inside * _FILLING + (1 - inside) * _SALT)
        if distance[i, j] < 5.5 and step[i, j] > 5 and sulfur[i, j] < 0.08:
            table = _SULFUR
        for here, there in ((i, j), (j, i)):
            partners[here].append(there)
            tables[here].append(table)
    return _Model(field, [np.array(some, int) for some in partners], [np.array(some).reshape(-1, 20, 20) for some in tables])


def _sweep(model: _Model, rows: Array, rate: Array, draw: Draw) -> None:
    """Gibbs sampling in place: each row draws a share ``rate`` of its letters again, given its others.   [S, N], [S]"""
    for column in draw.permutation(rows.shape[1]):
        partners = model.partners[column]
        energy = model.field[column] + model.tables[column][np.arange(len(partners)), rows[:, partners]].sum(1)
        chance = np.cumsum(np.exp(energy - energy.max(1, keepdims=True)), 1)
        drawn = (chance < draw.random((len(rows), 1)) * chance[:, -1:]).sum(1)
        rows[:, column] = np.where(draw.random(len(rows)) < rate, drawn, rows[:, column])


# ---- all atoms


def _placed(types: Array, chi: Array, origin: Array, frames: Array, psi: Array) -> Array:
    """Atoms of residues: [M] types, [M, 4] chi, [M, 3] CA, [M, 3, 3] backbone frames, [M] psi -> [M, 14, 3]"""
    ideal = residues.GROUP_FRAME[types].astype(float)
    turns = _turned(np.concatenate([psi[:, None], chi], 1), 0)
    rotation, at = np.tile(frames[:, None], (1, 8, 1, 1)), np.tile(origin[:, None], (1, 8, 1))
    for group in range(3, 8):
        parent = 0 if group < 5 else group - 1
        at[:, group] = at[:, parent] + np.einsum("nij,nj->ni", rotation[:, parent], ideal[:, group, :3, 3])
        rotation[:, group] = rotation[:, parent] @ ideal[:, group, :3, :3] @ turns[:, group - 3]
    of, here = residues.ATOM14_GROUP[types], np.arange(len(types))[:, None]
    return np.asarray(at[here, of] + np.einsum("naij,naj->nai", rotation[here, of], residues.ATOM14_POSITION[types].astype(float)))


def _packed(types: Array, angle: Array, atoms: Array, frames: Array, draw: Draw) -> tuple[Array, Array]:
    """Types, where one that fits nowhere has become alanine, and atoms [N, 14, 3].

    Side chains take turns, the most buried first: each takes the rotamer that overlaps least with what is there by then.
    """
    types, length = types.copy(), len(types)
    where = atoms[:, 1], frames[:, 1], angle[:, 1]
    found = _placed(types, np.zeros((length, 4)), *where)
    found[:, :3] = atoms
    there = (residues.ATOM14_EXISTS[types] > 0) & (np.arange(14) < 5)       # N, CA, C, O, CB
    reach = _apart(atoms[:, 1]) < 15
    np.fill_diagonal(reach, False)
    order = np.argsort(-_buried(_beta(atoms, frames)), kind="stable")
    for turn, i in product(range(3), order):
        kind = types[i]
        if turn and kind in (A, G, P):
            continue
        choices = np.radians([(*row, *[0] * (4 - len(row))) for row in _ROTAMERS[RESTYPES[kind]]])
        many = len(choices)
        if kind != P:                                                       # its ring would open
            choices = choices + np.radians(5) * np.clip(draw.standard_normal(choices.shape), -2, 2)
        tries = _placed(np.full(many, kind), choices, *(np.repeat(part[i : i + 1], many, 0) for part in where))
        own, others = np.flatnonzero(residues.ATOM14_EXISTS[kind][5:]) + 5, np.flatnonzero(reach[i])
        row, place = np.nonzero(there[others])
        far = np.sqrt(((tries[:, own, None] - found[others[row], place]) ** 2).sum(-1))
        least = residues.ATOM14_RADIUS[kind][own, None] + residues.ATOM14_RADIUS[types[others[row]], place] - 0.5
        overlap = (np.maximum(least - far, 0) ** 2).sum((1, 2))
        best = int(overlap.argmin())
        if turn and overlap[best] > 1.5:
            types[i] = A
        else:
            found[i, 4:] = tries[best, 4:]
        there[i] = residues.ATOM14_EXISTS[types[i]] > 0
    final = _placed(types, np.zeros((length, 4)), *where)
    found[:, 3] = final[:, 3]
    found[types == A, 4] = final[types == A, 4]
    return types, found * residues.ATOM14_EXISTS[types][..., None]


# ---- alignments


def _alignment(model: _Model, query: Array, kind: Array, rows: int, name: str, draw: Draw) -> Alignment:
    """Rows that evolve together from the query and split as they go, each branch at its own pace; the most alike come first."""
    length, columns = len(query), np.arange(len(query))
    msa, rate = query[None].copy(), np.zeros(1)
    gone, deletions = np.zeros((1, length), bool), np.zeros((1, length), np.int32)
    loose = np.cumsum(np.where(kind == LOOP, 1.0, 0.08))

    def where() -> Array:
        return np.searchsorted(loose, draw.random((count, 1)) * loose[-1])

    def events(often: float, shorter: float) -> Array:
        return np.where(draw.random(count) < often * rate, draw.geometric(shorter, count), 0)[:, None]

    while len(msa) < rows:
        old = len(msa)
        count = min(2 * old, rows)
        # A third of the new leave the line of the query, which is row 0 and stays as it is.
        parent = np.append(np.arange(old), np.where(draw.random(count - old) < 0.35, 0, draw.integers(0, old, count - old)))
        msa, gone, deletions = msa[parent], gone[parent], deletions[parent]
        rate = np.append(rate, np.exp(draw.uniform(np.log(0.07), 0, count - old)))
        for _ in range(2 if count < rows else 3):
            _sweep(model, msa, rate, draw)
        first = where()
        gone |= (columns >= first) & (columns < first + events(0.3, 0.2))
        gone |= columns < events(0.15, 0.2)
        gone |= columns >= length - events(0.15, 0.2)
        np.put_along_axis(deletions, at := where(), np.take_along_axis(deletions, at, 1) + events(0.3, 0.35).astype(np.int32), 1)
    gone &= ~gone.all(1, keepdims=True)
    same = ((msa == query) & ~gone).sum(1) / (~gone).sum(1)
    order = np.append(0, 1 + np.argsort(-same[1:], kind="stable"))
    msa, deletions = np.where(gone, GAP, msa), np.where(gone | (columns == 0), 0, deletions)
    names = [name, *(f"{name}/{number} identity={same[row]:.2f}" for number, row in enumerate(order[1:], 1))]
    return Alignment(msa[order].astype(np.int8), deletions[order], names)


# ---- proteins


def protein(seed: int, length: int, rows: int) -> tuple[Chain, Alignment]:
    """A chain of ``length`` residues, and an alignment of ``rows`` with the chain's sequence first; a pure function."""
    return family(seed, 1, length, rows)[0]


def family(seed: int, members: int, length: int, rows: int) -> list[tuple[Chain, Alignment]]:
    """Relatives with one fold, none of which depends on how many there are. The first is ``protein(seed, ...)``, the others are
    bent a little and have drifted from its sequence. Raises DataError for what is too small."""
    for name, value, least in (("length", length, SHORTEST), ("rows", rows, 1), ("members", members, 1), ("seed", seed, 0)):
        if value < least:
            raise DataError(f"proteins: {name} {value}, expected {least} at least")
    draw = np.random.default_rng([seed, 0])
    plans, steps = (_plan(draw, length) for _ in range(ATTEMPTS)), STEPS * max(80, length) // 80
    plan, angle = _best((plan, _fold(plan, draw, plan.angle, steps, 1.0)) for plan in plans)
    found = [_member(f"made{seed}m0_A", seed, 0, plan, angle, None, rows)]
    for member in range(1, members):
        draw = np.random.default_rng([seed, 1, member])
        plans = (_relative(plan, angle, draw) for _ in range(ATTEMPTS))
        _, bent = _best((near, _fold(near, draw, angle, AGAIN, 0.2)) for near in plans)
        found.append(_member(f"made{seed}m{member}_A", seed, member, plan, bent, found[0][0].aatype, rows))
    return found


def _member(name: str, seed: int, member: int, plan: _Plan, angle: Array, ancestor: Array | None, rows: int
            ) -> tuple[Chain, Alignment]:  # fmt: skip
    draw = np.random.default_rng([seed, 2, member])
    atoms, frames = _Backbone(plan.given)(angle)
    model = _model(plan, _beta(atoms, frames), np.random.default_rng([seed, 3]))
    # The chain itself must have what its bonds were made for, and no proline elsewhere; rows may differ.
    never = (plan.given[:, None] == P) != (np.arange(20) == P)
    never |= (plan.given[:, None] == G) & (np.arange(20) != G)
    strict = _Model(np.where(never, -99, model.field), model.partners, model.tables)
    query = (strict.field.argmax(1) if ancestor is None else ancestor)[None].copy()
    for _ in range(10 if ancestor is None else 1):
        _sweep(strict, query, np.array([1.0 if ancestor is None else draw.uniform(0.15, 0.7)]), draw)
    types, points = _packed(query[0], angle, atoms, frames, draw)
    return _chain(name, types, points, draw), _alignment(model, types, plan.kind, rows, name, draw)


def _chain(name: str, types: Array, points: Array, draw: Draw) -> Chain:
    """The chain as a crystallographer leaves it: ends may be disordered, and what moves has high B factors."""
    length = len(types)
    resolution = round(float(draw.uniform(1.2, 3.5)), 2)
    ends = np.minimum(draw.geometric(0.5, 2) - 1, 4)
    number = np.arange(length)
    seen = (number >= ends[0]) & (number < length - ends[1])
    mask = residues.ATOM37_EXISTS[types] * seen[:, None]
    positions = np.take_along_axis(points - points[:, 1].mean(0), residues.ATOM37_TO_14[types][..., None], 1) * mask[..., None]
    bfactors = np.maximum(12 * resolution - 6 * _buried(points[:, 1]), 5)[:, None] * mask
    sequence, release = "".join(RESTYPES[kind] for kind in types), FIRST_DAY + timedelta(int(draw.integers(DAYS)))
    xyz, there, b = (part.astype(np.float32) for part in (positions, mask, bfactors))
    return Chain(name, sequence, types.astype(np.int64), xyz, there, b, resolution, release, "x-ray diffraction")
