"""CT of phantoms: simulation, statistics and checks; conversion of NIfTI cases."""

import gzip
import io
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import h5py
import nibabel
import numpy as np
import pytest

from data_prep import kits19, nifti, phantom
from hpcai.cli.check.examination import check_dataset
from hpcai.cli.check.findings import Options
from hpcai.data.hdf5 import Rows
from hpcai.models.unet3d.volume import preprocess
from tests.data_prep.prep_contract import PrepContract, cache_results, check_error, check_fails, read_json, runner

SMALL = ["--cases", "10", "--spacing", "9.6", "7.2", "7.2", "--least", "8", "32", "32", "--extent", "150", "--no-check"]
GRID = ["--spacing", "9.6", "7.2", "7.2", "--least", "8", "32", "32"]
FIELDS = {"image": ("float32", (None, None, None)), "label": ("uint8", (None, None, None)), "boxes": ("int32", (2, 2, 6))}
RECIPE = kits19.Recipe(1, (9.6, 7.2, 7.2), (8, 32, 32), 150.0, 0.2, 0.0)
run = runner(kits19)


def read_case(out, name):
    with h5py.File(next(out.glob(f"*/{name}.h5"))) as file:
        return {key: file[key][0] for key in file}, dict(file.attrs)


# Each phantom is simulated once.
scan_cache = cache_results(kits19.Recipe, "scan")


@pytest.fixture(scope="module")
def public(tmp_path_factory):
    out = tmp_path_factory.mktemp("kits19") / "public"
    assert run("simulate", out, *SMALL, "--cases", "4", "--nifti") == 0
    return out


def test_files_have_the_format_that_the_loader_expects(dataset):
    index, source = read_json(dataset / "train" / "index.json"), Rows(dataset / "train", FIELDS)
    assert "shape" not in index and index["spacing_mm"] == [9.6, 7.2, 7.2] and index["classes"][1:] == ["kidney", "tumour"]
    assert index["fields"]["image"] == {"dtype": "float32", "shape": [None, None, None]}
    assert len({tuple(entry["shape"]) for entry in index["files"]}) > 1
    assert [len(list((dataset / split).glob("*.h5"))) for split in ("train", "validation")] == [8, 2]
    for number, entry in enumerate(index["files"]):
        values, attrs = read_case(dataset, entry["name"][:-3])
        assert list(values["image"].shape) == entry["shape"] and (np.asarray(source.read(number)["label"]) == values["label"]).all()
        assert attrs["kind"] == "simulated" and attrs["case"] == entry["name"][:-3] and attrs["original_shape"].shape == (3,)
        assert values["image"].dtype == np.float32 and -2.35 < values["image"].min() < values["image"].max() < 2.65
    assert check_dataset(dataset, Options(seconds=0, threads=2)).findings == ()


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL


def test_statistics_are_those_of_the_data(dataset):
    statistics = read_json(dataset / "statistics.json")["splits"]["train"]
    files = [read_case(dataset, path.stem)[0] for path in sorted(dataset.glob("train/*.h5"))]
    values = np.concatenate([file["image"].ravel() for file in files]).astype(np.float64)
    classes = sum(np.bincount(file["label"].ravel(), minlength=3) for file in files)
    shapes = [file["image"].shape for file in files]
    assert statistics["rows"] == 8 and statistics["shapes"]["least"] == np.min(shapes, 0).tolist()
    image = {name: value for name, (value,) in ((key, np.atleast_1d(each)) for key, each in statistics["image"].items())}
    assert (image["cells"], image["minimum"], image["maximum"]) == (values.size, values.min(), values.max())
    assert [image["mean"], image["deviation"]] == pytest.approx([values.mean(), values.std()], rel=1e-12)
    assert statistics["label"] == {"cells": classes.tolist(), "frequency": (classes / values.size).tolist()}


def test_boxes_are_those_of_the_two_largest_components():
    label = np.zeros((20, 20, 20), np.uint8)
    label[1:4, 2:5, 3:9], label[10:19, 10:19, 10:12], label[0, 0, 0] = 1, 1, 1
    label[12, 12, 10], label[5, 5, 5], label[6, 6, 5] = 2, 2, 2      # the last two touch at an edge only
    kidney, tumour = kits19.bounding_boxes(label)
    assert kidney.tolist() == [[10, 10, 10, 19, 19, 12], [1, 2, 3, 4, 5, 9]]
    assert {tuple(box) for box in tumour.tolist()} < {(12, 12, 10, 13, 13, 11), (5, 5, 5, 6, 6, 6), (6, 6, 5, 7, 7, 6)}
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
    other = replace(RECIPE, seed=2).scan(0)
    assert other.image.shape != scans[0].image.shape or (other.image != scans[0].image).mean() > 0.5
    fine = phantom.simulate_scan(np.random.default_rng(0), (1.6, 1.2, 1.2), 40.0)
    assert 1.5 <= fine.spacing_mm[0] <= 5 and 0.54 <= fine.spacing_mm[1] <= 0.95


