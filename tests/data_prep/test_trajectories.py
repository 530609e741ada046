"""Trajectories of every kind to our files: the same frames from each, one method of labels, one line per error."""

import json
import lzma
import re
import zlib
from contextlib import contextmanager

import ase.build
import ase.calculators.emt
import ase.io
import lmdb
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian

from data_prep import frames, trajectories
from tests.data_prep.prep_contract import columns, read_json
from tests.data_prep.test_opencatalyst import run
from tests.reference_data import load_arrays, load_json

PUBLIC = load_json("relaxations/files")



def labelled(atoms, energy=None, forces=None, name=None, **info):
    if energy is None:
        atoms.calc = ase.calculators.emt.EMT()
        energy, forces = atoms.get_potential_energy(), atoms.get_forces(apply_constraint=False)
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    if name:
        atoms.calc.name = name
    atoms.info.update(info)
    return atoms


def images(number=6, metal="Cu", seed=0, **how):
    random, slab = np.random.default_rng(seed), ase.build.fcc111(metal, (2, 2, 3), vacuum=8, periodic=True)
    slab.info.clear()
    slab.set_tags(np.arange(12) >= 8)
    slab.set_constraint(FixAtoms(range(4)))
    found = []
    for _ in range(number):
        atoms = slab.copy()
        atoms.positions += 0.05 * random.standard_normal((12, 3))
        found.append(labelled(atoms, **how))
    return found


@pytest.mark.originals
@pytest.mark.parametrize("row", PUBLIC, ids=lambda row: row["source_file"])
def test_every_original_file_is_converted(tmp_path, row, capsys, originals):
    real = originals / "oc20"
    sources = [real / row["file"], real / "original" / row["source_file"]]
    if row["source_file"] == "random1447590.traj":
        sources.append(real / "oc20_random1447590.aselmdb")
    parts = []
    for number, source in enumerate(source for source in sources if trajectories.file_format(source)):
        out = tmp_path / str(number)
        assert run("convert", source, out, "--validation", "0", "--skip-bad", "--label", "as told") == 0
        found, part = read_json(out / "statistics.json")["splits"]["train"], columns(out / "train")
        assert found["frames"] == row["frames"] and sorted({*part["atoms"].tolist()}) == row["natoms"]
        assert found["energy"]["mean"] == pytest.approx(row["energy_mean"], rel=1e-9)
        assert found["forces"]["zero_mae"] == pytest.approx(row["zero_force_mae_free"], rel=1e-5)
        assert part["pbc"][0].astype(bool).tolist() == row["pbc"] and run("check", out, "--no-picture") == 0
        parts.append(part)
    for name in ("numbers", "positions", "forces", "fixed", "energy", "cell", "edges", "triplets"):
        assert all(np.abs(part[name] - parts[0][name]).max() < 1e-5 for part in parts[1:]), name
    if row["source_file"] == "sample_traj.traj":
        assert "refused: 2 of " in capsys.readouterr().out


def relaxation():
    """47 frames of OC20's random1447590, an oxygen atom on rubidium."""
    real = load_arrays("relaxations/random1447590")
    for positions, energy, forces in zip(real["positions"], real["energy"], real["forces"]):
        atoms = ase.Atoms(real["numbers"], positions, cell=real["cell"], pbc=real["pbc"], tags=real["tags"])
        atoms.set_constraint(FixAtoms(mask=real["fixed"]))
        yield labelled(atoms, energy, forces, "vasp")


def test_a_real_relaxation_is_converted(tmp_path):
    """The figures are those of the original file."""
    row, source = PUBLIC[0], tmp_path / "random1447590.extxyz"
    ase.io.write(source, [*relaxation()])
    assert run("convert", source, tmp_path / "out", "--validation", "0", "--label", "as told") == 0
    found, part = read_json(tmp_path / "out" / "statistics.json")["splits"]["train"], columns(tmp_path / "out" / "train")
    assert found["frames"] == row["frames"] and sorted({*part["atoms"].tolist()}) == row["natoms"]
    assert found["energy"]["mean"] == pytest.approx(row["energy_mean"], rel=1e-9)
    assert found["forces"]["zero_mae"] == pytest.approx(row["zero_force_mae_free"], rel=1e-5)
    real = load_arrays("relaxations/random1447590")
    assert np.abs(part["forces"].reshape(real["forces"].shape) - real["forces"]).max() < 1e-5


