"""Rows and layouts of HDF5 files: equal by every reader, with and without an index; errors name file and content."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai import dist
from hpcai.data import Loader, Rows
from hpcai.data.direct import Reader
from hpcai.data.layout import MAX_GAP, UnreadableLayoutError, hdf5_layout, is_finite, npy_layout
from hpcai.data.splits import Samples
from hpcai.errors import DataError
from tests.array_files import arrays_and_slices, write_arrays
from tests.reference_data import load_json

FIELDS = {"counts": ("int16", (4, 4, 4, 2)), "target": ("float32", (3,))}


def write_h5(path: Path, rows: int = 2, value: float = 0.5, **datasets: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"counts": np.full((rows, 4, 4, 4, 2), rows, np.int16), "target": np.full((rows, 3), value, np.float32)} | datasets
    with h5py.File(path, "w") as file:
        for name, array in data.items():
            if array is not None:
                file[name] = array


def write_index(folder: Path) -> None:
    files = [{"name": p.name, "rows": len(h5py.File(p)["target"]), "bytes": p.stat().st_size} for p in sorted(folder.glob("*.h5"))]
    (folder / "index.json").write_text(json.dumps({"files": files, "low": [0, 0, 0]}))


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda p: None, r"u0.h5: dataset 'counts' is \(2, 4, 4, 4, 9\), expected \(rows, 4, 4, 4, 2\); make it so"),
        (lambda p: write_h5(p, counts=np.zeros((2, 4, 4, 4, 2))), "u0.h5: dataset 'counts' is float64, expected int16; make it so"),
        (lambda p: write_h5(p, target=None), "u0.h5: no dataset 'target'; it has counts"),
        (lambda p: write_h5(p, target=np.zeros((3, 3), np.float32)), "different numbers of rows"),
        (lambda p: p.write_bytes(p.read_bytes()[:100]), "u0.h5: not a complete HDF5 file"),
        (lambda p: p.unlink(), "holds no .*h5 file; make it so"),
    ],
)
def test_unusable_files_raise_at_construction(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    write_h5(tmp_path / "u0.h5", counts=np.zeros((2, 4, 4, 4, 9), np.int16))
    damage(tmp_path / "u0.h5")
    with pytest.raises(DataError, match=message):
        Rows(tmp_path, FIELDS, "make it so")


def test_with_an_index_missing_files_raise_at_once_and_truncated_files_at_their_first_read(tmp_path: Path) -> None:
    for i in range(3):
        write_h5(tmp_path / f"u{i}.h5")
    write_index(tmp_path)
    content = (tmp_path / "u2.h5").read_bytes()
    (tmp_path / "u2.h5").write_bytes(content[:-1])
    rows = Rows(tmp_path, FIELDS)
    assert rows.read(3)["target"][0] == 0.5
    with pytest.raises(DataError, match=r"u2.h5: has [\d,]+ bytes \(truncated or rewritten\?\), index.json has [\d,]+ bytes and"):
        rows.read(4)
    (tmp_path / "u2.h5").unlink()
    with pytest.raises(DataError, match=r"u2.h5: is missing \(moved or deleted since the start\?\), index.json has"):
        rows.read(5)
    with pytest.raises(DataError, match=r"u2.h5: is missing, index.json has"):
        Rows(tmp_path, FIELDS)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index.json: cannot be read"):
        Rows(tmp_path, FIELDS)
    with pytest.raises(DataError, match="no such folder"):
        Rows(tmp_path / "nowhere", FIELDS)


def test_nan_is_named_with_its_file_and_row(tmp_path: Path) -> None:
    target = np.zeros((2, 3), np.float32)
    target[1, 2] = np.nan
    write_h5(tmp_path / "u0.h5", target=target)
    rows = Rows(tmp_path, FIELDS)
    rows.read(0)
    assert rows.describe(1) == f"{tmp_path.name}/u0.h5 row 1"
    with pytest.raises(DataError, match=r"u0.h5: row 1 of 'target' holds NaN"):
        rows.read(1)


LARGE = {"counts": ("int16", (8, 8, 8, 2)), "target": ("float32", (3,))}
"""Fields with rows of 2 KiB. Fields of a few bytes are read with the header."""


@pytest.mark.parametrize("reader", ["direct", "memory"])
def test_cached_rows_are_not_changed_by_a_batch(tmp_path: Path, reader: str) -> None:
    write_h5(tmp_path / "u0.h5", counts=np.full((2, 8, 8, 8, 2), 2, np.int16))
    source = Rows(tmp_path, LARGE, reader=reader)

    (tmp_path / "u0.h5").rename(tmp_path / "moved")
    with pytest.raises(DataError, match="no such file"):
        source.read(0)
    (tmp_path / "moved").rename(tmp_path / "u0.h5")
    with Loader(Samples(source), 1, dist.single_process(), name="t", shuffle=False) as loader:
        for epoch in range(2):
            for batch in loader.epoch(epoch):
                assert (batch["counts"] == 2).all() and batch["counts"].shape == (1, 8, 8, 8, 2)
                assert (batch["target"] == 0.5).all(), "small fields are cached by every reader"
                batch["counts"].fill_(77)
                batch["target"].fill_(77)
    (tmp_path / "u0.h5").unlink()
    if reader == "memory":
        assert source.read(1)["counts"][0, 0, 0, 0] == 2, "the file is read once"


def test_local_copies_are_read_in_place_of_the_shared_files(tmp_path: Path) -> None:
    write_h5(tmp_path / "shared" / "u0.h5", 2)
    write_h5(tmp_path / "shared" / "u1.h5", 3)
    write_h5(tmp_path / "own" / "u1.h5", 3, value=9)
    rows = Rows(tmp_path / "shared", FIELDS, local={tmp_path / "shared" / "u1.h5": tmp_path / "own" / "u1.h5"})
    assert [rows.read(i)["target"][0] for i in range(5)] == [0.5, 0.5, 9, 9, 9]


def test_rows_that_the_index_lists_and_the_file_lacks_raise(tmp_path: Path) -> None:
    write_h5(tmp_path / "u0.h5", counts=np.zeros((2, 8, 8, 8, 2), np.int16))
    write_index(tmp_path)
    text = (tmp_path / "index.json").read_text()
    (tmp_path / "index.json").write_text(text.replace('"rows": 2', '"rows": 4'))
    for reader in ("direct", "hdf5"):
        with pytest.raises(DataError, match="u0.h5: .*row"):
            Rows(tmp_path, LARGE, reader=reader).read(3)


@pytest.mark.parametrize("reader", ["direct", "hdf5", "memory"])
@pytest.mark.parametrize("kind", ["link", "external", "virtual", "unwritten"])
def test_values_of_another_file_or_none_are_never_read(tmp_path: Path, kind: str, reader: str) -> None:
    """A link can name any readable file, and its offset would be applied to this file."""
    write_h5(tmp_path / "other.h5")
    (tmp_path / "set").mkdir()
    shape = (2, 4, 4, 4, 2)
    with h5py.File(tmp_path / "set" / "u0.h5", "w") as file:
        file["target"] = np.zeros((2, 3), np.float32)
        if kind == "link":
            file["counts"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/counts")
        elif kind == "external":
            file.create_dataset("counts", shape, "i2", external=[(str(tmp_path / "other.h5"), 0, h5py.h5f.UNLIMITED)])
        elif kind == "unwritten":
            file.create_dataset("counts", shape, "i2", chunks=(1, *shape[1:]))[:1] = 1
        else:
            layout = h5py.VirtualLayout(shape, "i2")
            layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "counts", shape)
            file.create_virtual_dataset("counts", layout)
    with pytest.raises(DataError, match="u0.h5: .*(into another file|in other files|in 2 chunks, of which 1 were never written)"):
        Rows(tmp_path / "set", FIELDS, reader=reader).read(0)


INDEXES = [("[" * 100_000, "recursion limit"), *load_json("refused/indexes_of_rows")]


@pytest.mark.parametrize(("text", "message"), INDEXES, ids=range(len(INDEXES)))
def test_an_invalid_index_raises(tmp_path: Path, text: str, message: str) -> None:
    write_h5(tmp_path / "u0.h5")
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=f"index.json: cannot be read as an index of files .*{message}"):
        Rows(tmp_path, FIELDS)


# ---- layouts


@given(arrays_and_slices(["<i2", ">f4", "f8", "u1"]), st.sampled_from(["earliest", "latest"]), st.booleans())
@settings(max_examples=60)
def test_any_slice_equals_that_of_the_library(tmp_path_factory: Any, case: Any, version: str, partial: bool) -> None:
    array, chunks, index = case
    array, layouts = write_arrays(tmp_path_factory.mktemp("layout"), array, chunks, partial, version=version)
    with Reader("direct", threads=2, block=4096) as reader:
        for layout in layouts:
            actual = layout.read(reader, *index)
            assert actual.dtype == array.dtype and np.array_equal(actual, array[tuple(index)]) and actual.flags.aligned


def test_a_row_is_read_in_place_and_a_slice_of_it_transfers_its_bytes(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 99, (3, 64, 64, 64, 4), np.int16)
    with h5py.File(tmp_path / "x.h5", "w", alignment_threshold=1, alignment_interval=4096) as file:
        file["x"] = array
        layout = hdf5_layout(file, "x")
    with Reader("direct") as reader:
        assert np.array_equal(layout.read(reader, 1), array[1])
        assert reader.transferred == array[1].nbytes
        for part in (slice(0, 32), slice(16, 48)):  # a slice of the first dim is one contiguous range
            before = reader.transferred
            assert np.array_equal(layout.read(reader, 2, part), array[2, part])
            assert reader.transferred - before == array[2, part].nbytes
        before = reader.transferred  # a slice of the second dim: gaps of 16 KiB are read over, larger gaps are not
        assert np.array_equal(layout.read(reader, 0, slice(None), slice(0, 32)), array[0, :, :32])
        assert array[0, 0, :32].nbytes == MAX_GAP and reader.transferred - before <= array[0].nbytes


def test_ranges_with_large_gaps_are_read_separately(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((8, 16, 4096))
    np.save(tmp_path / "x.npy", array)
    layout = npy_layout(tmp_path / "x.npy")
    with Reader("direct") as reader:
        assert np.array_equal(layout.read(reader, slice(None), slice(3, 5)), array[:, 3:5])
        assert reader.transferred <= array[:, 3:5].nbytes + 8 * 3 * 4096


def test_invalid_indices_raise(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 4)))
    layout = npy_layout(tmp_path / "x.npy")
    with Reader() as reader:
        messages = {(3,): "index 3 of dim 0, which has 3", (0, 0, 0): "2 dims, but 3 indices are given"}
        for index, message in [*messages.items(), ((slice(0, 3, 2),), "step of 2")]:
            with pytest.raises(DataError, match=message):
                layout.read(reader, *index)


# ---- unreadable layouts


def test_unreadable_layouts_raise_with_the_name_of_the_dataset(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("gzip", data=np.zeros((4, 100)), compression="gzip", shuffle=True)
        file.create_dataset("checksum", data=np.zeros((4, 100)), fletcher32=True)
        file.create_dataset("strings", data=["a", "b"])
        file.create_dataset("external", (4,), "f4", external=[("other.bin", 0, 16)])
        file.create_virtual_dataset("virtual", h5py.VirtualLayout((4,), "f4"))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((4,)), plist)
        file.create_dataset("empty", data=h5py.Empty("f4"))
        file.create_group("group")
        messages = {
            "gzip": "written through shuffle, deflate", "checksum": "written through fletcher32", "strings": "object",
            "external": "is in other files", "virtual": "is in other files", "compact": "within the header",
            "empty": "expected numbers", "group": "is a group",
        }  # fmt: skip
        for name, message in messages.items():
            with pytest.raises(DataError, match=f"'{name}'.*{message}") as caught:
                hdf5_layout(file, name)
            assert isinstance(caught.value, UnreadableLayoutError) == (name != "group")
    with h5py.File(tmp_path / "user.h5", "w", userblock_size=512) as file:
        file["x"] = np.zeros(3)
        with pytest.raises(UnreadableLayoutError, match="user block of 512"):
            hdf5_layout(file, "x")
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.zeros((3, 4))))
    with pytest.raises(UnreadableLayoutError, match="Fortran order"):
        npy_layout(tmp_path / "fortran.npy")
    np.save(tmp_path / "object.npy", np.array([None, {}]), allow_pickle=True)
    with pytest.raises(DataError, match=r"object.npy: 'object.npy' is object"):
        npy_layout(tmp_path / "object.npy")


def test_truncated_files_raise_before_the_first_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(1000))
    content = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"'x.npy' \(1000,\) ends at byte 8,128, but the file has 8,127; it is truncated"):
        npy_layout(tmp_path / "x.npy")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        npy_layout(tmp_path / "none.npy")


def test_is_finite_is_correct_if_the_sum_overflows() -> None:
    large = np.full(10, 3e38, np.float32)
    assert is_finite(large) and is_finite(np.array([1, 2])) and is_finite(np.array([1 + 2j]))
    for nonfinite in (np.nan, np.inf, -np.inf):
        assert not is_finite(np.array([1.0, nonfinite, 2.0])) and not is_finite(np.append(large, np.float32(nonfinite)))
    assert not is_finite(np.array([np.inf, -np.inf])), "they sum to NaN"