def test_the_check_compares_boxes_with_labels_and_shapes_with_the_index(dataset, tmp_path, capsys):
    assert check_fails(run, dataset, tmp_path / "damaged", lambda file: file["boxes"].__setitem__((0, 0, 0, 3), 1), "the label has")
    index = read_json(dataset / "train" / "index.json")
    assert run("check", dataset, "--no-picture") == 0 and "boxes of 5 cases" in capsys.readouterr().out
    index["fields"]["label"]["high"] = 1
    (tmp_path / "damaged" / "train" / "index.json").write_text(json.dumps(index))
    assert run("check", tmp_path / "damaged") == 1 and "'label'" in capsys.readouterr().out


# ---- NIfTI


def test_the_public_layout_is_converted(public, dataset, tmp_path, capsys):
    assert run("convert", public, tmp_path / "out", *GRID, workers="2") == 0
    stdout = capsys.readouterr().out
    assert "4 of the 210 labelled cases" in stdout and "cases: 2 for train, 2 for validation" in stdout
    for number in range(4):
        values, attrs = read_case(tmp_path / "out", f"case_{number:05d}")
        simulated = read_case(dataset, f"case_{number:05d}")[0]                  # without NIfTI
        assert all((values[name] == simulated[name]).all() for name in values) and attrs["kind"] == "converted"
        folder = public / f"case_{number:05d}"
        image, label = (nibabel.load(folder / name) for name in (nifti.IMAGE, nifti.LABEL))
        assert image.get_data_dtype() == np.int16 and nibabel.aff2axcodes(image.affine) == ("I", "P", "L")
        expected = preprocess(
            np.asarray(image.dataobj), np.asarray(label.dataobj), [float(mm) for mm in image.header.get_zooms()], (9.6, 7.2, 7.2),
            (8, 32, 32),
        )  # fmt: skip
        assert (values["image"] == expected[0]).all() and (values["label"] == expected[1]).all()
    assert {path.stem for path in (tmp_path / "out" / "validation").glob("*.h5")} == {"case_00000", "case_00003"}
    assert check_dataset(tmp_path / "out", Options(seconds=0, threads=2)).findings == () and run("check", tmp_path / "out") == 0


def load_volumes(folder):
    return [nibabel.load(folder / name) for name in (nifti.IMAGE, nifti.LABEL)]


def save(folder, image=None, label=None):
    for name, file in ((nifti.IMAGE, image), (nifti.LABEL, label)):
        if file is not None:
            nibabel.save(file, folder / name)
    return folder


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_axes_in_another_order_give_the_same_volume(public, tmp_path, order):
    source, folder = public / "case_00001", tmp_path / "case_00001"
    folder.mkdir()
    pairs = [(np.asarray(file.dataobj), file.affine) for file in load_volumes(source)]
    transposed = [nibabel.Nifti1Image(values.transpose(order), affine[:, [*order, 3]]) for values, affine in pairs]
    expected, actual = nifti.read(source), nifti.read(save(folder, *transposed))
    assert transposed[0].shape != expected[0].shape or (np.asarray(transposed[0].dataobj) != expected[0]).any()
    assert (expected[0] == actual[0]).all() and (expected[1] == actual[1]).all() and expected[2] == actual[2]
    assert expected[0].dtype == np.float32 and expected[1].dtype == np.uint8


