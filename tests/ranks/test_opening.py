"""One rank reads what is known of a split for all; another touches no file before it reads a sample of it.

The folder has a relative name, and the second rank's working directory holds no such folder, or one with some of the files: what
else it asked the file system for would not be found.
"""

import re
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

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
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The split "set", in a folder for each way to tell of its files."""
    home = tmp_path_factory.mktemp("made")
    (home / "table/set").mkdir(parents=True)
    entries = []
    for i in range(FILES):
        path = home / f"table/set/u{i:03d}.h5"
        with h5py.File(path, "w") as file:
            file["cube"] = np.full((ROWS, 4 + i % 3, 16, 16), i, "i2")
            file["vector"], file["atoms"] = np.full((ROWS, 3), i, "f4"), np.array([i % 2, 2], "i4")
            file["flat"] = np.full((i % 2 + 2, 400), i, "i2")
        entries.append({"name": path.name, "rows": ROWS, "bytes": path.stat().st_size})
    for kind in ("index", "none"):
        shutil.copytree(home / "table", home / kind)
    for kind in ("table", "index"):
        write_index(home / kind / "set", {"files": entries, "units": "a"}, table=kind == "table")
    return home


def opened(mesh: Mesh, home: Path, kind: str, own: Path) -> tuple[Any, ...]:
    """What a rank knows without a file, and the samples of two files that the second rank alone has there."""
    asked = []
    before = h5py.File.__init__

    def noted(self: Any, *args: Any, **words: Any) -> None:
        asked.append(Path(args[0]).name)
        before(self, *args, **words)

    h5py.File.__init__ = noted
    try:
        with chdir(own if mesh.rank else home / kind):
            rows = open_split(Path("set"), FIELDS, "make it so", LoaderConfig(reader="buffered"), mesh)
            if mesh.rank:
                (own / "set").mkdir()
                for name in ("u007.h5", "u150.h5"):
                    shutil.copy(home / kind / "set" / name, own / "set" / name)
            told: Any = rows.column("atoms").tolist(), [rows.shape(i, "cube")[0] for i in (0, 15, 399)] if kind == "table" else None
            read = [rows.read(index) for index in (15, 300)]
            values = [{name: (value.shape, set(value.reshape(-1).tolist())) for name, value in row.items()} for row in read]
            try:
                rows.read(20)
                gone = ""
            except DataError as problem:
                gone = str(problem)
            return len(rows), rows.identity, rows.metadata.get("units"), rows.shapes, told, values, gone, asked
    finally:
        h5py.File.__init__ = before


def without_columns(mesh: Mesh, home: Path, kind: str, own: Path) -> tuple[Any, ...]:
    with chdir(own if mesh.rank else home / kind):
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(splits.logger, "info", lambda text, *words: said.append(text % words))
            rows = open_split(Path("set"), FIELDS, "make it so", LoaderConfig(reader="buffered"), mesh)
        return len(rows), rows.identity, rows.metadata.get("units"), rows.shapes, said


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"depth": 2}], ids=str)
def test_the_second_rank_touches_only_files_that_it_reads(made: Path, tmp_path: Path, axes: dict[str, int]) -> None:
    first, second = on_ranks(axes, opened, made, "table", tmp_path)
    assert first[:6] == second[:6] and first[0] == FILES * ROWS and first[2] == "a" and first[3]["cube"] == (4, 16, 16)
    assert first[4] == ([n for i in range(FILES) for n in (i % 2, 2)], [4, 5, 5])
    assert first[5] == [
        {"cube": ((5, 16, 16), {7}), "vector": ((3,), {7.0}), "atoms": ((), {2}), "flat": ((2, 400), {7})},
        {"cube": ((4, 16, 16), {150}), "vector": ((3,), {150.0}), "atoms": ((), {0}), "flat": ((0, 400), set())},
    ]
    assert first[6] == "" and "u010.h5: cannot be opened: no such file" in second[6] and second[6].endswith("2 rows; make it so")
    assert first[7] == second[7] == [], "HDF5 is asked for a file that the table knows"


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_table_the_second_rank_opens_a_split_by_what_it_is_told(made: Path, tmp_path: Path, kind: str) -> None:
    first, second = on_ranks({"replicate": 2}, without_columns, made, kind, tmp_path)
    assert first == second and first[0] == FILES * ROWS and first[2] == (None if kind == "none" else "a")
    advice = "set: no table of its 200 files, so each rank opens the files that it needs; hpcai data check set --index writes one"
    assert first[4] == ([] if kind == "table" else [advice])
    assert first[1] == on_ranks({}, without_columns, made, "table", tmp_path)[0][1]


def test_ranks_that_only_evaluate_read_for_themselves(made: Path, tmp_path: Path) -> None:
    told = on_ranks({"replicate": 2, "evaluate": 2}, told_of, made, tmp_path)
    assert len(set(told)) == 1


def told_of(mesh: Mesh, home: Path, own: Path) -> str:
    with chdir(home / "table" if mesh.peers.rank == 0 else own):
        return open_split(Path("set"), FIELDS, "", LoaderConfig(reader="buffered"), mesh).identity


def faulty(mesh: Mesh, folder: Path, fields: Any) -> tuple[str, str]:
    try:
        with chdir(folder.parent if mesh.rank == 0 else "/"):
            open_split(Path(folder.name), fields, "make it so", LoaderConfig(reader="buffered"), mesh)
    except Exception as problem:
        return type(problem).__name__, str(problem)
    return "", ""


@pytest.mark.parametrize(("spoil", "fields", "text"), [
    (lambda folder: (folder / "u199.h5").unlink(), {}, r"set/u199.h5: is missing, index.json has [\d,]+ bytes and 2 rows; "),
    (lambda folder: (folder / "index.json").write_text("{"), {}, "set/index.json: cannot be read as an index"),
    (lambda folder: next(folder.glob("index-*")).write_bytes(b"x"), {}, "no table of the files beside it"),
    (shutil.rmtree, {}, "set: no such folder; make it so"),
    (lambda folder: None, {"cube": ("int16", (5, 16, 16))}, r"u000.h5: dataset 'cube' is \(2, 4, 16, 16\), expected \(rows, 5,"),
])  # fmt: skip
def test_what_the_first_rank_finds_is_an_error_on_all(made: Path, tmp_path: Path, spoil: Any, fields: Any, text: str) -> None:
    folder = Path(shutil.copytree(made / "table/set", tmp_path / "set"))
    spoil(folder)
    first, second = on_ranks({"replicate": 2}, faulty, folder, FIELDS | fields)
    assert first == second and first[0] == "DataError"
    assert re.search(text, first[1])
