"""Weather maps: simulation, growth of a data set, checks, and conversion of public time steps."""

import re
import shutil

import h5py
import numpy as np
import pytest

from data_prep import deepcam, detection, scenes, store
from data_prep.atmosphere import VARIABLES
from data_prep.sphere import Grid
from hpcai.data import hdf5_source
from hpcai.data.hdf5 import Rows
from hpcai.errors import DataError
from tests.data_prep.prep_contract import PrepContract, check_error, read_json, runner

SMALL = ["--height", "48", "--width", "72", "--spacing", "1", "--samples", "20", "--rows", "6", "--no-check"]
NAMES = list(VARIABLES)


run = runner(deepcam)


def read_split(out, split="train"):
    parts = [h5py.File(path) for path in sorted((out / split).glob("*.h5"))]
    return [np.concatenate([part[name][...] for part in parts]) for name in ("fields", "mask")]


def test_files_have_the_format_that_the_loader_expects(dataset, tmp_path):
    index = read_json(dataset / "train" / "index.json")
    assert index["shape"] == [48, 72, 16] and index["variables"] == NAMES and index["units"][:3] == ["kg/m2", "m/s", "m/s"]
    assert index["latitude"] == [8.5, 55.5] and index["longitude"] == [0.5, 71.5] and not index["periodic"]
    assert index["fields"]["mask"] == {"dtype": "uint8", "shape": [48, 72], "low": 0, "high": 2, "blank": 0}
    assert [len(read_split(dataset, split)[0]) for split in ("train", "validation", "test")] == [16, 2, 2]
    for path in dataset.glob("*/*.h5"):
        with h5py.File(path) as file:
            assert all(file[name].chunks is None for name in ("fields", "mask"))
            assert list(file.attrs["variables"]) == NAMES and len(file.attrs["samples"]) == len(file["mask"]) <= 6
    with store.create_file(tmp_path / "x.h5", 9, {"odd": store.Field("uint8", (8191,)), **deepcam.fields(96, 144)}, {}) as file:
        for name in file:
            file[name][...] = 1
        assert [file[name].id.get_offset() % 4096 for name in file] == [0, 0, 0]
    source = Rows(dataset / "train", {"fields": ("float32", (48, 72, 16)), "mask": ("uint8", (48, 72))})
    assert len(source) == 16 and (np.asarray(source.read(5)["fields"]) == read_split(dataset)[0][5]).all()


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL


def test_a_set_grows_and_does_not_shrink(dataset, tmp_path, capsys):
    out = shutil.copytree(dataset, tmp_path / "more")
    assert run("simulate", out, *SMALL, "--samples", "28") == 0
    for split in ("train", "validation", "test"):
        before, after = read_split(dataset, split), read_split(out, split)
        assert all((new[: len(old)] == old).all() for old, new in zip(before, after))
    assert sum(len(read_split(out, split)[0]) for split in ("train", "validation", "test")) == 28, "a file with room is rewritten"
    for fewer in ("20", "27"):                                                  # too many files, too many rows
        assert run("simulate", out, *SMALL, "--samples", fewer) == 2 and "ask for at least as many" in capsys.readouterr().err


def test_the_check_compares_masks_with_the_rule(dataset, capsys, monkeypatch):
    assert run("check", dataset, "--no-picture") == 0
    assert "masks of 20 samples" in capsys.readouterr().out
    monkeypatch.setattr(detection, "MIN_TRANSPORT", 2 * detection.MIN_TRANSPORT)
    assert run("check", dataset, "--no-picture") == 1 and "differs from the rule" in capsys.readouterr().out


# ---- public data


def write_step(path, seed, key="labels_0", dtype=np.int64, change=None, name="data", attrs=(), **datasets):
    fields = scenes.sample(Grid.globe(24, 36), np.random.default_rng(seed))
    labels = np.random.default_rng(seed).integers(0, 3, (24, 36)).astype(dtype)
    if change:
        change(fields, labels)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for dataset, values in {name: fields, key: labels, **datasets}.items():
            file[f"climate/{dataset}"] = values
        file[f"climate/{name}"].attrs.update(attrs)
    return fields, labels