def test_slope_and_intercept_are_applied(public, tmp_path):
    image, label = load_volumes(public / "case_00001")
    folder = save(tmp_path, image, label)
    set_header(folder, 0, (np.asarray(image.dataobj) // 2).astype(np.int16), scl_slope=2, scl_inter=-3)
    assert (nifti.read(folder)[0] == np.asarray(image.dataobj) // 2 * 2.0 - 3).all()


def rotate(affine, degrees=5):
    rotation = np.eye(4)
    c, s = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    rotation[:2, :2] = [[c, -s], [s, c]]
    return rotation @ affine


def translate(affine):
    shift = np.eye(4)
    shift[0, 3] = 30
    return shift @ affine


def set_header(folder, index, values=None, **fields):
    """Change fields of the header, and the bytes of the voxels, of the image (index 0) or the label (1)."""
    raw = bytearray(load_volumes(folder)[index].to_bytes())
    header = nibabel.Nifti1Header.from_fileobj(io.BytesIO(bytes(raw)), check=False)
    for name, value in fields.items():
        header[name] = value
    raw[:348] = header.binaryblock
    raw[352:] = raw[352:] if values is None else values.tobytes(order="F")
    (folder / (nifti.IMAGE, nifti.LABEL)[index]).write_bytes(gzip.compress(bytes(raw)))


def flip_byte(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]


def patch(folder, change):
    (folder / nifti.IMAGE).write_bytes(change((folder / nifti.IMAGE).read_bytes()))


def edit_volume(folder, index, values=lambda x: x, affine=lambda x: x):
    """Change the voxels or the affine of the image (index 0) or the label (1)."""
    file = load_volumes(folder)[index]
    kind = (np.float32, np.uint8)[index]
    image = nibabel.Nifti1Image(values(np.asarray(file.dataobj).astype(kind)), affine(file.affine))
    save(folder, **{("image", "label")[index]: image})


def put(value, values):
    values[3, 4, 5] = value
    return values


def to_metres(case, unit, scale):
    for index in (0, 1):
        edit_volume(case, index, affine=lambda affine: np.diag([scale] * 3 + [1]) @ affine)
        set_header(case, index, xyzt_units=unit)


def unpack(case, rename):
    for name in (nifti.IMAGE, nifti.LABEL):
        content = gzip.decompress((case / name).read_bytes())
        (case / name).unlink()
        (case / rename(name)).write_bytes(content)


FORMS = {
    "a dim of 1": lambda case: [edit_volume(case, index, lambda x: x[..., None]) for index in (0, 1)],
    "micrometres": lambda case: to_metres(case, 3, 1e3),
    "metres": lambda case: to_metres(case, 1, 1e-3),
    "labels as floats": lambda case: edit_volume(case, 1, lambda x: np.where(x == 1, np.float32(0.9882), x * np.float32(1.01))),
    "not compressed": lambda case: unpack(case, lambda name: name.removesuffix(".gz")),
    "not compressed, .gz": lambda case: unpack(case, str),
    "NIfTI-2": lambda case: save(case, *map(nibabel.Nifti2Image.from_image, load_volumes(case))),
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_another_form_give_the_same_case(public, tmp_path, form):
    expected = nifti.read(public / "case_00001")
    case = Path(shutil.copytree(public / "case_00001", tmp_path / "case_00001"))
    FORMS[form](case)
    image, label, spacing = nifti.read(case)
    assert (image == expected[0]).all() and (label == expected[1]).all() and label.any()
    assert spacing == pytest.approx(expected[2], rel=1e-6)


def test_values_that_are_not_in_hounsfield_units_are_reported(public, tmp_path, capfd):
    for number in (0, 1):
        case = Path(shutil.copytree(public / f"case_{number:05d}", tmp_path / f"in/case_{number:05d}"))
    edit_volume(case, 0, lambda x: x + 1024)
    assert run("convert", tmp_path / "in", tmp_path / "out", *GRID) == run("check", tmp_path / "out") == 0
    stdout, stderr = capfd.readouterr()
    assert stderr.count("no value below -200") == 1 and f"{case}: no value" in stderr
    assert stdout.count("most voxels are above 304 HU") == 1 and "case_00001.h5: most voxels" in stdout


def test_a_bad_case_is_left_out_and_counted(public, tmp_path, capsys):
    source = Path(shutil.copytree(public, tmp_path / "in"))
    patch(source / "case_00001", lambda data: data[:-200])
    options = *GRID, "--validation-cases", "3"
    assert run("convert", source, tmp_path / "out", *options) == 2
    check_error(capsys, "case_00001/imaging.nii.gz: cannot be read", "leave such items out with --skip-bad")
    assert run("convert", source, tmp_path / "out", *options, "--skip-bad") == run("check", tmp_path / "out") == 0
    assert {path.stem for path in (tmp_path / "out" / "train").glob("*.h5")} == {"case_00000", "case_00002"}
    assert "refused: 1 of 4 items: 1 such as " in capsys.readouterr().out


FAULTS = {
    "missing": (lambda case: (case / nifti.LABEL).unlink(), nifti.LABEL, ["no such file"]),
    "cut": (lambda case: patch(case, lambda data: data[:-200]), nifti.IMAGE, ["cannot be read", "fetch it again"]),
    "damaged": (lambda case: patch(case, flip_byte), nifti.IMAGE, ["cannot be read", "fetch it again"]),
    "not gzip": (lambda case: patch(case, lambda data: b"no scan at all"), nifti.IMAGE, ["compressed by gzip"]),
    "no NIfTI": (lambda case: patch(case, lambda data: gzip.compress(b"no scan at all" * 99)), nifti.IMAGE, ["fetch it again"]),
    "short": (lambda case: patch(case, lambda data: gzip.compress(gzip.decompress(data)[:-500])), nifti.IMAGE, ["before the last"]),
    "shapes": (lambda case: edit_volume(case, 1, lambda x: x[1:]), nifti.LABEL, ["imaging.nii.gz has", "on the grid of its image"]),
    "moved": (lambda case: edit_volume(case, 1, affine=translate), nifti.LABEL, ["voxels from its position", "resample the label"]),
    "label 7": (lambda case: edit_volume(case, 1, partial(put, 7)), nifti.LABEL, ["[7]", "1 kidney, 2 tumour"]),
    "4-D": (lambda case: edit_volume(case, 0, lambda x: np.stack([x, x], -1)), nifti.IMAGE, ["4 dimensions", "expected 3"]),
    "labels 1.5": (lambda case: edit_volume(case, 1, lambda x: x * np.float32(1.5)), nifti.LABEL, ["[1.5", "map them"]),
    "geometries": (lambda case: set_header(case, 0, pixdim=(1, 1, 1, 1, 1, 1, 1, 1)), nifti.IMAGE,
                   ["(1.0, 1.0, 1.0) mm apart by pixdim and (", "mm by the affine"]),
    "unknown unit": (lambda case: edit_volume(case, 0, affine=lambda x: x * 30), nifti.IMAGE,
                     ["expected 0.05 to 20", "xyzt_units"]),
    "rotated": (lambda case: (edit_volume(case, 0, affine=rotate), edit_volume(case, 1, affine=rotate)), nifti.IMAGE,
                ["rotated or sheared", "resample it to an axis-aligned grid first"]),
    "spacing 0": (lambda case: set_header(case, 0, pixdim=[1.0] * 2 + [0.0] * 6), nifti.IMAGE, ["0.0", "correct pixdim"]),
    "spacing NaN": (lambda case: set_header(case, 0, pixdim=[1.0] * 2 + [np.nan] * 6), nifti.IMAGE, ["nan", "correct pixdim"]),
    "NaN": (lambda case: edit_volume(case, 0, partial(put, np.nan)), nifti.IMAGE, ["NaN or infinity"]),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_case_is_refused_with_its_name(public, tmp_path, capsys, fault):
    for name in ("case_00000", "case_00001"):
        shutil.copytree(public / name, tmp_path / "in" / name)
    damage, name, messages = FAULTS[fault]
    damage(tmp_path / "in" / "case_00001")
    assert run("convert", tmp_path / "in", tmp_path / "out", *GRID) == 2
    check_error(capsys, f"case_00001/{name}", *messages)
    assert not list((tmp_path / "out" / "train").glob("*")) and not list((tmp_path / "out").rglob("*.partial"))


def touch(root, *numbers, unlabelled=()):
    for number in (*numbers, *unlabelled):
        folder = root / f"case_{number:05d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / nifti.IMAGE).touch()
        if number in numbers:
            (folder / nifti.LABEL).touch()
    return root


def test_the_split_is_that_of_the_reference(tmp_path):
    splits, unlabelled = kits19.split_cases(touch(tmp_path, *range(210), unlabelled=range(210, 300)), None)
    assert [len(splits[split]) for split in ("train", "validation")] == [168, 42]
    assert splits["validation"][:5] == ["case_00000", "case_00003", "case_00005", "case_00006", "case_00012"]
    assert splits["validation"][-1] == "case_00207" and not {*splits["train"]} & {*splits["validation"]}
    assert len(unlabelled) == 90 and unlabelled[0] == "case_00210"
    chosen, _ = kits19.split_cases(tmp_path, (1, 2))
    assert chosen["validation"] == ["case_00001", "case_00002"] and len(chosen["train"]) == 208


def test_private_cases_are_split_by_option(tmp_path, capsys):
    touch(tmp_path / "own", 1000, 1001, 1002)
    for options, text in (
        ([], "case_01000 is no labelled case of the public set; name yours"), (["--validation-cases", "7"], "names [7], which"),
        (["--validation-cases", "1000,1001,1002"], "is for train"),
    ):  # fmt: skip
        assert run("convert", tmp_path / "own", tmp_path / "out", *options) == 2 and text in capsys.readouterr().err
    assert kits19.split_cases(tmp_path / "own", (1001,))[0]["validation"] == ["case_01001"]
    assert run("convert", touch(tmp_path / "few", 1, 2), tmp_path / "out") == 2 and "is for validation" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run("convert", tmp_path / "empty", tmp_path / "out") == 2 and "no folder case_00000" in capsys.readouterr().err
    assert run("convert", tmp_path / "none", tmp_path / "out") == 2 and "no such folder" in capsys.readouterr().err
