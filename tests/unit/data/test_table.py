"""Index tables: the same values as from HDF5 alone, no file opened for tabulated data, and every table validated."""

import copy
import hashlib
import json
import pickle
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import load, save

from hpcai.data import Reader, Rows, file_cache
from hpcai.data.index import write_index
from hpcai.data.layout import UnreadableLayoutError
from hpcai.data.table import describe
from hpcai.errors import DataError
from tests.reference_data import load_json

ROWS = (3, 1, 4, 2)
FIELDS: Any = {
    "cube": ("float32", (None, 8, 8)), "blank": ("int32", (8, 40)), "mask": ("uint8", (8, 400)), "target": ("float64", (3,)),
    "count": ("int32", ()), "name": ("S6", ()), "flat": ("int16", ("count", 200)), "codes": ("uint8", ("count",)),
    "group/day": ("float32", ()), "is_new": ("bool", ()),
}  # fmt: skip
READERS = ("auto", "direct", "buffered", "memory", "hdf5")


def write_files(folder: Path) -> list[dict[str, np.ndarray]]:
    """Write files with all kinds of datasets. Return their rows."""
    folder.mkdir(parents=True, exist_ok=True)
    random, expected = np.random.default_rng(0), []
    for number, rows in enumerate(ROWS):
        count = random.integers(0, 4, rows).astype("i4")
        total = int(count.sum())
        data = {
            "cube": random.random((rows, 5 + number, 8, 8), np.float32), "target": random.random((rows, 3)),
            "mask": random.integers(0, 9, (rows, 8, 400)).astype("u1"), "count": count, "is_new": count > 1,
            "name": np.array([f"r{number}{i}" for i in range(rows)], "S6"), "group/day": random.random(rows, np.float32),
            "flat": random.integers(0, 9, (total, 200)).astype("i2"), "codes": random.integers(0, 9, total).astype("u1"),
        }  # fmt: skip
        with h5py.File(folder / f"u{number}.h5", "w") as file:
            for name, array in data.items():
                big_endian = name in ("cube", "target", "count", "group/day") and number % 2
                chunks = (2, 3, 5, 8)[: array.ndim] if name == "cube" and number > 1 else None
                file.create_dataset(name, data=array.astype(array.dtype.newbyteorder(">")) if big_endian else array, chunks=chunks)
            blank = file.create_dataset("blank", (rows, 8, 40), "i4", chunks=(1, 4, 32) if number > 1 else None, fillvalue=7)
            data["blank"] = np.full((rows, 8, 40), 7, "i4")
            if number == 3:
                blank[1, 2:6] = data["blank"][1, 2:6] = 9
        ends = np.append(0, np.cumsum(count))
        for row in range(rows):
            span = slice(ends[row], ends[row + 1])
            expected.append({name: array[span] if name in ("flat", "codes") else array[row] for name, array in data.items()})
    return expected


def index_entries(folder: Path) -> list[dict[str, Any]]:
    def rows(path: Path) -> int:
        with h5py.File(path) as file:
            return int(file["count"].shape[0])

    return [{"name": path.name, "rows": rows(path), "bytes": path.stat().st_size} for path in sorted(folder.glob("*.h5"))]


def write_table(folder: Path, **kwargs: Any) -> Path:
    """Write the index and the table. Return the path of the table."""
    write_index(folder, {"files": index_entries(folder), "units": "a"}, **kwargs)
    return table_path(folder)


