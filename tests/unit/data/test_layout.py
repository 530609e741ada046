"""Layouts: slices by direct reads equal those of h5py and NumPy; unreadable layouts and damaged files raise."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.data.direct import Reader
from hpcai.data.layout import MAX_GAP, UnreadableLayoutError, hdf5_layout, is_finite, npy_layout
from hpcai.errors import DataError
from tests.array_files import arrays_and_slices, write_arrays


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
