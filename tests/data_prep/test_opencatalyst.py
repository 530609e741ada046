"""Slabs by EMT: simulation, exact labels, no composition in two splits, statistics and checks."""

from dataclasses import replace

import ase.build
import ase.calculators.emt
import h5py
import numpy as np
import pytest
from ase.constraints import FixAtoms
from ase.optimize import LBFGS

from data_prep import frames, opencatalyst, slabs, store
from hpcai.errors import DataError
from tests.data_prep.prep_contract import PrepContract, cache_results, check_fails, columns, field_types, read_json, runner

SMALL = ["--systems", "5", "--each", "1", "--size", "2", "2", "3", "--dynamics", "6", "--no-check"]
RECIPE = opencatalyst.Recipe(1, (2, 2, 3), 6, 1, 0.2, 0.0, 6.0, 50)
run = runner(opencatalyst)


# Each system is simulated once. One test calls the function without this cache.
system_cache = cache_results(opencatalyst.Recipe, "make_system")


# ---- simulate


def test_files_have_the_expected_format(dataset):
    index = read_json(dataset / "train" / "index.json")
    assert {name: (field["dtype"], tuple(field["shape"])) for name, field in index["fields"].items()} == field_types(frames.FIELDS)
    assert index["fields"]["forces"] == {"dtype": "float32", "shape": ["atoms", 3], "unit": "eV/angstrom"}
    assert (index["cutoff"], index["most"]) == (6.0, 50) and "EMT" in index["label"] and "not DFT" in index["label"]
    assert all(source["labels"] == "EMT" for source in index["sources"]) and len(index["sources"]) == 3
    assert len(index["files"]) == 4 and len(list(dataset.glob("validation/*.h5"))) == 1
    part = columns(dataset / "train")
    assert (part["atoms"] >= 13).all() and (part["pbc"] == 1).all() and (part["edges"] > 12 * 12).all()
    assert {*part["tags"]} == {0, 1, 2} and ((part["tags"] == 0) == (part["fixed"] == 1)).all()
    assert (np.isin(part["numbers"], [13, 28, 29, 46, 47, 78, 79]) == (part["tags"] < 2)).all()


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL


def test_no_composition_is_in_two_splits(dataset):
    for seed in range(20):
        parts = slabs.split_compositions(np.random.default_rng(seed), 0.2, 0.1)
        assert [len(parts[split]) for split in store.SPLITS] == [19, 6, 3]
        assert sorted(sum(parts.values(), [])) == slabs.compositions() and len(set(slabs.compositions())) == 28
    compositions = read_json(dataset / "validation" / "index.json")["compositions"]
    for split in ("train", "validation"):
        for path in dataset.glob(f"{split}/*.h5"):
            with h5py.File(path) as file:
                metals = {ase.data.chemical_symbols[z] for z in file["numbers"][...][file["tags"][...] < 2]}
            assert "-".join(sorted(metals)) in compositions[split]
    assert not {*compositions["train"]} & {*compositions["validation"]} and compositions["test"] == []


def as_atoms(frame):
    atoms = ase.Atoms(frame.numbers, np.asarray(frame.positions, np.float64), cell=frame.cell, pbc=frame.pbc)
    atoms.calc = ase.calculators.emt.EMT(asap_cutoff=False)
    return atoms


def test_labels_are_emt_energies_and_their_gradients():
    system = RECIPE.make_system(0)
    for frame in system.frames[::7]:
        atoms = as_atoms(frame)
        assert atoms.get_potential_energy() - system.reference == pytest.approx(frame.energy, abs=1e-9)
        assert np.abs(atoms.get_forces() - frame.forces).max() < 1e-9 and np.abs(frame.forces).max() <= slabs.MAX_FRAME_FORCE
    assert replace(RECIPE, seed=2).make_system(0).frames[0].energy != system.frames[0].energy
    moved = system.frames[-1]
    assert (system.frames[0].positions != moved.positions)[moved.fixed == 0].all()
    assert (system.frames[0].positions == moved.positions)[moved.fixed == 1].all()
    for atom, axis in ((0, 2), (len(moved.numbers) - 1, 0), (7, 1)):              # fixed, adsorbate, metal
        energies = []
        for step in (1e-4, -1e-4):
            atoms = as_atoms(moved)
            atoms.positions[atom, axis] += step
            energies.append(atoms.get_potential_energy())
        assert (energies[1] - energies[0]) / 2e-4 == pytest.approx(moved.forces[atom, axis], abs=1e-6)


