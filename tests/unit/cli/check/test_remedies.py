"""Repair does what is certain and nothing else: all but the layout is kept, what may be damaged is left alone."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcai import cli
from hpcai.cli.check import copying, tabulate
from hpcai.data import Rows
from tests.unit.cli.check.making import (
    PACKED,
    SHAPE,
    change,
    entries,
    everything,
    flip,
    index,
    look,
    mend,
    one,
    put,
    reword,
    table_of,
    told,
    values,
    write,
    written_again,
)


def odd_file(path: Path) -> None:
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
        file["soft"], file["away"] = h5py.SoftLink("/group/names"), h5py.ExternalLink("other.h5", "/x")
        for item in (file, file["zeta"], file["group"], file["group/names"]):
            item.attrs["text"], item.attrs["bytes"], item.attrs["list"] = "héllo", np.bytes_("abc"), ["a", "bb"]
            item.attrs["big"], item.attrs["none"], item.attrs["flag"] = np.arange(4, dtype=">i2"), h5py.Empty("i4"), True
            item.attrs["pair"], item.attrs["grid"] = np.array((1, 2.0), "i4,f8"), np.eye(3)


def contents(path: Path) -> dict[str, Any]:
    """All of a file that people can see."""
    found: dict[str, Any] = {}

    def note(name: str, item: Any) -> None:
        found[f"{name}@"] = {key: (item.attrs.get_id(key).dtype, plain(item.attrs[key])) for key in item.attrs}
        if isinstance(item, h5py.Dataset):
            value = None if item.shape is None else item[()]
            fill = str(item.fillvalue if item.shape else "")
            found[name] = item.shape, item.dtype, h5py.check_enum_dtype(item.dtype), plain(value), fill
        else:
            links = {key: item.get(key, getlink=True) for key in item}
            found[name] = [(key, type(at), getattr(at, "filename", None), getattr(at, "path", None)) for key, at in links.items()]

    with h5py.File(path) as file:
        note("/", file)
        file.visititems(note)
    return found


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value] if value.dtype == object else (value.dtype, value.tobytes())
    return repr(value)


def test_repair_keeps_all_but_the_layout(tmp_path: Path) -> None:
    path = tmp_path / "odd.h5"
    odd_file(path)
    path.chmod(0o640)
    index(tmp_path)
    before = contents(path)
    assert {f.dataset for f in look(tmp_path).findings if f.repairable and f.code == "compressed"} == {"zeta", "group/pairs"}
    (line,) = mend(tmp_path)
    assert f"{path}: rewritten in one piece, aligned:" in line
    assert contents(path) == before and path.stat().st_mode & 0o777 == 0o640
    with h5py.File(path) as file:
        assert file["zeta"].id.get_offset() and not file["zeta"].chunks and not file["group/fixed"].chunks
        assert list(file)[:3] == ["zeta", "nan", "partly"]  # the order in which they were made
    after = look(tmp_path)
    assert {f.code for f in after.findings} <= {"nan", "layout", "constant", "rows"} and not after.findings[0].repairable
    assert {f.code for f in after.findings if f.repairable} == set() and after.splits[0].verified == 1
    assert everything(tmp_path).keys() == {"odd.h5", "index.json", *table_of(tmp_path)}


def test_repair_of_a_set_is_clean_aligned_and_done_once(made: Path) -> None:
    data, train = values(500), made / "train"
    write(train / "u0.h5", data, compression="gzip", shuffle=True, chunks=(1, 8, 8, 8, 4))
    with h5py.File(train / "u1.h5", "w") as file:
        for name, array in values(501).items():
            file[name] = array  # on byte 2048
    index(train)
    before = entries(train)
    assert {f.code for f in look(made).findings} == {"compressed", "unaligned"}
    done = mend(made)
    assert [line.partition(": ")[2].partition(":")[0] for line in done] == ["rewritten in one piece, aligned"] * 2
    assert look(made).findings == ()
    with h5py.File(train / "u0.h5") as file:
        assert file["counts"].id.get_offset() % 4096 == 0 and np.array_equal(file["counts"], data["counts"])
        assert dict(file.attrs) == {"made by": "a test"}
    about = json.loads((train / "index.json").read_text())
    assert about["units"] == ["a", "b"] and about["files"][2:] == before[2:]
    then = everything(made)
    assert mend(made) == [] and everything(made) == then


def test_what_is_not_certain_is_left_alone(made: Path) -> None:
    """Damage, strangers, files that are gone, samples that are there twice, odd values, half-written files of others."""
    train = made / "train"
    put(train / "u0.h5", values(500), **PACKED)
    (train / "u0.h5").write_bytes((train / "u0.h5").read_bytes().replace(b"a test", b"b test"))  # as long, and whole for HDF5
    (train / "u3.h5").unlink()
    write(train / "x.h5", values(501))
    (train / ".u9.h5.partial").write_bytes(b"half")
    flip(made / "validation" / "u1.h5", 0, 0)
    before = everything(made)
    codes = {f.code for f in look(made).findings}
    assert codes == {"bit-flip", "compressed", "missing", "stranger", "duplicate", "leftover", "unreadable"}
    (line,) = mend(made)
    assert line.startswith(f"{train / 'u0.h5'}: refused: not rewritten: its SHA-256 is not that of the index")
    assert everything(made) == before


@pytest.mark.parametrize("content", [None, "{ damaged"])
def test_the_index_is_made_from_the_files(made: Path, content: str | None) -> None:
    path, before = made / "train" / "index.json", entries(made / "train")
    path.unlink()
    if content:
        path.write_text(content)
    write(made / "train" / "u3.h5", values(503), **PACKED)  # to be rewritten as well
    done = mend(made)
    assert done[-1] == f"{path}: made from 4 files" and "rewritten" in done[0] and len(done) == (3 if content else 2)
    assert entries(made / "train")[:3] == before[:3] and look(made).findings == () and look(made).splits[0].verified == 4
    damaged = path.with_name("index.json.damaged")
    assert damaged.read_text() == content if content else not damaged.exists()


@pytest.mark.parametrize(
    "spoil, text",
    [
        (lambda file: file.attrs.__setitem__("points at", file["counts"].ref), "holds references, which would point to nothing"),
        (lambda file: file.__setitem__("again", file["target"]), "has a second name, which is not rewritten"),
        (lambda file: file.__setitem__("type", np.dtype("i4,f8")), "is a type with a name"),
    ],
)
def test_a_file_that_would_not_be_the_same_is_not_rewritten(made: Path, spoil: Any, text: str) -> None:
    write(made / "train" / "u0.h5", values(500), **PACKED)
    change(made / "train" / "u0.h5", spoil)
    before = everything(made)
    (line,) = mend(made)
    assert "refused: not rewritten: " in line and text in line and everything(made) == before


def test_a_link_and_a_file_that_is_written_to_meanwhile_are_left_alone(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made / "validation" / "u0.h5"
    write(made.parent / "elsewhere.h5", values(3), **PACKED)
    path.unlink()
    path.symlink_to(made.parent / "elsewhere.h5")
    index(path.parent)
    assert not one(look(made), "compressed").repairable and mend(made) == []
    path = made / "train" / "u0.h5"
    put(path, values(500), **PACKED)
    monkeypatch.setattr(copying, "flush", lambda partial: os.utime(path, (0, 0)))
    (line,) = mend(made)
    assert "written to meanwhile" in line and not path.with_name(".u0.h5.partial").exists()


@pytest.mark.parametrize(
    "spoil, text",
    [
        (lambda file: file["counts"].__setitem__((0, 0, 0, 0, 0), -1), "values of 'counts' in the copy differ"),
        (lambda file: file["target"].attrs.__setitem__("more", 1), "'target' in the copy differs"),
        (lambda file: file.__delitem__("target"), "'target' in the copy differs"),
        (lambda file: [file.__delitem__("target"), file.__setitem__("target", np.ones((5, 3)))], "'target' in the copy differs"),
    ],
)
def test_a_copy_that_differs_never_takes_the_place_of_its_source(
    made: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any, text: str
) -> None:
    put(made / "train" / "u0.h5", values(500), **PACKED)
    before, copied = everything(made), copying._copy_group

    def spoilt(old: h5py.Group, new: h5py.Group) -> Any:
        yield from copied(old, new)
        spoil(new.file)

    monkeypatch.setattr(copying, "_copy_group", spoilt)
    (line,) = mend(made)
    assert f"refused: not rewritten: {text}" in line and everything(made) == before


# ---- the table of an index

FIELDS = {"counts": ("int16", SHAPE), "target": ("float32", (3,))}


def run(*words: object) -> int:
    return cli.main(["data", "check", *map(str, words), "--threads", "1", "--seconds", "0"])


def row(folder: Path, number: int) -> dict[str, Any]:
    rows = Rows(folder, FIELDS)
    try:
        return rows.read(number)
    finally:
        rows.close()


@pytest.fixture
def tabled(made: Path) -> Path:
    for split in ("train", "validation"):
        index(made / split, fields={"target": {"dtype": "float32", "shape": [3]}})
    told = {"train": "a table of 4 files now", "validation": "a table of 2 files now"}
    assert tabulate(made, look(made)) == [f"{made / split / 'index.json'}: has {text}" for split, text in told.items()]
    return made


def test_a_table_is_written_after_a_check(made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before, wanted = everything(made), row(made / "train", 5)
    assert run(made, "--index") == 0
    out = capsys.readouterr().out
    assert f"index: {made / 'train/index.json'}: has a table of 4 files now\n" in out and "fine: 6 files" in out
    after = everything(made)
    assert {name for name in after if after[name] != before.get(name)} == {
        f"{split}/{name}" for split in ("train", "validation") for name in ("index.json", *table_of(made / split))
    }  # fmt: skip
    about = json.loads(after["train/index.json"])
    about.pop("table")
    assert about == json.loads(before["train/index.json"])
    assert run(made, "--index", "--quick") == 0 and everything(made) == after
    monkeypatch.setattr(h5py.File, "__init__", None)
    found = row(made / "train", 5)
    assert all(np.array_equal(found[name], wanted[name]) for name in FIELDS)


def test_there_is_no_table_of_a_folder_that_is_not_right(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "validation" / "index.json").unlink()
    data = bytearray((made / "train" / "u1.h5").read_bytes())
    (made / "train" / "u1.h5").write_bytes(data[:-1])
    before = everything(made)
    assert run(made, "--index") == 1
    out = capsys.readouterr().out
    assert "train/index.json: refused: no table while files are not as the index says (u1.h5: is cut off" in out
    assert "validation/index.json: refused: no table without an index; make it with --repair" in out
    assert everything(made) == before
    for folder in (made / "train", made / "validation"):
        shutil.rmtree(folder)
    (made / "train").mkdir()
    np.save(made / "train" / "a.npy", np.arange(6.0))
    index(made / "train")
    assert run(made, "--index") == 0
    assert "train/index.json: refused: a table is of HDF5 files alone" in capsys.readouterr().out and not table_of(made / "train")


@pytest.mark.parametrize("how", ["gone", "damaged", "other rows"])
def test_a_table_that_jobs_refuse_is_an_error_until_it_is_written_again(tabled: Path, how: str) -> None:
    train = tabled / "train"
    (name,) = table_of(train)
    if how == "gone":
        (train / name).unlink()
    elif how == "damaged":
        flip(train / name, 99, 2)
    else:
        reword(train, lambda files: files[0].pop("sha256"))
        reword(train, lambda files: files[0].update(name="u9.h5"))
        (train / "u0.h5").rename(train / "u9.h5")
    assert told(look(tabled)) == [("error", "index", "train/index.json", None, None)]
    finding = one(look(tabled), "index")
    assert finding.text.startswith(f"{name}: no table of the files beside it (") and "--index writes it again" in finding.text
    assert mend(tabled) == [f"{train / 'index.json'}: its table is written anew"]
    assert look(tabled).findings == () and len(table_of(train)) == 1 and mend(tabled) == []
    assert len(Rows(train, FIELDS)) == 16


@pytest.mark.parametrize("meant", [True, False])
def test_a_file_that_was_written_again_is_not_that_of_the_table(tabled: Path, meant: bool) -> None:
    """With as many bytes, which the index says are right, or says nothing of."""
    path = tabled / "train" / "u1.h5"
    written_again(path)
    if not meant:
        reword(tabled / "train", lambda files: files[1].pop("sha256"))
    finding = one(look(tabled), "table")
    assert finding.path == path and finding.repairable == meant and "or --index if it is right" in finding.text
    assert len(mend(tabled)) == meant
    if not meant:
        assert len(tabulate(tabled, look(tabled))) == 2
    assert look(tabled).findings == ()


def test_repair_writes_the_table_of_what_it_has_rewritten(tabled: Path) -> None:
    train = tabled / "train"
    put(train / "u1.h5", values(999), **PACKED)
    (line,) = mend(tabled)
    assert "rewritten in one piece" in line and look(tabled).findings == () and len(table_of(train)) == 1
    assert np.array_equal(row(train, 4)["counts"], values(999)["counts"][0])
