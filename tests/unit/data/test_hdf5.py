"""Files that cannot be used are named, with what was found and what was expected."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpcai.data import Rows
from hpcai.errors import DataError

FIELDS = {"counts": ("int16", (4, 4, 4, 2)), "target": ("float32", (3,))}


def write(path: Path, rows: int = 2, value: float = 0.5, **other: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"counts": np.full((rows, 4, 4, 4, 2), rows, np.int16), "target": np.full((rows, 3), value, np.float32)} | other
    with h5py.File(path, "w") as file:
        for name, array in data.items():
            if array is not None:
                file[name] = array


def index(folder: Path) -> None:
    files = [{"name": p.name, "rows": len(h5py.File(p)["target"]), "bytes": p.stat().st_size} for p in sorted(folder.glob("*.h5"))]
    (folder / "index.json").write_text(json.dumps({"files": files, "low": [0, 0, 0]}))


@pytest.mark.parametrize("indexed", [True, False])
def test_rows_of_all_files_in_order(tmp_path: Path, indexed: bool) -> None:
    for i, rows in enumerate((2, 1, 3)):
        write(tmp_path / f"u{i}.h5", rows, value=i)
    if indexed:
        index(tmp_path)
    rows = Rows(tmp_path, FIELDS)
    assert len(rows) == 6 and rows.shapes["counts"] == (4, 4, 4, 2)
    assert [rows.read(i)["target"][0] for i in range(6)] == [0, 0, 1, 2, 2, 2]
    assert rows.describe(5) == f"{tmp_path.name}/u2.h5 row 2"
    assert rows.about.get("low") == ([0, 0, 0] if indexed else None)


@pytest.mark.parametrize(
    "spoil, text",
    [
        (lambda p: None, r"u0.h5: dataset 'counts' is \(2, 4, 4, 4, 9\), expected \(rows, 4, 4, 4, 2\); make it so"),
        (lambda p: write(p, counts=np.zeros((2, 4, 4, 4, 2))), "u0.h5: dataset 'counts' is float64, expected int16; make it so"),
        (lambda p: write(p, target=None), "u0.h5: no dataset 'target'; it has counts"),
        (lambda p: write(p, target=np.zeros((3, 3), np.float32)), "different numbers of rows"),
        (lambda p: p.write_bytes(p.read_bytes()[:100]), "u0.h5: not a whole HDF5 file"),
        (lambda p: p.unlink(), "holds no .*h5 file; make it so"),
    ],
)
def test_bad_files(tmp_path: Path, spoil, text: str) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path / "u0.h5", counts=np.zeros((2, 4, 4, 4, 9), np.int16))
    spoil(tmp_path / "u0.h5")
    with pytest.raises(DataError, match=text):
        Rows(tmp_path, FIELDS, "make it so")


def test_the_index_finds_truncated_and_missing_files_without_opening_them(tmp_path: Path) -> None:
    for i in range(3):
        write(tmp_path / f"u{i}.h5")
    index(tmp_path)
    whole = (tmp_path / "u2.h5").read_bytes()
    (tmp_path / "u2.h5").write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"u2.h5: has [\d,]+ bytes \(truncated or rewritten\?\), index.json says"):
        Rows(tmp_path, FIELDS)
    (tmp_path / "u2.h5").unlink()
    with pytest.raises(DataError, match=r"u2.h5: is missing"):
        Rows(tmp_path, FIELDS)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index.json: cannot be read"):
        Rows(tmp_path, FIELDS)
    with pytest.raises(DataError, match="no such folder"):
        Rows(tmp_path / "nowhere", FIELDS)


def test_nan_is_named_with_its_file_and_row(tmp_path: Path) -> None:
    target = np.zeros((2, 3), np.float32)
    target[1, 2] = np.nan
    write(tmp_path / "u0.h5", target=target)
    rows = Rows(tmp_path, FIELDS)
    rows.read(0)
    with pytest.raises(DataError, match=r"u0.h5: row 1 of 'target' holds NaN"):
        rows.read(1)


def test_many_files_do_not_stay_open(tmp_path: Path) -> None:
    for i in range(70):
        write(tmp_path / f"u{i:02d}.h5", 1)
    rows = Rows(tmp_path, FIELDS)
    for i in range(70):
        rows.read(i)
    assert len(rows._files) <= 64
