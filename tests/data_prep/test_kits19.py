"""CT of phantoms: the same from any number of processes, resumable, checked, not separable by HU alone; NIfTI cases to files."""

import gzip
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest

from data_prep import kits19, nifti, phantom
from hpcai.cli.check import Options, check_dataset
from hpcai.data.hdf5 import Rows
from hpcai.models.unet3d.volume import preprocess
from tests.data_prep.prep_contract import PrepContract, cached, check_fails, read_json, runner

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--cases", "10", "--spacing", "9.6", "7.2", "7.2", "--least", "8", "32", "32", "--extent", "150", "--no-check"]
GRID = ["--spacing", "9.6", "7.2", "7.2", "--least", "8", "32", "32"]
FIELDS = {"image": ("float32", (None, None, None)), "label": ("uint8", (None, None, None)), "boxes": ("int32", (2, 2, 6))}
RECIPE = kits19.Recipe(1, (9.6, 7.2, 7.2), (8, 32, 32), 150.0, 0.2, 0.0)


run = runner(kits19)


def case(out, name):
    with h5py.File(next(out.glob(f"*/{name}.h5"))) as file:
        return {key: file[key][0] for key in file}, dict(file.attrs)


# A phantom is drawn once; that it is a pure function of seed and index has a test.
remembered = cached(kits19.Recipe, "scan")


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    out = tmp_path_factory.mktemp("kits19") / "public"
    assert run("simulate", out, *SMALL, "--cases", "4", "--nifti") == 0
    return out


def test_the_files_are_as_promised_to_the_loader(made):
    index, source = read_json(made / "train" / "index.json"), Rows(made / "train", FIELDS)
    assert "shape" not in index and index["spacing_mm"] == [9.6, 7.2, 7.2] and index["classes"][1:] == ["kidney", "tumour"]
    assert index["fields"]["image"] == {"dtype": "float32", "shape": [None, None, None]}
    assert len({tuple(entry["shape"]) for entry in index["files"]}) > 1
    assert [len(list((made / split).glob("*.h5"))) for split in ("train", "validation")] == [8, 2]
    for number, entry in enumerate(index["files"]):
        values, about = case(made, entry["name"][:-3])
        assert list(values["image"].shape) == entry["shape"] and (np.asarray(source.read(number)["label"]) == values["label"]).all()
        assert about["kind"] == "simulated" and about["case"] == entry["name"][:-3] and about["original_shape"].shape == (3,)
        assert values["image"].dtype == np.float32 and -2.35 < values["image"].min() < values["image"].max() < 2.65
    assert check_dataset(made, Options(seconds=0, threads=2)).findings == ()


def test_a_case_is_a_pure_function_of_seed_and_index(made):
    for index in (7, 2):
        scan = kits19.Recipe.scan.__wrapped__(RECIPE, index)
        values, about = case(made, f"case_{index:05d}")
        image, label = preprocess(scan.image, scan.label, scan.spacing_mm, (9.6, 7.2, 7.2), (8, 32, 32))
        assert (values["image"] == image).all() and (values["label"] == label).all()
        assert (values["boxes"] == kits19.bounding_boxes(label)).all()
        assert tuple(about["original_spacing_mm"]) == scan.spacing_mm and tuple(about["original_shape"]) == scan.image.shape
    other = replace(RECIPE, seed=2).scan(2)
    assert other.image.shape != scan.image.shape or (other.image != scan.image).mean() > 0.5


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL
    wrong = {
        "--seed 2": "seed 1 (now 2)", "--cases 1": "none is left for", "--spacing 0.1 1 1": "expected 0.3 to 20 mm",
        "--extent 9": "expected 40 to 600", "--validation 0.6 --test 0.4": "sum to less than 1",
        "--least 8 32 9999": "at most 1024",
    }  # fmt: skip


