"""Every fault that is seeded is found, with its code, file and row; healthy sets are left in peace; no file is believed."""

import hashlib
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from data_prep import cosmoflow, deepcam
from hpcai.data.direct import Reader
from hpcai.data.doctor import (
    Finding,
    Inspector,
    Inspectors,
    Options,
    Outcome,
    Progress,
    check,
    child,
    divide,
    examination,
    findings,
    repair,
    rewriting,
    tally,
)
from hpcai.errors import ConfigError, DataError
from tests.apps import universes

ALIGNED = {"alignment_threshold": 1 << 16, "alignment_interval": 4096}
SHAPE = (16, 16, 16, 4)  # 32 KiB of int16
ROWS = 4


@pytest.fixture(scope="module")
def children() -> Iterator[Inspectors]:
    with Inspectors(2, patience=20) as inspectors:
        yield inspectors


@pytest.fixture(autouse=True)
def nothing_leaks(children: Inspectors) -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    opened = [fd for fd in set(os.listdir("/proc/self/fd")) - before if os.path.exists(f"/proc/self/fd/{fd}")]
    files = [os.readlink(f"/proc/self/fd/{fd}") for fd in opened]
    assert not [name for name in files if name.startswith("/") and not name.startswith("/dev/null")]
    assert len(opened) <= 4  # the pipes of children that this test was the first to need


def values(seed: int, rows: int = ROWS, shape: tuple[int, ...] = SHAPE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 1000, (rows, *shape), dtype=np.int16)
    return {"counts": counts, "target": rng.uniform(-1, 1, (rows, 3)).astype(np.float32)}


def write(path: Path, data: dict[str, np.ndarray], **how: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w", **ALIGNED) as file:
        for name, array in data.items():
            file.create_dataset(name, data=array, **(how if array.ndim > 2 else {}))
        file.attrs["made by"] = "a test"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def index(folder: Path, **more: Any) -> None:
    files = []
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".h5", ".npy")):
        rows = 1
        if path.suffix == ".h5":
            with h5py.File(path) as file:
                rows = next(iter(file.values())).shape[0]
        files.append({"name": path.name, "rows": rows, "bytes": path.stat().st_size, "sha256": sha256(path)})
    (folder / "index.json").write_text(json.dumps({"format": 1, "files": files, "units": ["a", "b"], **more}))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    for split, count in (("train", 4), ("validation", 2)):
        for i in range(count):
            write(folder / split / f"u{i}.h5", values(100 * len(split) + i))
        index(folder / split)
    return folder


@pytest.fixture
def look(children: Inspectors) -> Any:
    def checked(folder: Path, **options: Any) -> Outcome:
        return check(folder, Options(**{"seconds": 0, "threads": 2, "patience": 20, **options}), inspectors=children)

    return checked


def told(outcome: Outcome) -> list[tuple[str, str, str, str | None, int | None]]:
    where = outcome.directory
    return [(f.severity, f.code, f.path.relative_to(where).as_posix(), f.dataset, f.row) for f in outcome.findings]


def one(outcome: Outcome, code: str) -> Finding:
    found = [finding for finding in outcome.findings if finding.code == code]
    assert len(found) == 1, outcome.findings
    return found[0]


def change(path: Path, name: str, where: Any, value: Any, reindex: bool = True) -> None:
    with h5py.File(path, "a") as file:
        file[name][where] = value
    if reindex:
        index(path.parent)


# ---- healthy sets


def test_a_healthy_set_gives_no_finding(made: Path, look: Any) -> None:
    outcome = look(made)
    assert outcome.findings == () and not outcome.failed(strict=True)
    train = outcome.splits[0]
    assert (train.name, train.files, train.samples, train.verified, train.aligned) == ("train", 4, 16, 4, 1.0)
    assert train.fields == {"counts": "<i2 (16, 16, 16, 4)", "target": "<f4 (3)"}
    assert outcome.figures["files"] == 6 and outcome.figures["inodes"] == 11
    assert outcome.figures["bytes_read"] >= train.bytes
    for options in ({"quick": True}, {"sample": 3}):
        assert look(made, **options).findings == ()
    assert look(made / "train").findings == ()
    assert look(made / "train").splits[0].name == "."


def test_the_sets_of_other_tests_are_healthy(tmp_path: Path, look: Any) -> None:
    assert look(universes.make(tmp_path / "tiny")).findings == ()


