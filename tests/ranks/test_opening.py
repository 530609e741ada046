"""One rank reads the metadata of a split for all; another opens no file before it reads a sample of it.

The folder has a relative name, and the second rank's working directory has no such folder, or one with some of the files: it would
not find any other file.
"""

import re
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
import pytest

from hpcai.data import splits
from hpcai.data.index import write_index
from hpcai.data.splits import open_split
from hpcai.dist.mesh import Mesh
from hpcai.errors import DataError
from hpcai.settings import LoaderConfig
from tests.ranks.launch import on_ranks

FILES, ROWS = 200, 2
FIELDS: Any = {
    "cube": ("int16", (None, 16, 16)), "vector": ("float32", (3,)), "atoms": ("int32", ()), "flat": ("int16", ("atoms", 400)),
}  # fmt: skip
KINDS = ("table", "index", "none")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the split "set" to three folders: with a table of its files, with an index, and with neither."""
    root = tmp_path_factory.mktemp("home")
    (root / "table/set").mkdir(parents=True)
    entries = []
    for i in range(FILES):
        path = root / f"table/set/u{i:03d}.h5"
        with h5py.File(path, "w") as file:
            file["cube"] = np.full((ROWS, 4 + i % 3, 16, 16), i, "i2")
            file["vector"], file["atoms"] = np.full((ROWS, 3), i, "f4"), np.array([i % 2, 2], "i4")
            file["flat"] = np.full((i % 2 + 2, 400), i, "i2")
        entries.append({"name": path.name, "rows": ROWS, "bytes": path.stat().st_size})
    for kind in ("index", "none"):
        shutil.copytree(root / "table", root / kind)
    for kind in ("table", "index"):
        write_index(root / kind / "set", {"files": entries, "units": "a"}, table=kind == "table")
    return root


def open_and_read(mesh: Mesh, home: Path, kind: str, own: Path) -> tuple[Any, ...]:
    """Return metadata, and samples of two files, the only ones in the second rank's folder; it creates them after the opening."""
    opened = []
    original = h5py.File.__init__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        opened.append(Path(args[0]).name)
        original(self, *args, **kwargs)

    with patch.object(h5py.File, "__init__", recorded), chdir(own if mesh.rank else home / kind):
        rows = open_split(Path("set"), FIELDS, "make it so", LoaderConfig(reader="buffered"), mesh)
        if mesh.rank:
            (own / "set").mkdir()
            for name in ("u007.h5", "u150.h5"):
                shutil.copy(home / kind / "set" / name, own / "set" / name)
        info: Any = rows.column("atoms").tolist(), [rows.shape(i, "cube")[0] for i in (0, 15, 399)] if kind == "table" else None
        read = [rows.read(index) for index in (15, 300)]
        values = [{name: (value.shape, set(value.reshape(-1).tolist())) for name, value in row.items()} for row in read]
        try:
            rows.read(20)
            error = ""
        except DataError as problem:
            error = str(problem)
        return len(rows), rows.identity, rows.metadata.get("units"), rows.shapes, info, values, error, opened


def open_with_messages(mesh: Mesh, home: Path, kind: str, own: Path) -> tuple[Any, ...]:
    with chdir(own if mesh.rank else home / kind):
        messages: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(splits.logger, "info", lambda text, *args: messages.append(text % args))
            rows = open_split(Path("set"), FIELDS, "make it so", LoaderConfig(reader="buffered"), mesh)
        return len(rows), rows.identity, rows.metadata.get("units"), rows.shapes, messages


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"depth": 2}], ids=str)
def test_the_second_rank_opens_only_files_that_it_reads(home: Path, tmp_path: Path, axes: dict[str, int]) -> None:
    first, second = on_ranks(axes, open_and_read, home, "table", tmp_path)
    assert first[:6] == second[:6] and first[0] == FILES * ROWS and first[2] == "a" and first[3]["cube"] == (4, 16, 16)
    assert first[4] == ([n for i in range(FILES) for n in (i % 2, 2)], [4, 5, 5])
    assert first[5] == [
        {"cube": ((5, 16, 16), {7}), "vector": ((3,), {7.0}), "atoms": ((), {2}), "flat": ((2, 400), {7})},
        {"cube": ((4, 16, 16), {150}), "vector": ((3,), {150.0}), "atoms": ((), {0}), "flat": ((0, 400), set())},
    ]
    assert first[6] == "" and "u010.h5: cannot be opened: no such file" in second[6] and second[6].endswith("2 rows; make it so")
    assert first[7] == second[7] == [], "HDF5 opens a file that is in the table"


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_table_the_second_rank_opens_a_split_with_metadata_of_the_first(home: Path, tmp_path: Path, kind: str) -> None:
    first, second = on_ranks({"replicate": 2}, open_with_messages, home, kind, tmp_path)
    assert first == second and first[0] == FILES * ROWS and first[2] == (None if kind == "none" else "a")
    advice = "set: no table of its 200 files, so each rank opens the files that it needs; hpcai data check set --index writes one"
    assert first[4] == ([] if kind == "table" else [advice])
    assert first[1] == on_ranks({}, open_with_messages, home, "table", tmp_path)[0][1]


def test_ranks_that_only_evaluate_read_for_themselves(home: Path, tmp_path: Path) -> None:
    identities = on_ranks({"replicate": 2, "evaluate": 2}, split_identity, home, tmp_path)
    assert len(set(identities)) == 1


def split_identity(mesh: Mesh, home: Path, own: Path) -> str:
    with chdir(home / "table" if mesh.peers.rank == 0 else own):
        return open_split(Path("set"), FIELDS, "", LoaderConfig(reader="buffered"), mesh).identity


def open_error(mesh: Mesh, folder: Path, fields: Any) -> tuple[str, str]:
    try:
        with chdir(folder.parent if mesh.rank == 0 else "/"):
            open_split(Path(folder.name), fields, "make it so", LoaderConfig(reader="buffered"), mesh)
    except Exception as problem:
        return type(problem).__name__, str(problem)
    return "", ""


@pytest.mark.parametrize(("damage", "fields", "text"), [
    (lambda folder: (folder / "u199.h5").unlink(), {}, r"set/u199.h5: is missing, index.json has [\d,]+ bytes and 2 rows; "),
    (lambda folder: (folder / "index.json").write_text("{"), {}, "set/index.json: cannot be read as an index"),
    (lambda folder: next(folder.glob("index-*")).write_bytes(b"x"), {}, "no table of the files beside it"),
    (shutil.rmtree, {}, "set: no such folder; make it so"),
    (lambda folder: None, {"cube": ("int16", (5, 16, 16))}, r"u000.h5: dataset 'cube' is \(2, 4, 16, 16\), expected \(rows, 5,"),
])  # fmt: skip
def test_errors_of_the_first_rank_are_raised_on_all(home: Path, tmp_path: Path, damage: Any, fields: Any, text: str) -> None:
    folder = Path(shutil.copytree(home / "table/set", tmp_path / "set"))
    damage(folder)
    first, second = on_ranks({"replicate": 2}, open_error, folder, FIELDS | fields)
    assert first == second and first[0] == "DataError"
    assert re.search(text, first[1])
