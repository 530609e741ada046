"""``hpcai data check --index`` writes an index of the files, and a table of valid ones; other files are unchanged."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcai import cli
from hpcai.data import Rows
from tests.unit.cli.check.datasets import (
    SHAPE,
    check,
    edit_entries,
    entries,
    file_contents,
    flip,
    index,
    rewrite,
    single_finding,
    summarize,
    tables_in,
    write_all_indexes,
)

FIELDS = {"counts": ("int16", SHAPE), "target": ("float32", (3,))}


def run(*args: object) -> int:
    return cli.main(["data", "check", *map(str, args), "--threads", "1", "--seconds", "0"])


@pytest.mark.parametrize("content", [None, "{ damaged"])
def test_the_index_is_made_from_the_files(root: Path, content: str | None) -> None:
    path, before = root / "train" / "index.json", entries(root / "train")
    path.unlink()
    if content:
        path.write_text(content)
    (root / "train" / "x.h5").write_bytes(b"no HDF5")
    messages = [line for line in write_all_indexes(root) if "train" in line]
    assert messages[0].startswith(f"{root / 'train' / 'x.h5'}: refused: not entered into index.json: ")
    assert messages[-1] == f"{path}: made from 4 files" and len(messages) == (3 if content else 2)
    assert entries(root / "train") == before and check(root).splits[0].verified == 4
    damaged = path.with_name("index.json.damaged")
    assert damaged.read_text() == content if content else not damaged.exists()


def read_row(folder: Path, number: int) -> dict[str, Any]:
    rows = Rows(folder, FIELDS)
    try:
        return rows.read(number)
    finally:
        rows.close()


@pytest.fixture
def indexed(root: Path) -> Path:
    for split in ("train", "validation"):
        index(root / split, fields={"target": {"dtype": "float32", "shape": [3]}})
    messages = {"train": "a table of 4 files now", "validation": "a table of 2 files now"}
    assert write_all_indexes(root) == [f"{root / split / 'index.json'}: has {text}" for split, text in messages.items()]
    return root


def test_a_table_is_written_after_a_check(root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before, expected = file_contents(root), read_row(root / "train", 5)
    assert run(root, "--index") == 0
    out = capsys.readouterr().out
    assert f"index: {root / 'train/index.json'}: has a table of 4 files now\n" in out and "fine: 6 files" in out
    after = file_contents(root)
    assert {name for name in after if after[name] != before.get(name)} == {
        f"{split}/{name}" for split in ("train", "validation") for name in ("index.json", *tables_in(root / split))
    }  # fmt: skip
    document = json.loads(after["train/index.json"])
    document.pop("table")
    assert document == json.loads(before["train/index.json"])
    assert run(root, "--index", "--quick") == 0 and file_contents(root) == after
    monkeypatch.setattr(h5py.File, "__init__", None)
    actual = read_row(root / "train", 5)
    assert all(np.array_equal(actual[name], expected[name]) for name in FIELDS)


@pytest.mark.parametrize(("spoil", "reason"), [(lambda path: os.truncate(path, 5000), "is truncated"),
                                             (lambda path: flip(path, 9000, 3), "its SHA-256 is")])  # fmt: skip
def test_no_table_is_written_for_an_invalid_folder(root: Path, capsys: Any, spoil: Any, reason: str) -> None:
    edit_entries(root / "validation", lambda files: files.append({"name": "../u"}))
    spoil(root / "train" / "u1.h5")
    before = file_contents(root)
    assert run(root, "--index") == 1
    out = capsys.readouterr().out
    assert f"train/index.json: refused: no table while files differ from the index (u1.h5: {reason}" in out
    assert "validation/index.json: refused: no table while files differ from the index (index.json: cannot be used" in out
    assert file_contents(root) == before
    for folder in (root / "train", root / "validation"):
        shutil.rmtree(folder)
    (root / "train").mkdir()
    np.save(root / "train" / "a.npy", np.arange(6.0))
    index(root / "train")
    assert run(root, "--index") == 0
    assert "train/index.json: refused: a table is of HDF5 files alone" in capsys.readouterr().out and not tables_in(root / "train")


@pytest.mark.parametrize("fault", ["gone", "damaged", "other rows"])
def test_an_invalid_table_is_an_error_until_it_is_rewritten(indexed: Path, fault: str) -> None:
    train = indexed / "train"
    (name,) = tables_in(train)
    if fault == "gone":
        (train / name).unlink()
    elif fault == "damaged":
        flip(train / name, 99, 2)
    else:
        edit_entries(train, lambda files: files[0].pop("sha256"))
        edit_entries(train, lambda files: files[0].update(name="u9.h5"))
        (train / "u0.h5").rename(train / "u9.h5")
    assert summarize(check(indexed)) == [("error", "index", "train/index.json", None, None)]
    finding = single_finding(check(indexed), "index")
    assert finding.text.startswith(f"{name}: no table of the files beside it (") and "--index writes it again" in finding.text
    assert write_all_indexes(indexed)[0] == f"{train / 'index.json'}: has a table of 4 files now"
    assert check(indexed).findings == () and len(tables_in(train)) == 1
    assert len(Rows(train, FIELDS)) == 16


def test_a_rewritten_file_does_not_match_the_table(indexed: Path) -> None:
    path = indexed / "train" / "u1.h5"
    rewrite(path)
    finding = single_finding(check(indexed), "table")
    assert finding.path == path and "or --index if it is right" in finding.text
    assert len(write_all_indexes(indexed)) == 2 and check(indexed).findings == ()
