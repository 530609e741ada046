"""Valid data sets have no findings, rows of any size and dtype are read, and files are untrusted."""

import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from data_prep import deepcam
from hpcai.cli.check import inspection, manifest, pool
from hpcai.cli.check.examination import check_dataset
from hpcai.cli.check.findings import Options, Outcome
from hpcai.cli.findings import failed
from hpcai.cli.progress import Progress
from hpcai.errors import DataError
from tests.reference_data import load_json
from tests.unit.cli.check import datasets
from tests.unit.cli.check.datasets import ROWS, arrays, check, child_pids, edit, index, put, single_finding, summarize, write

# ---- healthy sets


def test_a_valid_data_set_has_no_findings(root: Path) -> None:
    outcome = check(root)
    assert outcome.findings == ()
    train = outcome.splits[0]
    assert (train.name, train.files, train.samples, train.verified) == ("train", 4, 16, 4)
    assert train.fields == {"counts": "<i2 (16, 16, 16, 4)", "target": "<f4 (3)"}
    assert outcome.figures["files"] == 6
    fields = {"counts": {"dtype": "int16", "shape": [16, 16, 16, 4], "low": 0, "high": None}, "target": {"low": -1, "high": 1}}
    index(root / "train", fields=fields)
    for options in ({}, {"quick": True}):
        assert check(root, **options).findings == ()
    assert check(root / "train").findings == ()
    assert check(root / "train").splits[0].name == "."
    with pytest.raises(DataError, match=r"nowhere: no such folder; name the folder of a data set"):
        check(root / "nowhere")


