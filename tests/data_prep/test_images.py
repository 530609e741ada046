"""Folders of images and WebDataset: unchanged bytes, labels, splits, refused items, a picture."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import images, picture
from hpcai.data.hdf5 import Rows
from hpcai.data.images import FIELDS
from tests.data_prep.prep_contract import check_error, check_fails, read_json, runner, set_to, write_files

run = runner(images)
CLASSES = ("ape", "bee", "cat")


def picture_of(number: int, kind: str = "JPEG") -> bytes:
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (9, 12, 3)).astype(np.uint8)).save(buffer := io.BytesIO(), kind)
    return buffer.getvalue()


def write_folders(root: Path, split: bool = True) -> dict[bytes, int]:
    """Write images of three classes, and return the label of each."""
    files, labels = {}, {}
    for label, number in ((label, 10 * label + n) for label in range(3) for n in range(10)):
        folder, kind = ["train", "val", "test"][(number % 10 > 5) + (number % 10 > 8)], ("PNG", "JPEG")[number % 2]
        labels[data := picture_of(number, kind)] = label
        files[f"{f'{folder}/' * split}{CLASSES[label]}/deep/{number}.{kind}"] = data
    write_files(root, files)
    return labels


def write_tar(path: Path, numbers: range, text: str = "{}") -> dict[bytes, int]:
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = {picture_of(number): number % 3 for number in numbers}
    with tarfile.open(path, "w") as tar:
        for number, (data, label) in zip(numbers, labels.items()):
            for ending, content in (("jpg", data), ("json", b"{}"), ("cls", text.format(label).encode())):
                member = tarfile.TarInfo(f"{number:03d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return labels


def read(folder: Path) -> list[tuple[bytes, int]]:
    rows = Rows(folder, FIELDS)
    values = [rows.read(n) for n in range(len(rows))]
    assert all(len(value["image"]) == value["bytes"] for value in values)
    return [(value["image"].tobytes(), int(value["label"])) for value in values]


def test_folders_with_splits_are_converted_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels, out = write_folders(tmp_path / "in"), tmp_path / "out"
    write_files(tmp_path / "in", {"train/bee/x.gif": b"", "val/readme.md": "text"})
    assert run("convert", tmp_path / "in", out, "--rows", 4, workers="2") == 0
    splits = {split: read(out / split) for split in ("train", "validation", "test")}
    assert {split: len(rows) for split, rows in splits.items()} == {"train": 18, "validation": 9, "test": 3}
    assert dict(sum(splits.values(), [])) == labels and len({label for _, label in splits["train"][:6]}) > 1, "classes are mixed"
    assert read_json(out / "train/index.json")["classes"] == [*CLASSES]
    statistics = read_json(out / "statistics.json")["splits"]["train"]["label"]
    assert statistics == {"cells": [6, 6, 6], "frequency": pytest.approx([1 / 3] * 3)}
    assert "refused: 1 of 31 items" in capsys.readouterr().out and run("check", out) == 0
    assert (out / picture.NAME).read_bytes().startswith(b"\x89PNG") and "30 images decoded" in capsys.readouterr().out
    assert check_fails(run, out, tmp_path / "bad", set_to("image", slice(0, 3), 0), "row 0: cannot be read as an image")


def test_a_part_is_held_out_by_the_hash_of_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = write_folders(tmp_path / "in", split=False)
    assert run("convert", tmp_path / "in", tmp_path / "out", "--validation", 0.3) == 0
    train, held_out = (dict(read(tmp_path / "out" / split)) for split in ("train", "validation"))
    assert train | held_out == labels and not train.keys() & held_out.keys() and 3 <= len(held_out) <= 16
    write_files(tmp_path / "in", {"bee/new.jpg": picture_of(99)})
    assert run("convert", tmp_path / "in", tmp_path / "more", "--validation", 0.3) == 0
    assert held_out.keys() <= dict(read(tmp_path / "more/validation")).keys() <= {*held_out, picture_of(99)}, "others stay"
    capsys.readouterr()
    assert run("convert", tmp_path / "in", tmp_path / "none", "--validation", 1e-6) == 2
    check_error(capsys, "no image for validation; give more, or change --validation")


@pytest.mark.parametrize(("text", "names"), [("{}\n", ["0", "1", "2"]), ("c{}", ["c0", "c1", "c2"])])
def test_webdataset(tmp_path: Path, text: str, names: list[str]) -> None:
    train = write_tar(tmp_path / "in/train/a.tar", range(7), text) | write_tar(tmp_path / "in/train/b.tar", range(7, 12), text)
    validation = write_tar(tmp_path / "in/val/a.tar", range(12, 15), text)
    assert run("convert", tmp_path / "in", tmp_path / "out", "--rows", 5) == 0
    assert read(tmp_path / "out/train") == [*train.items()] and read(tmp_path / "out/validation") == [*validation.items()]
    assert read_json(tmp_path / "out/train/index.json")["classes"] == names


def test_bad_images_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folders(source := tmp_path / "in")
    Image.new("L", (8, 8)).save(frames := io.BytesIO(), "PNG", save_all=True, append_images=[Image.new("L", (8, 8), 9)])
    bad = {"train/ape/cut.jpg": (picture_of(50)[:-99], "truncated"), "train/ape/text.png": (b"text", "cannot be read as an image"),
           "train/bee/none.jpg": (b"", "cannot be read as an image"), "train/cat/moving.png": (frames.getvalue(), "animated"),
           "val/dog/a.jpg": (picture_of(51), "class 'dog', expected one of the 3"),
           "train/b.jpg": (picture_of(52), "in no folder")}  # fmt: skip
    for number, (name, (data, reason)) in enumerate(bad.items()):
        write_files(source, {name: data})
        assert run("convert", source, tmp_path / f"out{number}") == 2
        check_error(capsys, str(source), Path(name).name, reason, "--skip-bad")
        if number < len(bad) - 1:
            (source / name).unlink()
    write_files(source, {name: data for name, (data, _) in bad.items()})
    assert run("convert", source, out := tmp_path / "out", "--skip-bad") == 0
    assert "refused: 6 of 36 items" in capsys.readouterr().out
    assert len(read(out / "train")) == 18 and len(read_json(out / "skipped.json")["unusable"]) == 6
    write_tar(tars := tmp_path / "tars/a.tar", range(40))
    with tarfile.open(tars, "a") as tar:
        tar.add(source / "train/b.jpg", "no-class.jpg")
    capsys.readouterr()
    assert run("convert", tars.parent, tmp_path / "out-tars") == 2
    check_error(capsys, "a.tar: no-class: has jpg, expected also cls")
    write_tar(tars.with_name("b.tar"), range(1), "9999")
    assert run("convert", tars.parent, tmp_path / "far", "--skip-bad") == 2
    check_error(capsys, "class 9999 of 41 images")