def test_statistics_are_those_of_the_data(made):
    found = read_json(made / "statistics.json")["splits"]["train"]
    files = [case(made, path.stem)[0] for path in sorted(made.glob("train/*.h5"))]
    values = np.concatenate([file["image"].ravel() for file in files]).astype(np.float64)
    classes = sum(np.bincount(file["label"].ravel(), minlength=3) for file in files)
    shapes = [file["image"].shape for file in files]
    assert found["rows"] == 8 and found["shapes"]["least"] == np.min(shapes, 0).tolist()
    image = {name: value for name, (value,) in ((key, np.atleast_1d(each)) for key, each in found["image"].items())}
    assert (image["cells"], image["minimum"], image["maximum"]) == (values.size, values.min(), values.max())
    assert [image["mean"], image["deviation"]] == pytest.approx([values.mean(), values.std()], rel=1e-12)
    assert found["label"] == {"cells": classes.tolist(), "frequency": (classes / values.size).tolist()}


def test_boxes_are_those_of_the_two_largest_parts():
    label = np.zeros((20, 20, 20), np.uint8)
    label[1:4, 2:5, 3:9], label[10:19, 10:19, 10:12], label[0, 0, 0] = 1, 1, 1
    label[12, 12, 10], label[5, 5, 5], label[6, 6, 5] = 2, 2, 2      # the last two touch at an edge only
    one, two = kits19.bounding_boxes(label)
    assert one.tolist() == [[10, 10, 10, 19, 19, 12], [1, 2, 3, 4, 5, 9]]
    assert {tuple(box) for box in two.tolist()} < {(12, 12, 10, 13, 13, 11), (5, 5, 5, 6, 6, 6), (6, 6, 5, 7, 7, 6)}
    assert kits19.bounding_boxes(np.full((3, 4, 5), 2, np.uint8)).tolist() == [[[0] * 6] * 2, [[0, 0, 0, 3, 4, 5], [0] * 6]]
    assert not kits19.bounding_boxes(np.zeros((3, 4, 5), np.uint8)).any()


def test_phantoms_are_plausible():
    scans = [RECIPE.scan(index) for index in range(16)]
    with_tumour = sum((scan.label == 2).any() for scan in scans)
    assert 11 <= with_tumour <= 16 and all((scan.label == 1).any() for scan in scans)
    for scan in scans:
        voxel = np.prod(scan.spacing_mm) / 1000                     # ml
        assert 60 < (scan.label == 1).sum() * voxel < 700
        assert scan.image[scan.label > 0].mean() > 0 and (scan.image == np.rint(scan.image)).all()
        middle = np.argwhere(scan.label > 0).mean(0) / scan.label.shape
        assert (abs(middle[1:] - 0.55) < 0.3).all()
    fine = phantom.simulate_scan(np.random.default_rng(0), (1.6, 1.2, 1.2), 40.0)
    assert 1.5 <= fine.spacing_mm[0] <= 5 and 0.54 <= fine.spacing_mm[1] <= 0.95


def test_the_check_compares_boxes_with_labels_and_shapes_with_the_index(made, tmp_path, capsys, monkeypatch):
    assert check_fails(run, made, tmp_path / "harmed", lambda file: file["boxes"].__setitem__((0, 0, 0, 3), 1), "the label has")
    index = read_json(made / "train" / "index.json")
    assert run("check", made, "--no-picture") == 0 and "boxes of 5 cases" in capsys.readouterr().out
    index["fields"]["label"]["high"] = 1
    (tmp_path / "harmed" / "train" / "index.json").write_text(json.dumps(index))
    assert run("check", tmp_path / "harmed") == 1 and "'label'" in capsys.readouterr().out


# ---- NIfTI


def test_the_public_layout_is_converted(public, made, tmp_path, capsys):
    assert run("convert", public, tmp_path / "out", *GRID, workers="2") == 0
    told = capsys.readouterr().out
    assert "4 of the 210 labelled cases" in told and "cases: 2 for train, 2 for validation" in told
    for number in range(4):
        values, about = case(tmp_path / "out", f"case_{number:05d}")
        there = case(made, f"case_{number:05d}")[0]                  # simulated without a detour
        assert all((values[name] == there[name]).all() for name in values) and about["kind"] == "converted"
        folder = public / f"case_{number:05d}"
        image, label = (nibabel.load(folder / name) for name in (nifti.IMAGE, nifti.LABEL))
        assert image.get_data_dtype() == np.int16 and nibabel.aff2axcodes(image.affine) == ("I", "P", "L")
        ready = preprocess(
            np.asarray(image.dataobj), np.asarray(label.dataobj), [float(mm) for mm in image.header.get_zooms()], (9.6, 7.2, 7.2),
            (8, 32, 32),
        )  # fmt: skip
        assert (values["image"] == ready[0]).all() and (values["label"] == ready[1]).all()
    assert {path.stem for path in (tmp_path / "out" / "validation").glob("*.h5")} == {"case_00000", "case_00003"}
    assert check_dataset(tmp_path / "out", Options(seconds=0, threads=2)).findings == () and run("check", tmp_path / "out") == 0


