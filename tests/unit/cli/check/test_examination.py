"""Healthy sets are left in peace; rows of every size and type are looked at; no file is believed."""

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
from hpcai.cli.check import Options, Outcome, examination, examine, manifest, tally, work
from hpcai.cli.check.inspector import Inspector
from hpcai.cli.check.remedies import repair
from hpcai.cli.progress import Progress
from hpcai.errors import DataError
from tests.unit.cli.check import making
from tests.unit.cli.check.making import PACKED, ROWS, change, entries, everything, flip, index, look, one, put, told, values, write

# ---- healthy sets


def test_a_healthy_set_gives_no_finding(made: Path) -> None:
    outcome = look(made)
    assert outcome.findings == () and not outcome.failed(strict=True)
    train = outcome.splits[0]
    assert (train.name, train.files, train.samples, train.verified, train.aligned) == ("train", 4, 16, 4, 1.0)
    assert train.fields == {"counts": "<i2 (16, 16, 16, 4)", "target": "<f4 (3)"}
    assert outcome.figures["files"] == 6 and outcome.figures["inodes"] == 11
    assert outcome.figures["bytes_read"] >= train.bytes
    fields = {"counts": {"dtype": "int16", "shape": [16, 16, 16, 4], "low": 0, "high": None}, "target": {"low": -1, "high": 1}}
    index(made / "train", fields=fields)
    for options in ({}, {"quick": True}, {"sample": 3}):
        assert look(made, **options).findings == ()
    assert look(made / "train").findings == ()
    assert look(made / "train").splits[0].name == "."
    with pytest.raises(DataError, match=r"nowhere: no such folder; name the folder of a data set"):
        look(made / "nowhere")