@contextmanager
def written(path):
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as opened, opened.begin(write=True) as transaction:
        yield transaction


def write_rows(path, atoms_list, method="vasp"):
    """As ase-db-backends writes .aselmdb."""
    def array(values):
        values = np.asarray(values)
        return {"__ndarray__": [list(values.shape), str(values.dtype), values.ravel().tolist()]}
    with written(path) as transaction:
        for n, atoms in enumerate(atoms_list, 1):
            arrays = {"numbers": atoms.numbers, "positions": atoms.positions, "pbc": atoms.pbc, "cell": atoms.cell.array,
                      "forces": atoms.calc.results["forces"], "tags": atoms.get_tags()}  # fmt: skip
            row = {key: array(value) for key, value in arrays.items()}
            row |= {"energy": atoms.calc.results["energy"], "calculator": method, "data": {"sid": 7, "fid": n},
                    "constraints": [{"name": "FixAtoms", "kwargs": {"indices": [0, 1, 2, 3]}}]}  # fmt: skip
            transaction.put(str(n).encode(), zlib.compress(json.dumps(row).encode()))
        transaction.put(b"nextid", zlib.compress(b"99"))
    return path


def test_every_kind_of_file_gives_the_same_frames(tmp_path):
    some = images()
    ase.io.write(tmp_path / "a.extxyz", some)
    (tmp_path / "b.extxyz.xz").write_bytes(lzma.compress((tmp_path / "a.extxyz").read_bytes()))
    ase.io.write(tmp_path / "c.traj", some)
    write_rows(tmp_path / "e.aselmdb", some)
    parts = {}
    for source in sorted(tmp_path.glob("?.*")):
        assert run("convert", source, tmp_path / "out" / source.name, "--validation", "0", "--frames", "4") == 0
        parts[source.name] = columns(tmp_path / "out" / source.name / "train")
        assert len(list((tmp_path / "out" / source.name / "train").glob("*.h5"))) == 2
    first = parts["c.traj"]
    assert (first["fixed"].reshape(6, 12).sum(1) == 4).all() and set(first["tags"]) == {0, 1}
    assert np.abs(first["forces"].reshape(6, 12, 3)[:, :4]).min() > 0                               # raw, of held atoms too
    for name, part in parts.items():
        for key in ("numbers", "tags", "fixed", "atoms", "edges", "triplets", "pbc"):
            assert (part[key] == first[key]).all(), (name, key)
        assert all(np.abs(part[key] - first[key]).max() < 1e-6 for key in ("energy", "forces", "positions", "cell")), name
        assert len({*part["system"]}) == 1 and (np.diff(part["frame"]) == 1).all()
        assert (part["system"] == 7).all() == (name[0] == "e")


