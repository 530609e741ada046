"""Boxes of arrays by direct reads equal what the libraries read; what does not lie plainly is refused; damage is an error."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.data.direct import MemoryPool, Reader
from hpcai.data.layout import MAX_GAP, UnreadableLayoutError, hdf5_layout, is_finite, npy_layout
from hpcai.errors import DataError
from tests.array_files import arrays_and_slices, write_arrays


@given(arrays_and_slices(["<i2", ">f4", "f8", "u1"]), st.sampled_from(["earliest", "latest"]), st.booleans())
@settings(max_examples=60)
def test_any_box_equals_what_the_library_reads(tmp_path_factory: Any, case: Any, version: str, partly: bool) -> None:
    array, chunks, where = case
    array, layouts = write_arrays(tmp_path_factory.mktemp("layout"), array, chunks, partly, version=version)
    with Reader("direct", threads=2, block=4096) as reader:
        for layout in layouts:
            found = layout.read(reader, *where)
            assert found.dtype == array.dtype and np.array_equal(found, array[tuple(where)]) and found.flags.aligned


def test_a_row_is_read_in_place_and_a_part_of_it_costs_its_bytes(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 99, (3, 64, 64, 64, 4), np.int16)
    with h5py.File(tmp_path / "x.h5", "w", alignment_threshold=1, alignment_interval=4096) as file:
        file["x"] = array
        layout = hdf5_layout(file, "x")
    with Reader("direct") as reader:
        assert np.array_equal(layout.read(reader, 1), array[1])
        assert reader.transferred == array[1].nbytes
        for part in (slice(0, 32), slice(16, 48)):  # a part of the first dim is one run
            before = reader.transferred
            assert np.array_equal(layout.read(reader, 2, part), array[2, part])
            assert reader.transferred - before == array[2, part].nbytes
        before = reader.transferred  # a part of the second dim: gaps of 16 KiB are read over, larger ones not
        assert np.array_equal(layout.read(reader, 0, slice(None), slice(0, 32)), array[0, :, :32])
        assert array[0, 0, :32].nbytes == MAX_GAP and reader.transferred - before <= array[0].nbytes


def test_ranges_with_large_gaps_are_read_separately(tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((8, 16, 4096))
    np.save(tmp_path / "x.npy", array)
    layout = npy_layout(tmp_path / "x.npy")
    with Reader("direct") as reader:
        assert np.array_equal(layout.read(reader, slice(None), slice(3, 5)), array[:, 3:5])
        assert reader.transferred <= array[:, 3:5].nbytes + 8 * 3 * 4096


def test_wrong_boxes_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 4)))
    layout = npy_layout(tmp_path / "x.npy")
    with Reader() as reader:
        wrong = {(3,): "index 3 of dim 0, which has 3", (0, 0, 0): "2 dims, but 3 indices are given"}
        for where, text in [*wrong.items(), ((slice(0, 3, 2),), "step of 2")]:
            with pytest.raises(DataError, match=text):
                layout.read(reader, *where)


# ---- what does not lie plainly


def test_unreadable_layouts_raise_with_their_name(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("gzip", data=np.zeros((4, 100)), compression="gzip", shuffle=True)
        file.create_dataset("checksum", data=np.zeros((4, 100)), fletcher32=True)
        file.create_dataset("words", data=["a", "b"])
        file.create_dataset("external", (4,), "f4", external=[("other.bin", 0, 16)])
        file.create_virtual_dataset("virtual", h5py.VirtualLayout((4,), "f4"))
        plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plist.set_layout(h5py.h5d.COMPACT)
        h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((4,)), plist)
        file.create_dataset("nothing", data=h5py.Empty("f4"))
        file.create_group("group")
        texts = {
            "gzip": "written through shuffle, deflate", "checksum": "written through fletcher32", "words": "object",
            "external": "is in other files", "virtual": "is in other files", "compact": "within the header",
            "nothing": "expected numbers", "group": "is a group",
        }  # fmt: skip
        for name, text in texts.items():
            with pytest.raises(DataError, match=f"'{name}'.*{text}") as caught:
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


def test_truncated_files_are_found_before_anything_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(1000))
    whole = (tmp_path / "x.npy").read_bytes()
    (tmp_path / "x.npy").write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"'x.npy' \(1000,\) ends at byte 8,128, but the file has 8,127; it is truncated"):
        npy_layout(tmp_path / "x.npy")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        npy_layout(tmp_path / "none.npy")


def damaged(content: bytes, draw: Any) -> bytes:
    spoilt = bytearray(content)
    for _ in range(draw.draw(st.integers(1, 6))):
        place = draw.draw(st.integers(0, min(len(spoilt) - 1, 2200)))
        spoilt[place] = draw.draw(st.integers(0, 255))
    return bytes(spoilt[: draw.draw(st.integers(0, len(spoilt)))] if draw.draw(st.booleans()) else spoilt)


@given(st.data())
@settings(max_examples=120)
def test_a_damaged_npy_is_an_error_or_within_the_file(tmp_path_factory: Any, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npy"
    np.save(path, np.arange(300, dtype=np.int16).reshape(10, 30))
    path.write_bytes(damaged(path.read_bytes(), data))
    reader = Reader("buffered", threads=1, memory=MemoryPool(max_unused=1 << 20))
    try:
        found = npy_layout(path)
        assert found.offset is not None and found.offset + found.nbytes <= path.stat().st_size
        assert found.read(reader).nbytes == found.nbytes
    except DataError as problem:
        assert str(path) in str(problem)
    finally:
        reader.close()


@given(st.data(), st.sampled_from([None, (2, 7)]))
@settings(max_examples=120)
def test_a_damaged_hdf5_is_an_error_or_within_the_file(tmp_path_factory: Any, data: Any, chunks: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(300, dtype=np.int16).reshape(10, 30), chunks=chunks)
    path.write_bytes(damaged(path.read_bytes(), data))
    try:
        file = h5py.File(path)
        file["x"]
    except Exception:  # the library itself says no
        return
    with file, Reader("buffered", threads=1) as reader:
        try:
            layout = hdf5_layout(file, "x")
            if layout.nbytes < 1 << 20:  # sources compare the shape with what they expect before they read
                layout.read(reader)
        except DataError as problem:
            assert str(path) in str(problem)


def test_finite_is_right_also_where_the_sum_overflows() -> None:
    large = np.full(10, 3e38, np.float32)
    assert is_finite(large) and is_finite(np.array([1, 2])) and is_finite(np.array([1 + 2j]))
    for bad in (np.nan, np.inf, -np.inf):
        assert not is_finite(np.array([1.0, bad, 2.0])) and not is_finite(np.append(large, np.float32(bad)))
    assert not is_finite(np.array([np.inf, -np.inf])), "which sum to NaN"