def test_npy_files_are_one_sample_each(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for i in range(3):
            np.save(tmp_path / split / f"s{i}.npy", arrays(100 * len(split) + i)["counts"])
        index(tmp_path / split)
    outcome = check(tmp_path)
    assert outcome.findings == () and [split.samples for split in outcome.splits] == [3, 3]
    datasets.edit_entries(tmp_path / "test", lambda files: [file.update(rows=ROWS) for file in files])  # dim 0 counts rows
    assert [split.samples for split in check(tmp_path).splits] == [3, 3 * ROWS]
    np.save(tmp_path / "test" / "s2.npy", np.load(tmp_path / "train" / "s1.npy"))
    index(tmp_path / "test")
    assert summarize(check(tmp_path)) == [("error", "leak", "test/s2.npy", "values", 0)]


def test_files_in_groups_scalars_and_odd_dtypes_are_fine(root: Path) -> None:
    def add_datasets(file: h5py.File, seed: list[int]) -> None:
        file["deep/er/mask"] = np.random.default_rng(seed).random((ROWS, 20)) > 0.5
        file["version"], file["none"], file["again"] = 3, h5py.Empty("f4"), file["target"]
        file["soft"], file["away"] = h5py.SoftLink("/nowhere"), h5py.ExternalLink("/dev/zero", "/x")
        file["pairs"], file["waves"] = np.zeros(ROWS, "i4,f8"), np.ones((ROWS, 4), np.complex64)
        file["names"] = [f"sample {j}" for j in range(ROWS)]
        file["loop"], file["deep/up"] = file["deep"], file["/"]

    for split in ("train", "validation"):
        for i, path in enumerate(sorted((root / split).glob("*.h5"))):
            edit(path, lambda file: add_datasets(file, [len(split), i]))  # noqa: B023
    outcome = check(root)
    assert {(f.severity, f.code, f.dataset) for f in outcome.findings} == {("note", "layout", "names")}
    assert outcome.splits[0].fields["deep/er/mask"] == "|b1 (20)"


def test_a_null_length_in_the_index_allows_any(tmp_path: Path) -> None:
    """This holds between files and between splits. Dtypes and numbers of dims must still match the index."""
    rng = np.random.default_rng(0)
    fields = {"image": {"dtype": "float32", "shape": [None, None, 3]}, "kind": {"dtype": "int32", "shape": [2]}}

    def write_volume(path: str, shape: tuple[int, ...], dtype: str = "f4") -> None:
        write(tmp_path / path, {"image": rng.normal(size=(1, *shape)).astype(dtype), "kind": rng.integers(0, 9, (1, 2), np.int32)})
        index((tmp_path / path).parent, fields=fields)

    for i, shape in enumerate([(40, 50, 3), (41, 50, 3), (40, 33, 3), (7, 9, 3)]):
        write_volume(f"train/v{i}.h5", shape)
    write_volume("validation/v0.h5", (20, 21, 3))
    outcome = check(tmp_path)
    assert outcome.findings == () and outcome.splits[0].fields["image"] == "<f4 (any, any, 3)"
    for changed, code, text in (
        (((40, 50, 4),), "shape", "has rows of (40, 50, 4), expected (any, any, 3), as index.json has it"),
        (((40, 50),), "shape", "has rows of (40, 50), expected (any, any, 3)"),
        (((40, 50, 3), "f8"), "dtype", "is <f8, expected <f4"),
    ):
        write_volume("train/v0.h5", *changed)
        outcome = check(tmp_path, quick=True)
        assert summarize(outcome) == [("error", code, "train/v0.h5", "image", None)] and text in outcome.findings[0].text
    write_volume("train/v0.h5", (40, 50, 3))
    write_volume("validation/v0.h5", (20, 21, 4))  # all files of a split against its index, and the splits
    findings = {(f.severity, f.code, f.text.split(",")[0]) for f in check(tmp_path, quick=True).findings}
    assert findings == {("error", "shape", "has rows of (20"), ("warning", "schema", "'image' is <f4 (any")}


# ---- the manifest


DEEP = ["[" * 100_000, "index/lost", "JSON: Invalid JSON"]


@pytest.mark.parametrize(("content", "code", "text"), [DEEP, *load_json("refused/index_findings")])
def test_a_damaged_index_is_a_finding(tmp_path: Path, content: str, code: str, text: str) -> None:
    (tmp_path / "index.json").write_bytes(content.encode("latin-1"))
    (tmp_path / "u0.h5").write_bytes(b"")
    _, (finding, *others) = manifest.find_splits(tmp_path)
    assert finding.code == "index" and text in finding.text and finding.repairable == (code == "index/lost") and not others
    assert finding.path == tmp_path / "index.json"


# ---- values


def test_rows_with_non_finite_values_are_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in each layout, and if a read has several rows or less than one."""
    monkeypatch.setattr(inspection, "_READ_BYTES", 100_000)
    data = {"density": np.random.default_rng(3).random((30, 300, 20), dtype=np.float32)}
    data["density"][[2, *range(8, 20)], 17, 3] = np.nan
    data["density"][2, 17, 3] = np.inf
    for kwargs in ({}, {"chunks": (1, 300, 20), "compression": "gzip"}, {"chunks": (2, 300, 20)}):
        put(root / "train" / "u1.h5", data, **kwargs)
        finding = single_finding(check(root / "train"), "nan")
        assert (finding.path, finding.dataset, finding.row) == (root / "train" / "u1.h5", "density", 2)
        assert finding.text.startswith("rows 2, 8, 9, 10, 11, 12, 13, 14, 15, 16 ... (13) of 30 holds NaN or infinity")


def test_ranges_of_the_command_override_the_index(root: Path) -> None:
    edit(root / "train" / "u3.h5", lambda file: file["counts"].__setitem__((2, 0, 0, 0, 1), -7), fields={"counts": {"low": 0}})
    assert summarize(check(root)) == [("error", "range", "train/u3.h5", "counts", 2)]
    assert check(root, ranges={"counts": (-7, 999)}).findings == ()
    above = [f for f in check(root, ranges={"counts": (None, 998.5)}).findings if f.code == "range"]
    assert len(above) == 6 and {f.text.split("such as ")[1][:3] for f in above} == {"999"}


def test_blank_rows_are_allowed_by_the_index(tmp_path: Path) -> None:
    """Only the declared value may fill a row, such as a mask without objects. Constant rows are no duplicates."""
    fields = {"mask": {**deepcam.fields(20, 30)["mask"].to_json((20, 30)), "key": True}}
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 3, (6, 20, 30), np.uint8)
    mask[1], mask[2], mask[4] = 0, 0, 2
    for kwargs in ({}, {"compression": "gzip"}):
        write(tmp_path / "a.h5", {"fields": rng.normal(size=(6, 20, 30, 2)).astype(np.float32), "mask": mask}, **kwargs)
        index(tmp_path, fields=fields)
        for options in ({}, {"ranges": {"mask": (0, 2)}}):
            finding = single_finding(check(tmp_path, **options), "constant")
            assert finding.row == 4 and "row 4 of 6 holds nothing but 2," in finding.text
    del fields["mask"]["blank"]
    index(tmp_path, fields=fields)
    outcome = check(tmp_path)
    assert "rows 1, 2, 4 (3) of 6 holds nothing but 0," in single_finding(outcome, "constant").text
    assert not {"duplicate", "leak"} & {finding.code for finding in outcome.findings}


@pytest.mark.parametrize("shape", [(4, 3), (300, 201, 3)])
@pytest.mark.parametrize("dtype", [">i2", "<f4", ">f8", "<f2", "u1", "?", "<c8", "i8"])
def test_rows_of_every_size_and_type(dtype: str, shape: tuple[int, ...]) -> None:
    normal, kind = np.random.default_rng(0).standard_normal((7, *shape)), np.dtype(dtype).kind
    data = (normal > 0 if kind == "b" else normal * 40).astype(dtype)
    data[3] = data[6]
    data[5] = 0 if kind == "c" else 1
    if kind in "fc":
        data[4].flat[0] = np.nan
    low = {"u": 1, "b": None, "c": None}.get(kind, -39)
    rows = inspection.RowStatistics(inspection.Bounds(low=low), keyed=True)
    for first, last in ((0, 2), (2, 7)):
        rows.add(first, data[first:last])
    outside = [i for i in range(7) if low is not None and not (kind == "f" and i == 4) and data[i].min() < low]
    blank = int(np.prod(shape)) > inspection.FEW_VALUES
    faults = {name: [row for row, _ in flagged] for name, flagged in rows.faults.items()}
    assert faults == {"nan": [4] if kind in "fc" else [], "range": outside, "constant": [5] if blank else []}
    assert (rows.keys[5] == 0) == blank and rows.keys[3] == rows.keys[6] and len(set(rows.keys)) == 6


def test_samples_are_identified_by_the_key_field(tmp_path: Path) -> None:
    """Many samples may have equal other fields, such as caption vectors wider than the samples."""
    data, wide = np.random.default_rng(0).normal(size=(7, 50)), np.random.default_rng(1).normal(size=(7, 90))
    data[6], wide[5] = data[2], wide[1]
    put(tmp_path / "a.h5", {"data": data, "wide": wide})
    assert [(f.code, f.dataset, f.row) for f in check(tmp_path).findings] == [("duplicate", "wide", 5)]
    index(tmp_path, fields={"data": {"key": True}})
    assert [(f.code, f.dataset, f.row) for f in check(tmp_path).findings] == [("duplicate", "data", 6)]


def test_ragged_rows_are_supported(root: Path) -> None:
    for i in range(4):
        count = np.random.default_rng(i).random((9 + i, 3))
        put(root / "train" / f"u{i}.h5", {**arrays(500 + i), "xyz": count})
    index(root / "train", fields={"xyz": {"shape": ["natoms", 3]}})
    assert check(root / "train").findings == ()
    index(root / "train")
    assert {f.code for f in check(root / "train").findings} == {"rows"}


def test_permuted_values_are_another_sample(tmp_path: Path) -> None:
    row = np.random.default_rng(0).integers(0, 99, (64, 2048), dtype=np.int16)  # 64 pages
    put(tmp_path / "a.h5", {"counts": np.stack([row, row[::-1], np.roll(row, 3, 0), np.roll(row, 4, 1)])})
    assert check(tmp_path).findings == ()


# ---- damage


def write_hdf5(path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["counts"] = rng.integers(0, 9, (3, 5, 5), dtype=np.int16)
        file.create_dataset("packed", data=rng.random((3, 30), dtype=np.float32), chunks=(2, 10), compression="gzip", shuffle=True)
        file.create_dataset("chunked", data=rng.random((3, 8)), chunks=(1, 8), fletcher32=True)
        file["group/target"] = rng.random((3, 2))
        file["text"] = ["a", "b", "c"]
        file.attrs["about"] = "text of varying length"


@pytest.mark.usefixtures("child_processes")
@pytest.mark.parametrize(
    "name, make", [("a.h5", write_hdf5), ("a.npy", lambda path: np.save(path, np.random.default_rng(0).random((3, 20))))]
)
def test_a_damaged_file_always_gives_an_outcome(tmp_path: Path, name: str, make: Any) -> None:
    """The test has 40 files, most with changed bytes in the headers, some truncated."""
    make(tmp_path / name)
    content, rng = (tmp_path / name).read_bytes(), random.Random(7)
    for number in range(40):
        data = bytearray(content)
        for _ in range(rng.randint(1, 12)):
            data[rng.randrange(min(len(data), 2048 if number % 4 else len(data)))] = rng.randrange(256)
        (tmp_path / f"{number}{name}").write_bytes(data[: rng.randrange(len(data))] if number % 5 == 0 else data)
    files = [{"name": f"{number}{name}", "rows": 3, "sha256": "0" * 64} for number in range(20)]
    (tmp_path / "index.json").write_text(json.dumps({"files": files}))
    for options in ({}, {"quick": True}):
        outcome = check(tmp_path, **options)
        assert isinstance(outcome, Outcome) and failed(outcome.findings)
        json.dumps(outcome.as_json(), allow_nan=False)


def test_a_dataset_larger_than_its_file_is_not_read(root: Path) -> None:
    def declare_large(file: h5py.File) -> None:
        del file["counts"]
        file.create_dataset("counts", (1 << 30, 1 << 20), np.int16, chunks=(1, 1 << 16), compression="gzip")

    edit(root / "train" / "u2.h5", declare_large)
    assert single_finding(check(root), "unwritten").path.name == "u2.h5"


def write_npy(path: Path, header: str, version: bytes = b"\x01\x00", length: int | None = None) -> None:
    text = header.encode("latin-1")
    count = len(text) if length is None else length
    path.write_bytes(b"\x93NUMPY" + version + count.to_bytes(2 if version[0] == 1 else 4, "little") + text)


def test_a_npy_header_is_validated(tmp_path: Path) -> None:
    template = "{{'descr': '{}', 'fortran_order': False, 'shape': {}}}\n"
    for number, header in enumerate([template.format("<f8", "(1099511627776, 3)"), template.format("<f8", "(-1,)"), "(" * 9000]):
        write_npy(tmp_path / f"{number}.npy", header)
    write_npy(tmp_path / "3.npy", template.format("|O", "(3,)"))
    write_npy(tmp_path / "4.npy", "x", b"\x02\x00", 0xFFFFFFFF)
    write_npy(tmp_path / "5.npy", "x", b"\x09\x00")
    refused = {f.path.name for f in check(tmp_path, quick=True).findings if f.code in ("unreadable", "layout")}
    assert refused == {f"{number}.npy" for number in range(6)}


def test_folders_pipes_and_empty_files_are_findings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    (tmp_path / "folder.h5").mkdir()
    (tmp_path / "link.h5").symlink_to("nowhere")
    (tmp_path / "none.h5").write_bytes(b"")
    (tmp_path / "empty.npy").write_bytes(b"")
    with h5py.File(tmp_path / "no dataset.h5", "w"):
        pass
    texts = {f.path.name: f.text for f in check(tmp_path).findings if f.code in ("unreadable", "empty")}
    assert texts.keys() == {"pipe.h5", "folder.h5", "link.h5", "none.h5", "empty.npy", "no dataset.h5"}
    assert "expected a file" in texts["pipe.h5"] and "No such file" in texts["link.h5"] and "no dataset" in texts["no dataset.h5"]


# ---- children


def test_a_hung_or_dead_child_is_a_finding_and_the_next_file_is_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child_processes: None
) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    (root / "h5py.py").write_text("raise SystemExit(3)")  # must not be imported
    monkeypatch.chdir(root)
    worker, valid = pool.Worker("the HDF5 library", "the file is damaged, or its disk hangs", 30, 8 << 30), root / "train" / "u0.h5"

    def count_fields() -> int:
        return len(worker.call(inspection.read_headers, valid, 4).fields)

    assert count_fields() == 2 and worker._child is not None
    threading.Timer(0.2, worker._child[0].kill).start()
    with pytest.raises(DataError, match=r"takes its process down \(SIGKILL\)"):
        worker.call(inspection.read_headers, tmp_path / "pipe.h5", 4)
    assert count_fields() == 2 and worker._child is not None
    worker._child[0].kill()  # between two requests: no file is to blame
    worker._child[0].wait()
    assert count_fields() == 2
    worker.seconds = 0.5
    start = time.monotonic()
    with pytest.raises(DataError, match=r"the HDF5 library is silent for 0.5 s; the file is damaged, or its disk hangs"):
        worker.call(inspection.read_headers, tmp_path / "pipe.h5", 4)
    assert 0.5 <= time.monotonic() - start < 4
    worker.kill(stop=True)


class Stop:
    def __init__(self, after: int = 0) -> None:
        self.remaining = after

    def __call__(self, now: Progress) -> None:
        self.remaining -= 1
        if self.remaining < 0:
            raise KeyboardInterrupt


@pytest.mark.usefixtures("child_processes")
def test_ctrl_c_does_not_wait_for_a_hung_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = child_pids()
    os.mkfifo(root / "train" / "u9.h5")
    monkeypatch.setattr(Path, "is_file", Path.exists)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        check_dataset(root, Options(seconds=0, threads=1), progress=Stop(after=4))
    assert child_pids() == before and time.monotonic() - start < 15
