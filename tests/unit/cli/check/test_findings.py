"""Each kind of finding: a fault is reported with its code, file, dataset and row, without other findings."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.cli.check import Options, disk
from hpcai.cli.check.findings import KINDS, divide_into_batches
from hpcai.data.direct import Reader
from hpcai.errors import ConfigError
from tests.unit.cli.check.datasets import (
    ALIGNED,
    PACKED,
    ROWS,
    SHAPE,
    arrays,
    check,
    delete_table,
    edit,
    edit_entries,
    flip,
    index,
    put,
    rewrite,
    write,
)


@dataclass
class Fault:
    kind: str
    spoil: Callable[[Path, pytest.MonkeyPatch], Any]
    path: str
    dataset: str | None = None
    row: int | None = None
    text: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    others: frozenset[str] = frozenset()  # codes of further findings
    repairable: bool = False


def nothing(root: Path, patch: pytest.MonkeyPatch) -> None:
    pass


def write_half(root: Path, patch: pytest.MonkeyPatch) -> None:
    with h5py.File(root / "train" / "u0.h5", "w", **ALIGNED) as file:
        file["target"] = arrays(500)["target"]
        file.create_dataset("counts", (ROWS, *SHAPE), np.int16, **PACKED)[:3] = arrays(500)["counts"][:3]
    index(root / "train")


def compact(file: h5py.File) -> None:
    data, plist = file["target"][:], h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    del file["target"]
    plist.set_layout(h5py.h5d.COMPACT)
    h5py.h5d.create(file.id, b"target", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple(data.shape), plist)
    file["target"][...] = data


def external(file: h5py.File, values: int = ROWS * 3) -> None:
    path = Path(file.filename).with_suffix(".bin")
    path.write_bytes(bytes(4 * values))
    del file["target"]
    file.create_dataset("target", (ROWS, 3), np.float32, external=[(str(path), 0, h5py.h5f.UNLIMITED)])


def write_unaligned(root: Path, patch: pytest.MonkeyPatch) -> None:
    with h5py.File(root / "train" / "u0.h5", "w") as file:
        for name, array in arrays(500).items():
            file[name] = array
    index(root / "train")


def mount_as(kind: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def mount(root: Path, patch: pytest.MonkeyPatch) -> None:
        (root.parent / "mounts").write_text(f"x {root} {kind} rw\n")
        patch.setattr(disk, "MOUNTS", root.parent / "mounts")

    return mount


def slow_down(root: Path, patch: pytest.MonkeyPatch) -> None:
    def read(descriptor: int, buffers: Any, offset: int) -> int:
        time.sleep(0.02)
        return os.preadv(descriptor, buffers, offset)

    patch.setattr(disk, "Reader", partial(Reader, preadv=read))


def on(name: str, function: Callable[[Path], Any]) -> Callable[[Path, pytest.MonkeyPatch], Any]:
    return lambda root, patch: function(root / name)


def inside(name: str, function: Callable[[h5py.File], Any], **fields: Any) -> Callable[[Path, pytest.MonkeyPatch], Any]:
    return lambda root, patch: edit(root / name, function, **fields)


def fields(**expected: Any) -> Callable[[Path, pytest.MonkeyPatch], Any]:
    return lambda root, patch: index(root / "train", fields=expected)


def other(split: str, shape: tuple[int, ...] = SHAPE, **data: np.ndarray) -> Callable[[Path, pytest.MonkeyPatch], Any]:
    """Replace the datasets in all files of a split."""

    def replace(root: Path, patch: pytest.MonkeyPatch) -> None:
        for i, path in enumerate(sorted((root / split).glob("*.h5"))):
            write(path, {**arrays(900 + i, shape=shape), **data})
        index(root / split)

    return replace


SAME = arrays(500)["counts"]  # of train/u0.h5
QUICK = {"quick": True}
FAULTS = [
    Fault("index/none", on("train/index.json", Path.unlink), "train/index.json", text="is missing, so", repairable=True),
    Fault("index/lost", on("train/index.json", lambda p: p.write_text("{")), "train/index.json", text="JSON", repairable=True),
    Fault("index", on("train", lambda p: edit_entries(p, lambda e: e.append({"name": "../u"}))), "train/index.json",
          text="files.4.name: String should match"),
    Fault("index/table", on("train", delete_table), "train/index.json", text="jobs refuse to start; --index writes it again",
          repairable=True),
    Fault("stranger", on("train/x.h5", lambda p: write(p, arrays(7))), "train/x.h5", text="a loader may leave it out"),
    Fault("missing", on("train/u2.h5", Path.unlink), "train/u2.h5", text="copy it again from its source, or remove its entry"),
    Fault("missing", on("train", lambda p: edit_entries(p, lambda e: e.append({"name": "x.rec"}))), "train/x.rec", text="is in"),
    Fault("leftover", on("train/.u2.h5.partial", lambda p: p.write_bytes(b"x")), "train/.u2.h5.partial", text="delete it when"),
    Fault("empty", on("test", Path.mkdir), "test", text="holds neither *.h5 nor *.npy; make it again", others=frozenset({"index"})),
    Fault("empty", lambda root, patch: [shutil.rmtree(root / name) for name in ("train", "validation")], ".", text="nor a folder"),
    Fault("empty", on("train/u2.h5", lambda p: put(p, arrays(1, rows=0))), "train/u2.h5", text="has 0 rows; make it again"),
    Fault("truncated", on("train/u2.h5", lambda p: os.truncate(p, 5000)), "train/u2.h5", text="has 5,000 bytes, the index says"),
    Fault("overlong", on("train/u2.h5", lambda p: os.truncate(p, 1 << 20)), "train/u2.h5", text="has 1,048,576 bytes, the"),
    Fault("bit-flip", on("train/u2.h5", lambda p: flip(p, 9000, 3)), "train/u2.h5", text="copy it from its source, or if it"),
    Fault("table", on("train/u2.h5", rewrite), "train/u2.h5", text="compare it with its source, or --index"),
    Fault("unreadable", on("train/u2.h5", lambda p: [p.write_text("no HDF5"), index(p.parent)]), "train/u2.h5", text="cannot be"),
    Fault("rows", on("train/u1.h5", lambda p: put(p, {**arrays(1), "target": np.ones((5, 3), "f4")})), "train/u1.h5", "target",
          text="has 5 rows, expected 4 as other datasets have it"),
    Fault("rows", on("train", lambda p: edit_entries(p, lambda e: e[1].update(rows=3))), "train/u1.h5",
          text="has 4 rows, expected 3 as index.json has it"),
    Fault("unwritten", write_half, "train/u0.h5", "counts", text="1 of 4 chunks of", others=frozenset({"compressed"})),
    Fault("compressed", on("train/u0.h5", lambda p: put(p, arrays(500), **PACKED)), "train/u0.h5", "counts",
          text="each read decompresses a whole chunk of (1, 16, 16, 16, 4); h5repack -l CONTI"),
    Fault("layout", inside("train/u0.h5", compact), "train/u0.h5", "target", text="contiguous values in the file"),
    Fault("layout/elsewhere", inside("train/u0.h5", external), "train/u0.h5", "target", text="are not checked; direct reads need"),
    Fault("unreadable", inside("train/u0.h5", lambda file: external(file, 9)), "train/u0.h5", "target",
          text="u0.bin, which has 36 bytes, expected 48; copy or write it again"),
    Fault("layout/objects", inside("train/u0.h5", lambda file: file.update(text=["a"] * 4)), "train/u0.h5", "text",
          text="its values are not checked", others=frozenset({"schema"})),
    Fault("chunked", on("train/u0.h5", lambda p: put(p, arrays(500), chunks=(1, 8, 8, 8, 4))), "train/u0.h5", "counts",
          text="so that a row is 8 reads instead of one"),
    Fault("unaligned", write_unaligned, "train/u0.h5", "counts", text="begins at byte 2,048, not at a page boundary"),
    Fault("nan", inside("train/u1.h5", lambda file: file["target"].__setitem__((2, 1), -np.inf)), "train/u1.h5", "target", 2,
          text="row 2 of 4 holds NaN or infinity"),
    Fault("range", inside("train/u3.h5", lambda file: file["counts"].__setitem__((2, 0, 0, 0, 1), -7)), "train/u3.h5", "counts", 2,
          text="row 2 of 4 holds values such as -7, expected 0 to any", options={"ranges": {"counts": (0, None)}}),
    Fault("constant", inside("train/u0.h5", lambda file: [file[name].__setitem__(1, 0) for name in ("counts", "target")]),
          "train/u0.h5", "counts", 1, text="row 1 of 4 holds nothing but 0, expected values that differ"),
    Fault("duplicate", inside("train/u3.h5", lambda file: file["counts"].__setitem__(slice(2, 4), SAME[:2])), "train/u3.h5",
          "counts", 2, text="row 2 is the same sample as train/u0.h5 row 0, and 1 more rows of these two;"),
    Fault("leak", inside("validation/u1.h5", lambda file: file["counts"].__setitem__(0, SAME[3])), "validation/u1.h5", "counts", 0,
          text="row 0 is the same sample as train/u0.h5 row 3;"),
    Fault("schema", on("train/u0.h5", lambda p: put(p, {"counts": SAME})), "train/u0.h5", "target",
          text="is not in this file; expected <f4 rows of (3), as 3 of 4 files have it"),
    Fault("schema/extra", on("train/u0.h5", lambda p: put(p, {**arrays(500), "more": np.ones((4, 3))})), "train/u0.h5", "more",
          text="is in this file and not in 3 of 4 files"),
    Fault("schema/index", fields(weights={}), "train/index.json", "weights", text="names dataset 'weights'", options=QUICK),
    Fault("schema/splits", other("validation", label=np.ones((4, 3))), "validation", "label", text="expected missing as in train"),
    Fault("schema/splits", other("validation", (9, 9, 9, 4)), "validation", "counts", text="is <i2 (9, 9, 9, 4) here, expected"),
    Fault("dtype", on("train/u0.h5", lambda p: put(p, {**arrays(500), "target": np.ones((4, 3))})), "train/u0.h5", "target",
          text="is <f8, expected <f4, as 3 of 4 files have it"),
    Fault("dtype", fields(target={"dtype": "float64"}), "train/u0.h5", "target", text="expected <f8, as index.json has it"),
    Fault("shape", on("train/u0.h5", lambda p: put(p, arrays(500, shape=(9, 9, 9, 4)))), "train/u0.h5", "counts",
          text="has rows of (9, 9, 9, 4), expected (16, 16, 16, 4)"),
    Fault("shape", fields(target={"shape": [4]}), "train/u0.h5", "target", text="has rows of (3), expected (4), as index.json has"),
    Fault("batch", nothing, "train", text="by 3 processes; expected a multiple: 3 or 6", options={**QUICK, "world": 3, "batch": 4}),
    Fault("few", nothing, "train", text="16 samples are less than one batch of 17", options={**QUICK, "batch": 17}),
    Fault("remainder", nothing, "train", text="16 samples in batches of 5: 'drop' leaves 1 out of each epoch, 'pad' repeats 4",
          options={**QUICK, "batch": 5}),
    Fault("inodes", lambda root, p: p.setattr(disk, "MANY_FILES", 5), ".", text="6 files of 139 kB on average", options=QUICK),
    Fault("network", mount_as("nfs4"), ".", text="is on nfs4, one server for all nodes"),
    Fault("rate", slow_down, ".", text="need 400.0 samples/s", options={**QUICK, "batch": 4, "step_time": 0.01, "seconds": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.text[:20]}")
def test_a_fault_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    fault.spoil(root, monkeypatch)
    severity, code = KINDS[fault.kind][0], fault.kind.partition("/")[0]
    outcome = check(root, **fault.options)
    first = next(finding for finding in outcome.findings if (finding.severity, finding.code) == (severity, code))
    location = (first.path.relative_to(root).as_posix(), first.dataset, first.row, first.repairable)
    assert location == (fault.path, fault.dataset, fault.row, fault.repairable)
    assert fault.text in first.text and {finding.code for finding in outcome.findings} == {code} | fault.others


def test_every_kind_of_finding_has_a_fault() -> None:
    assert list(dict.fromkeys(fault.kind for fault in FAULTS)) == list(KINDS)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 5000), st.integers(1, 5000))
def test_divide_into_batches_counts_every_sample(samples: int, batch: int, world: int) -> None:
    batches, problems = divide_into_batches(Path(), samples, batch, world)
    dropped, repeated = batches["left_out"], batches["repeated"]
    assert batches["batches"] * batch + dropped == samples == batches["padded_batches"] * batch - repeated
    assert 0 <= dropped < batch and 0 <= repeated < batch
    too_few, rest = samples < max(batch, world), dropped > 0
    codes = ["batch"] * (batch % world > 0) + (["few"] if too_few else ["remainder"] * rest)
    assert [problem.code for problem in problems] == codes


def test_all_invalid_options_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Options(world=0, batch=-1, step_time=0, seconds=-1)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == ["world", "batch", "step_time", "seconds"]
    with pytest.raises(ConfigError, match="step-time needs the samples of a step"):
        Options(step_time=1.0)
