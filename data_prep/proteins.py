"""Simulated proteins with alignments that encode their structure: realistic geometry without a download.

A chain is folded as NMR structures are computed, by annealing of torsion angles (Guntert et al., J. Mol. Biol. 1997), from a random
plan of helices, hairpins and loops; bond lengths and angles are ideal. Residue types depend on their surroundings, and the rows of
the alignment evolve along a tree under a Potts model whose pair terms couple residues in contact. Nothing is fitted to data: folds
lack the handed crossovers of parallel sheets, cofactors and function, and a model trained on them does not transfer directly.

N residues   S rows   lengths angstrom   angles degrees in tables and radians in code"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcai.models.openfold import residues
from hpcai.models.openfold.alignments import Alignment
from hpcai.models.openfold.residues import GAP, RESTYPES
from hpcai.models.openfold.structures import Chain

Array = NDArray[Any]
Generator = np.random.Generator

MIN_LENGTH = 16
CONTACT_DISTANCE = 8.0                          # between CB, or where glycine's would be
FIRST_DAY, RELEASE_DAYS = date(1990, 1, 1), 12418       # to the end of 2023
ATTEMPTS = 4                                    # to find a compact fold
MAX_DOMAIN = 120                                # residues of a compact domain, at most
STEPS, RELATIVE_STEPS = 450, 150                # steps of annealing: from the plan, from a relative
A, N, C, G, P = (RESTYPES.index(letter) for letter in "ANCGP")

HELIX, STRAND, LOOP = range(3)
_FILE = Path(__file__).with_suffix(".json")     # with the sources of its tables
_TABLES: dict[str, Any] = {name: table["values"] for name, table in json.loads(_FILE.read_text(encoding="utf-8")).items()}
_PROPENSITY, _LOG_FREQ = np.log(_TABLES["propensity"]), np.log(_TABLES["frequency"])
_HYDROPATHY, _CHARGE = np.array(_TABLES["hydropathy"]) / 3, np.array(_TABLES["charge"])
_BULK = np.clip((np.array(_TABLES["volume"]) - 137) / 42, -1.3, 1.3)


def _double_centred(table: Array) -> Array:
    """Return a table of pairs minus the preference of either residue alone."""
    frequency = np.exp(_LOG_FREQ) / np.exp(_LOG_FREQ).sum()
    return np.asarray(table - table @ frequency - (frequency @ table)[:, None] + frequency @ table @ frequency)


# Gains of pairs in contact, in units of kT: one large and one small, opposite charges, two cysteines. With strengths 1.5 times
# these, or more coupled pairs, rows freeze, and carry less information about contacts.
_PACKING = _double_centred(-1.2 * _BULK[:, None] * _BULK)
_SALT_BRIDGE = _double_centred(-2.2 * _CHARGE[:, None] * _CHARGE + 0.5 * _HYDROPATHY[:, None] * _HYDROPATHY)
_DISULFIDE = np.zeros((20, 20))
_DISULFIDE[C], _DISULFIDE[:, C], _DISULFIDE[C, C] = -1, -1, 5
COUPLED, COUPLED_NEAR = 0.5, 0.1                # fractions of the pairs in contact; near: up to 5 apart in the sequence

_BASINS, _IDEAL, _TURNS = (np.radians(_TABLES[name]) for name in ("basins", "ideal", "turns"))
_BASIN_PROBABILITIES, _MIN_DISTANCES = _TABLES["basin probabilities"], np.array(_TABLES["minimum distances"])
_IN_TURNS = (N, G), (G, -1)
_ROTAMERS: dict[str, Any] = _TABLES["rotamers"] | {
    letter: list(product(*choices)) for letters, choices in _TABLES["rotamer grids"].items() for letter in letters
}
_CB = np.array([-0.525, -0.777, -1.208])        # relative to CA, in the frame of the backbone
_SIDE_CHAIN_CENTRE = _CB * (2.4 / 1.53)
_C_TO_O = 1.23 * np.array([-0.543, -0.840, 0])  # relative to C, x to the next N


@dataclass(frozen=True)
class _Plan:
    kind: Array                                 # [N] helix, strand or loop
    angle: Array                                # [N, 3] phi, psi, and omega to the next residue
    spread: Array                               # [N, 3] deviations during folding
    fixed_types: Array                          # [N] glycine, proline and asparagine where angles require them, otherwise -1
    restrained_pairs: Array                     # [K, 2] sites of each pair
    restraints: Array                           # [K, 2] target distance and strength
    inward: Array                               # [N] 1 on the side to be buried


# ---- plans


def _draw_plan(rng: Generator, length: int) -> _Plan:
    kind: list[int] = []
    rows: list[Array] = []
    fixed_types: list[int] = []
    inner: list[float] = []
    bonded: list[tuple[int, int]] = []

    def loop(count: int) -> None:
        for _ in range(count):
            basin = int(rng.choice(4, p=_BASIN_PROBABILITIES))
            rows.append(_BASINS[basin])
            fixed_types.append(G if basin == 3 or rng.random() < 0.04 else P if basin == 2 and rng.random() < 0.4 else -1)
            if fixed_types[-1] == P and len(fixed_types) > 1 and kind[-1] == LOOP and fixed_types[-2] < 0:
                rows[-2] = _BASINS[1]           # in a right helix before proline atoms are too close
            kind.append(LOOP)
            inner.append(0.0)

    def element(structure: int, count: int) -> None:
        phase = rng.uniform(0, 2 * np.pi)
        step, phase = (np.radians(100), phase) if structure == HELIX else (np.pi, np.pi * (phase > np.pi))
        rows.extend(np.tile(_IDEAL[structure], (count, 1)))
        kind.extend([structure] * count)
        fixed_types.extend([-1] * count)
        inner.extend((np.cos(phase + step * np.arange(count)) > 0.1).astype(float))

    helical = rng.choice([0.95, 0.7, 0.3])
    loop(int(rng.integers(2, 4)))
    while len(kind) < length:
        if rng.random() < helical:
            element(HELIX, int(rng.integers(9, 19)))
        else:
            count = int(rng.integers(4, 8))
            element(STRAND, count)
            for _ in range(int(rng.integers(1, 4))):
                last = len(kind) - 1
                turn = int(rng.integers(2))
                rows.extend(_TURNS[turn])
                kind.extend([LOOP] * 2)
                fixed_types.extend(_IN_TURNS[turn])
                inner.extend([0.0] * 2)
                element(STRAND, count)
                bonded += [(last - k, last + 3 + k) for k in range(0, count, 2)]
                # Opposite residues are on one side of the sheet.
                inner[-count:] = inner[last - count + 1 : last + 1][::-1]
        loop(int(rng.integers(2, 6)))
    angle = np.full((length, 3), np.pi)
    angle[:, :2] = rows[:length]
    kinds, fixed = np.array(kind[:length]), np.array(fixed_types[:length])
    angle[fixed == P, 0] = np.radians(-65)
    spread = np.radians(np.array([[5, 5, 3], [11, 11, 3], [14, 28, 3]]))[kinds]
    spread[fixed == P, 0] = np.radians(6)
    angle[:, :2] += np.clip(rng.standard_normal((length, 2)), -2, 2) * np.radians(np.where(kinds == LOOP, 10, 4))[:, None]
    angle[:, 2] += np.clip(rng.standard_normal(length), -2, 2) * np.radians(2.5)
    i, j = np.array([pair for pair in bonded if pair[1] < length], int).reshape(-1, 2).T
    ties = np.stack([5 * np.append(i, j), 5 * np.append(j, i) + 3], 1)      # from N to O: hydrogen bonds
    return _Plan(kinds, angle, spread, fixed, ties, np.tile([2.9, 6.0], (len(ties), 1)), np.array(inner[:length]))


def _relative_plan(plan: _Plan, angle: Array, rng: Generator) -> _Plan:
    """Return a plan that folds into nearly the same chain: CA distances up to 12 angstrom are restrained to within 10 %."""
    alpha = _Backbone(plan.fixed_types)(angle)[0][:, 1]
    i, j = np.nonzero(np.triu(_distances(alpha) < 12, 4))
    length = _distances(alpha)[i, j] * (1 + 0.1 * np.clip(rng.standard_normal(len(i)), -2, 2))
    ties, tie = np.stack([5 * i + 1, 5 * j + 1], 1), np.stack([length, np.full(len(i), 0.7)], 1)
    bent = angle + 0.35 * plan.spread * rng.standard_normal(angle.shape)
    pairs, restraints = np.concatenate([plan.restrained_pairs, ties]), np.concatenate([plan.restraints, tie])
    return replace(plan, angle=bent, restrained_pairs=pairs, restraints=restraints)


# ---- folding


def _rotations(angle: Array, axis: int) -> Array:
    """Return rotations about x (0) or z (2).   [...] -> [..., 3, 3]"""
    matrices = np.zeros((*angle.shape, 3, 3))
    first, second = (1, 2) if axis == 0 else (0, 1)
    matrices[..., axis, axis] = 1
    matrices[..., first, first] = matrices[..., second, second] = np.cos(angle)
    matrices[..., second, first] = np.sin(angle)
    matrices[..., first, second] = -matrices[..., second, first]
    return matrices


class _Backbone:
    """The ideal bonds of a chain. Glycine and proline have their own geometry where they are fixed."""

    def __init__(self, fixed_types: Array) -> None:
        types = np.where(np.isin(fixed_types, (G, P)), fixed_types, A)
        n, c = residues.ATOM14_POSITION[types, 0].astype(float), residues.ATOM14_POSITION[types, 2].astype(float)
        next_n = np.where(np.append(types[1:], A) == P, residues.C_N_LENGTH[1][0], residues.C_N_LENGTH[0][0])
        self.lengths = np.stack([np.linalg.norm(n, axis=1), c[:, 0], next_n], 1).ravel()
        ends = np.full(len(types), np.arccos(residues.COS_C_N_CA[0])), np.full(len(types), np.arccos(residues.COS_CA_C_N[0]))
        bends = np.stack([ends[0], np.arctan2(n[:, 1], n[:, 0]), ends[1]], 1).ravel()
        self.bend = _rotations(np.pi - bends, 2)

    def __call__(self, angle: Array) -> tuple[Array, Array]:
        """Compute the positions of N, CA and C [N, 3, 3] and their frames [N, 3, 3, 3] from angles [N, 3]. In a frame, x points
        along the bond to the next atom, and the previous atom is at y > 0.

        A frame is the product of all rotations before it, by a parallel scan: each pass doubles the length of the products."""
        turns = np.empty_like(self.bend)
        turns[0] = np.eye(3)
        turns[1:] = np.einsum("nij,njk->nik", _rotations(angle.ravel()[:-1], 0), self.bend[1:])
        reach = 1
        while reach < len(turns):
            turns[reach:] = np.einsum("nij,njk->nik", turns[:-reach], turns[reach:])
            reach *= 2
        atoms = np.cumsum(turns[:, :, 0] * self.lengths[:, None], 0)
        atoms = np.concatenate([np.zeros((1, 3)), atoms[:-1]])
        return atoms.reshape(-1, 3, 3), turns.reshape(-1, 3, 3, 3)


def _expected_radius(length: int) -> float:
    """Return the radius of gyration of a folded protein: Skolnick and others, 2.2 N^0.38."""
    return float(2.2 * length**0.38)


def _radius_of_gyration(points: Array) -> float:
    return float(np.sqrt(((points - points.mean(0)) ** 2).sum(1).mean()))


def _fold(plan: _Plan, rng: Generator, start: Array, steps: int, heat: float) -> Array:
    """Anneal the angles from the temperature ``heat``, 1 at most. The steps are those of Adam, with noise, because gradients about
    an axis in the middle of a chain are far larger than those at its ends.   [N, 3] -> [N, 3]"""
    backbone, length, angle = _Backbone(plan.fixed_types), len(start), start.copy()
    mean, variance = np.zeros_like(angle), np.zeros_like(angle)
    pair_i, pair_j = np.triu_indices(length, 3)
    attracted = plan.inward[pair_i] * plan.inward[pair_j] > 0
    fixed_i, fixed_j = (np.append(5 * index[attracted] + 4, ties) for index, ties in zip((pair_i, pair_j), plan.restrained_pairs.T))
    targets, strengths = plan.restraints.T
    bounds = np.linspace(0, length, 1 + -(-length // MAX_DOMAIN)).round().astype(int)
    domains = [(slice(*ends), 1.5) for ends in pairwise(bounds)] + [(slice(None), 0.1)] * (len(bounds) > 2)
    for step in range(steps):
        temperature = heat * (1 - step / steps)
        atoms, frames = backbone(angle)
        oxygen, side = atoms[:, 2] + frames[:, 2] @ _C_TO_O, atoms[:, 1] + frames[:, 1] @ _SIDE_CHAIN_CENTRE
        sites = np.concatenate([atoms, oxygen[:, None], side[:, None]], 1)       # of _MIN_DISTANCES   [N, 5, 3]
        flat = sites.reshape(-1, 3)
        if step % 10 == 0:
            near_i, near_j, least = _close_pairs(sites)
            all_i, all_j = np.append(near_i, fixed_i), np.append(near_j, fixed_j)
            ends = (3 * np.append(all_i, all_j)[:, None] + np.arange(3)).ravel()
        difference = flat[all_i] - flat[all_j]
        distance = np.sqrt((difference**2).sum(1) + 1e-6)
        bad, good, tie = np.split(distance, [len(near_i), len(near_i) + int(attracted.sum())])
        beyond = np.maximum(good - 5.2, 0) / 3
        # At first, parts of the chain may pass through each other.
        overlaps = 0.6 * 60 ** (1 - temperature) * np.minimum(bad - least, 0)
        pair_gradient = np.concatenate([overlaps, beyond * np.exp(-(beyond**2)) / 3, strengths * np.clip(tie - targets, -1, 2)])
        pull = difference * (pair_gradient / distance)[:, None]
        gradient = np.bincount(ends, np.concatenate([pull, -pull]).ravel(), flat.size).reshape(length, 5, 3)
        for part, strength in domains:
            alpha = sites[part, 1] - sites[part, 1].mean(0)
            radius = _radius_of_gyration(alpha)
            gradient[part, 1] += strength * max(radius - 0.97 * _expected_radius(len(alpha)), 0) / radius * alpha
        angle_gradient = _torsion_gradient(gradient, sites, frames)
        deviation = (np.remainder(angle - plan.angle + np.pi, 2 * np.pi) - np.pi) / plan.spread
        angle_gradient += (deviation + deviation**3 / 9) / plan.spread
        mean, variance = 0.8 * mean + 0.2 * angle_gradient, 0.95 * variance + 0.05 * angle_gradient**2
        move = mean / (1 - 0.8 ** (step + 1)) / np.sqrt(variance / (1 - 0.95 ** (step + 1)) + 1e-6)
        noise = (temperature**2 if temperature > 0.3 else 0) * rng.standard_normal(angle.shape)
        angle -= plan.spread * (0.02 + 0.25 * temperature) * (move + noise)
    return angle


def _close_pairs(sites: Array) -> tuple[Array, Array, Array]:
    """Return the pairs of sites, as flat indices, that may overlap in the next ten steps, and their minimum distances.   3 x [K]"""
    residue_i, residue_j = np.triu_indices(len(sites), 2)
    nearby = ((sites[residue_i, 1] - sites[residue_j, 1]) ** 2).sum(1) < 11**2
    i, j = (5 * index[nearby][:, None] + site for index, site in zip((residue_i, residue_j), np.divmod(np.arange(25), 5)))
    i, j = i.ravel(), j.ravel()
    least = _MIN_DISTANCES[i % 5, j % 5]
    flat = sites.reshape(-1, 3)
    close = ((flat[i] - flat[j]) ** 2).sum(1) < (least + 2) ** 2
    return i[close], j[close], least[close]


def _torsion_gradient(gradient: Array, sites: Array, frames: Array) -> Array:
    """Return the gradient in the torsion angles: the torque about each bond on all atoms that rotate with it.   [N, 5, 3] -> [N, 3]

    An atom rotates with the bonds before the one that ends at it: O with the next N, the side chain with C."""
    length = len(sites)
    both = np.concatenate([gradient, np.cross(sites, gradient)], 2)
    total = np.zeros((length + 1, 3, 6))
    total[:-1] = both[:, :3]
    total[:-1, 2] += both[:, 4]
    total[1:, 0] += both[:, 3]
    beyond = np.cumsum(total.reshape(-1, 6)[::-1], 0)[::-1][2:-1].reshape(length, 3, 6)
    force, torque = np.split(beyond, 2, axis=2)
    return np.asarray((frames[..., 0] * (torque - np.cross(sites[:, :3], force))).sum(2))


def _best_fold(attempts: Iterable[tuple[_Plan, Array]]) -> tuple[_Plan, Array]:
    """Return the first fold without faults, or the one with the least: phi of glycine in another residue, CA too close, a large
    radius, few contacts."""
    candidates: list[tuple[float, _Plan, Array]] = []
    for plan, angle in attempts:
        atoms, frames = _Backbone(plan.fixed_types)(angle)
        length, beta = len(angle), _beta_carbons(atoms, frames)
        least = _distances(atoms[:, 1])[np.triu_indices(length, 2)].min()
        contacts = (_distances(beta)[np.triu_indices(length, 6)] < CONTACT_DISTANCE).sum() / length
        left_handed = ((np.sin(angle[1:, 0]) > 0) & ~np.isin(plan.fixed_types[1:], (G, N))).sum()
        fault = (left_handed + max(3.75 - least, 0) + max(_radius_of_gyration(atoms[:, 1]) / _expected_radius(length) - 1.25, 0)
                 + max(0.6 - contacts, 0))  # fmt: skip
        if not fault:
            return plan, angle
        candidates.append((fault, plan, angle))
    return min(candidates, key=lambda candidate: candidate[0])[1:]


# ---- residues in their surroundings


@dataclass(frozen=True)
class _PottsModel:
    """A Potts model: a field at each residue, and couplings of residues in contact."""

    field: Array                                # [N, 20]
    partners: list[Array]                       # [N] of [K]: residues in contact
    couplings: list[Array]                      # [N] of [K, 20, 20]: letters of the partner, letters of the residue


def _beta_carbons(atoms: Array, frames: Array) -> Array:
    """Return the positions of CB, also of the virtual one of glycine.   [N, 3]"""
    return np.asarray(atoms[:, 1] + frames[:, 1] @ _CB)


def _distances(points: Array) -> Array:
    """Return the distances between all pairs of points.   [N, 3] -> [N, N]"""
    return np.sqrt(((points[:, None] - points) ** 2).sum(-1))


def _burial(beta: Array) -> Array:
    """Return the burial of each residue, from its neighbours within 10 angstrom, with mean 0 and standard deviation 1.   [N]"""
    count = (_distances(beta) < 10).sum(1)
    return np.asarray((count - count.mean()) / (count.std() + 1e-6))


def _potts_model(plan: _Plan, beta: Array, rng: Generator) -> _PottsModel:
    """Build the Potts model. Hydropathy follows burial. Some pairs in contact are coupled: by charge where exposed, by the volume
    that both fill where buried, a few as cysteines."""
    length, buried, distance = len(beta), _burial(beta), _distances(beta)
    field = _LOG_FREQ + 1.6 * _PROPENSITY[plan.kind] + 0.6 * buried[:, None] * _HYDROPATHY
    field[:, P] -= 3
    field[np.arange(length), plan.fixed_types] += np.where(plan.fixed_types >= 0, 7, 0)
    drawn, strength, sulfur = rng.random((3, length, length))               # drawn for all pairs, so that relatives have the same
    free = plan.fixed_types < 0
    step = np.subtract.outer(np.arange(length), np.arange(length)).T
    joined = (distance < CONTACT_DISTANCE) & (step > 2) & free & free[:, None] & (drawn < np.where(step > 5, COUPLED, COUPLED_NEAR))
    partners: list[list[int]] = [[] for _ in beta]
    tables: list[list[Array]] = [[] for _ in beta]
    for i, j in np.argwhere(joined):
        inside = 1 / (1 + np.exp(-1.5 * (buried[i] + buried[j])))
        table = (0.7 + 0.6 * strength[i, j]) * (inside * _PACKING + (1 - inside) * _SALT_BRIDGE)
        if distance[i, j] < 5.5 and step[i, j] > 5 and sulfur[i, j] < 0.08:
            table = _DISULFIDE
        for site, partner in ((i, j), (j, i)):
            partners[site].append(partner)
            tables[site].append(table)
    return _PottsModel(field, [np.array(some, int) for some in partners], [np.array(some).reshape(-1, 20, 20) for some in tables])


def _gibbs_sweep(model: _PottsModel, rows: Array, rate: Array, rng: Generator) -> None:
    """Sample in place by Gibbs sampling: each row resamples a fraction ``rate`` of its letters, given the others.   [S, N], [S]"""
    for column in rng.permutation(rows.shape[1]):
        partners = model.partners[column]
        energy = model.field[column] + model.couplings[column][np.arange(len(partners)), rows[:, partners]].sum(1)
        chance = np.cumsum(np.exp(energy - energy.max(1, keepdims=True)), 1)
        drawn = (chance < rng.random((len(rows), 1)) * chance[:, -1:]).sum(1)
        rows[:, column] = np.where(rng.random(len(rows)) < rate, drawn, rows[:, column])


# ---- all atoms


def _place_atoms(types: Array, chi: Array, origin: Array, frames: Array, psi: Array) -> Array:
    """Place the atoms of residues: [M] types, [M, 4] chi, [M, 3] CA, [M, 3, 3] backbone frames, [M] psi -> [M, 14, 3]"""
    ideal = residues.GROUP_FRAME[types].astype(float)
    turns = _rotations(np.concatenate([psi[:, None], chi], 1), 0)
    rotation, group_origin = np.tile(frames[:, None], (1, 8, 1, 1)), np.tile(origin[:, None], (1, 8, 1))
    for group in range(3, 8):
        parent = 0 if group < 5 else group - 1
        group_origin[:, group] = group_origin[:, parent] + np.einsum("nij,nj->ni", rotation[:, parent], ideal[:, group, :3, 3])
        rotation[:, group] = rotation[:, parent] @ ideal[:, group, :3, :3] @ turns[:, group - 3]
    group_of, residue = residues.ATOM14_GROUP[types], np.arange(len(types))[:, None]
    return np.asarray(group_origin[residue, group_of] + np.einsum(
        "naij,naj->nai", rotation[residue, group_of], residues.ATOM14_POSITION[types].astype(float)))  # fmt: skip


def _pack_side_chains(types: Array, angle: Array, atoms: Array, frames: Array, rng: Generator) -> tuple[Array, Array]:
    """Return the types, with alanine where no rotamer fits, and the atoms [N, 14, 3].

    Side chains are placed by descending burial: each takes the rotamer that overlaps least with the atoms placed so far."""
    types, length = types.copy(), len(types)
    backbone = atoms[:, 1], frames[:, 1], angle[:, 1]
    positions = _place_atoms(types, np.zeros((length, 4)), *backbone)
    positions[:, :3] = atoms
    placed = (residues.ATOM14_EXISTS[types] > 0) & (np.arange(14) < 5)      # N, CA, C, O, CB
    reach = _distances(atoms[:, 1]) < 15
    np.fill_diagonal(reach, False)
    order = np.argsort(-_burial(_beta_carbons(atoms, frames)), kind="stable")
    for turn, i in product(range(3), order):
        kind = types[i]
        if turn and kind in (A, G, P):
            continue
        choices = np.radians([(*row, *[0] * (4 - len(row))) for row in _ROTAMERS[RESTYPES[kind]]])
        count = len(choices)
        if kind != P:                                                       # else its ring would open
            choices = choices + np.radians(5) * np.clip(rng.standard_normal(choices.shape), -2, 2)
        tries = _place_atoms(np.full(count, kind), choices, *(np.repeat(part[i : i + 1], count, 0) for part in backbone))
        side_atoms, neighbours = np.flatnonzero(residues.ATOM14_EXISTS[kind][5:]) + 5, np.flatnonzero(reach[i])
        row, atom = np.nonzero(placed[neighbours])
        distance = np.sqrt(((tries[:, side_atoms, None] - positions[neighbours[row], atom]) ** 2).sum(-1))
        least = residues.ATOM14_RADIUS[kind][side_atoms, None] + residues.ATOM14_RADIUS[types[neighbours[row]], atom] - 0.5
        overlap = (np.maximum(least - distance, 0) ** 2).sum((1, 2))
        best = int(overlap.argmin())
        if turn and overlap[best] > 1.5:
            types[i] = A
        else:
            positions[i, 4:] = tries[best, 4:]
        placed[i] = residues.ATOM14_EXISTS[types[i]] > 0
    final = _place_atoms(types, np.zeros((length, 4)), *backbone)
    positions[:, 3] = final[:, 3]
    positions[types == A, 4] = final[types == A, 4]
    return types, positions * residues.ATOM14_EXISTS[types][..., None]


# ---- alignments


def _evolve_alignment(
    model: _PottsModel, query: Array, kind: Array, rows: int, name: str, rng: Generator, settle: int
) -> Alignment:  # fmt: skip
    """Evolve rows from the query along a tree, with a rate for each branch; the most similar rows come first. ``settle``: further
    sweeps, after which rows have only the model in common."""
    length, columns = len(query), np.arange(len(query))
    msa, rate = query[None].copy(), np.zeros(1)
    gone, deletions = np.zeros((1, length), bool), np.zeros((1, length), np.int32)
    loose = np.cumsum(np.where(kind == LOOP, 1.0, 0.08))

    def sites() -> Array:
        return np.searchsorted(loose, rng.random((count, 1)) * loose[-1])

    def events(probability: float, stop_probability: float) -> Array:
        return np.where(rng.random(count) < probability * rate, rng.geometric(stop_probability, count), 0)[:, None]

    while len(msa) < rows:
        old = len(msa)
        count = min(2 * old, rows)
        # A third of the new rows descend directly from the query, which is row 0 and does not change.
        parent = np.append(np.arange(old), np.where(rng.random(count - old) < 0.35, 0, rng.integers(0, old, count - old)))
        msa, gone, deletions = msa[parent], gone[parent], deletions[parent]
        rate = np.append(rate, np.exp(rng.uniform(np.log(0.07), 0, count - old)))
        for _ in range(2 if count < rows else 3):
            _gibbs_sweep(model, msa, rate, rng)
        first = sites()
        gone |= (columns >= first) & (columns < first + events(0.3, 0.2))
        gone |= columns < events(0.15, 0.2)
        gone |= columns >= length - events(0.15, 0.2)
        np.put_along_axis(deletions, at := sites(), np.take_along_axis(deletions, at, 1) + events(0.3, 0.35).astype(np.int32), 1)
    for _ in range(settle):
        _gibbs_sweep(model, msa[1:], np.ones(len(msa) - 1), rng)
    gone &= ~gone.all(1, keepdims=True)
    identity = ((msa == query) & ~gone).sum(1) / (~gone).sum(1)
    order = np.append(0, 1 + np.argsort(-identity[1:], kind="stable"))
    msa, deletions = np.where(gone, GAP, msa), np.where(gone | (columns == 0), 0, deletions)
    names = [name, *(f"{name}/{number} identity={identity[row]:.2f}" for number, row in enumerate(order[1:], 1))]
    return Alignment(msa[order].astype(np.int8), deletions[order], names)


# ---- proteins


def make_family(seed: int, members: int, length: int, rows: int, settle: int = 0) -> list[tuple[Chain, Alignment]]:
    """Return relatives with one fold; none depends on their number. The others than the first are slightly deformed
    and have drifted from its sequence. An alignment begins with its chain; after about 12 sweeps of ``settle`` its other rows are
    independent samples of the family's Potts model."""
    rng = np.random.default_rng([seed, 0])
    plans, steps = (_draw_plan(rng, length) for _ in range(ATTEMPTS)), STEPS * max(80, length) // 80
    plan, angle = _best_fold((plan, _fold(plan, rng, plan.angle, steps, 1.0)) for plan in plans)
    chains = [_make_member(f"made{seed}m0_A", seed, 0, plan, angle, None, rows, settle)]
    for member in range(1, members):
        rng = np.random.default_rng([seed, 1, member])
        plans = (_relative_plan(plan, angle, rng) for _ in range(ATTEMPTS))
        _, bent = _best_fold((relative, _fold(relative, rng, angle, RELATIVE_STEPS, 0.2)) for relative in plans)
        chains.append(_make_member(f"made{seed}m{member}_A", seed, member, plan, bent, chains[0][0].aatype, rows, settle))
    return chains


