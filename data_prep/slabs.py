"""Metal slabs with an adsorbate, moved by the effective medium theory (EMT) of ASE: small catalysis data with exact labels.

A *system* is a pure function of its generator: an fcc metal, pure or randomly substituted by a second one, one of three facets, an
adsorbate put down at random. Its *frames* are a relaxation, rattled copies of what that came to, and molecular dynamics.

Energies are E - E(clean slab, relaxed) - sum of E(isolated atom) over the atoms of the adsorbate, all by EMT: adsorption energies
in the style of OC20. Forces are raw: of every atom, held ones too. EMT describes H, C, N and O badly (ASE says so): the labels are
exact derivatives of one smooth potential, and not chemistry. They are never to be called DFT.

A atoms   lengths angstrom   energies eV
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.frames import Frame, ase
from hpcai.errors import DataError

LABEL = "EMT (effective medium theory), not DFT"
SOURCES = [{"name": name, "labels": "EMT"} for name in ("relaxation", "rattled", "molecular dynamics")]
LATTICE = {"Al": 4.05, "Ni": 3.52, "Cu": 3.61, "Pd": 3.89, "Pt": 3.92, "Au": 4.08, "Ag": 4.09}
SHARES = (0.25, 0.5, 0.75)                      # that the second metal, by name, can have
FACETS = ("fcc111", "fcc100", "fcc110")
ADSORBATES = ("H", "C", "N", "O", "OH", "CO", "NH", "CH", "H2", "NO")
VACUUM = 8.0                                    # on each side of a slab, so that no adsorbate reaches the next one
HEIGHT = (1.1, 1.9)                             # lowest atom of the adsorbate above the highest of the slab
HELD = 2                                        # layers, the lowest
STEPS, CLEAN_STEPS, RELAXED = 25, 100, 0.02     # steps of relaxations at most; eV/A at which they end
SIGMAS = (0.03, 0.06, 0.1, 0.15) * 2
KELVIN, STEP_FS, FRICTION, EVERY = (300.0, 600.0, 900.0), 2.0, 0.02, 5      # friction per fs
HOPELESS, STEEP = 50.0, 20.0                    # eV/A: of a start that is drawn again, of a frame that is left out
DRAWS = 50
Array = NDArray[Any]


# ---- compositions


def compositions() -> list[str]:
    """A metal, or two of them, whose ratios are all held out together. In alphabetical order: Ag, Ag-Al, ..."""
    metals = sorted(LATTICE)
    return sorted("-".join(dict.fromkeys(pair)) for i, one in enumerate(metals) for pair in [(one, two) for two in metals[i:]])


def shared_out(random: np.random.Generator, validation: float, test: float) -> dict[str, list[str]]:
    """The compositions of each split: none is in two."""
    names = compositions()
    order = [names[n] for n in random.permutation(len(names))]
    held = [max(1, round(part * len(names))) if part else 0 for part in (validation, test)]
    cuts = {"validation": order[: held[0]], "test": order[held[0] : sum(held)], "train": order[sum(held) :]}
    return {split: sorted(names) for split, names in cuts.items()}


# ---- one system


@dataclass(frozen=True)
class System:
    name: str                                   # such as Cu(75%)Ni(25%) fcc111 + OH
    composition: str
    reference: float                            # what is taken from the total energy, eV
    frames: list[Frame]


def system(random: np.random.Generator, number: int, choice: Sequence[str], size: Sequence[int], steps: int) -> System:
    """A system of one of the compositions of ``choice``, ``size`` atoms along two directions and layers, and its frames, with
    ``steps`` of dynamics at each temperature. A start that is hopeless is drawn again from the same generator."""
    for _ in range(DRAWS):
        composition = choice[int(random.integers(len(choice)))]
        name, slab, adsorbate = _draw(random, composition, size)
        start = slab + adsorbate
        start.calc = emt()
        if not np.abs(start.get_forces(apply_constraint=False)).max() <= HOPELESS:
            continue
        slab.calc = emt()
        for _ in _relaxation(slab, CLEAN_STEPS):
            pass
        reference = float(slab.get_potential_energy()) + sum(alone(symbol) for symbol in adsorbate.symbols)
        frames = [
            Frame(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, energy - reference, forces, tags=_tags(atoms),
                  fixed=_fixed(atoms), system=number, source=source)
            for source, atoms, energy, forces in _frames(random, start, steps) if np.abs(forces).max() <= STEEP
        ]  # fmt: skip
        if frames:
            for count, frame in enumerate(frames):
                frame.frame = count
            return System(name, composition, reference, frames)
    raise DataError(f"system {number}: {DRAWS} draws began with forces above {HOPELESS:g} eV/angstrom; choose another --size")


def emt() -> Any:
    """One potential for every composition: with asap_cutoff the cutoff would follow the metals that are there."""
    return ase().calculators.emt.EMT(asap_cutoff=False)


def alone(symbol: str) -> float:
    """Energy of an isolated atom, eV."""
    atom = ase().Atoms(symbol)
    atom.calc = emt()
    return float(atom.get_potential_energy())


def _draw(random: np.random.Generator, composition: str, size: Sequence[int]) -> tuple[str, Any, Any]:
    """Name, slab with its lowest layers held, and adsorbate in its place."""
    first, second = (composition.split("-") * 2)[:2]
    share = float(random.choice(SHARES)) if second != first else 0.0
    facet, molecule = FACETS[int(random.integers(len(FACETS)))], ADSORBATES[int(random.integers(len(ADSORBATES)))]
    lattice = (1 - share) * LATTICE[first] + share * LATTICE[second]        # Vegard's law
    slab = getattr(ase().build, facet)(first, tuple(size), a=lattice, vacuum=VACUUM, periodic=True)
    swapped = random.permutation(len(slab))[: round(share * len(slab))]
    slab.symbols[swapped] = second
    slab.set_constraint(ase().constraints.FixAtoms(mask=slab.get_tags() > size[2] - HELD))      # ASE counts layers from the top
    made = ase().Atoms(molecule) if len(molecule) == 1 else ase().build.molecule(molecule)
    made.positions = (made.positions - made.positions.mean(0)) @ _rotation(random).T
    x, y, _ = random.random(2) @ slab.cell.array[:2]
    top = slab.positions[:, 2].max() + random.uniform(*HEIGHT)
    made.positions += (x, y, top - made.positions[:, 2].min())
    made.set_tags(0)
    metals = f"{first}({100 * (1 - share):.0f}%){second}({100 * share:.0f}%)" if share else first
    return f"{metals} {facet} + {molecule}", slab, made


def _rotation(random: np.random.Generator) -> Array:
    """A rotation, uniform over all of them, from a quaternion.   [3, 3]"""
    four = random.standard_normal(4)
    w, x, y, z = four / np.sqrt((four**2).sum())
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ])  # fmt: skip


def _fixed(atoms: Any) -> NDArray[np.uint8]:
    fixed = np.zeros(len(atoms), np.uint8)
    fixed[atoms.constraints[0].get_indices()] = 1
    return fixed


def _tags(atoms: Any) -> NDArray[np.uint8]:
    """Tags as in OC20, where the atoms below the surface are those that are held. ASE gives its adsorbates 0 and layers from 1."""
    return np.where(atoms.get_tags() == 0, 2, 1 - _fixed(atoms)).astype(np.uint8)


# ---- frames


def _frames(random: np.random.Generator, atoms: Any, steps: int) -> Iterator[tuple[int, Any, float, Array]]:
    """Yields an index into SOURCES, a copy of the atoms, the total energy and the raw forces [A, 3]."""
    for _ in _relaxation(atoms, STEPS):
        yield 0, *_labelled(atoms)
    relaxed, free = atoms.positions.copy(), _fixed(atoms) == 0
    for sigma in SIGMAS:
        atoms.positions = relaxed
        atoms.positions[free] += sigma * random.standard_normal((int(free.sum()), 3))
        yield 1, *_labelled(atoms)
    for kelvin in KELVIN:
        atoms.positions = relaxed
        for _ in _dynamics(random, atoms, free, kelvin, steps):
            yield 2, *_labelled(atoms)


def _labelled(atoms: Any) -> tuple[Any, float, Array]:
    energy, forces = float(atoms.get_potential_energy()), atoms.get_forces(apply_constraint=False)
    return atoms.copy(), energy, forces


def _relaxation(atoms: Any, steps: int) -> Iterator[bool]:
    """The structures of a relaxation, at every step and at the start. The optimizer is of limited memory, because without LAPACK
    no bit depends on the threads of a worker."""
    optimizer = ase().optimize.LBFGS(atoms, logfile=None)
    yield from optimizer.irun(fmax=RELAXED, steps=steps)


def _dynamics(random: np.random.Generator, atoms: Any, free: NDArray[np.bool_], kelvin: float, steps: int) -> Iterator[int]:
    """Langevin dynamics of the free atoms by BAOAB (Leimkuhler and Matthews 2013), stopping at every fifth step."""
    units = ase().units
    step, masses = STEP_FS * units.fs, atoms.get_masses()[free, None]
    keep = np.exp(-FRICTION * STEP_FS)
    thermal = np.sqrt(units.kB * kelvin / masses)
    speed = thermal * random.standard_normal((len(masses), 3))
    pull = atoms.get_forces(apply_constraint=False)[free]
    for count in range(1, steps + 1):
        speed += 0.5 * step * pull / masses
        middle = 0.5 * step * speed
        speed = keep * speed + np.sqrt(1 - keep**2) * thermal * random.standard_normal(speed.shape)
        atoms.positions[free] += middle + 0.5 * step * speed
        pull = atoms.get_forces(apply_constraint=False)[free]
        if not np.abs(pull).max() <= HOPELESS:                              # two atoms met: what follows is no matter
            return
        speed += 0.5 * step * pull / masses
        if count % EVERY == 0:
            yield count
