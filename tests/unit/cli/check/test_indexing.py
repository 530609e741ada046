"""``hpcai data check --index``: an index is made from the files, and a table from valid ones; all else is unchanged."""

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
    table_of,
    write_all_indexes,
)

FIELDS = {"counts": ("int16", SHAPE), "target": ("float32", (3,))}


def run(*words: object) -> int:
    return cli.main(["data", "check", *map(str, words), "--threads", "1", "--seconds", "0"])


@pytest.mark.parametrize("content", [None, "{ damaged"])
def test_the_index_is_made_from_the_files(made: Path, content: str | None) -> None:
    path, before = made / "train" / "index.json", entries(made / "train")
    path.unlink()
    if content:
        path.write_text(content)
    (made / "train" / "x.h5").write_bytes(b"no HDF5")
    done = [line for line in write_all_indexes(made) if "train" in line]
    assert done[0].startswith(f"{made / 'train' / 'x.h5'}: refused: not entered into index.json: ")
    assert done[-1] == f"{path}: made from 4 files" and len(done) == (3 if content else 2)
    assert entries(made / "train") == before and check(made).splits[0].verified == 4
    damaged = path.with_name("index.json.damaged")
    assert damaged.read_text() == content if content else not damaged.exists()


def row(folder: Path, number: int) -> dict[str, Any]:
    rows = Rows(folder, FIELDS)
    try:
        return rows.read(number)
    finally:
        rows.close()


@pytest.fixture
def tabled(made: Path) -> Path:
    for split in ("train", "validation"):
        index(made / split, fields={"target": {"dtype": "float32", "shape": [3]}})
    told = {"train": "a table of 4 files now", "validation": "a table of 2 files now"}
    assert write_all_indexes(made) == [f"{made / split / 'index.json'}: has {text}" for split, text in told.items()]
    return made


def test_a_table_is_written_after_a_check(made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before, wanted = file_contents(made), row(made / "train", 5)
    assert run(made, "--index") == 0
    out = capsys.readouterr().out
    assert f"index: {made / 'train/index.json'}: has a table of 4 files now\n" in out and "fine: 6 files" in out
    after = file_contents(made)
    assert {name for name in after if after[name] != before.get(name)} == {
        f"{split}/{name}" for split in ("train", "validation") for name in ("index.json", *table_of(made / split))
    }  # fmt: skip
    about = json.loads(after["train/index.json"])
    about.pop("table")
    assert about == json.loads(before["train/index.json"])
    assert run(made, "--index", "--quick") == 0 and file_contents(made) == after
    monkeypatch.setattr(h5py.File, "__init__", None)
    found = row(made / "train", 5)
    assert all(np.array_equal(found[name], wanted[name]) for name in FIELDS)


@pytest.mark.parametrize(("spoil", "said"), [(lambda path: os.truncate(path, 5000), "is truncated"),
                                             (lambda path: flip(path, 9000, 3), "its SHA-256 is")])  # fmt: skip
def test_no_table_is_written_for_an_invalid_folder(made: Path, capsys: Any, spoil: Any, said: str) -> None:
    edit_entries(made / "validation", lambda files: files.append({"name": "../u"}))
    spoil(made / "train" / "u1.h5")
    before = file_contents(made)
    assert run(made, "--index") == 1
    out = capsys.readouterr().out
    assert f"train/index.json: refused: no table while files differ from the index (u1.h5: {said}" in out
    assert "validation/index.json: refused: no table while files differ from the index (index.json: cannot be used" in out
    assert file_contents(made) == before
    for folder in (made / "train", made / "validation"):
        shutil.rmtree(folder)
    (made / "train").mkdir()
    np.save(made / "train" / "a.npy", np.arange(6.0))
    index(made / "train")
    assert run(made, "--index") == 0
    assert "train/index.json: refused: a table is of HDF5 files alone" in capsys.readouterr().out and not table_of(made / "train")


@pytest.mark.parametrize("how", ["gone", "damaged", "other rows"])
def test_an_invalid_table_is_an_error_until_it_is_rewritten(tabled: Path, how: str) -> None:
    train = tabled / "train"
    (name,) = table_of(train)
    if how == "gone":
        (train / name).unlink()
    elif how == "damaged":
        flip(train / name, 99, 2)
    else:
        edit_entries(train, lambda files: files[0].pop("sha256"))
        edit_entries(train, lambda files: files[0].update(name="u9.h5"))
        (train / "u0.h5").rename(train / "u9.h5")
    assert summarize(check(tabled)) == [("error", "index", "train/index.json", None, None)]
    finding = single_finding(check(tabled), "index")
    assert finding.text.startswith(f"{name}: no table of the files beside it (") and "--index writes it again" in finding.text
    assert write_all_indexes(tabled)[0] == f"{train / 'index.json'}: has a table of 4 files now"
    assert check(tabled).findings == () and len(table_of(train)) == 1
    assert len(Rows(train, FIELDS)) == 16


def test_a_rewritten_file_does_not_match_the_table(tabled: Path) -> None:
    path = tabled / "train" / "u1.h5"
    rewrite(path)
    finding = single_finding(check(tabled), "table")
    assert finding.path == path and "or --index if it is right" in finding.text
    assert len(write_all_indexes(tabled)) == 2 and check(tabled).findings == ()
