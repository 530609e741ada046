"""A small data set, and functions that damage it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcai.cli.check.examination import check_dataset
from hpcai.cli.check.findings import Finding, Options, Outcome
from hpcai.cli.check.indexing import write_indexes
from hpcai.data.index import write_index

ALIGNED = {"alignment_threshold": 1 << 16, "alignment_interval": 4096}
SHAPE = (16, 16, 16, 4)  # 32 KiB of int16
ROWS = 4
PACKED = {"compression": "gzip", "chunks": (1, *SHAPE)}


def arrays(seed: int, rows: int = ROWS, shape: tuple[int, ...] = SHAPE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 1000, (rows, *shape), dtype=np.int16)
    return {"counts": counts, "target": rng.uniform(-1, 1, (rows, 3)).astype(np.float32)}


def write(path: Path, data: dict[str, np.ndarray], **kwargs: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w", **ALIGNED) as file:
        for name, array in data.items():
            file.create_dataset(name, data=array, **(kwargs if array.ndim > 2 else {}))
        file.attrs["creator"] = "a test"


def index(folder: Path, **fields: Any) -> None:
    files = []
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".h5", ".npy")):
        rows, data = 1, path.read_bytes()
        if path.suffix == ".h5" and h5py.is_hdf5(path):
            with h5py.File(path) as file:
                rows = next((item.shape[0] for item in file.values() if getattr(item, "shape", ())), 1)
        files.append({"name": path.name, "rows": rows, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    (folder / "index.json").write_text(json.dumps({"format": 1, "files": files, "units": ["a", "b"], **fields}))


def entries(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "index.json").read_text())["files"]


def edit_entries(folder: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    document = json.loads((folder / "index.json").read_text())
    edit(document["files"])
    (folder / "index.json").write_text(json.dumps(document))


def put(path: Path, data: dict[str, Any], **kwargs: Any) -> None:
    write(path, data, **kwargs)
    index(path.parent)


def edit(path: Path, function: Callable[[h5py.File], Any], **fields: Any) -> None:
    with h5py.File(path, "a") as file:
        function(file)
    index(path.parent, **fields)


def flip(path: Path, byte: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def summarize(outcome: Outcome) -> list[tuple[str, str, str, str | None, int | None]]:
    root = outcome.directory
    return [(f.severity, f.code, f.path.relative_to(root).as_posix(), f.dataset, f.row) for f in outcome.findings]


def single_finding(outcome: Outcome, code: str) -> Finding:
    matching = [finding for finding in outcome.findings if finding.code == code]
    assert len(matching) == 1, outcome.findings
    return matching[0]


def file_contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def check(folder: Path, **options: Any) -> Outcome:
    return check_dataset(folder, Options(**{"seconds": 0, "threads": 2, **options}))


def write_all_indexes(folder: Path) -> list[str]:
    return write_indexes(folder, check(folder))


def child_pids(process: int | str = "self") -> set[str]:
    return {pid for file in Path(f"/proc/{process}/task").glob("*/children") for pid in file.read_text().split()}


def tables_in(folder: Path) -> list[str]:
    """Return the file names of the tables of a folder; at most one is expected."""
    return [path.name for path in folder.glob("index-*")]


def delete_table(folder: Path) -> None:
    write_index(folder, json.loads((folder / "index.json").read_text()))
    (name,) = tables_in(folder)
    (folder / name).unlink()


def rewrite(path: Path) -> None:
    """Replace a file by another of the size in the table, and update the index."""
    folder, size, data = path.parent, path.stat().st_size, arrays(77)
    write_index(folder, json.loads((folder / "index.json").read_text()))
    table = json.loads((folder / "index.json").read_text())["table"]
    write(path, {name: data[name] for name in reversed(data)})
    with path.open("r+b") as file:
        file.truncate(size)
    index(folder, table=table)
