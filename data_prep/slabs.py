"""Metal slabs with an adsorbate, moved by the effective medium theory (EMT) of ASE: small catalysis data with exact labels.

A *system* is a pure function of its generator: an fcc metal, pure or randomly substituted by a second one, one of three facets, an
adsorbate at a random position. Its *frames* are a relaxation, rattled copies of the relaxed structure, and molecular dynamics.

Energies are E - E(clean slab, relaxed) - sum of E(isolated atom) over the atoms of the adsorbate, all by EMT: adsorption energies
in the style of OC20. Forces are raw: of every atom, also of fixed ones. EMT describes H, C, N and O badly (see ASE's
documentation): the labels are exact derivatives of one smooth potential, not chemistry. Never call them DFT.

A atoms   lengths angstrom   energies eV"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.frames import Frame, import_ase
from hpcai.errors import DataError
from hpcai.lazy import import_optional

LABEL = "EMT (effective medium theory), not DFT"
SOURCES = [{"name": name, "labels": "EMT"} for name in ("relaxation", "rattled", "molecular dynamics")]
LATTICE = {"Al": 4.05, "Ni": 3.52, "Cu": 3.61, "Pd": 3.89, "Pt": 3.92, "Au": 4.08, "Ag": 4.09}
FRACTIONS = (0.25, 0.5, 0.75)                   # of the second metal
FACETS = ("fcc111", "fcc100", "fcc110")
ADSORBATES = ("H", "C", "N", "O", "OH", "CO", "NH", "CH", "H2", "NO")
VACUUM = 8.0                                    # on each side of a slab, so that no adsorbate reaches the next slab
HEIGHT = (1.1, 1.9)                             # lowest atom of the adsorbate above the highest of the slab
FIXED_LAYERS = 2                                # the lowest
RELAXATION_STEPS, CLEAN_STEPS, MAX_RELAXED_FORCE = 25, 100, 0.02                # at most; eV/A, at which a relaxation ends
SIGMAS = (0.03, 0.06, 0.1, 0.15) * 2
KELVIN, STEP_FS, FRICTION, FRAME_INTERVAL = (300.0, 600.0, 900.0), 2.0, 0.02, 5  # friction per fs
MAX_START_FORCE, MAX_FRAME_FORCE = 50.0, 20.0                                   # eV/A: redraw a start, omit a frame
MAX_DRAWS = 50
Array = NDArray[Any]


# ---- compositions


def compositions() -> list[str]:
    """Return all metals and pairs of metals, in alphabetical order: Ag, Ag-Al, ... All ratios of a pair are held out together."""
    metals = sorted(LATTICE)
    return sorted("-".join(dict.fromkeys(pair)) for i, metal in enumerate(metals) for pair in [(metal, m) for m in metals[i:]])


def split_compositions(random: np.random.Generator, validation: float, test: float) -> dict[str, list[str]]:
    """Return the disjoint compositions of each split."""
    names = compositions()
    order = [names[n] for n in random.permutation(len(names))]
    counts = [max(1, round(fraction * len(names))) if fraction else 0 for fraction in (validation, test)]
    splits = {"validation": order[: counts[0]], "test": order[counts[0] : sum(counts)], "train": order[sum(counts) :]}
    return {split: sorted(names) for split, names in splits.items()}


# ---- one system


@dataclass(frozen=True)
class System:
    name: str                                   # such as Cu(75%)Ni(25%) fcc111 + OH
    composition: str
    reference: float                            # eV, subtracted from the total energy
    frames: list[Frame]


def make_system(random: np.random.Generator, number: int, choice: Sequence[str], size: Sequence[int], steps: int) -> System:
    """Return a system of one of the compositions of ``choice`` and its frames, with ``steps`` of dynamics at each temperature.
    ``size``: atoms along two directions, and layers. A start with excessive forces is redrawn from the same generator."""
    for _ in range(MAX_DRAWS):
        composition = choice[int(random.integers(len(choice)))]
        name, slab, adsorbate = _draw_structure(random, composition, size)
        start = slab + adsorbate
        start.calc = emt_calculator()
        if not np.abs(start.get_forces(apply_constraint=False)).max() <= MAX_START_FORCE:
            continue
        slab.calc = emt_calculator()
        for _ in _relax(slab, CLEAN_STEPS):
            pass
        isolated = (import_ase().Atoms(symbol, calculator=emt_calculator()) for symbol in adsorbate.symbols)
        reference = float(slab.get_potential_energy()) + sum(float(atom.get_potential_energy()) for atom in isolated)
        # Tags as in OC20, where the atoms below the surface are the fixed ones. ASE gives its adsorbates 0 and layers from 1.
        frames = [
            Frame(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, energy - reference, forces,
                  tags=np.where(atoms.get_tags() == 0, 2, 1 - _fixed_atoms(atoms)).astype(np.uint8),
                  fixed=_fixed_atoms(atoms), system=number, source=source)
            for source, atoms, energy, forces in _simulate_frames(random, start, steps) if np.abs(forces).max() <= MAX_FRAME_FORCE
        ]  # fmt: skip
        if frames:
            for count, frame in enumerate(frames):
                frame.frame = count
            return System(name, composition, reference, frames)
    raise DataError(f"system {number}: {MAX_DRAWS} draws began with forces above {MAX_START_FORCE:g} eV/angstrom; change --size")


def emt_calculator() -> Any:
    """Return the same potential for every composition: with asap_cutoff the cutoff would depend on the metals that are present."""
    return import_ase().calculators.emt.EMT(asap_cutoff=False)


def _draw_structure(random: np.random.Generator, composition: str, size: Sequence[int]) -> tuple[str, Any, Any]:
    """Draw the name, a slab with fixed lowest layers, and an adsorbate above it."""
    first, second = (composition.split("-") * 2)[:2]
    fraction = float(random.choice(FRACTIONS)) if second != first else 0.0
    facet, molecule = FACETS[int(random.integers(len(FACETS)))], ADSORBATES[int(random.integers(len(ADSORBATES)))]
    lattice = (1 - fraction) * LATTICE[first] + fraction * LATTICE[second]        # Vegard's law
    slab = getattr(import_ase().build, facet)(first, tuple(size), a=lattice, vacuum=VACUUM, periodic=True)
    swapped = random.permutation(len(slab))[: round(fraction * len(slab))]
    slab.symbols[swapped] = second
    slab.set_constraint(import_ase().constraints.FixAtoms(mask=slab.get_tags() > size[2] - FIXED_LAYERS))  # layer 1 is the top
    molecule_atoms = import_ase().Atoms(molecule) if len(molecule) == 1 else import_ase().build.molecule(molecule)
    rotations = import_optional("scipy.spatial.transform", "rotating adsorbates needs", "opencatalyst")
    rotation = rotations.Rotation.from_quat(np.roll(random.standard_normal(4), -1))  # uniformly distributed; its last element is w
    molecule_atoms.positions = rotation.apply(molecule_atoms.positions - molecule_atoms.positions.mean(0))
    x, y, _ = random.random(2) @ slab.cell.array[:2]
    top = slab.positions[:, 2].max() + random.uniform(*HEIGHT)
    molecule_atoms.positions += (x, y, top - molecule_atoms.positions[:, 2].min())
    molecule_atoms.set_tags(0)
    metals = f"{first}({100 * (1 - fraction):.0f}%){second}({100 * fraction:.0f}%)" if fraction else first
    return f"{metals} {facet} + {molecule}", slab, molecule_atoms


def _fixed_atoms(atoms: Any) -> NDArray[np.uint8]:
    fixed = np.zeros(len(atoms), np.uint8)
    fixed[atoms.constraints[0].get_indices()] = 1
    return fixed


# ---- frames


def _simulate_frames(random: np.random.Generator, atoms: Any, steps: int) -> Iterator[tuple[int, Any, float, Array]]:
    """Yield an index into SOURCES, a copy of the atoms, the total energy and the raw forces [A, 3]."""
    for _ in _relax(atoms, RELAXATION_STEPS):
        yield 0, *_with_labels(atoms)
    relaxed, free = atoms.positions.copy(), _fixed_atoms(atoms) == 0
    for sigma in SIGMAS:
        atoms.positions = relaxed
        atoms.positions[free] += sigma * random.standard_normal((int(free.sum()), 3))
        yield 1, *_with_labels(atoms)
    for kelvin in KELVIN:
        atoms.positions = relaxed
        for _ in _langevin(random, atoms, free, kelvin, steps):
            yield 2, *_with_labels(atoms)


def _with_labels(atoms: Any) -> tuple[Any, float, Array]:
    energy, forces = float(atoms.get_potential_energy()), atoms.get_forces(apply_constraint=False)
    return atoms.copy(), energy, forces


def _relax(atoms: Any, steps: int) -> Iterator[bool]:
    """Relax the structure, and yield at the start and after every step. The optimizer is L-BFGS because without LAPACK no bit
    depends on the threads of a worker."""
    optimizer = import_ase().optimize.LBFGS(atoms, logfile=None)
    yield from optimizer.irun(fmax=MAX_RELAXED_FORCE, steps=steps)


def _langevin(random: np.random.Generator, atoms: Any, free: NDArray[np.bool_], kelvin: float, steps: int) -> Iterator[int]:
    """Run Langevin dynamics of the free atoms by BAOAB (Leimkuhler and Matthews 2013), and yield at every fifth step."""
    units = import_ase().units
    step, masses = STEP_FS * units.fs, atoms.get_masses()[free, None]
    damping = np.exp(-FRICTION * STEP_FS)
    thermal = np.sqrt(units.kB * kelvin / masses)
    velocity = thermal * random.standard_normal((len(masses), 3))
    forces = atoms.get_forces(apply_constraint=False)[free]
    for count in range(1, steps + 1):
        velocity += 0.5 * step * forces / masses
        middle = 0.5 * step * velocity
        velocity = damping * velocity + np.sqrt(1 - damping**2) * thermal * random.standard_normal(velocity.shape)
        atoms.positions[free] += middle + 0.5 * step * velocity
        forces = atoms.get_forces(apply_constraint=False)[free]
        if not np.abs(forces).max() <= MAX_START_FORCE:                              # two atoms collided
            return
        velocity += 0.5 * step * forces / masses
        if count % FRAME_INTERVAL == 0:
            yield count