def _make_member(name: str, seed: int, member: int, plan: _Plan, angle: Array, ancestor: Array | None, rows: int, settle: int
            ) -> tuple[Chain, Alignment]:  # fmt: skip
    rng = np.random.default_rng([seed, 2, member])
    atoms, frames = _Backbone(plan.fixed_types)(angle)
    model = _potts_model(plan, _beta_carbons(atoms, frames), np.random.default_rng([seed, 3]))
    # The chain itself must have the fixed types of its bonds, and no other proline; rows may differ.
    forbidden = (plan.fixed_types[:, None] == P) != (np.arange(20) == P)
    forbidden |= (plan.fixed_types[:, None] == G) & (np.arange(20) != G)
    strict = _PottsModel(np.where(forbidden, -99, model.field), model.partners, model.couplings)
    query = (strict.field.argmax(1) if ancestor is None else ancestor)[None].copy()
    for _ in range(10 if ancestor is None else 1):
        _gibbs_sweep(strict, query, np.array([1.0 if ancestor is None else rng.uniform(0.15, 0.7)]), rng)
    types, points = _pack_side_chains(query[0], angle, atoms, frames, rng)
    # As in a crystal structure, the ends may be disordered, and B factors are high where the chain is mobile.
    resolution, number = round(float(rng.uniform(1.2, 3.5)), 2), np.arange(len(types))
    ends = np.minimum(rng.geometric(0.5, 2) - 1, 4)
    resolved = (number >= ends[0]) & (number < len(types) - ends[1])
    mask = residues.ATOM37_EXISTS[types] * resolved[:, None]
    positions = np.take_along_axis(points - points[:, 1].mean(0), residues.ATOM37_TO_14[types][..., None], 1) * mask[..., None]
    bfactors = np.maximum(12 * resolution - 6 * _burial(points[:, 1]), 5)[:, None] * mask
    sequence, release = "".join(RESTYPES[kind] for kind in types), FIRST_DAY + timedelta(int(rng.integers(RELEASE_DAYS)))
    coordinates, exists, b = (part.astype(np.float32) for part in (positions, mask, bfactors))
    chain = Chain(name, sequence, types.astype(np.int64), coordinates, exists, b, resolution, release, "x-ray diffraction")
    return chain, _evolve_alignment(model, types, plan.kind, rows, name, rng, settle)