def test_energies_are_relative_to_a_clean_slab_and_isolated_atoms():
    for number in (0, 2):
        system = RECIPE.make_system(number)
        first = system.frames[0]
        clean = as_atoms(first)
        lone = {"H": 3.21, "C": 3.5, "N": 5.1, "O": 4.6}
        atoms = sum(lone[symbol] for symbol in clean.symbols[first.tags == 2])
        clean.set_constraint(FixAtoms(mask=first.fixed == 1))
        del clean[np.flatnonzero(first.tags == 2)]
        LBFGS(clean, logfile=None).run(fmax=0.02, steps=100)
        assert system.reference == pytest.approx(clean.get_potential_energy() + atoms, abs=1e-6)


def test_frames_with_large_forces_are_omitted_and_such_starts_redrawn(monkeypatch):
    all_frames, make_system = RECIPE.make_system(0).frames, opencatalyst.Recipe.make_system.__wrapped__
    monkeypatch.setattr(slabs, "MAX_FRAME_FORCE", float(np.median([np.abs(frame.forces).max() for frame in all_frames])))
    remaining = make_system(RECIPE, 0).frames
    assert 0 < len(remaining) < len(all_frames) and [frame.frame for frame in remaining] == list(range(len(remaining)))
    assert all(np.abs(frame.forces).max() <= slabs.MAX_FRAME_FORCE for frame in remaining)
    monkeypatch.setattr(slabs, "MAX_START_FORCE", 1e-9)
    with pytest.raises(DataError, match="system 0: 50 draws began with forces above 1e-09"):
        make_system(RECIPE, 0)


def test_dynamics_keep_their_temperature():
    atoms = ase.build.fcc111("Cu", (2, 2, 3), vacuum=8, periodic=True)
    atoms.calc, free, before = slabs.emt_calculator(), np.arange(12) >= 4, atoms.positions.copy()
    trajectory = [atoms.positions.copy() for _ in slabs._langevin(np.random.default_rng(0), atoms, free, 600.0, 400)]
    spread = np.std(trajectory[20:], axis=0)[free]
    assert 0.05 < spread.mean() < 0.3 and (atoms.positions[~free] == before[~free]).all()
    potential = []
    for positions in trajectory[20:]:
        atoms.positions = positions
        potential.append(atoms.get_potential_energy())
    atoms.positions = before
    assert (np.mean(potential) - atoms.get_potential_energy()) / (12 * ase.units.kB * 600) == pytest.approx(1, abs=0.35)


def test_statistics_are_those_of_the_data(dataset):
    statistics = read_json(dataset / "statistics.json")
    train, validation = columns(dataset / "train"), columns(dataset / "validation")

    for split, part in (("train", train), ("validation", validation)):
        actual, free = statistics["splits"][split], part["forces"][part["fixed"] == 0].astype(np.float64)
        assert (actual["frames"], actual["atoms"]) == (len(part["energy"]), len(part["numbers"]))
        assert actual["systems"] == len({*part["system"]}) and sum(actual["elements"].values()) == len(part["numbers"])
        assert actual["elements"] == {ase.data.chemical_symbols[z]: int((part["numbers"] == z).sum()) for z in {*part["numbers"]}}
        energy = [part["energy"].mean(), part["energy"].std(), part["energy"].min(), part["energy"].max()]
        assert [actual["energy"][name] for name in ("mean", "deviation", "minimum", "maximum")] == pytest.approx(energy, rel=1e-12)
        forces = [np.sqrt((free**2).mean()), np.abs(free).mean(), np.sqrt((free**2).sum(1)).max()]
        assert [actual["forces"][name] for name in ("rms", "zero_mae", "largest")] == pytest.approx(forces, rel=1e-12)
        assert actual["triplets_per_frame"]["mean"] == pytest.approx(part["triplets"].mean())
        assert actual["edges_per_frame"]["maximum"] == part["edges"].max()


@pytest.mark.parametrize("name, text", [("edges", "recounted"), ("energy", "recomputed EMT is"), ("forces", "the forces sum to")])
def test_the_check_recomputes_labels_and_neighbours(dataset, tmp_path, name, text):
    offset = 1 if name == "edges" else 3e-4
    change = lambda file: file[name].write_direct(np.asarray(file[name][...] + offset, file[name].dtype))  # noqa: E731
    assert check_fails(run, dataset, tmp_path / "damaged", change, text)