def test_a_simulated_set_is_healthy(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    words = ["simulate", str(tmp_path / "sim"), "--universes", "8", "--size", "16", "--cut", "2", "--workers", "1", "--no-check"]
    assert cosmoflow.main(words) == 0
    outcome = look(tmp_path / "sim")
    assert outcome.findings == () and [split.verified for split in outcome.splits] == [7, 1]


def test_npy_files_are_one_sample_each(tmp_path: Path, look: Any) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        for i in range(3):
            np.save(tmp_path / split / f"s{i}.npy", values(100 * len(split) + i)["counts"])
        index(tmp_path / split)
    outcome = look(tmp_path)
    assert outcome.findings == () and [split.samples for split in outcome.splits] == [3, 3]
    np.save(tmp_path / "test" / "s2.npy", np.load(tmp_path / "train" / "s1.npy"))
    index(tmp_path / "test")
    assert told(look(tmp_path)) == [("error", "leak", "test/s2.npy", "values", 0)]


# ---- the manifest


def spoil_size(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def spoil_length(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def spoil_bit(path: Path) -> None:
    flip(path, path.stat().st_size // 2, 3)


def flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil, severity, code, text",
    [
        (spoil_size, "error", "truncated", "is cut off: has {short:,} bytes, the manifest says {size:,}; copy it again"),
        (spoil_length, "error", "overlong", "has {long:,} bytes, the manifest says {size:,}"),
        (spoil_bit, "error", "bit-flip", "--repair --accept u2.h5"),
        (Path.unlink, "error", "missing", "--repair --accept u2.h5"),
        (lambda p: p.write_bytes(b""), "error", "truncated", "has 0 bytes"),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says(made: Path, look: Any, spoil: Any, severity: str, code: str, text: str) -> None:
    size = (made / "train" / "u2.h5").stat().st_size
    spoil(made / "train" / "u2.h5")
    outcome = look(made)
    assert told(outcome) == [(severity, code, "train/u2.h5", None, None)]
    assert text.format(size=size, short=size - 5000, long=size + 1) in outcome.findings[0].text
    assert look(made, quick=True).findings == (() if code == "bit-flip" else outcome.findings)


def test_a_stranger_is_named(made: Path, look: Any) -> None:
    write(made / "train" / "extra.h5", values(7))
    outcome = look(made)
    assert told(outcome) == [("warning", "stranger", "train/extra.h5", None, None)]
    assert not outcome.failed() and outcome.failed(strict=True)


def test_records_stand_in_for_a_missing_index(made: Path, look: Any) -> None:
    entries = json.loads((made / "train" / "index.json").read_text())["files"]
    (made / "train" / "index.json").unlink()
    assert told(look(made)) == [("warning", "index", "train/index.json", None, None)]
    (made / "train" / ".records").mkdir()
    for entry in entries:
        (made / "train" / ".records" / f"{entry['name']}.json").write_text(json.dumps(entry))
    spoil_bit(made / "train" / "u0.h5")
    assert told(look(made)) == [
        ("error", "bit-flip", "train/u0.h5", None, None),
        ("warning", "index", "train/index.json", None, None),
    ]


@pytest.mark.parametrize(
    "content, text",
    [
        ("{", "cannot be read as JSON"),
        ("\xff", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON"),
        ("[]", "is a list, expected an object with a list 'files'"),
        ('{"file": []}', "is an object with file, expected"),
        ('{"files": [1]}', "entry 0 of 'files' has no name"),
        ('{"files": [{"name": "../u0.h5"}]}', "entry 0 of 'files' name '../u0.h5' is not that of a file in this folder"),
        ('{"files": [{"name": "u0.h5"}, {"name": "u0.h5"}]}', "entry 1 of 'files' names 'u0.h5' a second time"),
        ('{"files": [{"name": "u0.h5", "bytes": -1}]}', "'-1' is no count"),
        ('{"files": [{"name": "u0.h5", "rows": true}]}', "'True' is no count"),
        ('{"files": [{"name": "u0.h5", "sha256": "abc"}]}', "is not 64 hexadecimal digits"),
        ('{"files": [], "fields": []}', "'fields' is a list"),
        ('{"files": [], "fields": {"counts": {"dtype": "no"}}}', "'fields' of 'counts': "),
        ('{"files": [], "fields": {"counts": {"shape": [-1]}}}', "'fields' of 'counts': '-1' is no count"),
        ('{"files": [], "fields": {"counts": {"low": "0"}}}', "low is '0', expected a number or null"),
        ('{"files": [], "fields": {"counts": {"blank": true}}}', "blank is 'True', expected a number or null"),
    ],
)
def test_a_damaged_index_is_a_finding(made: Path, look: Any, content: str, text: str) -> None:
    (made / "train" / "index.json").write_bytes(content.encode("latin-1"))
    found = [f for f in look(made, quick=True).findings if f.code == "index"]
    assert len(found) == 1 and found[0].severity == "error" and text in found[0].text
    assert found[0].path == made / "train" / "index.json"


def test_a_set_without_files_is_an_error(tmp_path: Path, look: Any) -> None:
    assert told(look(tmp_path)) == [("error", "empty", ".", None, None)]
    (tmp_path / "train").mkdir()
    assert ("error", "empty", "train", None, None) in told(look(tmp_path))
    with pytest.raises(DataError, match=r"nowhere: no such folder; name the folder of a data set"):
        look(tmp_path / "nowhere")


# ---- the schema


def test_the_odd_file_is_named_and_not_the_first(made: Path, look: Any) -> None:
    for spoiled, data, code, text in (
        ("counts", {"counts": values(1, shape=(9, 9, 9, 4))["counts"]}, "shape", "rows of (9, 9, 9, 4), expected (16, 16, 16, 4)"),
        ("target", {"target": np.ones((ROWS, 3))}, "dtype", "is <f8, expected <f4, as 3 of 4 files have it"),
        ("target", {"target": None}, "schema", "is not in this file; expected <f4 (rows, 3)"),
        ("more", {"more": np.ones((ROWS, 3))}, "schema", "is in this file and not in 3 of 4 files"),
    ):  # fmt: skip
        whole = {name: array for name, array in {**values(500), **data}.items() if array is not None}
        write(made / "train" / "u0.h5", whole)
        index(made / "train")
        outcome = look(made, quick=True)
        assert told(outcome) == [("error", code, "train/u0.h5", spoiled, None)]
        assert text in outcome.findings[0].text


def test_rows_disagree(made: Path, look: Any) -> None:
    write(made / "train" / "u1.h5", {**values(1), "target": np.ones((ROWS + 1, 3), np.float32)})
    index(made / "train")
    finding = one(look(made), "rows")
    assert (finding.path.name, finding.dataset) == ("u1.h5", "target") and "has 5 rows, expected 4" in finding.text
    write(made / "train" / "u1.h5", values(1))
    index(made / "train")
    about = json.loads((made / "train" / "index.json").read_text())
    about["files"][1]["rows"] = 3
    (made / "train" / "index.json").write_text(json.dumps(about))
    finding = one(look(made), "rows")
    assert finding.dataset is None and finding.repairable and "has 4 rows, index.json says 3" in finding.text


def test_no_rows_and_no_datasets(made: Path, look: Any) -> None:
    write(made / "train" / "u1.h5", values(1, rows=0))
    write(made / "train" / "u2.h5", {})
    (made / "train" / "index.json").unlink()
    found = [entry for entry in told(look(made)) if entry[1] == "empty"]
    assert found == [("error", "empty", "train/u1.h5", None, None), ("error", "empty", "train/u2.h5", None, None)]


def test_splits_that_differ_are_a_warning(made: Path, look: Any) -> None:
    for i in range(2):
        write(
            made / "validation" / f"u{i}.h5",
            {"counts": values(i + 50, shape=(16, 16, 16, 5))["counts"], "label": np.ones((ROWS, 3))},
        )
    index(made / "validation")
    assert told(look(made, quick=True)) == [
        ("warning", "schema", "validation", "label", None),
        ("warning", "schema", "validation", "target", None),
        ("warning", "shape", "validation", "counts", None),
    ]


def test_the_fields_of_the_index_are_obeyed(made: Path, look: Any) -> None:
    fields = {"counts": {"dtype": "int16", "shape": [16, 16, 16, 4], "low": 0, "high": None}, "target": {"low": -1, "high": 1}}
    index(made / "train", fields=fields)
    assert look(made).findings == ()
    for key, value, code in (("dtype", "int32", "dtype"), ("shape", [16, 16, 16], "shape")):
        index(made / "train", fields={"counts": {**fields["counts"], key: value}})
        assert {(f.code, f.dataset) for f in look(made, quick=True).findings} == {(code, "counts")}
    index(made / "train", fields={**fields, "weights": {}})
    assert one(look(made, quick=True), "schema").path.name == "index.json"


def test_a_length_that_the_index_leaves_open_may_be_any(tmp_path: Path, look: Any) -> None:
    """Also where files and splits are compared with one another; dtypes and numbers of dims are still those of the index."""
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
    assert outcome.splits[0].verified == 4
    for spoiled, code, text in (
        (((40, 50, 4),), "shape", "has rows of (40, 50, 4), expected (any, any, 3), as 3 of 4 files have it"),
        (((40, 50),), "shape", "has rows of (40, 50), expected (any, any, 3)"),
        (((40, 50, 3, 1),), "shape", "has rows of (40, 50, 3, 1), expected (any, any, 3)"),
        (((40, 50, 3), "f8"), "dtype", "is <f8, expected <f4"),
    ):
        volume("train/v0.h5", *spoiled)
        outcome = look(tmp_path, quick=True)
        assert told(outcome) == [("error", code, "train/v0.h5", "image", None)] and text in outcome.findings[0].text
    volume("train/v0.h5", (40, 50, 3))
    volume("validation/v0.h5", (20, 21, 4))                         # all files of a split against its index, and the splits
    found = {(f.severity, f.code, f.text.split(",")[0]) for f in look(tmp_path, quick=True).findings}
    assert found == {("error", "shape", "has rows of (20"), ("warning", "shape", "'image' has a shape of (any")}
    fields["image"]["shape"] = [40, 50, 3]
    index(tmp_path / "train", fields=fields)
    wrong = [f for f in look(tmp_path / "train", quick=True).findings if f.code == "shape"]
    assert len(wrong) == 3 and all("expected (40, 50, 3)" in f.text for f in wrong)


def test_files_in_groups_scalars_and_odd_dtypes_are_fine(made: Path, look: Any) -> None:
    for split in ("train", "validation"):
        for i, path in enumerate(sorted((made / split).glob("*.h5"))):
            with h5py.File(path, "a") as file:
                file["deep/er/mask"] = np.random.default_rng([len(split), i]).random((ROWS, 20)) > 0.5
                file["version"] = 3
                file["none"] = h5py.Empty("f4")
                file["again"] = file["target"]
                file["soft"], file["away"] = h5py.SoftLink("/nowhere"), h5py.ExternalLink("/dev/zero", "/x")
                file["pairs"] = np.zeros(ROWS, "i4,f8")
                file["names"] = [f"sample {j}" for j in range(ROWS)]
                file["waves"] = np.ones((ROWS, 4), np.complex64)
                file["loop"] = file["deep"]
                file["deep/up"] = file["/"]
        index(made / split)
    outcome = look(made)
    assert {(f.severity, f.code, f.dataset) for f in outcome.findings} == {("note", "layout", "names")}
    assert outcome.splits[0].fields["deep/er/mask"] == "|b1 (20)"


# ---- values


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", [{}, {"chunks": (1, 300, 20), "compression": "gzip"}, {"chunks": (2, 300, 20)}])
def test_what_is_not_finite_is_found_with_its_rows(made: Path, look: Any, bad: float, how: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    for path in sorted(made.glob("*/*.h5")):
        data = {"density": rng.random((30, 300, 20), dtype=np.float32)}
        if path.name == "u1.h5" and path.parent.name == "train":
            data["density"][[5, *range(8, 20)], 17, 3] = bad
        write(path, data, **how)
    for split in ("train", "validation"):
        index(made / split)
    finding = one(look(made), "nan")
    assert (finding.severity, finding.path, finding.dataset, finding.row) == ("error", made / "train" / "u1.h5", "density", 5)
    assert finding.text.startswith("rows 5, 8, 9, 10, 11, 12, 13, 14, 15, 16 ... (13) of 30 holds NaN or infinity")
    assert one(look(made, sample=120), "nan").row == 5


def test_values_out_of_range(made: Path, look: Any) -> None:
    change(made / "train" / "u3.h5", "counts", (2, 0, 0, 0, 1), -7)
    assert look(made).findings == ()
    outcome = look(made, ranges={"counts": (0, None)})
    assert told(outcome) == [("error", "range", "train/u3.h5", "counts", 2)]
    assert outcome.findings[0].text.startswith("row 2 of 4 holds values such as -7, expected 0 to any")
    index(made / "train", fields={"counts": {"low": 0}})
    assert told(look(made)) == told(outcome)
    assert look(made, ranges={"counts": (-7, 999)}).findings == ()
    above = [f for f in look(made, ranges={"counts": (None, 998.5)}).findings if f.code == "range"]
    assert len(above) == 6 and {f.text.split("such as ")[1][:3] for f in above} == {"999"}


def test_a_constant_row_is_a_warning(made: Path, look: Any) -> None:
    change(made / "train" / "u0.h5", "counts", 1, 0)
    change(made / "validation" / "u1.h5", "counts", 3, 0)  # two blank samples are no leak
    change(made / "train" / "u0.h5", "target", 1, 0)  # three equal values are no wonder
    assert told(look(made)) == [
        ("warning", "constant", "train/u0.h5", "counts", 1),
        ("warning", "constant", "validation/u1.h5", "counts", 3),
    ]


@pytest.mark.parametrize("how", [{}, {"compression": "gzip"}])
def test_a_row_may_be_blank_where_the_index_says_so(tmp_path: Path, look: Any, how: dict[str, Any]) -> None:
    """With the value that the index names and no other; maps without an object are such rows, by what data_prep says of them."""
    fields = deepcam.CONTENTS.fields([20, 30, 2], {})
    rng = np.random.default_rng(0)
    mask = rng.integers(0, 3, (6, 20, 30), np.uint8)
    mask[1], mask[2], mask[4] = 0, 0, 2
    write(tmp_path / "a.h5", {"fields": rng.normal(size=(6, 20, 30, 2)).astype(np.float32), "mask": mask}, **how)
    index(tmp_path, fields=fields)
    for options in ({}, {"sample": 6}, {"ranges": {"mask": (0, 2)}}):
        finding = one(look(tmp_path, **options), "constant")
        assert finding.row == 4 and "row 4 of 6 holds nothing but 2," in finding.text
    del fields["mask"]["blank"]
    index(tmp_path, fields=fields)
    assert "rows 1, 2, 4 (3) of 6 holds nothing but 0," in one(look(tmp_path), "constant").text
    fields["mask"]["blank"], mask[4] = 0, mask[0]
    write(tmp_path / "a.h5", {"fields": rng.normal(size=(6, 20, 30, 2)).astype(np.float32), "mask": mask}, **how)
    index(tmp_path, fields=fields)
    assert {f.code for f in look(tmp_path).findings} <= {"compressed", "chunked"}


@pytest.mark.parametrize("shape", [(4, 3), (200, 100), (300, 200, 9)])
@pytest.mark.parametrize("dtype", [">i2", "<f4", ">f8", "<f2", "u1", "?", "<c8", "i8"])
def test_rows_of_every_size_and_type(tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch, dtype: str, shape: Any) -> None:
    """Narrow rows go by many at once, wide ones in pieces, the widest in several blocks."""
    monkeypatch.setattr(examination, "BLOCK", 1 << 19)
    real, kind = np.random.default_rng(0).standard_normal((7, *shape)), np.dtype(dtype).kind
    data = (real > 0 if kind == "b" else real * 40).astype(dtype)
    data[3] = data[6]
    data[5] = 0 if kind == "c" else 1
    if kind in "fc":
        data[4].flat[0] = np.nan
    write(tmp_path / "a.h5", {"pad": np.arange(7, dtype="u1"), "data": data})
    index(tmp_path)
    low = {"u": 1, "b": None, "c": None}.get(kind, -39)
    outside = [i for i in range(7) if low is not None and not (kind == "f" and i == 4) and data[i].min() < low]
    found = {f.code: f for f in look(tmp_path, ranges={"data": (low, None)}).findings}
    blank = np.prod(shape) > tally.FEW
    expected = {"duplicate"} | {code for code, there in (("constant", blank), ("nan", kind in "fc"), ("range", outside)) if there}
    assert found.keys() - {"unaligned"} == expected
    assert found["duplicate"].row == 6 and "a.h5 row 3" in found["duplicate"].text
    if blank:
        assert found["constant"].row == 5
    if kind in "fc":
        assert found["nan"].row == 4
    if outside:
        assert found["range"].row == outside[0]


@given(st.data())
@settings(max_examples=60)
def test_pieces_of_a_row_tell_what_the_whole_row_tells(data: st.DataObject) -> None:
    items = data.draw(st.sampled_from([20, 8192, 9001, 40_000]))
    rows = np.random.default_rng(items).integers(-5, 5, (3, items), dtype=np.int64)
    rows[1] = rows[0]
    cuts = sorted(set(data.draw(st.lists(st.integers(1, items - 1), max_size=6))))
    whole, cut = (tally.Tally(rows.dtype, rows.shape[1:], (-4, 4), keys=True) for _ in range(2))
    whole.rows(0, rows.reshape(-1).view(np.uint8))
    for i, row in enumerate(rows):
        for start, stop in zip([0, *cuts], [*cuts, items]):
            cut.piece(i, row[start:stop].view(np.uint8), stop == items)
    assert whole.keys == cut.keys and whole.told() == cut.told()
    assert whole.keys is not None and whole.keys[0] == whole.keys[1] != whole.keys[2]


# ---- the same sample twice


def test_duplicates_and_leaks_name_both_places(made: Path, look: Any) -> None:
    counts = values(500)["counts"]  # that of train/u0.h5
    change(made / "train" / "u3.h5", "counts", slice(2, 4), counts[:2])
    change(made / "validation" / "u1.h5", "counts", 0, counts[3])
    outcome = look(made)
    assert told(outcome) == [
        ("error", "leak", "validation/u1.h5", "counts", 0),
        ("warning", "duplicate", "train/u3.h5", "counts", 2),
    ]
    leak, duplicate = outcome.findings
    assert "row 0 is the same sample as train/u0.h5 row 3;" in leak.text
    assert "row 2 is the same sample as train/u0.h5 row 0, and 1 more rows of these two;" in duplicate.text
    assert look(made, sample=100).findings == outcome.findings
    assert look(made, quick=True).findings == ()


def test_a_leak_is_found_through_compression(made: Path, look: Any) -> None:
    same = {"counts": values(500)["counts"][[2, 1]], "target": np.ones((2, 3), np.float32)}
    write(made / "validation" / "u0.h5", same, chunks=(1, 16, 16, 16, 4), compression="gzip")
    index(made / "validation")
    leaks = [f for f in look(made).findings if f.code == "leak"]
    assert [(f.row, f.text.partition(";")[0]) for f in leaks] == [
        (0, "row 0 is the same sample as train/u0.h5 row 2, and 1 more rows of these two")
    ]


def test_the_same_pages_in_another_order_are_another_sample(tmp_path: Path, look: Any) -> None:
    row = np.random.default_rng(0).integers(0, 99, (64, 2048), dtype=np.int16)  # 64 pages
    write(tmp_path / "a.h5", {"counts": np.stack([row, row[::-1], np.roll(row, 3, 0)])})
    index(tmp_path)
    assert look(tmp_path).findings == ()
    tallies = tally.Tally(row.dtype, row.shape, (None, None), keys=True)
    tallies.rows(0, np.stack([row, row[::-1]]).reshape(-1).view(np.uint8))
    assert tallies.keys is not None and tallies.keys[0] == tallies.keys[1]  # so digests had to tell them apart


# ---- batches


@pytest.mark.parametrize(
    "samples, batch, world, numbers, codes",
    [
        (64, 8, 4, (8, 0, 8, 0), []),
        (65, 8, 4, (8, 1, 9, 7), ["remainder"]),
        (64, 10, 4, (6, 4, 7, 6), ["batch", "remainder"]),
        (3, 4, 4, (0, 3, 1, 1), ["ranks"]),
        (6, 8, 4, (0, 6, 1, 2), ["remainder"]),
        (0, 4, 2, (0, 0, 0, 0), ["ranks"]),
    ],
)
def test_divide(samples: int, batch: int, world: int, numbers: tuple[int, ...], codes: list[str]) -> None:
    found = divide(samples, batch, world)
    assert (found.batches, found.left_out, found.padded_batches, found.repeated) == numbers
    assert [code for _, code, _ in found.problems] == codes


@given(st.integers(0, 10**6), st.integers(1, 5000), st.integers(1, 5000))
def test_divide_counts_every_sample(samples: int, batch: int, world: int) -> None:
    found = divide(samples, batch, world)
    assert found.batches * batch + found.left_out == samples == found.padded_batches * batch - found.repeated
    assert 0 <= found.left_out < batch and 0 <= found.repeated < batch
    assert (batch % world == 0) == ("batch" not in {code for _, code, _ in found.problems})


def test_the_nearest_batches_are_named(made: Path, look: Any) -> None:
    outcome = look(made, quick=True, world=3, batch=4)
    assert {(f.severity, f.code, f.path.name) for f in outcome.findings} == {
        ("error", "batch", "train"), ("error", "batch", "validation"),
    }  # fmt: skip
    assert "expected a multiple: 3 or 6" in outcome.findings[0].text
    assert "expected a multiple: 8" in divide(64, 3, 8).problems[0][2]
    outcome = look(made, quick=True, world=12)
    assert told(outcome) == [("error", "ranks", "validation", None, None), ("note", "remainder", "train", None, None)]
    assert outcome.splits[0].division == divide(16, 12, 12)


def test_options_refuse_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Options(world=0, batch=-1, quick=True, sample=2, step_time=0, ranges={"x": (2, 1)}, seconds=-1)
    assert len(str(caught.value).splitlines()) == 6
    with pytest.raises(ConfigError, match="step-time says nothing without the samples of a step"):
        Options(step_time=1.0)


# ---- files and file systems


def test_many_small_files_are_a_warning(made: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings.metadata_bound(made, 10_000, 10_000) is None
    assert findings.metadata_bound(made, 10_001, 10_001 << 20) is None
    monkeypatch.setattr(findings, "MANY", 5)
    finding = one(look(made, quick=True), "inodes")
    assert (finding.severity, finding.path) == ("warning", made) and "6 files of 139 kB on average" in finding.text


@pytest.fixture
def lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mounts file that says Lustre, and an ``lfs`` that answers."""

    def mounted(answer: str, status: int = 0) -> Path:
        mounts = tmp_path / "mounts"
        space = str(tmp_path).replace(" ", "\\040")
        mounts.write_text(f"/dev/sda / ext4 rw 0 0\nmds@tcp:/home {space} lustre rw 0 0\nproc {space}-not proc rw 0 0\n")
        (tmp_path / "bin").mkdir(exist_ok=True)
        script = tmp_path / "bin" / "lfs"
        script.write_text(f'#!/bin/sh\n[ "$1 $2" = "getstripe -c" ] && [ -f "$3" ] && echo {answer}\nexit {status}\n')
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(script.parent), prepend=os.pathsep)
        return mounts

    return mounted


def test_the_file_system_is_that_of_the_longest_mount_point(tmp_path: Path) -> None:
    place = tmp_path / "a b" / "c"
    place.mkdir(parents=True)
    mounts = tmp_path / "mounts"
    above = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(f"x / ext4 rw\ny {above} nfs4 rw\nbroken\nz {above}/c gpfs rw\nw {above}/c beegfs rw\nv {above}/cc xfs rw\n")
    assert findings.file_system(place, mounts) == "beegfs"
    assert findings.file_system(tmp_path / "a b", mounts) == "nfs4"
    assert findings.file_system(tmp_path, mounts) == "ext4"
    assert findings.file_system(tmp_path, tmp_path / "nothing") is None
    assert findings.file_system(Path("/proc")) == "proc"


def test_stripes_of_small_files(made: Path, look: Any, lustre: Any) -> None:
    assert told(look(made, quick=True, mounts=lustre("1"))) == []
    outcome = look(made, quick=True, mounts=lustre("8"))
    assert told(outcome) == [("note", "stripe", "train", None, None), ("note", "stripe", "validation", None, None)]
    assert outcome.figures["file_system"] == "lustre"
    assert (
        f"on 1 server, found on 8: each further server costs an open; lfs setstripe -c 1 {made}/train" in outcome.findings[0].text
    )
    for answer, status in (("what", 0), ("1", 1)):
        unknown = look(made, quick=True, mounts=lustre(answer, status)).findings
        assert len(unknown) == 2 and "found on" not in unknown[0].text


def test_stripe_hint(tmp_path: Path) -> None:
    def hint(kind: str, size: float, present: int | None = None) -> str:
        finding = findings.stripe_hint(kind, tmp_path, [int(size)] * 3, present)
        return finding.text if finding else ""

    assert [findings.stripes(int(n)) for n in (1e6, 9e8, 2e9, 2e10, 2e12)] == [1, 1, 8, 24, 72]
    assert f"lfs setstripe -c 8 -S 4m {tmp_path}" in hint("lustre", 5e9, 1)
    assert hint("lustre", 5e9, -1) == hint("lustre", 5e9, 8) == hint("lustre", 1e6, 1) == hint("ext4", 1e6) == ""
    assert "found on all" in hint("lustre", 1e6, -1)
    assert "--numtargets=8" in hint("beegfs", 5e9) and not hint("beegfs", 1e6)
    assert "pack samples" in hint("gpfs", 1e4) and not hint("gpfs", 1e9)
    assert "hpcai data stage" in hint("nfs4", 1e9)
    assert findings.stripe_hint("lustre", tmp_path, []) is None


def test_files_that_direct_reads_cannot_use(made: Path, look: Any) -> None:
    write(made / "train" / "u0.h5", values(500), compression="gzip", chunks=(1, *SHAPE))
    write(made / "train" / "u1.h5", values(501), chunks=(1, 8, 8, 8, 4))
    write(made / "train" / "u2.h5", values(502), chunks=(1, *SHAPE))
    with h5py.File(made / "train" / "u3.h5", "w") as file:
        file["small"] = np.zeros(3)
        for name, array in values(503).items():
            file[name] = array
        del file["small"]
    index(made / "train")
    outcome = look(made)
    assert [(f.severity, f.code, f.path.name, f.dataset, f.repairable) for f in outcome.findings] == [
        ("warning", "compressed", "u0.h5", "counts", True),
        ("note", "chunked", "u1.h5", "counts", True),
        ("note", "unaligned", "u3.h5", "counts", True),
    ]
    assert "a row is 8 reads instead of one" in outcome.findings[1].text
    assert outcome.splits[0].aligned is not None and 0 <= outcome.splits[0].aligned < 1


def test_chunks_that_were_never_written(made: Path, look: Any) -> None:
    data = values(1)
    with h5py.File(made / "train" / "u0.h5", "w", **ALIGNED) as file:
        file["target"] = data["target"]
        file.create_dataset("counts", data["counts"].shape, np.int16, chunks=(1, *SHAPE), compression="gzip")[:3] = data["counts"][
            :3
        ]
    with h5py.File(made / "train" / "u1.h5", "w", **ALIGNED) as file:
        file["target"] = data["target"]
        file.create_dataset("counts", (ROWS, *SHAPE), np.int16)
    with h5py.File(made / "train" / "u2.h5", "w", **ALIGNED) as file:
        file["target"] = data["target"]
        file.create_dataset("counts", (1 << 30, 1 << 20), np.int16, chunks=(1, 1 << 16), compression="gzip")
    index(made / "train")
    found = [f for f in look(made).findings if f.code == "unwritten"]
    assert [(f.severity, f.path.name, f.dataset) for f in found] == [("error", f"u{i}.h5", "counts") for i in range(3)]
    assert "1 of 4 parts" in found[0].text


def test_values_in_other_files_are_not_followed(made: Path, look: Any) -> None:
    with h5py.File(made / "train" / "u0.h5", "w") as file:
        file.create_dataset("counts", (ROWS, *SHAPE), np.int16, external=[("/dev/zero", 0, h5py.h5f.UNLIMITED)])
        layout = h5py.VirtualLayout((ROWS, 3), np.float32)
        layout[:] = h5py.VirtualSource(str(made / "train" / "u1.h5"), "target", (ROWS, 3))
        file.create_virtual_dataset("target", layout)
    index(made / "train")
    outcome = look(made)
    assert {(f.code, f.dataset, f.repairable) for f in outcome.findings} == {
        ("layout", "counts", False),
        ("layout", "target", False),
    }


def test_leftovers_and_files_of_other_kinds(made: Path, look: Any) -> None:
    (made / "train" / ".u9.h5.partial").write_bytes(b"half")
    (made / ".recipe.json.abc.partial").write_bytes(b"half")
    (made / "train" / "notes.txt").write_text("mine")
    (made / "runs").mkdir()
    (made / "runs" / "x.partial").write_text("not ours")
    assert told(look(made)) == [
        ("warning", "leftover", ".recipe.json.abc.partial", None, None),
        ("warning", "leftover", "train/.u9.h5.partial", None, None),
    ]


# ---- the rate


def reading(delay: float) -> Any:
    def slow(descriptor: int, buffers: Any, offset: int) -> int:
        time.sleep(delay)
        return os.preadv(descriptor, buffers, offset)

    return lambda mode, **more: Reader(mode, preadv=slow, **more)


def test_a_disk_that_is_too_slow_is_an_error(made: Path, look: Any) -> None:
    need = {"batch": 4, "step_time": 0.01, "seconds": 0.2, "quick": True}
    outcome = look(made, reader=reading(0.05), **need)
    assert told(outcome) == [("error", "rate", ".", None, None)]
    assert "400.0 samples/s" in outcome.findings[0].text and "hpcai data stage" in outcome.findings[0].text
    rate = outcome.figures["rate"]
    assert rate["bytes_per_sample"] == 2 * np.prod(SHAPE) + 12
    # 8 threads, two reads to a row, each 0.05 s: about 80 rows a second
    for mode in ("direct", "buffered"):
        assert 20 < rate[mode]["samples_per_s"] <= 81, rate
        assert rate[mode]["gb_per_s"] == pytest.approx(rate[mode]["samples_per_s"] * rate["bytes_per_sample"] / 1e9, rel=1e-3)
        assert 0.2 <= rate[mode]["seconds"] < 2
    assert look(made, reader=reading(0.05), nodes=100, **need).findings == ()
    assert rate["needed_per_node"] == {"samples_per_s": 400.0, "gb_per_s": pytest.approx(400 * rate["bytes_per_sample"] / 1e9)}


def test_the_rate_of_packed_rows_and_of_nothing(made: Path, tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        write(made / "train" / f"u{i}.h5", values(500 + i), compression="gzip", chunks=(1, *SHAPE))
    index(made / "train")
    evicted: list[Path] = []
    monkeypatch.setattr(examination, "_evict", evicted.append)
    rate = look(made, quick=True, seconds=0.05).figures["rate"]
    assert set(evicted) == set((made / "train").glob("*.h5"))  # of the largest split, before the first row
    assert 0 < rate["bytes_per_sample"] < 2 * np.prod(SHAPE) and rate["buffered"]["samples_per_s"] > 0
    (tmp_path / "none").mkdir()
    assert look(tmp_path / "none", seconds=0.05).figures["rate"] is None

    def refuse(mode: str, **more: Any) -> Reader:
        if mode == "direct":
            raise DataError("no O_DIRECT here")
        return Reader(mode, **more)  # type: ignore[arg-type]

    assert look(made, quick=True, seconds=0.05, reader=refuse).figures["rate"]["direct"] == {"problem": "no O_DIRECT here"}


# ---- damage


def test_sixty_flips_and_truncations_are_all_found(tmp_path: Path, look: Any) -> None:
    chance = random.Random(4)
    whole = tmp_path / "whole"
    for split in ("train", "validation"):
        for i in range(3):
            write(whole / split / f"u{i}.h5", values(10 * len(split) + i, shape=(12, 12, 2)))
        np.save(whole / split / "one.npy", values(7 + len(split))["counts"])
        (whole / split / "u0.h5").replace(whole / split / "u9.h5")
        index(whole / split)
    schema = {"schema", "shape", "dtype"}  # the .npy file has others than its neighbours
    found = 0
    for number in range(60):
        folder = shutil.copytree(whole, tmp_path / "copy")
        path = chance.choice(sorted([*folder.rglob("*.h5"), *folder.rglob("*.npy")]))
        size = path.stat().st_size
        if number % 3:
            flip(path, chance.randrange(size), chance.randrange(8))
        else:
            os.truncate(path, chance.randrange(size))
        codes = {f.code for f in look(folder).findings if f.path == path}
        found += bool(codes & {"bit-flip", "truncated"})
        shutil.rmtree(folder)
    assert found == 60
    assert {f.code for f in look(whole).findings} <= schema


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


BASES = {"a.h5": small_hdf5, "a.npy": small_npy}
mutations = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=12)


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("indexed", [True, False])
def test_a_damaged_file_never_gives_anything_but_an_outcome(
    tmp_path_factory: pytest.TempPathFactory, children: Inspectors, name: str, indexed: bool
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    BASES[name](folder / name)
    if indexed:
        (folder / "index.json").write_text(json.dumps({"files": [{"name": name, "rows": 3, "sha256": "0" * 64}]}))
    whole = (folder / name).read_bytes()

    @settings(max_examples=120, suppress_health_check=list(HealthCheck))
    @given(mutations, st.booleans(), st.floats(0.01, 1))
    @example([(0.0, 0)], True, 1.0)
    def fuzz(changes: list[tuple[float, int]], early: bool, keep: float) -> None:
        data = bytearray(whole)
        for where, value in changes:  # most of them into the first bytes, where headers are
            data[int(where * (min(len(data), 2048) if early else len(data)))] = value
        (folder / name).write_bytes(data[: int(len(data) * keep)] if keep < 0.2 else data)
        for options in ({}, {"sample": 2}):
            outcome = check(folder, Options(seconds=0, threads=1, patience=20, **options), inspectors=children)
            assert isinstance(outcome, Outcome)
            json.dumps(outcome.as_json(), allow_nan=False)

    fuzz()


def npy_with(path: Path, header: str, version: bytes = b"\x01\x00", length: int | None = None) -> None:
    text = header.encode("latin-1")
    count = len(text) if length is None else length
    path.write_bytes(b"\x93NUMPY" + version + count.to_bytes(2 if version[0] == 1 else 4, "little") + text)


def test_the_length_of_a_npy_header_is_looked_at_before_numpy_reads_it(
    tmp_path: Path, look: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    npy_with(tmp_path / "a.npy", "x", b"\x02\x00", 0xFFFFFFFF)
    os.truncate(tmp_path / "a.npy", 5 << 30)  # a hole, of which numpy would read 4 GiB
    monkeypatch.setattr(examination.layout, "npy", None)
    assert one(look(tmp_path, sample=1), "unreadable").path.name == "a.npy"


@pytest.mark.parametrize(
    "header, more",
    [
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776, 3)}\n", {}),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}\n", {}),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (3,)}\n", {}),
        ("(" * 9000, {}),
        ("x", {"version": b"\x02\x00", "length": 0xFFFFFFFF}),
        ("x", {"version": b"\x09\x00"}),
    ],
)
def test_a_npy_header_is_not_believed(tmp_path: Path, look: Any, header: str, more: dict[str, Any]) -> None:
    npy_with(tmp_path / "a.npy", header, **more)
    finding = next(f for f in look(tmp_path).findings if f.code != "index")
    assert (finding.code, finding.path.name) in {("unreadable", "a.npy"), ("layout", "a.npy")}


def test_what_is_not_a_file_at_all(tmp_path: Path, look: Any) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    (tmp_path / "folder.h5").mkdir()
    (tmp_path / "link.h5").symlink_to("nowhere")
    (tmp_path / "text.h5").write_text("no HDF5")
    (tmp_path / "empty.npy").write_bytes(b"")
    found = {f.path.name: f for f in look(tmp_path).findings if f.code == "unreadable"}
    assert found.keys() == {"pipe.h5", "folder.h5", "link.h5", "text.h5", "empty.npy"}
    assert "expected a file" in found["pipe.h5"].text and "No such file" in found["link.h5"].text


def test_a_child_that_hangs_or_dies_is_a_finding_and_the_next_file_is_read(made: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    inspector = Inspector(patience=1.0)
    list(inspector.ask("describe", path=str(made / "train" / "u0.h5")))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"the HDF5 library is silent for 1 s; the file is damaged, or its disk hangs"):
        list(inspector.ask("describe", path=str(tmp_path / "pipe.h5")))
    assert 1 <= time.monotonic() - began < 4
    inspector.patience = 30
    assert len(list(inspector.ask("describe", path=str(made / "train" / "u0.h5")))) == 2
    child = inspector._child
    assert child is not None
    asked = inspector.ask("describe", path=str(tmp_path / "pipe.h5"))
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(DataError, match=r"takes its process down \(SIGKILL\)"):
        next(asked)
    list(inspector.ask("describe", path=str(made / "train" / "u0.h5")))
    assert inspector._child is not None
    inspector._child.kill()  # between two requests: no file is to blame
    inspector._child.wait()
    assert len(list(inspector.ask("describe", path=str(made / "train" / "u0.h5")))) == 2
    inspector.stop()


def test_a_file_that_changes_under_the_check_is_told(made: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    described = examination.Work.describe

    def touched(self: Any, path: Path) -> Any:
        if path.name == "u3.h5":
            os.utime(path, (0, 0))
        return described(self, path)

    monkeypatch.setattr(examination.Work, "describe", touched)
    assert told(look(made)) == [("warning", "changing", "train/u3.h5", None, None)]


def test_datasets_that_lie_over_one_another_are_damage(made: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    described = examination.Work.describe

    def moved(self: Any, path: Path) -> Any:
        fields = described(self, path)
        if path == made / "train" / "u3.h5":
            fields[1].offset = fields[0].offset + 100
        return fields

    monkeypatch.setattr(examination.Work, "describe", moved)
    finding = one(look(made), "unreadable")
    assert finding.path == made / "train" / "u3.h5" and "lies over 'target'" in finding.text


class Stop:
    """Ctrl-C at the nth report of progress."""

    def __init__(self, after: int = 0) -> None:
        self.left = after

    def __call__(self, now: Progress) -> None:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def processes() -> set[str]:
    return {pid for pid in os.listdir("/proc") if pid.isdigit() and f"\nPPid:\t{os.getpid()}\n" in _status(pid)}


def _status(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_ctrl_c_leaves_nothing_behind(made: Path, look: Any) -> None:
    for i in range(4):
        write(made / "train" / f"u{i}.h5", values(500 + i), compression="gzip", chunks=(1, *SHAPE))
    index(made / "train")
    before, running = everything(made), processes()
    with pytest.raises(KeyboardInterrupt):
        check(made, Options(seconds=0), progress=Stop())
    outcome = look(made)
    with pytest.raises(KeyboardInterrupt):
        repair(made, outcome, progress=Stop())
    assert processes() == running and everything(made).keys() == before.keys()
    assert {f.code for f in look(made).findings} <= {"compressed"}  # those that were done are whole and in the index


def test_ctrl_c_does_not_wait_for_a_disk_that_hangs(made: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(made / "train" / "u9.h5")
    monkeypatch.setattr(examination.stat, "S_ISREG", lambda _: True)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        check(made, Options(seconds=0, patience=30), progress=Stop(after=12))
    assert time.monotonic() - began < 15


# ---- repair


def keeps(folder: Path, look: Any, **options: Any) -> list[str]:
    return repair(folder, look(folder, **options))


def odd_file(path: Path) -> dict[str, Any]:
    """One of everything, in the layouts that are to go."""
    rng = np.random.default_rng(8)
    with h5py.File(path, "w", track_order=True) as file:
        nan = np.frombuffer(np.uint32([0x7FC01234, 0xFF800001]).tobytes() * 30, np.float32).reshape(3, 20)
        how = {"compression": "gzip", "shuffle": True}
        file.create_dataset("zeta", data=rng.integers(0, 99, (3, 40, 40)).astype(">i2"), chunks=(2, 10, 10), fillvalue=7, **how)
        file.create_dataset("nan", data=nan, chunks=(1, 20), maxshape=(None, 20))
        file.create_dataset("partly", (3, 50), "f4", chunks=(1, 50), fillvalue=2.5)[1] = 1
        file.create_dataset("group/names", data=np.array(["x", "yé", ""], object), dtype=h5py.string_dtype(), chunks=(2,), **how)
        file.create_dataset("group/fixed", data=np.array([b"ab", b"c", b""], "S5"), chunks=(3,))
        file.create_dataset("group/pairs", data=np.array([(1, 2.5)] * 3, [("a", "i4"), ("b", "<f8")]), chunks=(3,), **how)
        file.create_dataset("kind", data=[0, 1, 2], dtype=h5py.enum_dtype({"no": 0, "yes": 1, "maybe": 2}), chunks=(3,))
        lists = file.create_dataset("lists", (3,), h5py.vlen_dtype(np.int32))
        for i in range(3):
            lists[i] = np.arange(i + 1)
        file["one"], file["none"], file["alpha"] = 3.5, h5py.Empty("f4"), np.arange(3)
        file["type"] = np.dtype("i4,f8")
        file["hard"], file["group/up"] = file["zeta"], file["/"]
        file["soft"], file["away"] = h5py.SoftLink("/group/names"), h5py.ExternalLink("other.h5", "/x")
        for item in (file, file["zeta"], file["group"], file["type"]):
            item.attrs["text"], item.attrs["bytes"], item.attrs["list"] = "héllo", np.bytes_("abc"), ["a", "bb"]
            item.attrs["big"], item.attrs["none"], item.attrs["flag"] = np.arange(4, dtype=">i2"), h5py.Empty("i4"), True
            item.attrs["pair"], item.attrs["grid"] = np.array((1, 2.0), "i4,f8"), np.eye(3)
    return {}


def contents(path: Path) -> dict[str, Any]:
    """All of a file that people can see."""
    found: dict[str, Any] = {}

    def note(name: str, item: Any) -> None:
        found[f"{name}@"] = {key: (item.attrs.get_id(key).dtype, _plain(item.attrs[key])) for key in item.attrs}
        if isinstance(item, h5py.Dataset):
            raw = None if item.shape is None else item[()]
            found[name] = (
                item.shape,
                item.dtype,
                h5py.check_enum_dtype(item.dtype),
                _plain(raw),
                str(item.fillvalue if item.shape else ""),
            )
        elif isinstance(item, h5py.Group):
            found[name] = [(key, repr(item.get(key, getlink=True)).split(" at ")[0], _link(item, key)) for key in item]
        else:
            found[name] = item.dtype

    with h5py.File(path) as file:
        note("/", file)
        file.visititems(note)
        assert file["hard"] == file["zeta"] and file["group/up"] == file["/"]
    return found


def _link(group: h5py.Group, key: str) -> Any:
    link = group.get(key, getlink=True)
    return getattr(link, "filename", None), getattr(link, "path", None)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return value.dtype, value.tobytes()
    if isinstance(value, np.ndarray):
        return [_plain(v) for v in value]
    return repr(value)


def test_repair_keeps_all_but_the_layout(tmp_path: Path, look: Any) -> None:
    path = tmp_path / "odd.h5"
    odd_file(path)
    path.chmod(0o640)
    index(tmp_path)
    before = contents(path)
    outcome = look(tmp_path)
    assert {f.dataset for f in outcome.findings if f.repairable and f.code == "compressed"} == {"zeta", "group/pairs"}
    done = repair(tmp_path, outcome)
    assert f"{path}: rewritten in one piece, aligned:" in done[0] and done[1] == f"{tmp_path / 'index.json'}: renewed"
    assert contents(path) == before and path.stat().st_mode & 0o777 == 0o640
    with h5py.File(path) as file:
        assert file["zeta"].id.get_offset() and not file["zeta"].chunks and not file["group/names"].chunks
        assert list(file)[:3] == ["zeta", "nan", "partly"]  # the order in which they were made
    after = look(tmp_path)
    assert {f.code for f in after.findings} <= {"nan", "layout", "constant", "rows"}
    assert {f.code for f in after.findings if f.repairable} == set() and after.splits[0].verified == 1
    assert everything(tmp_path).keys() == {"odd.h5", "index.json"}


def test_repair_of_a_set_is_clean_aligned_and_done_once(made: Path, look: Any) -> None:
    data = values(500)
    write(made / "train" / "u0.h5", data, compression="gzip", shuffle=True, chunks=(1, 8, 8, 8, 4))
    with h5py.File(made / "train" / "u1.h5", "w", userblock_size=0) as file:
        for name, array in values(501).items():
            file[name] = array  # on byte 2048
    (made / "train" / ".records").mkdir()
    index(made / "train")
    entries = json.loads((made / "train" / "index.json").read_text())["files"]
    record = made / "train" / ".records" / "u0.h5.json"
    record.write_text(json.dumps({**entries[0], "sums": {"cells": 5}}))
    (made / "train" / ".u7.h5.partial").write_bytes(b"x")
    os.utime(made / "train" / ".u7.h5.partial", (0, 0))
    outcome = look(made)
    assert {f.code for f in outcome.findings} == {"compressed", "unaligned", "leftover"}
    done = repair(made, outcome)
    assert sorted(line.partition(": ")[2].partition(":")[0] for line in done) == [
        "removed", "renewed", "renewed", "rewritten in one piece, aligned", "rewritten in one piece, aligned",
    ]  # fmt: skip
    assert look(made).findings == ()
    with h5py.File(made / "train" / "u0.h5") as file:
        assert file["counts"].id.get_offset() % 4096 == 0 and np.array_equal(file["counts"], data["counts"])
        assert dict(file.attrs) == {"made by": "a test"}
    about = json.loads((made / "train" / "index.json").read_text())
    assert about["units"] == ["a", "b"] and about["files"][2:] == entries[2:]
    renewed = json.loads(record.read_text())
    assert renewed == {**about["files"][0], "sums": {"cells": 5}} and renewed["sha256"] == sha256(made / "train" / "u0.h5")
    before = everything(made)
    assert keeps(made, look) == [] and everything(made) == before


def test_repair_refuses_corruption_until_it_is_accepted(made: Path, look: Any) -> None:
    path = made / "train" / "u0.h5"
    write(path, values(500), compression="gzip", chunks=(1, *SHAPE))
    index(made / "train")
    path.write_bytes(path.read_bytes().replace(b"a test", b"b test"))  # as long, and whole for HDF5
    before = everything(made)
    outcome = look(made)
    assert {f.code for f in outcome.findings} == {"bit-flip", "compressed"}
    (line,) = repair(made, outcome)
    assert line.startswith(f"{path}: refused: its SHA-256 is not that of the manifest") and everything(made) == before
    with pytest.raises(DataError, match=r"--accept u77.h5: .* has no such file"):
        repair(made, outcome, accept=["u77.h5"])
    assert any("rewritten" in line for line in repair(made, outcome, accept=["train/u0.h5"]))
    assert look(made).findings == ()


@pytest.mark.parametrize("accept", ["u0.h5", "all"])
def test_accepted_files_enter_the_index_as_they_are(made: Path, look: Any, accept: str) -> None:
    path = made / "train" / "u0.h5"
    change(path, "counts", (0, 0, 0, 0, 0), 5, reindex=False)
    (made / "train" / "u3.h5").unlink()
    assert keeps(made, look) == []
    done = repair(made, look(made), accept=[accept, "u3.h5"])
    assert f"{made / 'train' / 'u3.h5'}: is missing, and dropped from index.json" in done
    assert look(made).findings == () and look(made).splits[0].samples == 12


def test_a_file_that_hdf5_cannot_read_is_never_accepted(made: Path, look: Any) -> None:
    flip(made / "train" / "u0.h5", 0, 0)
    before = everything(made)
    (line,) = repair(made, look(made), accept=["all"])
    assert "refused: not entered into index.json" in line and everything(made) == before


def test_the_index_is_made_from_the_files(made: Path, look: Any) -> None:
    before = json.loads((made / "train" / "index.json").read_text())
    (made / "train" / "index.json").unlink()
    write(made / "validation" / "extra.h5", values(77))
    done = keeps(made, look)
    assert done == [f"{made / 'train' / 'index.json'}: made from 4 files", f"{made / 'validation' / 'index.json'}: renewed"]
    assert json.loads((made / "train" / "index.json").read_text())["files"] == before["files"]
    about = json.loads((made / "validation" / "index.json").read_text())
    assert [entry["name"] for entry in about["files"]] == ["u0.h5", "u1.h5", "extra.h5"] and about["units"] == ["a", "b"]
    assert look(made).findings == ()
    (made / "train" / "index.json").write_text("{ damaged")
    assert len(keeps(made, look)) == 2
    assert json.loads((made / "train" / "index.json").read_text())["files"] == before["files"]
    assert (made / "train" / "index.json.damaged").read_text() == "{ damaged" and look(made).findings == ()


def test_a_missing_index_and_packed_files_are_repaired_at_once(made: Path, look: Any) -> None:
    for i in range(4):
        write(made / "train" / f"u{i}.h5", values(500 + i), compression="gzip", chunks=(1, *SHAPE))
    (made / "train" / "index.json").unlink()
    assert sum("rewritten" in line for line in keeps(made, look)) == 4
    assert look(made).findings == () and look(made).splits[0].verified == 4


def test_a_record_is_not_overruled_by_a_new_index(made: Path, look: Any) -> None:
    test_records_stand_in_for_a_missing_index(made, look)
    done = keeps(made, look)
    assert "refused: not entered into index.json: its SHA-256 is not that of the manifest" in done[0]
    assert told(look(made)) == [("error", "bit-flip", "train/u0.h5", None, None)]


def test_a_record_without_a_digest_tells_at_least_the_size(made: Path, look: Any) -> None:
    (made / "train" / "index.json").unlink()
    (made / "train" / ".records").mkdir()
    (made / "train" / ".records" / "u0.h5.json").write_text('{"bytes": 5}')
    assert "refused: not entered into index.json: has " in keeps(made, look)[0]
    assert told(look(made)) == [("error", "overlong", "train/u0.h5", None, None)]


def test_wrong_rows_in_the_index_are_corrected(made: Path, look: Any) -> None:
    about = json.loads((made / "train" / "index.json").read_text())
    about["files"][2]["rows"] = 99
    (made / "train" / "index.json").write_text(json.dumps(about))
    assert keeps(made, look) == [f"{made / 'train' / 'index.json'}: renewed"] and look(made).findings == ()


def test_a_stop_between_file_and_index_is_no_corruption(made: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write(made / "train" / "u0.h5", values(500), compression="gzip", chunks=(1, *SHAPE))
    index(made / "train")
    with monkeypatch.context() as patch:
        patch.setattr(rewriting._Repair, "_write_index", lambda *_: None)
        keeps(made, look)
    outcome = look(made)
    assert told(outcome) == [("warning", "leftover", f"train/{findings.JOURNAL}", None, None)] and outcome.splits[0].verified == 4
    assert repair(made, outcome) == [f"{made / 'train' / 'index.json'}: renewed"]
    assert look(made).findings == () and not (made / "train" / findings.JOURNAL).exists()


def test_what_repair_leaves_alone(made: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(made / "train" / "u0.h5", "w") as file:
        for name, array in values(500).items():
            file.create_dataset(name, data=array, compression="gzip")
        file.attrs["points at"] = file["counts"].ref
    (made / "validation" / "u0.h5").replace(made / "elsewhere.h5")
    write(made / "elsewhere.h5", values(3), compression="gzip")
    (made / "validation" / "u0.h5").symlink_to(made / "elsewhere.h5")
    (made / "elsewhere.h5").rename(made.parent / "elsewhere.h5")
    (made / "validation" / "u0.h5").unlink()
    (made / "validation" / "u0.h5").symlink_to(made.parent / "elsewhere.h5")
    for split in ("train", "validation"):
        index(made / split)
    (made / "train" / ".new.partial").write_bytes(b"x")
    before = everything(made)
    outcome = look(made)
    assert [f.path.name for f in outcome.findings if f.code == "compressed" and not f.repairable] == ["u0.h5"]
    done = "\n".join(repair(made, outcome))
    assert "holds references, which would point to nothing in a new file" in done and "perhaps by a process at work" in done
    assert everything(made) == before

    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"to rewrite 1 files needs .* but 1 kB are free; make room"):
        repair(made, outcome)
    assert everything(made) == before


def test_a_copy_that_differs_never_takes_the_place_of_its_source(made: Path, look: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is the one of the child; here it runs in this process, on a copy that was spoiled."""
    write(made / "train" / "u0.h5", values(500), compression="gzip")
    copy = made.parent / "copy.h5"
    list(child._rewrite(str(made / "train" / "u0.h5"), str(copy)))
    for spoil, text in (
        (lambda file: file["counts"].__setitem__((0, 0, 0, 0, 0), -1), "other values than those of the source"),
        (lambda file: file.attrs.__setitem__("made by", "b test"), "attribute b'made by' differs"),
        (lambda file: file.attrs.__setitem__("more", 1), "other attributes than those of the source"),
        (lambda file: file.__delitem__("target"), "other members than those of the source"),
    ):
        broken = made.parent / "broken.h5"
        shutil.copy(copy, broken)
        with h5py.File(broken, "a") as file:
            spoil(file)
        with h5py.File(made / "train" / "u0.h5") as old, h5py.File(broken) as new, pytest.raises(DataError, match=text):
            list(child._compare(old["/"], new["/"], set()))