def test_public_folders_are_converted(tmp_path, capsys):
    source, out = tmp_path / "All-Hist", tmp_path / "out"
    layouts = ("labels_0", np.float32), ("labels", np.uint8), ("labels_0", np.int8)
    steps = {split: [write_step(source / split / f"data-1996-{i:02d}.h5", i + 10 * len(split), *layout)
                     for i, layout in enumerate(layouts)] for split in ("train", "test")}  # fmt: skip
    assert run("convert", source, out, "--rows", "2", workers="2") == 0
    for split, samples in steps.items():
        fields, mask = read_split(out, split)
        assert (fields == np.stack([f for f, _ in samples])).all() and (mask == np.stack([m for _, m in samples])).all()
    assert mask.dtype == np.uint8 and len(list((out / "train").glob("*.h5"))) == 2
    with h5py.File(out / "train" / "samples_000001.h5") as file:
        assert file["source"][...].tolist() == [b"train/data-1996-02.h5"] and file.attrs["latitude"].tolist() == [-90, 90]
    stdout = capsys.readouterr().out
    assert "refused: none of 6 items" in stdout and read_json(out / "skipped.json") == {"unusable": {}, "filtered": {}}
    assert run("check", out) == 0 and (out / "samples.png").is_file()


def test_a_wrong_source_is_reported_in_one_line(tmp_path, capsys):
    write_step(tmp_path / "flat" / "data-0.h5", 0)
    (tmp_path / "empty" / "train").mkdir(parents=True)
    for source, message in (("flat", "holds no folder train"), ("none", "no such folder"), ("empty", "no files data-*.h5")):
        assert run("convert", tmp_path / source, tmp_path / "new") == 2 and message in capsys.readouterr().err
    assert run("convert", tmp_path / "flat", tmp_path / "flat") == 2


def put(name, value, index=np.s_[:]):
    return lambda fields, labels: fields[..., NAMES.index(name)].__setitem__(index, value(fields[..., NAMES.index(name)][index]))


