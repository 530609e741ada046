"""Conversion of trajectories: equal frames from each format, one method of labels, one line per error."""

import json
import lzma
import re
import zlib

import ase.build
import ase.calculators.emt
import ase.io
import lmdb
import numpy as np
import pytest
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixCartesian

from data_prep import frames, trajectories
from tests.data_prep.prep_contract import check_error, columns, read_json
from tests.data_prep.test_opencatalyst import run
from tests.reference_data import load_arrays, load_json

PUBLIC = load_json("relaxations/files")


def with_labels(atoms, energy=None, forces=None, name=None, **info):
    if energy is None:
        atoms.calc = ase.calculators.emt.EMT()
        energy, forces = atoms.get_potential_energy(), atoms.get_forces(apply_constraint=False)
    atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
    if name:
        atoms.calc.name = name
    atoms.info.update(info)
    return atoms


def make_images(number=6, metal="Cu", seed=0, **labels):
    random, slab = np.random.default_rng(seed), ase.build.fcc111(metal, (2, 2, 3), vacuum=8, periodic=True)
    slab.info.clear()
    slab.set_tags(np.arange(12) >= 8)
    slab.set_constraint(FixAtoms(range(4)))
    images = []
    for _ in range(number):
        atoms = slab.copy()
        atoms.positions += 0.05 * random.standard_normal((12, 3))
        images.append(with_labels(atoms, **labels))
    return images


def read_converted(out, row):
    """Return the frames of a converted original file, whose statistics are those of ``row``."""
    statistics, part = read_json(out / "statistics.json")["splits"]["train"], columns(out / "train")
    assert statistics["frames"] == row["frames"] and sorted({*part["atoms"].tolist()}) == row["natoms"]
    assert statistics["energy"]["mean"] == pytest.approx(row["energy_mean"], rel=1e-9)
    assert statistics["forces"]["zero_mae"] == pytest.approx(row["zero_force_mae_free"], rel=1e-5)
    return part


@pytest.mark.originals
@pytest.mark.parametrize("row", PUBLIC, ids=lambda row: row["source_file"])
def test_every_original_file_is_converted(tmp_path, row, capsys, originals):
    folder = originals / "oc20"
    sources = [folder / row["file"], folder / "original" / row["source_file"]]
    if row["source_file"] == "random1447590.traj":
        sources.append(folder / "oc20_random1447590.aselmdb")
    parts = []
    for number, source in enumerate(source for source in sources if trajectories.file_format(source)):
        out = tmp_path / str(number)
        assert run("convert", source, out, "--validation", "0", "--skip-bad", "--label", "as given") == 0
        part = read_converted(out, row)
        assert part["pbc"][0].astype(bool).tolist() == row["pbc"] and run("check", out, "--no-picture") == 0
        parts.append(part)
    for name in ("numbers", "positions", "forces", "fixed", "energy", "cell", "edges", "triplets"):
        assert all(np.abs(part[name] - parts[0][name]).max() < 1e-5 for part in parts[1:]), name
    if row["source_file"] == "sample_traj.traj":
        assert "refused: 2 of " in capsys.readouterr().out


def load_relaxation():
    """Yield the 47 frames of OC20's random1447590, an oxygen atom on rubidium."""
    arrays = load_arrays("relaxations/random1447590")
    for positions, energy, forces in zip(arrays["positions"], arrays["energy"], arrays["forces"]):
        atoms = ase.Atoms(arrays["numbers"], positions, cell=arrays["cell"], pbc=arrays["pbc"], tags=arrays["tags"])
        atoms.set_constraint(FixAtoms(mask=arrays["fixed"]))
        yield with_labels(atoms, energy, forces, "vasp")


def test_a_real_relaxation_is_converted(tmp_path):
    source = tmp_path / "random1447590.extxyz"
    ase.io.write(source, [*load_relaxation()])
    assert run("convert", source, tmp_path / "out", "--validation", "0", "--label", "as given") == 0
    part, arrays = read_converted(tmp_path / "out", PUBLIC[0]), load_arrays("relaxations/random1447590")
    assert np.abs(part["forces"].reshape(arrays["forces"].shape) - arrays["forces"]).max() < 1e-5