def table_path(folder: Path) -> Path:
    return folder / json.loads((folder / "index.json").read_text())["table"]["name"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("dataset")
    expected = write_files(folder)
    write_table(folder)
    return folder, expected


@pytest.fixture
def no_hdf5(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_hdf5(monkeypatch)


def forbid_hdf5(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("h5py opens a file")

    monkeypatch.setattr(h5py.File, "__init__", refuse)


def check_equal(actual: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(actual[name], values) and np.shape(actual[name]) == values.shape, name
        assert np.asarray(actual[name]).dtype == values.dtype, "in the byte order of this machine"


# ---- equal values


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["table", "index", "none"])
def test_rows_are_the_same_with_and_without_a_table(
    dataset: tuple[Path, Any], tmp_path: Path, kind: str, reader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, expected = Path(shutil.copytree(dataset[0], tmp_path / "set")), dataset[1]
    if kind == "index":
        write_index(folder, json.loads((folder / "index.json").read_text()), table=False)
        assert sorted(path.name for path in folder.iterdir()) == ["index.json", *(f"u{i}.h5" for i in range(4))]
    if kind == "none":
        (folder / "index.json").unlink()
    elif kind == "table" and reader != "hdf5":
        forbid_hdf5(monkeypatch)
    rows = Rows(folder, FIELDS, reader=reader)
    restored = copy.copy(rows)  # as for a worker process
    assert rows.metadata.get("units") == (None if kind == "none" else "a")
    for source in (rows, restored, rows):
        assert len(source) == 10 and source.identity == Rows(dataset[0], FIELDS).identity
        for index, row in enumerate(expected):
            check_equal(source.read(index), row)
            assert source.shape(index, "cube") == row["cube"].shape
    check_equal(restored.read(8, {"cube": (slice(2, 5), slice(3, 4))}), expected[8] | {"cube": expected[8]["cube"][2:5, 3:4]})
    for name in ("count", "group/day", "is_new", "target", "name"):
        if kind == "table" and name in ("target", "name"):
            continue  # these are read from files
        assert np.array_equal(rows.column(name), [row[name] for row in expected])
    rows.close()
    restored.close()


def test_tables_do_not_change_the_identity(dataset: tuple[Path, Any]) -> None:
    lines = "\n".join(f"u{i}.h5 {n} {(dataset[0] / f'u{i}.h5').stat().st_size}" for i, n in enumerate(ROWS))
    assert Rows(dataset[0], FIELDS).identity == f"4 files, 10 rows, {hashlib.sha256(lines.encode()).hexdigest()[:12]}"


@pytest.mark.usefixtures("no_hdf5")
def test_columns_and_shapes_open_no_file_and_rows_only_their_own(dataset: tuple[Path, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dataset[0], tmp_path / "set"))
    rows = Rows(folder, FIELDS, "copy them")
    for path in folder.iterdir():
        if path.name != "u1.h5":
            path.unlink()
    assert rows.column("count").tolist() == [row["count"] for row in dataset[1]] and rows.shapes["cube"] == (5, 8, 8)
    assert [rows.shape(index, "cube")[0] for index in (0, 3, 9)] == [5, 6, 8]
    check_equal(rows.read(3), dataset[1][3])
    with pytest.raises(DataError, match=r"u2.h5: cannot be opened: no such file .*, index.json has .* and 4 rows; copy them"):
        rows.read(4)


@pytest.mark.parametrize("read", [lambda rows: rows.read(0), lambda rows: rows._open(rows.paths[0])], ids=["bytes", "h5py"])
def test_too_many_open_files_have_their_own_advice(dataset: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    rows = Rows(dataset[0], FIELDS, "copy them", reader="direct")
    monkeypatch.setattr(file_cache, "raise_file_limit", lambda: 64)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(DataError, match=r"u0.h5: cannot be opened: Too many .* have 64\); raise the limit: ulimit -n 4096$"):
            read(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_column_is_a_copy(dataset: tuple[Path, Any]) -> None:
    rows = Rows(dataset[0], FIELDS)
    rows.column("count")[:] = 99
    rows.read(0)["target"][:] = 99
    check_equal(rows.read(0), dataset[1][0])


def test_compressed_files_are_opened_by_h5py_at_their_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = write_files(tmp_path / "set")
    with h5py.File(tmp_path / "set" / "u2.h5", "r+") as file:
        cube = file["cube"][...]
        del file["cube"]
        file.create_dataset("cube", data=cube, compression="gzip")
    write_table(tmp_path / "set")
    rows = Rows(tmp_path / "set", FIELDS, reader="direct")
    assert rows.read(0) and rows.shape(5, "cube") == (7, 8, 8)
    with pytest.raises(UnreadableLayoutError, match=r"u2.h5: dataset 'cube' is written through .*deflate.*h5repack"):
        rows.read(5)
    by_hdf5 = Rows(tmp_path / "set", FIELDS, reader="hdf5")
    for index, row in enumerate(expected):
        check_equal(by_hdf5.read(index), row)
    forbid_hdf5(monkeypatch)  # shapes are in the table
    assert Rows(tmp_path / "set", FIELDS, reader="hdf5").shape(5, "cube") == (7, 8, 8)


def test_a_file_is_opened_once(dataset: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, opened = Reader("buffered"), list[str]()
    original = reader._files._open
    monkeypatch.setattr(reader._files, "_open", lambda path: opened.append(path.name) or original(path))
    rows = Rows(dataset[0], FIELDS, reader=reader)
    assert not opened
    for index in (9, 0, 8, 0):
        rows.read(index)
    assert opened == ["u3.h5", "u0.h5"]


# ---- errors


@pytest.mark.usefixtures("no_hdf5")
@pytest.mark.parametrize(("change", "message"), load_json("refused/fields"))
def test_datasets_that_differ_from_the_fields_raise_at_construction(dataset: tuple[Path, Any], change: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Rows(dataset[0], FIELDS | change, "make it so")


def test_a_field_that_no_file_has_raises_at_construction(dataset: tuple[Path, Any]) -> None:
    with pytest.raises(DataError, match="u0.h5: no dataset 'other'; it has "):
        Rows(dataset[0], {"other": ("int32", ())})


def rewrite_file(path: Path) -> None:
    """Replace a file by another one of the same size."""
    size = path.stat().st_size
    with h5py.File(path) as file:
        data = {name: file[name][...] for name in reversed([*FIELDS])}
    with h5py.File(path, "w") as file:
        for name, array in data.items():
            file[name] = array
    with path.open("r+b") as file:
        assert path.stat().st_size <= size
        file.truncate(size)


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"u0.h5: has [\d,]+ bytes \(truncated or rewritten\?\), index.json"),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"u0.h5: has [\d,]+ bytes \(truncated or rewritten\?\), index.json"),
    (rewrite_file, r"u0.h5: its first bytes differ from those in the table .*hpcai data check .* --index.*; copy it"),
    (lambda path: path.unlink(), "u0.h5: .*no such file"),
])  # fmt: skip
def test_changed_files_raise_when_they_are_read(
    dataset: tuple[Path, Any], tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    folder = Path(shutil.copytree(dataset[0], tmp_path / "set"))
    with h5py.File(folder / "u0.h5", "r+") as file:
        file.create_dataset("padding", data=np.zeros(30_000))
    write_table(folder)
    rows = Rows(folder, FIELDS, "copy it")
    damage(folder / "u0.h5")
    check_equal(rows.read(3), dataset[1][3])
    with pytest.raises(DataError, match=message):
        rows.read(0)


def replace_table(folder: Path, raw: bytes) -> None:
    """Replace the table by ``raw``, with its size and digest in the index."""
    index = json.loads((folder / "index.json").read_text())
    (folder / index["table"]["name"]).unlink(missing_ok=True)
    digest = hashlib.sha256(raw).hexdigest()
    index["table"] = {"name": f"index-{digest[:8]}.safetensors", "bytes": len(raw), "sha256": digest}
    (folder / index["table"]["name"]).write_bytes(raw)
    (folder / "index.json").write_text(json.dumps(index))


def check_refused(folder: Path, text: str) -> None:
    with pytest.raises(DataError, match=rf"{table_path(folder)}: no table of the files beside it \({text}.*check {folder} --index"):
        Rows(folder, FIELDS)


def test_a_missing_damaged_or_foreign_table_raises(dataset: tuple[Path, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dataset[0], tmp_path / "set"))
    table, raw = table_path(folder), table_path(folder).read_bytes()
    table.write_bytes(raw[:-1])
    check_refused(folder, r"it has [\d,]+ bytes, the index has [\d,]+")
    table.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    check_refused(folder, "its SHA-256 is not that of the index")
    table.unlink()
    check_refused(folder, "No such file")
    table.write_bytes(raw)
    index = json.loads((folder / "index.json").read_text())
    for change in ({"name": "u9.h5"}, {"rows": 2}):
        (folder / "index.json").write_text(json.dumps(index | {"files": [index["files"][0] | change, *index["files"][1:]]}))
        shutil.copy(folder / "u0.h5", folder / "u9.h5")
        check_refused(folder, "it is of other files than the index names, or of other rows or sizes")
    (folder / "index.json").write_text(json.dumps(index | {"table": index["table"] | {"name": "../index-00000000.safetensors"}}))
    with pytest.raises(DataError, match="index.json: cannot be read as an index of files .table.name"):
        Rows(folder, FIELDS)


def set_value(name: str, index: Any, value: Any, arrays: dict[str, np.ndarray]) -> None:
    arrays[name] = arrays[name].copy()
    arrays[name][index] = value


INVALID = [
    *((partial(set_value, *value), text) for *value, text in load_json("refused/index_tables")),
    (partial(set_value, "cube:type", (0, 1), ord("O")), "'cube' has invalid dtype"),
    (partial(set_value, "cube:type", (0, slice(None)), list(b"<f4,<f8,<f4,")), "'cube' has invalid dtype"),
    (lambda arrays: arrays.pop("cube:offset"), "'cube:offset' is no array of its kind"),
    (lambda arrays: arrays.update({"cube:offset": arrays["cube:offset"].astype("f8")}), "'cube:offset' is no array of its kind"),
    (lambda arrays: arrays.update({"cube:type": arrays["cube:type"][:, :3]}), "'cube' is not of so many files"),
    (lambda arrays: arrays.update({"cube:fill": np.zeros(3, "u1")}), "'cube' has arrays of other lengths"),
    (lambda arrays: arrays.update({"count:values": np.zeros(3, "i4")}), "the values of 'count' are not those of its rows"),
    (lambda arrays: arrays.update({"count:values": np.zeros(10, "f4")}), "the values of 'count' are not those of its rows"),
    (lambda arrays: arrays.update({"target:values": np.zeros(10, "f8")}), "the values of 'target' are not those of its rows"),
    (lambda arrays: arrays.update({"head": arrays["head"][:2]}), "its sums are not those of so many files"),
    (lambda arrays: arrays.pop("head"), "KeyError: 'head'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), INVALID, ids=range(len(INVALID)))
def test_an_invalid_table_raises(
    dataset: tuple[Path, Any], tmp_path: Path, change: Callable[[dict[str, np.ndarray]], Any], message: str
) -> None:
    folder = Path(shutil.copytree(dataset[0], tmp_path / "set"))
    arrays = load(table_path(folder).read_bytes())
    replace_table(folder, save(arrays))
    check_equal(Rows(folder, FIELDS).read(8), dataset[1][8])
    change(arrays)
    replace_table(folder, save(arrays))
    check_refused(folder, message)


def test_tables_of_other_formats_raise_and_are_never_unpickled(dataset: tuple[Path, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dataset[0], tmp_path / "set"))
    huge = {"x": {"dtype": "I64", "shape": [1 << 60], "data_offsets": [0, 1 << 63]}}
    for raw in (pickle.dumps([1]), b"", b"\xff" * 100, len(header := json.dumps(huge).encode()).to_bytes(8, "little") + header):
        replace_table(folder, raw)
        check_refused(folder, "SafetensorError")


def test_a_table_with_a_large_field_of_a_small_file_raises_on_read(tmp_path: Path) -> None:
    """A chunk that was never written has no storage, and its fill values would take memory."""
    with h5py.File(tmp_path / "u0.h5", "w") as file:
        file["count"] = np.zeros(1 << 20, "i1")
        file.create_dataset("wide", (1 << 20, 1000), "i1", chunks=(1 << 20, 1000))
    write_table(tmp_path)
    with pytest.raises(DataError, match="u0.h5: dataset 'wide' has 1,048,576,000 bytes by its header; the file is damaged"):
        Rows(tmp_path, {"wide": ("int8", (1000,))}).read(0)


# ---- writing


def test_a_table_is_written_before_the_index_and_old_ones_are_deleted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path)
    first = write_table(tmp_path)
    (tmp_path / "u3.h5").unlink()
    steps = list[list[str]]()
    replace = Path.replace

    def replace_and_record(path: Path, to: Path) -> Path:
        result = replace(path, to)
        steps.append(sorted(path.name for path in tmp_path.glob("index*")))
        return result

    monkeypatch.setattr(Path, "replace", replace_and_record)
    second = write_table(tmp_path)
    assert steps == [sorted([first.name, second.name, "index.json"])] * 2 and not first.exists()
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["format"] == 1 and index["units"] == "a" and index["table"]["name"] == second.name
    assert index["table"]["sha256"] == hashlib.sha256(second.read_bytes()).hexdigest()
    write_index(tmp_path, {**index, "files": []})
    assert "table" not in json.loads((tmp_path / "index.json").read_text()) and not second.exists()


def test_files_of_other_formats_have_no_table(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    write_index(tmp_path, {"files": [{"name": "a.npy", "rows": 1, "bytes": (tmp_path / "a.npy").stat().st_size}]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "index.json"]


def test_a_file_without_table_entries_is_opened_when_it_is_read(tmp_path: Path, dataset: tuple[Path, Any]) -> None:
    folder = Path(shutil.copytree(dataset[0], tmp_path / "set"))
    write_table(folder, describe_file=lambda path, rows: None if path.name == "u2.h5" else describe(path, rows))
    rows = Rows(folder, FIELDS)
    for index, row in enumerate(dataset[1]):
        check_equal(rows.read(index), row)
    assert rows.column("count").tolist() == [row["count"] for row in dataset[1]]
    first, *others = index_entries(folder)
    write_index(folder, {"files": [first | {"bytes": first["bytes"] - 1}, *others]})
    with pytest.raises(DataError, match=r"u0.h5: has [\d,]+ bytes \(truncated or rewritten\?\), index.json"):
        Rows(folder, FIELDS)
    (folder / "u1.h5").write_bytes(b"no HDF5")
    with pytest.raises(DataError, match=r"u1.h5: cannot be read as HDF5"):
        write_index(folder, {"files": [{"name": "u1.h5", "rows": 1, "bytes": 7}]})
