"""Each kind of finding: a fault is reported with its code, file, dataset and row, without other findings."""

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.cli.check import disk
from hpcai.cli.check.findings import KINDS, Options, divide_into_batches
from hpcai.data.direct import Reader
from hpcai.errors import ConfigError
from tests.reference_data import load_json
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


def mount_by_network(root: Path, patch: pytest.MonkeyPatch) -> None:
    (root.parent / "mounts").write_text(f"x {root} nfs4 rw\n")
    patch.setattr(disk, "MOUNTS", root.parent / "mounts")


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


def other(root: Path, patch: pytest.MonkeyPatch, shape: tuple[int, ...] = SHAPE, **data: np.ndarray) -> None:
    """Replace the datasets in all files of validation."""
    for i, path in enumerate(sorted((root / "validation").glob("*.h5"))):
        write(path, {**arrays(900 + i, shape=shape), **data})
    index(root / "validation")


SAME = arrays(500)["counts"]  # of train/u0.h5
FAULTS = load_json("data_findings")
SPOIL: dict[str, Callable[[Path, pytest.MonkeyPatch], Any]] = {
    "index/none": on("train/index.json", Path.unlink),
    "index/lost": on("train/index.json", lambda p: p.write_text("{")),
    "index": on("train", lambda p: edit_entries(p, lambda e: e.append({"name": "../u"}))),
    "index/table": on("train", delete_table),
    "stranger": on("train/x.h5", lambda p: write(p, arrays(7))),
    "missing": on("train/u2.h5", Path.unlink),
    "missing, only in the index": on("train", lambda p: edit_entries(p, lambda e: e.append({"name": "x.rec"}))),
    "leftover": on("train/.u2.h5.partial", lambda p: p.write_bytes(b"x")),
    "empty, a split": on("test", Path.mkdir),
    "empty, no split": lambda root, patch: [shutil.rmtree(root / name) for name in ("train", "validation")],
    "empty, a file": on("train/u2.h5", lambda p: put(p, arrays(1, rows=0))),
    "truncated": on("train/u2.h5", lambda p: os.truncate(p, 5000)),
    "overlong": on("train/u2.h5", lambda p: os.truncate(p, 1 << 20)),
    "bit-flip": on("train/u2.h5", lambda p: flip(p, 9000, 3)),
    "table": on("train/u2.h5", rewrite),
    "unreadable": on("train/u2.h5", lambda p: [p.write_text("no HDF5"), index(p.parent)]),
    "rows": on("train/u1.h5", lambda p: put(p, {**arrays(1), "target": np.ones((5, 3), "f4")})),
    "rows, other than the index": on("train", lambda p: edit_entries(p, lambda e: e[1].update(rows=3))),
    "unwritten": write_half,
    "compressed": on("train/u0.h5", lambda p: put(p, arrays(500), **PACKED)),
    "layout": inside("train/u0.h5", compact),
    "layout/elsewhere": inside("train/u0.h5", external),
    "unreadable, external storage": inside("train/u0.h5", lambda file: external(file, 9)),
    "layout/objects": inside("train/u0.h5", lambda file: file.update(text=["a"] * 4)),
    "chunked": on("train/u0.h5", lambda p: put(p, arrays(500), chunks=(1, 8, 8, 8, 4))),
    "unaligned": write_unaligned,
    "nan": inside("train/u1.h5", lambda file: file["target"].__setitem__((2, 1), -np.inf)),
    "range": inside("train/u3.h5", lambda file: file["counts"].__setitem__((2, 0, 0, 0, 1), -7)),
    "constant": inside("train/u0.h5", lambda file: [file[name].__setitem__(1, 0) for name in ("counts", "target")]),
    "duplicate": inside("train/u3.h5", lambda file: file["counts"].__setitem__(slice(2, 4), SAME[:2])),
    "leak": inside("validation/u1.h5", lambda file: file["counts"].__setitem__(0, SAME[3])),
    "schema": on("train/u0.h5", lambda p: put(p, {"counts": SAME})),
    "schema/extra": on("train/u0.h5", lambda p: put(p, {**arrays(500), "more": np.ones((4, 3))})),
    "schema/index": fields(weights={}),
    "schema/splits": partial(other, label=np.ones((4, 3))),
    "schema/splits, shapes": partial(other, shape=(9, 9, 9, 4)),
    "dtype": on("train/u0.h5", lambda p: put(p, {**arrays(500), "target": np.ones((4, 3))})),
    "dtype, other than the index": fields(target={"dtype": "float64"}),
    "shape": on("train/u0.h5", lambda p: put(p, arrays(500, shape=(9, 9, 9, 4)))),
    "shape, other than the index": fields(target={"shape": [4]}),
    "inodes": lambda root, p: p.setattr(disk, "MANY_FILES", 5),
    "network": mount_by_network,
    "rate": slow_down,
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault in SPOIL:  # other faults are those of options
        SPOIL[fault](root, monkeypatch)
    kind, expected = fault.partition(",")[0], FAULTS[fault]
    severity, code = KINDS[kind][0], kind.partition("/")[0]
    outcome = check(root, **expected.get("options", {}))
    first = next(finding for finding in outcome.findings if (finding.severity, finding.code) == (severity, code))
    location = (first.path.relative_to(root).as_posix(), first.dataset, first.row, first.repairable)
    assert location == (expected["path"], expected.get("dataset"), expected.get("row"), expected.get("repairable", False))
    assert expected["text"] in first.text and {finding.code for finding in outcome.findings} == {code, *expected.get("others", ())}


def test_every_kind_of_finding_has_a_fault() -> None:
    assert list(dict.fromkeys(fault.partition(",")[0] for fault in FAULTS)) == list(KINDS) and SPOIL.keys() <= FAULTS.keys()


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