def write_aselmdb(path, atoms_list, method="vasp"):
    """Write an .aselmdb file in the format of ase-db-backends."""
    def array(values):
        values = np.asarray(values)
        return {"__ndarray__": [list(values.shape), str(values.dtype), values.ravel().tolist()]}
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24) as env, env.begin(write=True) as transaction:
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
    images = make_images()
    ase.io.write(tmp_path / "a.extxyz", images)
    (tmp_path / "b.extxyz.xz").write_bytes(lzma.compress((tmp_path / "a.extxyz").read_bytes()))
    ase.io.write(tmp_path / "c.traj", images)
    write_aselmdb(tmp_path / "e.aselmdb", images)
    parts = {}
    for source in sorted(tmp_path.glob("?.*")):
        assert run("convert", source, tmp_path / "out" / source.name, "--validation", "0", "--frames", "4") == 0
        parts[source.name] = columns(tmp_path / "out" / source.name / "train")
        assert len(list((tmp_path / "out" / source.name / "train").glob("*.h5"))) == 2
    first = parts["c.traj"]
    assert (first["fixed"].reshape(6, 12).sum(1) == 4).all() and set(first["tags"]) == {0, 1}
    assert np.abs(first["forces"].reshape(6, 12, 3)[:, :4]).min() > 0               # unconstrained, also of fixed atoms
    for name, part in parts.items():
        for key in ("numbers", "tags", "fixed", "atoms", "edges", "triplets", "pbc"):
            assert (part[key] == first[key]).all(), (name, key)
        assert all(np.abs(part[key] - first[key]).max() < 1e-6 for key in ("energy", "forces", "positions", "cell")), name
        assert len({*part["system"]}) == 1 and (np.diff(part["frame"]) == 1).all()
        assert (part["system"] == 7).all() == (name[0] == "e")