def test_npy_files_are_one_sample_each(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for i in range(3):
            np.save(tmp_path / split / f"s{i}.npy", values(100 * len(split) + i)["counts"])
        index(tmp_path / split)
    outcome = look(tmp_path)
    assert outcome.findings == () and [split.samples for split in outcome.splits] == [3, 3]
    making.reword(tmp_path / "test", lambda files: [file.update(rows=ROWS) for file in files])  # dim 0 counts rows
    assert [split.samples for split in look(tmp_path).splits] == [3, 3 * ROWS]
    np.save(tmp_path / "test" / "s2.npy", np.load(tmp_path / "train" / "s1.npy"))
    index(tmp_path / "test")
    assert told(look(tmp_path)) == [("error", "leak", "test/s2.npy", "values", 0)]


def test_files_in_groups_scalars_and_odd_dtypes_are_fine(made: Path) -> None:
    def odd(file: h5py.File, seed: list[int]) -> None:
        file["deep/er/mask"] = np.random.default_rng(seed).random((ROWS, 20)) > 0.5
        file["version"], file["none"], file["again"] = 3, h5py.Empty("f4"), file["target"]
        file["soft"], file["away"] = h5py.SoftLink("/nowhere"), h5py.ExternalLink("/dev/zero", "/x")
        file["pairs"], file["waves"] = np.zeros(ROWS, "i4,f8"), np.ones((ROWS, 4), np.complex64)
        file["names"] = [f"sample {j}" for j in range(ROWS)]
        file["loop"], file["deep/up"] = file["deep"], file["/"]

    for split in ("train", "validation"):
        for i, path in enumerate(sorted((made / split).glob("*.h5"))):
            change(path, lambda file: odd(file, [len(split), i]))  # noqa: B023
    outcome = look(made)
    assert {(f.severity, f.code, f.dataset) for f in outcome.findings} == {("note", "layout", "names")}
    assert outcome.splits[0].fields["deep/er/mask"] == "|b1 (20)"


def test_what_is_not_of_the_set_is_left_alone(made: Path) -> None:
    (made / "train" / "notes.txt").write_text("mine")
    (made / "runs").mkdir()
    (made / "runs" / "x.partial").write_text("not ours")
    (made / ".recipe.json.abc.partial").write_bytes(b"half")
    assert told(look(made)) == [("warning", "leftover", ".recipe.json.abc.partial", None, None)]


def test_a_length_that_the_index_leaves_open_may_be_any(tmp_path: Path) -> None:
    """Files and splits are compared with one another likewise; dtypes and numbers of dims are still those of the index."""
    rng = np.random.default_rng(0)
    fields = {"image": {"dtype": "float32", "shape": [None, None, 3]}, "kind": {"dtype": "int32", "shape": [2]}}

    def volume(path: str, shape: tuple[int, ...], dtype: str = "f4") -> None:
        write(tmp_path / path, {"image": rng.normal(size=(1, *shape)).astype(dtype), "kind": rng.integers(0, 9, (1, 2), np.int32)})
        index((tmp_path / path).parent, fields=fields)

    for i, shape in enumerate([(40, 50, 3), (41, 50, 3), (40, 33, 3), (7, 9, 3)]):
        volume(f"train/v{i}.h5", shape)
    volume("validation/v0.h5", (20, 21, 3))
    outcome = look(tmp_path)
    assert outcome.findings == () and outcome.splits[0].fields["image"] == "<f4 (any, any, 3)"
    for spoiled, code, text in (
        (((40, 50, 4),), "shape", "has rows of (40, 50, 4), expected (any, any, 3), as 3 of 4 files have it"),
        (((40, 50),), "shape", "has rows of (40, 50), expected (any, any, 3)"),
        (((40, 50, 3), "f8"), "dtype", "is <f8, expected <f4"),
    ):
        volume("train/v0.h5", *spoiled)
        outcome = look(tmp_path, quick=True)
        assert told(outcome) == [("error", code, "train/v0.h5", "image", None)] and text in outcome.findings[0].text
    volume("train/v0.h5", (40, 50, 3))
    volume("validation/v0.h5", (20, 21, 4))  # all files of a split against its index, and the splits
    found = {(f.severity, f.code, f.text.split(",")[0]) for f in look(tmp_path, quick=True).findings}
    assert found == {("error", "shape", "has rows of (20"), ("warning", "shape", "'image' has a shape of (any")}


# ---- the manifest


@pytest.mark.parametrize(
    "content, text",
    [
        ("\xff", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"file": []}', "is an object with file, expected"),
        ('{"files": [1]}', "entry 0 of 'files' has no name"),
        ('{"files": [{"name": "u0.h5"}, {"name": "u0.h5"}]}', "entry 1 of 'files' names 'u0.h5' a second time"),
        ('{"files": [{"name": "u0.h5", "bytes": -1}]}', "'-1' is no count"),
        ('{"files": [{"name": "u0.h5", "rows": true}]}', "'True' is no count"),
        ('{"files": [{"name": "u0.h5", "sha256": "abc"}]}', "is not 64 hexadecimal digits"),
        ('{"files": [{"name": "u0.h5", "lengths": [1]}]}', "lengths is a list, expected an object"),
        ('{"files": [], "fields": []}', "'fields' is a list"),
        ('{"files": [], "fields": {"counts": {"dtype": "no"}}}', "'fields' of 'counts': "),
        ('{"files": [], "fields": {"counts": {"shape": [-1]}}}', "'fields' of 'counts': '-1' is no count"),
        ('{"files": [], "fields": {"counts": {"blank": true}}}', "blank is 'True', expected a number or null"),
    ],
)
def test_a_damaged_index_is_a_finding(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "index.json").write_bytes(content.encode("latin-1"))
    (tmp_path / "u0.h5").write_bytes(b"")
    _, findings = manifest.splits_in(tmp_path)
    found = [f for f in findings if f.code == "index"]
    assert len(found) == 1 and found[0].severity == "error" and text in found[0].text
    assert found[0].path == tmp_path / "index.json"


def test_records_stand_in_for_a_missing_index(made: Path) -> None:
    known = entries(made / "train")
    (made / "train" / "index.json").unlink()
    (made / "train" / ".records").mkdir()
    for entry in known:
        (made / "train" / ".records" / f"{entry['name']}.json").write_text(json.dumps(entry))
    flip(made / "train" / "u0.h5", 9000, 3)
    assert [entry[:3] for entry in told(look(made))] == [
        ("error", "bit-flip", "train/u0.h5"), ("warning", "index", "train/index.json"),
    ]  # fmt: skip


def test_the_dataset_that_is_not_like_the_index_is_the_odd_one(made: Path) -> None:
    for i in range(2):
        write(made / "train" / f"u{i}.h5", {**values(500 + i), "target": np.ones((ROWS, 3))})
    index(made / "train", fields={"target": {"dtype": "float32"}})
    wrong = [f.path.name for f in look(made / "train", quick=True).findings]
    assert wrong == ["u0.h5", "u1.h5"]  # as many files have the one type as the other


# ---- values


def test_what_is_not_finite_is_found_with_its_rows(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in a compressed dataset too, which is much larger than the check allows a file that lies about its size."""
    monkeypatch.setattr(manifest, "_MOST_FILL", 0)
    data = {"density": np.random.default_rng(3).random((30, 300, 20), dtype=np.float32)}
    data["density"][[2, *range(8, 20)], 17, 3] = np.nan
    for how in ({}, {"chunks": (1, 300, 20), "compression": "gzip"}, {"chunks": (2, 300, 20)}):
        put(made / "train" / "u1.h5", data, **how)
        for options in ({}, {"sample": 120}):
            finding = one(look(made / "train", **options), "nan")
            assert (finding.path, finding.dataset, finding.row) == (made / "train" / "u1.h5", "density", 2)
            assert finding.text.startswith("rows 2, 8, 9, 10, 11, 12, 13, 14, 15, 16 ... (13) of 30 holds NaN or infinity")


def test_ranges_of_the_command_come_before_those_of_the_index(made: Path) -> None:
    change(made / "train" / "u3.h5", lambda file: file["counts"].__setitem__((2, 0, 0, 0, 1), -7), fields={"counts": {"low": 0}})
    assert told(look(made)) == [("error", "range", "train/u3.h5", "counts", 2)]
    assert look(made, ranges={"counts": (-7, 999)}).findings == ()
    above = [f for f in look(made, ranges={"counts": (None, 998.5)}).findings if f.code == "range"]
    assert len(above) == 6 and {f.text.split("such as ")[1][:3] for f in above} == {"999"}


def test_a_row_may_be_blank_where_the_index_says_so(tmp_path: Path) -> None:
    """Only the value that the index names may fill it; maps without an object are such rows, by what data_prep says of them."""
    fields = {"mask": deepcam.fields(20, 30)["mask"].told((20, 30))}
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 3, (6, 20, 30), np.uint8)
    mask[1], mask[2], mask[4] = 0, 0, 2
    for how in ({}, {"compression": "gzip"}):
        write(tmp_path / "a.h5", {"fields": rng.normal(size=(6, 20, 30, 2)).astype(np.float32), "mask": mask}, **how)
        index(tmp_path, fields=fields)
        for options in ({}, {"sample": 6}, {"ranges": {"mask": (0, 2)}}):
            finding = one(look(tmp_path, **options), "constant")
            assert finding.row == 4 and "row 4 of 6 holds nothing but 2," in finding.text
    del fields["mask"]["blank"]
    index(tmp_path, fields=fields)
    assert "rows 1, 2, 4 (3) of 6 holds nothing but 0," in one(look(tmp_path), "constant").text


@pytest.mark.parametrize("shape", [(4, 3), (200, 101), (300, 201, 3)])
@pytest.mark.parametrize("dtype", [">i2", "<f4", ">f8", "<f2", "u1", "?", "<c8", "i8"])
def test_rows_of_every_size_and_type(dtype: str, shape: tuple[int, ...]) -> None:
    """Rows may come in any pieces; narrow ones are judged many at a time and wide ones in parts."""
    real, kind = np.random.default_rng(0).standard_normal((7, *shape)), np.dtype(dtype).kind
    data = (real > 0 if kind == "b" else real * 40).astype(dtype)
    data[3] = data[6]
    data[5] = 0 if kind == "c" else 1
    if kind in "fc":
        data[4].flat[0] = np.nan
    raw, chance, low = data.reshape(-1).view(np.uint8), random.Random(1), {"u": 1, "b": None, "c": None}.get(kind, -39)
    seen = []
    for cuts in ([], [1, 2, 9], sorted(chance.sample(range(raw.size), 20)), list(range(65_536, raw.size, 65_536))):
        rows = tally.Tally(data.dtype, shape, (low, None), keys=True)
        for start, stop in zip([0, *cuts], [*cuts, raw.size]):
            rows.add(raw[start:stop])
        assert rows.row == 7
        seen.append((list(rows.keys), rows.told()["faults"]))  # NaN is not equal to itself
    assert len(set(map(repr, seen))) == 1
    keys, faults = seen[0]
    outside = [i for i in range(7) if low is not None and not (kind == "f" and i == 4) and data[i].min() < low]
    blank = int(np.prod(shape)) > tally.FEW
    assert faults["nan"]["rows"] == ([4] if kind in "fc" else []) and faults["range"]["rows"] == outside
    assert faults["constant"]["rows"] == ([5] if blank else []) and (keys[5] == 0) == blank
    assert keys[3] == keys[6] and len(set(keys)) == 6


def test_wide_rows_are_put_together_from_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "BLOCK", 1 << 16)
    data = np.random.default_rng(0).normal(size=(7, 201, 301)).astype(np.float32)
    data[3], data[4, 200, 300] = data[6], np.nan
    put(tmp_path / "a.h5", {"pad": np.arange(7, dtype="u1"), "data": data, "more": np.random.default_rng(1).normal(size=(7, 5))})
    for options in ({}, {"sample": 7}):
        outcome = look(tmp_path, **options)
        assert [(f.code, f.row) for f in outcome.findings] == [("nan", 4), ("duplicate", 6)]
        assert "a.h5 row 3" in outcome.findings[1].text


def test_samples_are_told_apart_by_the_field_that_the_index_names(tmp_path: Path) -> None:
    """Many samples may have the same caption, whose vectors are larger than they are."""
    data, wide = np.random.default_rng(0).normal(size=(7, 50)), np.random.default_rng(1).normal(size=(7, 90))
    data[6], wide[5] = data[2], wide[1]
    put(tmp_path / "a.h5", {"data": data, "wide": wide})
    assert [(f.code, f.dataset, f.row) for f in look(tmp_path).findings] == [("duplicate", "wide", 5)]
    index(tmp_path, fields={"data": {"key": True}})
    for options in ({}, {"sample": 7}):
        assert [(f.code, f.dataset, f.row) for f in look(tmp_path, **options).findings] == [("duplicate", "data", 6)]
    index(tmp_path, fields={"data": {"key": "yes"}})
    assert "key is 'yes', expected true or false" in look(tmp_path).findings[0].text


def test_a_leak_is_found_through_compression_and_in_a_sample(made: Path) -> None:
    same = {"counts": values(500)["counts"][[2, 1]], "target": np.ones((2, 3), np.float32)}
    put(made / "validation" / "u0.h5", same, **PACKED)
    for options in ({}, {"sample": 100}):
        leaks = [f for f in look(made, **options).findings if f.code == "leak"]
        assert [(f.row, f.text.partition(";")[0]) for f in leaks] == [
            (0, "row 0 is the same sample as train/u0.h5 row 2, and 1 more rows of these two")
        ]


def test_the_same_pages_in_another_order_are_another_sample(tmp_path: Path) -> None:
    row = np.random.default_rng(0).integers(0, 99, (64, 2048), dtype=np.int16)  # 64 pages
    put(tmp_path / "a.h5", {"counts": np.stack([row, row[::-1], np.roll(row, 3, 0), np.roll(row, 4, 1)])})
    assert look(tmp_path).findings == ()


# ---- damage


def test_sixty_flips_and_truncations_are_all_found(tmp_path: Path) -> None:
    chance, source = random.Random(4), values(1, shape=(12, 12, 2))
    for i in range(40):
        write(tmp_path / f"u{i}.h5", source)
    for i in range(20):
        np.save(tmp_path / f"s{i}.npy", source["counts"])
    index(tmp_path)
    paths = sorted([*tmp_path.glob("*.h5"), *tmp_path.glob("*.npy")])
    for number, path in enumerate(paths):
        size = path.stat().st_size
        if number % 3:
            flip(path, chance.randrange(size), chance.randrange(8))
        else:
            os.truncate(path, chance.randrange(size))
    assert {f.path for f in look(tmp_path).findings if f.code in ("bit-flip", "truncated")} == set(paths)


def small_hdf5(path: Path) -> None:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["counts"] = rng.integers(0, 9, (3, 5, 5), dtype=np.int16)
        file.create_dataset("packed", data=rng.random((3, 30), dtype=np.float32), chunks=(2, 10), compression="gzip", shuffle=True)
        file.create_dataset("chunked", data=rng.random((3, 8)), chunks=(1, 8), fletcher32=True)
        file["group/target"] = rng.random((3, 2))
        file["text"] = ["a", "b", "c"]
        file.attrs["about"] = "text of varying length"


def small_npy(path: Path) -> None:
    np.save(path, np.random.default_rng(0).random((3, 20)))


@pytest.mark.parametrize("name, make", [("a.h5", small_hdf5), ("a.npy", small_npy)])
def test_a_damaged_file_never_gives_anything_but_an_outcome(tmp_path: Path, name: str, make: Any) -> None:
    """A hundred of them, most with changes in the first bytes, where headers are, some cut short."""
    make(tmp_path / name)
    whole, chance = (tmp_path / name).read_bytes(), random.Random(7)
    for number in range(100):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 12)):
            data[chance.randrange(min(len(data), 2048 if number % 4 else len(data)))] = chance.randrange(256)
        (tmp_path / f"{number}{name}").write_bytes(data[: chance.randrange(len(data))] if number % 5 == 0 else data)
    about = [{"name": f"{number}{name}", "rows": 3, "sha256": "0" * 64} for number in range(50)]
    (tmp_path / "index.json").write_text(json.dumps({"files": about}))
    for options in ({}, {"sample": 200}):
        outcome = look(tmp_path, **options)
        assert isinstance(outcome, Outcome) and outcome.failed()
        json.dumps(outcome.as_json(), allow_nan=False)


def test_a_dataset_that_says_it_is_larger_than_its_file_could_be_is_not_read(made: Path) -> None:
    def vast(file: h5py.File) -> None:
        del file["counts"]
        file.create_dataset("counts", (1 << 30, 1 << 20), np.int16, chunks=(1, 1 << 16), compression="gzip")

    change(made / "train" / "u2.h5", vast)
    assert one(look(made), "unwritten").path.name == "u2.h5"


def npy_with(path: Path, header: str, version: bytes = b"\x01\x00", length: int | None = None) -> None:
    text = header.encode("latin-1")
    count = len(text) if length is None else length
    path.write_bytes(b"\x93NUMPY" + version + count.to_bytes(2 if version[0] == 1 else 4, "little") + text)


def test_the_length_of_a_npy_header_is_looked_at_before_numpy_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    npy_with(tmp_path / "a.npy", "x", b"\x02\x00", 0xFFFFFFFF)
    os.truncate(tmp_path / "a.npy", 5 << 30)  # a hole, of which numpy would read 4 GiB
    monkeypatch.setattr(work.layout, "npy", None)
    assert one(look(tmp_path, sample=1), "unreadable").path.name == "a.npy"


def test_a_npy_header_is_not_believed(tmp_path: Path) -> None:
    said = "{{'descr': '{}', 'fortran_order': False, 'shape': {}}}\n"
    for number, header in enumerate([said.format("<f8", "(1099511627776, 3)"), said.format("<f8", "(-1,)"), "(" * 9000]):
        npy_with(tmp_path / f"{number}.npy", header)
    npy_with(tmp_path / "3.npy", said.format("|O", "(3,)"))
    npy_with(tmp_path / "4.npy", "x", b"\x02\x00", 0xFFFFFFFF)
    npy_with(tmp_path / "5.npy", "x", b"\x09\x00")
    found = {f.path.name for f in look(tmp_path).findings if f.code in ("unreadable", "layout")}
    assert found == {f"{number}.npy" for number in range(6)}


def test_what_is_not_a_file_at_all(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    (tmp_path / "folder.h5").mkdir()
    (tmp_path / "link.h5").symlink_to("nowhere")
    (tmp_path / "none.h5").write_bytes(b"")
    (tmp_path / "empty.npy").write_bytes(b"")
    with h5py.File(tmp_path / "no dataset.h5", "w"):
        pass
    found = {f.path.name: f.text for f in look(tmp_path).findings if f.code in ("unreadable", "empty")}
    assert found.keys() == {"pipe.h5", "folder.h5", "link.h5", "none.h5", "empty.npy", "no dataset.h5"}
    assert "expected a file" in found["pipe.h5"] and "No such file" in found["link.h5"] and "no dataset" in found["no dataset.h5"]


# ---- children


def test_a_child_that_hangs_or_dies_is_a_finding_and_the_next_file_is_read(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    (made / "h5py.py").write_text("raise SystemExit(3)")  # no module of a data set is ever imported
    monkeypatch.chdir(made)
    inspector, whole = Inspector(patience=30), str(made / "train" / "u0.h5")
    assert len(list(inspector.ask("describe", path=whole))) == 2
    assert inspector._child is not None
    threading.Timer(0.2, inspector._child[0].kill).start()
    with pytest.raises(DataError, match=r"takes its process down \(SIGKILL\)"):
        next(inspector.ask("describe", path=str(tmp_path / "pipe.h5")))
    assert len(list(inspector.ask("describe", path=whole))) == 2
    assert inspector._child is not None
    inspector._child[0].kill()  # between two requests: no file is to blame
    inspector._child[0].wait()
    assert len(list(inspector.ask("describe", path=whole))) == 2
    inspector.patience, began = 0.5, time.monotonic()
    with pytest.raises(DataError, match=r"the HDF5 library is silent for 0.5 s; the file is damaged, or its disk hangs"):
        list(inspector.ask("describe", path=str(tmp_path / "pipe.h5")))
    assert 0.5 <= time.monotonic() - began < 4
    inspector.stop()


class Stop:
    """Ctrl-C at the nth report of progress."""

    def __init__(self, after: int = 0) -> None:
        self.left = after

    def __call__(self, now: Progress) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def processes() -> set[str]:
    return {line for task in Path("/proc/self/task").glob("*/children") for line in task.read_text().split()}


@pytest.mark.usefixtures("own_children")
def test_ctrl_c_leaves_nothing_behind(made: Path) -> None:
    for i in range(4):
        write(made / "train" / f"u{i}.h5", values(500 + i), **PACKED)
    index(made / "train")
    outcome = look(made)
    before, running = everything(made), processes()
    with pytest.raises(KeyboardInterrupt):
        examine(made, Options(seconds=0, threads=1), progress=Stop())
    with pytest.raises(KeyboardInterrupt):
        repair(made, outcome, progress=Stop())
    assert processes() == running and everything(made).keys() == before.keys()
    assert {f.code for f in look(made).findings} <= {"compressed"}  # those that were done are whole and in the index


@pytest.mark.usefixtures("own_children")
def test_ctrl_c_does_not_wait_for_a_disk_that_hangs(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(made / "train" / "u9.h5")
    monkeypatch.setattr(examination.stat, "S_ISREG", lambda _: True)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        examine(made, Options(seconds=0, threads=1), progress=Stop(after=4))
    assert time.monotonic() - began < 15