def test_chunks_of_oc20_lose_their_references(tmp_path, capsys):
    for n, metal in enumerate(("Cu", "Ag", "Au", "Ni", "Pd")):
        ase.io.write(tmp_path / "x.extxyz", images(3, metal, seed=n))
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{n}.extxyz.xz").write_bytes(lzma.compress((tmp_path / "x.extxyz").read_bytes()))
        (tmp_path / "in" / f"{n}.txt").write_text("".join(f"random{n + 40},frame{7 * k},{-100.5 - n}\n" for k in range(3)))
    assert run("convert", tmp_path / "in", tmp_path / "out", "--label", "DFT (VASP)") == 0
    told = read_json(tmp_path / "out" / "train" / "index.json")
    assert told["label"] == "DFT (VASP)"
    assert told["sources"] == [{"name": "in", "labels": "DFT (VASP)", "energy": "less a reference"}]
    parts = {split: columns(tmp_path / "out" / split) for split in ("train", "validation")}
    there = [{*part["system"].tolist()} for part in parts.values()]
    assert [len(systems) for systems in there] == [4, 1] and not there[0] & there[1]
    for part in parts.values():
        for row, system in enumerate(part["system"]):
            first = images(3, ("Cu", "Ag", "Au", "Ni", "Pd")[system - 40], seed=system - 40)
            assert part["frame"][row] in (0, 7, 14)
            energy = first[part["frame"][row] // 7].calc.results["energy"] + 100.5 + system - 40
            assert part["energy"][row] == pytest.approx(energy, abs=1e-7)
    (tmp_path / "in" / "2.txt").write_text("random42,frame0,-1\n")
    assert run("convert", tmp_path / "in", tmp_path / "out2") == 2
    assert "2.extxyz.xz: frame 1: its line in 2.txt" in capsys.readouterr().err


def test_the_last_frames_of_a_trajectory_are_held_out(tmp_path, capsys):
    some = images()
    ase.io.write(tmp_path / "a.traj", some)
    assert run("convert", tmp_path / "a.traj", tmp_path / "out", "--hold-last", "2") == 0
    for split, wanted in (("train", [0, 1, 2, 3]), ("validation", [4, 5])):
        part = columns(tmp_path / "out" / split)
        assert part["frame"].tolist() == wanted
        assert (part["energy"] == [some[n].calc.results["energy"] for n in wanted]).all()
    assert run("convert", tmp_path / "a.traj", tmp_path / "b", "--hold-last", "6") == 2 and "6 frames" in capsys.readouterr().err
    assert run("convert", tmp_path / "a.traj", tmp_path / "c") == 2 and "is of one system" in capsys.readouterr().err


def test_named_folders_are_the_splits(tmp_path):
    for folder, number in (("train", 5), ("val_id", 2), ("val_ood_ads", 3)):
        (tmp_path / "in" / folder).mkdir(parents=True)
        ase.io.write(tmp_path / "in" / folder / "a.traj", images(number))
    assert run("convert", tmp_path / "in", tmp_path / "out", "--label", "EMT") == 0
    folders = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert {path.name: len(columns(path)["energy"]) for path in folders} == {"train": 5, "validation": 2}
    assert run("check", tmp_path / "out") == 0


def test_labels_of_several_methods_are_refused(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    ase.io.write(tmp_path / "in" / "a.traj", images(4, name="vasp"))
    other = [labelled(atoms, atoms.calc.results["energy"] + 5, atoms.calc.results["forces"], "emt") for atoms in images(4)]
    ase.io.write(tmp_path / "in" / "b.traj", other)
    words = [tmp_path / "in", tmp_path / "out", "--validation", "0"]
    told = r"a.traj has DFT \(VASP\), b.traj has EMT; convert them one by one"
    assert run("convert", *words) == 2 and re.search(told, capsys.readouterr().err)
    for name in "ab":
        ase.io.write(tmp_path / "in" / f"{name}.traj", images(2))
    assert run("convert", *words) == 2 and "have no method of their labels" in capsys.readouterr().err
    assert run("convert", *words, "--label", "DFT (VASP)") == 0
    assert read_json(tmp_path / "out" / "train" / "index.json")["sources"][0]["labels"] == "DFT (VASP)"


def shortened(data):
    return data[: -max(400, len(data) // 3)]


FRAMES = {                                                                       # what is done to the third frame
    "no energy": lambda one: setattr(one, "calc", SinglePointCalculator(one, forces=one.calc.results["forces"])),
    "no forces": lambda one: setattr(one, "calc", SinglePointCalculator(one, energy=1.0)),
    "NaN energy": lambda one: one.calc.results.update(energy=np.nan),
    "NaN forces": lambda one: one.calc.results["forces"].__setitem__((3, 1), np.nan),
    "NaN positions": lambda one: one.positions.__setitem__((3, 1), np.nan),
    "flat cell": lambda one: one.cell.__setitem__(2, 0),
    "overlap": lambda one: one.positions.__setitem__(5, one.positions[4] + one.cell[0]),
    "far": lambda one: (one.set_cell([100, 100, 100]), one.positions.__imul__(30)),
    "element": lambda one: one.numbers.__setitem__(3, 0), "tags": lambda one: one.set_tags(range(12)),
}  # fmt: skip
FILES = {                                                                        # what is done to a file
    "cut": (".extxyz", lambda data: data[: int(0.6 * len(data))]),
    "letters": (".extxyz", lambda data: data.replace(b"Cu", b"Qx", 30)),
    "cut xz": (".extxyz.xz", lambda data: lzma.compress(np.random.default_rng(0).bytes(10) + lzma.decompress(data))[:-400]),
    "empty": (".extxyz", lambda data: b""), "cut lmdb": (".aselmdb", shortened), "cut traj": (".traj", shortened),
    "wide": (".extxyz", lambda data: data.replace(b"pos:R:3", b"pos:R:3:move_mask:L:99999999999", 1)),
    "lost page": (".aselmdb", lambda data: data[:8192] + b"\xff" * 8192 + data[16384:]),
}  # fmt: skip


def spoil(folder, fault):
    ending, change = FILES.get(fault, (".extxyz", bytes))
    some, path = images(4), folder / f"a{ending}"
    if fault in FRAMES:
        FRAMES[fault](some[2])
    (write_rows if ending == ".aselmdb" else ase.io.write)(path, some)
    path.write_bytes(change(path.read_bytes()))


REFUSED = {
    "no energy": ("frame 2 (system ", "has no energy"), "no forces": ("frame 2 (system ", "has no forces"),
    "NaN energy": ("frame 2 (", "energy holds NaN"), "NaN forces": ("frame 2 (", "forces holds NaN"),
    "NaN positions": ("frame 2 (", "positions[3, 1] is nan"), "flat cell": ("frame 2 (", "has no volume"),
    "overlap": ("frame 2 (", "angstrom apart"), "far": ("frame 2 (", "no two atoms are within 6 angstrom"),
    "element": ("frame 2 (", "numbers[3] is 0"), "tags": ("frame 2", "expected 0 below the surface"),
    "cut": ("frame 2: ", "of its 12 atoms"), "letters": ("frame 0: ", "cannot be read"),
    "cut xz": ("a.extxyz.xz: frame 0", "fetch it"),
    "empty": ("a.extxyz: empty", "fetch it again"), "cut lmdb": ("a.aselmdb: ", "its pages need"),
    "cut traj": ("a.traj: ", "cannot be read"),
    "wide": ("a.extxyz: frame 0: ", "property of 99999999999 columns"), "lost page": ("a.aselmdb: ", "fetch it again"),
}  # fmt: skip


LEFT = {"cut": 2, "letters": 1, "cut traj": 2, "cut xz": 0, "empty": 0, "cut lmdb": 0, "lost page": 0}  # good frames


@pytest.mark.parametrize("fault", REFUSED)
def test_errors_are_one_line_and_skipped_on_demand(tmp_path, capsys, fault):
    (tmp_path / "in").mkdir()
    spoil(tmp_path / "in", fault)
    source, words = next((tmp_path / "in").glob("a.*")), ["--validation", "0", "--label", "EMT"]
    assert run("convert", source, tmp_path / "out", *words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert all(text in error for text in (source.name, *REFUSED[fault])), error
    assert not list(tmp_path.rglob("*.h5")) and not list(tmp_path.rglob("*.partial"))
    ase.io.write(tmp_path / "in" / "good.traj", images(3, "Ag"))
    assert run("convert", tmp_path / "in", tmp_path / "less", *words, "--skip-bad") == 0
    told, left = capsys.readouterr().out, len(columns(tmp_path / "less" / "train")["energy"])
    last = told.splitlines()[-1]
    assert source.name in last and REFUSED[fault][1] in last and re.match(r"refused: \d of \d+ items: ", last)
    assert left == 3 + LEFT.get(fault, 3)


def test_an_atom_is_fixed_that_cannot_move_at_all(tmp_path):
    atoms = images(1)[0]
    atoms.set_constraint([FixCartesian([2]), FixCartesian([5], mask=(True, False, True)), FixAtoms([7])])
    ase.io.write(tmp_path / "a.traj", atoms)
    frame = next(item() for item in trajectories.frame_readers(tmp_path / "a.traj", "a"))
    assert np.flatnonzero(frame.fixed).tolist() == [2, 7]
    assert frames.count_graph(frame, 6.0, 50, "here")[0] > frames.count_graph(frame, 6.0, 10, "here")[0] == 120
    alone = frames.Frame(np.array([8, 1]), np.eye(2, 3), np.zeros((3, 3)), np.zeros(3), 0.0, np.zeros((2, 3)), *np.zeros((2, 2)))
    assert frames.count_graph(alone, 6.0, 50, "no cell, nothing periodic") == (2, 0)


def test_ids_are_numbers_or_made_from_their_text():
    values = [7, "random12", np.array([3.0]), "frame0", "a1b2"]
    assert [trajectories._id_number(value) for value in values] == [7, 12, 3, 0, None]
    assert len({trajectories._system_id(value) for value in (*values, "a1b3")}) == 6