def test_references_are_subtracted_from_energies_of_oc20_chunks(tmp_path, capsys):
    for n, metal in enumerate(("Cu", "Ag", "Au", "Ni", "Pd")):
        ase.io.write(tmp_path / "x.extxyz", make_images(3, metal, seed=n))
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{n}.extxyz.xz").write_bytes(lzma.compress((tmp_path / "x.extxyz").read_bytes()))
        (tmp_path / "in" / f"{n}.txt").write_text("".join(f"random{n + 40},frame{7 * k},{-100.5 - n}\n" for k in range(3)))
    assert run("convert", tmp_path / "in", tmp_path / "out", "--label", "DFT (VASP)") == 0
    index = read_json(tmp_path / "out" / "train" / "index.json")
    assert index["label"] == "DFT (VASP)"
    assert index["sources"] == [{"name": "in", "labels": "DFT (VASP)", "energy": "less a reference"}]
    parts = {split: columns(tmp_path / "out" / split) for split in ("train", "validation")}
    systems_by_split = [{*part["system"].tolist()} for part in parts.values()]
    assert [len(systems) for systems in systems_by_split] == [4, 1] and not systems_by_split[0] & systems_by_split[1]
    for part in parts.values():
        for row, system in enumerate(part["system"]):
            first = make_images(3, ("Cu", "Ag", "Au", "Ni", "Pd")[system - 40], seed=system - 40)
            assert part["frame"][row] in (0, 7, 14)
            energy = first[part["frame"][row] // 7].calc.results["energy"] + 100.5 + system - 40
            assert part["energy"][row] == pytest.approx(energy, abs=1e-7)
    (tmp_path / "in" / "2.txt").write_text("random42,frame0,-1\n")
    assert run("convert", tmp_path / "in", tmp_path / "out2") == 2
    assert "2.extxyz.xz: frame 1: its line in 2.txt" in capsys.readouterr().err


def test_the_last_frames_of_a_trajectory_are_held_out(tmp_path, capsys):
    images = make_images()
    ase.io.write(tmp_path / "a.traj", images)
    assert run("convert", tmp_path / "a.traj", tmp_path / "out", "--hold-last", "2") == 0
    for split, expected in (("train", [0, 1, 2, 3]), ("validation", [4, 5])):
        part = columns(tmp_path / "out" / split)
        assert part["frame"].tolist() == expected
        assert (part["energy"] == [images[n].calc.results["energy"] for n in expected]).all()
    assert run("convert", tmp_path / "a.traj", tmp_path / "b", "--hold-last", "6") == 2 and "6 frames" in capsys.readouterr().err
    assert run("convert", tmp_path / "a.traj", tmp_path / "c") == 2 and "is of one system" in capsys.readouterr().err


def test_named_folders_are_the_splits(tmp_path):
    for folder, number in (("train", 5), ("val_id", 2), ("val_ood_ads", 3)):
        (tmp_path / "in" / folder).mkdir(parents=True)
        ase.io.write(tmp_path / "in" / folder / "a.traj", make_images(number))
    assert run("convert", tmp_path / "in", tmp_path / "out", "--label", "EMT") == 0
    folders = [path for path in (tmp_path / "out").iterdir() if path.is_dir()]
    assert {path.name: len(columns(path)["energy"]) for path in folders} == {"train": 5, "validation": 2}
    assert run("check", tmp_path / "out") == 0


def test_labels_of_several_methods_are_refused(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    ase.io.write(tmp_path / "in" / "a.traj", make_images(4, name="vasp"))
    other = [with_labels(atoms, atoms.calc.results["energy"] + 5, atoms.calc.results["forces"], "emt") for atoms in make_images(4)]
    ase.io.write(tmp_path / "in" / "b.traj", other)
    args = [tmp_path / "in", tmp_path / "out", "--validation", "0"]
    message = r"a.traj has DFT \(VASP\), b.traj has EMT; convert them one by one"
    assert run("convert", *args) == 2 and re.search(message, capsys.readouterr().err)
    for name in "ab":
        ase.io.write(tmp_path / "in" / f"{name}.traj", make_images(2))
    assert run("convert", *args) == 2 and "have no method of their labels" in capsys.readouterr().err
    assert run("convert", *args, "--label", "DFT (VASP)") == 0
    assert read_json(tmp_path / "out" / "train" / "index.json")["sources"][0]["labels"] == "DFT (VASP)"


def truncate(data):
    return data[: -max(400, len(data) // 3)]


FRAME_CHANGES = {                                                                       # changes of the third frame
    "no energy": lambda atoms: setattr(atoms, "calc", SinglePointCalculator(atoms, forces=atoms.calc.results["forces"])),
    "no forces": lambda atoms: setattr(atoms, "calc", SinglePointCalculator(atoms, energy=1.0)),
    "NaN energy": lambda atoms: atoms.calc.results.update(energy=np.nan),
    "NaN forces": lambda atoms: atoms.calc.results["forces"].__setitem__((3, 1), np.nan),
    "NaN positions": lambda atoms: atoms.positions.__setitem__((3, 1), np.nan),
    "flat cell": lambda atoms: atoms.cell.__setitem__(2, 0),
    "overlap": lambda atoms: atoms.positions.__setitem__(5, atoms.positions[4] + atoms.cell[0]),
    "far": lambda atoms: (atoms.set_cell([100, 100, 100]), atoms.positions.__imul__(30)),
    "element": lambda atoms: atoms.numbers.__setitem__(3, 0),
}  # fmt: skip
FILE_CHANGES = {                                                                        # changes of a file
    "cut": (".extxyz", lambda data: data[: int(0.6 * len(data))]),
    "letters": (".extxyz", lambda data: data.replace(b"Cu", b"Qx", 30)),
    "cut xz": (".extxyz.xz", lambda data: lzma.compress(np.random.default_rng(0).bytes(10) + lzma.decompress(data))[:-400]),
    "empty": (".extxyz", lambda data: b""), "cut lmdb": (".aselmdb", truncate), "cut traj": (".traj", truncate),
    "wide": (".extxyz", lambda data: data.replace(b"pos:R:3", b"pos:R:3:move_mask:L:99999999999", 1)),
    "lost page": (".aselmdb", lambda data: data[:8192] + b"\xff" * 8192 + data[16384:]),
}  # fmt: skip


def write_spoiled(folder, fault):
    ending, change = FILE_CHANGES.get(fault, (".extxyz", bytes))
    images, path = make_images(4), folder / f"a{ending}"
    if fault in FRAME_CHANGES:
        FRAME_CHANGES[fault](images[2])
    (write_aselmdb if ending == ".aselmdb" else ase.io.write)(path, images)
    path.write_bytes(change(path.read_bytes()))


REFUSED = load_json("refused/frames")


GOOD_FRAMES = {"cut": 2, "letters": 1, "cut traj": 2, "cut xz": 0, "empty": 0, "cut lmdb": 0, "lost page": 0}


@pytest.mark.parametrize("fault", REFUSED)
def test_errors_are_one_line_and_skipped_on_demand(tmp_path, capsys, fault):
    (tmp_path / "in").mkdir()
    write_spoiled(tmp_path / "in", fault)
    source, options = next((tmp_path / "in").glob("a.*")), ["--validation", "0", "--label", "EMT"]
    assert run("convert", source, tmp_path / "out", *options) == 2
    check_error(capsys, source.name, *REFUSED[fault])
    assert not list(tmp_path.rglob("*.h5")) and not list(tmp_path.rglob("*.partial"))
    ase.io.write(tmp_path / "in" / "good.traj", make_images(3, "Ag"))
    assert run("convert", tmp_path / "in", tmp_path / "less", *options, "--skip-bad") == 0
    stdout, count = capsys.readouterr().out, len(columns(tmp_path / "less" / "train")["energy"])
    last = stdout.splitlines()[-1]
    assert source.name in last and REFUSED[fault][1] in last and re.match(r"refused: \d of \d+ items: ", last)
    assert count == 3 + GOOD_FRAMES.get(fault, 3)


def test_an_atom_is_fixed_that_cannot_move_at_all(tmp_path):
    atoms = make_images(1)[0]
    atoms.set_constraint([FixCartesian([2]), FixCartesian([5], mask=(True, False, True)), FixAtoms([7])])
    ase.io.write(tmp_path / "a.traj", atoms)
    frame = next(item() for item in trajectories.frame_readers(tmp_path / "a.traj", "a"))
    assert np.flatnonzero(frame.fixed).tolist() == [2, 7]
    assert frames.count_graph(frame, 6.0, 50, "here")[0] > frames.count_graph(frame, 6.0, 10, "here")[0] == 120
    pair = frames.Frame(np.array([8, 1]), np.eye(2, 3), np.zeros((3, 3)), np.zeros(3), 0.0, np.zeros((2, 3)), *np.zeros((2, 2)))
    assert frames.count_graph(pair, 6.0, 50, "no cell, nothing periodic") == (2, 0)


def write_slabs(folder, change=str):
    """Write three systems of two frames each, whose text may be changed."""
    folder.mkdir()
    for seed, metal in enumerate(("Cu", "Ag", "Au")):
        ase.io.write(path := folder / f"{seed}.extxyz", make_images(2, metal, seed=seed))
        path.write_bytes(change(path.read_text()).encode())


def as_fortran(text):
    return re.sub(r"(-?\d+\.\d{6,})", lambda match: f"{float(match[1]):.12e}".replace("e", "D"), text)


def rename_keys(text):
    return text.replace(" energy=", " REF_energy=").replace(":forces:", ":REF_forces:")


def without(name):
    return lambda text: re.sub(rf" {name}=\S+", "", text)


FORMS = {                                       # changes of text, options, and a line of the output
    "Fortran's exponents": (as_fortran, [], ""), "byte order mark": (lambda text: "\ufeff" + text, [], ""),
    "labels of sites": (lambda text: text.replace("\nAg", "\nAg12-").replace("\nAu", "\nAu_a").replace("\nCu", "\nCu1"), [], ""),
    "left-handed cells": (lambda text: re.sub(r'"(\S+ \S+ \S+) (\S+ \S+ \S+) ', r'"\2 \1 ', text), [], ""),
    "MACE": (rename_keys, [], "energies are REF_energy, forces REF_forces: 0.extxyz, one of 3 such files"),
    "other names": (lambda text: rename_keys(text).replace("REF_", "dft_"),
                    ["--energy-key", "dft_energy", "--forces-key", "dft_forces"], ""),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_other_spellings_give_the_same_frames(tmp_path, capsys, form):
    change, options, line = FORMS[form]
    args = ["--label", "EMT", "--validation", "0.34", "--workers", "1"]
    for name, function, more in (("plain", str, []), ("other", change, options)):
        write_slabs(tmp_path / name, function)
        assert run("convert", tmp_path / name, tmp_path / "out" / name, *args, *more) == 0
    assert (tmp_path / "plain/1.extxyz").read_text() != (tmp_path / "other/1.extxyz").read_text()
    assert line in capsys.readouterr().out
    for split in ("train", "validation"):
        actual, expected = columns(tmp_path / "out/other" / split), columns(tmp_path / "out/plain" / split)
        assert all(np.allclose(actual[key], expected[key], atol=1e-6) for key in expected if key not in ("system", "cell"))
        assert np.abs(actual["forces"].reshape(-1, 12, 3)[:, :4]).min() > 0                     # of fixed atoms


@pytest.mark.parametrize("skip", [[], ["--skip-bad"]])
@pytest.mark.parametrize(("change", "count", "text"), [
    (without("energy"), 6, "has no energy (it has "), (lambda text: text.replace("pos:R:3", "pos:R:2"), 6, "cannot be read"),
    (lambda text: text.replace("\nAu", "\nCA1"), 2, "ASE does not know 'Ca1'; expected elements"),
])  # fmt: skip
def test_refused_frames_are_named_and_not_the_split(tmp_path, capsys, skip, change, count, text):
    write_slabs(tmp_path / "in", change)
    (tmp_path / "in/slab.cif").touch()
    status = run("convert", tmp_path / "in", tmp_path / "out", "--label", "EMT", "--validation", "0.5", "--workers", "1", *skip)
    assert status == (0 if skip and count < 6 else 2)
    stdout, stderr = capsys.readouterr()
    where, report = f"{count} such as {tmp_path}/in/{0 if count == 6 else 2}.extxyz: frame 0: ", stdout if status == 0 else stderr
    assert where in report and text in report and "hold-last" not in report
    assert f"{count} of 6 frames cannot be used" in report if status else "slab.cif: files .cif are not read" in report


@pytest.mark.parametrize(("tags", "expected", "note"), [
    ([3] * 4 + [2] * 4 + [1] * 3 + [0], [0] * 8 + [1] * 3 + [2], "tags are layers, as ASE numbers them: 0 is"),
    ([2] * 4 + [2] * 4 + [1] * 4, [0] * 8 + [1] * 4, "tags are layers"), ([0] * 8 + [1] * 3 + [2], [0] * 8 + [1] * 3 + [2], ""),
    (range(12), [0] * 12, "tags are neither OC20's nor ASE's layers, and are left out"), ([-1] * 12, [0] * 12, "left out"),
])  # fmt: skip
def test_tags_of_other_meanings_are_translated_or_left_out(tmp_path, capsys, tags, expected, note):
    atoms = make_images(1)[0]
    atoms.positions[11, 2] += 1
    atoms.set_tags(tags)
    atoms.set_initial_magnetic_moments(np.arange(12))
    ase.io.write(tmp_path / "a.extxyz", with_labels(atoms))
    assert run("convert", tmp_path / "a.extxyz", tmp_path / "out", "--validation", "0", "--workers", "1") == 0
    part, stdout = columns(tmp_path / "out" / "train"), capsys.readouterr().out
    assert part["tags"].tolist() == expected and np.flatnonzero(part["fixed"]).tolist() == [0, 1, 2, 3]
    assert note in stdout and bool(note) == ("tags are" in stdout)


def test_ids_are_numbers_or_made_from_their_text():
    values = [7, "random12", np.array([3.0]), "frame0", "a1b2"]
    assert [trajectories._id_number(value) for value in values] == [7, 12, 3, 0, None]
    assert len({trajectories._system_id(value) for value in (*values, "a1b3")}) == 6