REFUSED = {
    "misnamed labels": ({"key": "label"}, ["no climate/labels_0", "'label'", "rename"]),
    "missing data": ({"name": "fields"}, ["no dataset climate/data", "found ['fields', 'labels_0']"]),
    "15 channels": ({"data": np.zeros((24, 36, 15), "f4")}, ["(24, 36, 15)", "(H, W, 16)", "TMQ, U850"]),
    "another size": ({"data": np.zeros((12, 36, 16), "f4"), "labels_0": np.zeros((12, 36), int)}, ["(12, 36)", "(24, 36)"]),
    "labels of another shape": ({"labels_0": np.zeros((24, 35), int)}, ["int64 (24, 35)", "(24, 36)"]),
    "labels of halves": ({"labels_0": np.full((24, 36), 0.5)}, ["holds [0.5]", "0 background"]),
    "_FillValue": ({"change": put("TMQ", lambda v: 1e20, (5, 6)), "attrs": {"_FillValue": np.float32([1e20])}},
                   ["TMQ (variable 0) is NaN, infinite or a fill value (9.96921e+36, 1e+20) in 1 cells in rows 5 to 5"]),
    "scale_factor": ({"attrs": {"scale_factor": 0.1}}, ["'climate/data' has scale_factor; apply"]),
    "label 3": ({"change": lambda fields, labels: labels.__setitem__((3, 4), 3)}, ["holds [3]", "0 background"]),
    "NaN at a pole": ({"change": put("U850", lambda v: v * np.nan, 0)}, ["U850 (variable 1)", "36 cells in rows 0 to 0", "pole"]),
    "infinite inside": ({"change": put("TS", lambda v: np.inf, (5, 6))}, ["TS (variable 11)", "1 cells in rows 5 to 5 of"]),
    "PSL in hPa": ({"change": put("PSL", lambda v: v / 100)}, ["PSL (variable 7)", "expected Pa", "convert PSL to Pa"]),
    "a fill value": ({"change": put("T500", lambda v: -9999, (2, 3))}, ["T500 (variable 9) is -9999 to"]),
    "TREFHT in C": ({"change": put("TREFHT", lambda v: v - 273.15)}, ["TREFHT", "expected K"]),
    "PRECT in mm/day": ({"change": put("PRECT", lambda v: v * 8.64e7)}, ["PRECT", "expected m/s"]),
    "no HDF5": (b"not HDF5", ["cannot be read as HDF5", "fetch it again"]),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_faulty_step_is_refused_with_its_name(tmp_path, capsys, fault):
    change, messages = REFUSED[fault]
    write_step(tmp_path / "train" / "data-0.h5", 0)
    path = tmp_path / "train" / "data-1.h5"
    write_step(path, 1, **(change if isinstance(change, dict) else {}))
    if isinstance(change, bytes):
        path.write_bytes(change)
    assert run("convert", tmp_path, tmp_path / "out") == 2
    check_error(capsys, "data-1.h5", *messages)
    assert not list((tmp_path / "out").rglob("*.h5")) and not list((tmp_path / "out").rglob("*.partial"))


def test_bad_steps_are_left_out_and_counted(tmp_path, capsys):
    steps = [write_step(tmp_path / "train" / f"data-{number}.h5", number) for number in range(4)]
    for number in (0, 2):
        (tmp_path / "train" / f"data-{number}.h5").write_bytes(b"not HDF5")
    for name in ("readme.md", "._data-1.h5", "data-1.nc"):
        (tmp_path / "train" / name).touch()
    assert run("convert", tmp_path, tmp_path / "out", "--skip-bad") == run("check", tmp_path / "out") == 0
    fields, mask = read_split(tmp_path / "out")
    assert (fields == np.stack([steps[1][0], steps[3][0]])).all() and (mask == np.stack([steps[1][1], steps[3][1]])).all()
    assert "refused: 3 of 5 items: 2 such as " in (output := capsys.readouterr().out) and "files .nc are not read" in output


def virtual(file, path):
    layout = h5py.VirtualLayout((8, 4), "f4")
    for number in range(2):
        with h5py.File(path.parent / f"part{number}.h5", "w") as part:
            part["x"] = np.ones((4, 4), "f4")
        layout[4 * number : 4 * number + 4] = h5py.VirtualSource(f"part{number}.h5", "x", (4, 4))
    file.create_virtual_dataset("x", layout)


def external(file, path):
    file.create_dataset("x", (8, 4), "f4", external=[(str(path.parent / "x.bin"), 0, 128)])[...] = 1


MISSING = {
    "part of a virtual dataset": (virtual, "part1.h5", "has values in part1.h5, which is not there"),
    "end of external storage": (external, "x.bin", "x.bin, which has 0 bytes, expected 128"),
    "chunks": (lambda file, path: file.create_dataset("x", (8, 4), "f4", chunks=(2, 4)).__setitem__(slice(0, 4), 1), "",
               "in 4 chunks, of which 2 were never written"),
    "all values": (lambda file, path: file.create_dataset("x", (8, 4), "f4"), "", "that were never written"),
    "a link": (lambda file, path: file.__setitem__("x", h5py.SoftLink("/y")), "", "is a link to /y, where nothing is"),
    "values of a group": (lambda file, path: file.create_group("x"), "", "is a group, expected values"),
}  # fmt: skip


@pytest.mark.parametrize("missing", MISSING)
def test_values_that_hdf5_would_read_as_zeros_are_refused(tmp_path, missing):
    write, lost, message = MISSING[missing]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        write(file, tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        if lost:
            assert (hdf5_source.open_dataset(file, "x")[...] == 1).all()
            (tmp_path / lost).unlink()
        with pytest.raises(DataError, match=re.escape(message)):
            hdf5_source.open_dataset(file, "x")


def test_a_filter_that_hdf5_lacks_is_named(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset("x", data=np.ones(9), compression="gzip")
        monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
        monkeypatch.setattr(hdf5_source, "find_spec", lambda name: None)
        with pytest.raises(DataError, match="compressed by filter 1 .deflate., which this HDF5 lacks: pip install hdf5plugin"):
            hdf5_source.open_dataset(file, data.name)