def volumes(folder):
    return [nibabel.load(folder / name) for name in (nifti.IMAGE, nifti.LABEL)]


def save(folder, image=None, label=None, **how):
    for name, file in ((nifti.IMAGE, image), (nifti.LABEL, label)):
        if file is not None:
            nibabel.save(file, folder / name)
    return folder


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_axes_in_another_order_give_the_same_volume(public, tmp_path, order):
    source, folder = public / "case_00001", tmp_path / "case_00001"
    folder.mkdir()
    both = [(np.asarray(file.dataobj), file.affine) for file in volumes(source)]
    turned = [nibabel.Nifti1Image(values.transpose(order), affine[:, [*order, 3]]) for values, affine in both]
    one, other = nifti.read(source), nifti.read(save(folder, *turned))
    assert turned[0].shape != one[0].shape or (np.asarray(turned[0].dataobj) != one[0]).any()
    assert (one[0] == other[0]).all() and (one[1] == other[1]).all() and one[2] == other[2]
    assert one[0].dtype == np.float32 and one[1].dtype == np.uint8


def test_slope_and_intercept_are_applied(public, tmp_path):
    image, label = volumes(public / "case_00001")
    scaled = nibabel.Nifti1Image(np.asarray(image.dataobj) // 2, image.affine)
    scaled.header.set_slope_inter(2, -3)
    raw = bytearray(scaled.to_bytes())
    header = nibabel.Nifti1Header.from_fileobj(io.BytesIO(bytes(raw)), check=False)
    header["scl_slope"], header["scl_inter"] = 2, -3
    raw[:348] = header.binaryblock
    raw[352:] = (np.asarray(image.dataobj) // 2).astype(np.int16).tobytes(order="F")
    folder = save(tmp_path, label=label)
    (folder / nifti.IMAGE).write_bytes(gzip.compress(bytes(raw)))
    assert (nifti.read(folder)[0] == np.asarray(image.dataobj) // 2 * 2.0 - 3).all()


def rotated(affine, degrees=5):
    turn = np.eye(4)
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    turn[:2, :2] = [[c, -s], [s, c]]
    return turn @ affine


def moved(affine):
    shift = np.eye(4)
    shift[0, 3] = 30
    return shift @ affine


def with_pixdim(folder, value):
    raw = bytearray(volumes(folder)[0].to_bytes())
    header = nibabel.Nifti1Header.from_fileobj(io.BytesIO(bytes(raw)), check=False)
    header["pixdim"][2] = value
    raw[:348] = header.binaryblock
    (folder / nifti.IMAGE).write_bytes(gzip.compress(bytes(raw)))


def flipped(data):
    spot = len(data) // 2
    return data[:spot] + bytes([data[spot] ^ 0xFF]) + data[spot + 1 :]


def packed(folder, change):
    """Changes the bytes of the image's file."""
    (folder / nifti.IMAGE).write_bytes(change((folder / nifti.IMAGE).read_bytes()))


def changed(folder, which, values=lambda it: it, affine=lambda it: it):
    """Changes the voxels or the affine of image or label."""
    file = volumes(folder)[which]
    kind = (np.float32, np.uint8)[which]
    made = nibabel.Nifti1Image(values(np.asarray(file.dataobj).astype(kind)), affine(file.affine))
    save(folder, **{("image", "label")[which]: made})


def put(value):
    def act(values):
        values[3, 4, 5] = value
        return values

    return act


FAULTS = {
    "missing": (lambda at: (at / nifti.LABEL).unlink(), nifti.LABEL, ["no such file"]),
    "cut": (lambda at: packed(at, lambda data: data[:-200]), nifti.IMAGE, ["cannot be read", "fetch it again"]),
    "damaged": (lambda at: packed(at, flipped), nifti.IMAGE, ["cannot be read", "fetch it again"]),
    "not gzip": (lambda at: packed(at, lambda data: b"no scan at all"), nifti.IMAGE, ["compressed by gzip"]),
    "no NIfTI": (lambda at: packed(at, lambda data: gzip.compress(b"no scan at all" * 99)), nifti.IMAGE, ["fetch it again"]),
    "short": (lambda at: packed(at, lambda data: gzip.compress(gzip.decompress(data)[:-500])), nifti.IMAGE, ["before the last"]),
    "shapes": (lambda at: changed(at, 1, lambda it: it[1:]), nifti.LABEL, ["imaging.nii.gz has", "on the grid of its image"]),
    "moved": (lambda at: changed(at, 1, affine=moved), nifti.LABEL, ["voxels from its position", "resample the label"]),
    "label 7": (lambda at: changed(at, 1, put(7)), nifti.LABEL, ["[7]", "1 kidney, 2 tumour"]),
    "4-D": (lambda at: changed(at, 0, lambda it: it[..., None]), nifti.IMAGE, ["4 dimensions", "expected 3"]),
    "rotated": (lambda at: (changed(at, 0, affine=rotated), changed(at, 1, affine=rotated)), nifti.IMAGE,
                ["rotated or sheared", "resample it to an axis-aligned grid first"]),
    "spacing 0": (lambda at: with_pixdim(at, 0), nifti.IMAGE, ["0.0", "correct pixdim"]),
    "spacing NaN": (lambda at: with_pixdim(at, np.nan), nifti.IMAGE, ["nan", "correct pixdim"]),
    "NaN": (lambda at: changed(at, 0, put(np.nan)), nifti.IMAGE, ["NaN or infinity"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_case_is_refused_with_its_name(public, tmp_path, capsys, fault):
    for name in ("case_00000", "case_00001"):
        shutil.copytree(public / name, tmp_path / "in" / name)
    spoil, name, words = FAULTS[fault]
    spoil(tmp_path / "in" / "case_00001")
    assert run("convert", tmp_path / "in", tmp_path / "out", *GRID) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in (f"case_00001/{name}", *words)), error
    assert not list((tmp_path / "out" / "train").glob("*")) and not list((tmp_path / "out").rglob("*.partial"))


def names(root, *numbers, bare=()):
    for number in (*numbers, *bare):
        folder = root / f"case_{number:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / nifti.IMAGE).touch()
        if number in numbers:
            (folder / nifti.LABEL).touch()
    return root


def test_the_split_is_that_of_the_reference(tmp_path):
    splits, bare = kits19.split_cases(names(tmp_path, *range(210), bare=range(210, 300)), None)
    assert [len(splits[split]) for split in ("train", "validation")] == [168, 42]
    assert splits["validation"][:5] == ["case_00000", "case_00003", "case_00005", "case_00006", "case_00012"]
    assert splits["validation"][-1] == "case_00207" and not {*splits["train"]} & {*splits["validation"]}
    assert len(bare) == 90 and bare[0] == "case_00210"
    chosen, _ = kits19.split_cases(tmp_path, (1, 2))
    assert chosen["validation"] == ["case_00001", "case_00002"] and len(chosen["train"]) == 208


def test_private_cases_are_split_by_option(tmp_path, capsys):
    names(tmp_path / "own", 1000, 1001, 1002)
    for words, text in (
        ([], "case_01000 is no labelled case of the public set; name yours"), (["--validation-cases", "7"], "names [7], which"),
        (["--validation-cases", "1000,1001,1002"], "is for train"),
    ):  # fmt: skip
        assert run("convert", tmp_path / "own", tmp_path / "out", *words) == 2 and text in capsys.readouterr().err
    assert kits19.split_cases(tmp_path / "own", (1001,))[0]["validation"] == ["case_01001"]
    assert run("convert", names(tmp_path / "few", 1, 2), tmp_path / "out") == 2 and "is for validation" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run("convert", tmp_path / "empty", tmp_path / "out") == 2 and "no folder case_00000" in capsys.readouterr().err
    assert run("convert", tmp_path / "none", tmp_path / "out") == 2 and "no such folder" in capsys.readouterr().err
