"""Conversion of text to rows of tokens: each document occurs once, for any number of processes; unusable ones are refused."""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import shutil
import sysconfig
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_prep import documents, packing, store, text
from hpcai.cli.subprocesses import ForkedProcesses
from hpcai.errors import DataError
from hpcai.models.llm import Tokenizer
from tests.data_prep.prep_contract import check_error, check_fails, content, read_json, set_to, write_files
from tests.reference_data import DATA, load_json
from tests.unit.models.llm.test_tokenizer import metaspace

GOLDEN = str(DATA / "llm" / "tokenizer")
T = 32
SMALL = ["--sequence", T, "--held-out", 0.3, "--each", 7, "--seed", 3]
FIELDS, ANSWERS = (packing.make_fields(T, Tokenizer.byte_level(), answers) for answers in (False, True))
NOTES = {f"notes/{n}.txt": f"note {n}: " + "word " * n + f"– ½ {n}\n" for n in range(24)} | {"read me.md": "# Title\n\nsmall\n"}
LINES = [f'"{n}" says\n' + "ab " * (n % 7) for n in range(40)]
TABLE = [f"row {n} " + "é" * n for n in range(30)]
FASTA = b">one of three\nMKV\nLAT\n\n>two\nmk-va*\n>three\nGG..GA\n"
A3M = b"#30\t1\n>q\nMKVL\n>r\nM-VLabc\n"
SEQUENCES = ["MKVLAT", "MKVA", "GGGA", "MKVL", "MVL"]
DOCUMENTS = Counter([*NOTES.values(), *LINES, *TABLE, *SEQUENCES])


def json_lines(texts: Sequence[str]) -> bytes:
    return b"".join(json.dumps({"id": n, "text": each}).encode() + b"\n" for n, each in enumerate(texts))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compress, zst = gzip.compress, zstandard.ZstdCompressor().compress
    texts = {name: each.encode() for name, each in NOTES.items()}
    texts["notes/5.txt.gz"], texts["notes/6.txt.zst"] = compress(texts.pop("notes/5.txt")), zst(texts.pop("notes/6.txt"))
    folder = write_files(tmp_path_factory.mktemp("source"), {
        **texts, "a.jsonl": json_lines(LINES[:15]) + b"\n", "b.json.gz": compress(json_lines(LINES[15:28])) + compress(b""),
        "deep/down/c.jsonl.zst": zst(json_lines(LINES[28:35])) + zst(json_lines(LINES[35:])), "f.fasta": FASTA, "g.a3m": A3M,
        "empty.txt": b"", ".hidden": b"no",
    })  # fmt: skip
    pq.write_table(pa.table({"n": range(30), "text": TABLE}), folder / "t.parquet", row_group_size=8)
    return folder


def convert(*args: object, workers: int = 1) -> int:
    return int(text.main(["convert", *map(str, args), "--workers", str(workers)]))


@pytest.fixture(scope="module")
def dataset(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text") / "bytes"
    assert convert(source, out, "--tokenizer", "bytes", *SMALL) == 0
    return out


def use_small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "SHARD_BYTES", 200)
    monkeypatch.setattr(text, "MAX_FILES", 3)


def rows_of(out: Path, split: str, fields: Any = FIELDS) -> list[dict[str, Any]]:
    rows = []
    for path in sorted((out / split).glob("*.h5")):
        with h5py.File(path) as file:
            rows += list(store.read_rows(file, fields))
    return rows


def documents_of(out: Path, split: str) -> list[str]:
    """Return the documents of a split, from its rows."""
    rows, end = rows_of(out, split), Tokenizer.load(out).end_tokens[-1]
    stream = np.concatenate([*(row["tokens"][:-1] for row in rows), rows[-1]["tokens"][-1:]])
    parts = np.split(stream, np.flatnonzero(stream == end) + 1)
    return [Tokenizer.load(out).decode(part.tolist(), skip_special=True) for part in parts]


# ---- conversion


def test_every_document_occurs_once_complete_but_for_the_last(dataset: Path) -> None:
    meta, counts = read_json(dataset / "text.json"), Counter[str]()
    for split in ("train", "validation"):
        *complete, last = documents_of(dataset, split)
        counts += Counter(complete)
        assert meta["splits"][split]["documents"] - len(complete) in (0, 1) and meta["splits"][split]["left_over"] < T
        if last:
            (document,) = [each for each in DOCUMENTS - counts if each.startswith(last)][:1]
            counts[document] += 1
    missing = DOCUMENTS - counts
    assert counts <= DOCUMENTS and sum(len(each.encode()) + 1 for each in missing) <= 2 * T
    assert sum(split["documents"] for split in meta["splits"].values()) == DOCUMENTS.total()


def test_rows_ends_and_bytes_are_those_of_the_stream_split_by_hand(dataset: Path) -> None:
    for split in ("train", "validation"):
        rows = rows_of(dataset, split)
        stream = [*(token for row in rows for token in row["tokens"][:-1].tolist()), int(rows[-1]["tokens"][-1])]
        for number, row in enumerate(rows):
            part = stream[number * T : number * T + T + 1]
            assert row["tokens"].tolist() == part
            assert row["ends"].tolist() == [position + 1 for position, token in enumerate(part) if token == 256]
            assert row["bytes"] == sum(token != 256 for token in part[1:])
    files = read_json(dataset / "train" / "index.json")["files"]
    assert len(files) > 3 and {file["rows"] for file in files[:-1]} == {7}
    assert any(T + 1 in row["ends"] for row in rows_of(dataset, "train"))          # the last token of a row ends a document


def test_an_end_between_two_rows_is_in_both() -> None:
    for ends in ([1], [3], [4], [5, 6, 7], [1, 4, 7, 10, 13], [2, 13, 20], [13], [14]):
        expected = [(n, end - n * 3) for n in range(4) for end in ends if 1 <= end - n * 3 <= 4]
        assert [*map(tuple, np.stack(packing.ends_in_rows(np.array(ends), 4, 3), 1).tolist())] == expected


def test_the_order_is_that_of_the_seed(dataset: Path, source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path / "other", "--tokenizer", "bytes", *SMALL[:-1], 4) == 0
    first, second = (documents_of(folder, "train") for folder in (dataset, tmp_path / "other"))
    assert first[:20] != second[:20] and first[:20] != sorted(first[:20])
    assert (Counter(first) - Counter(second)).total() <= 3                             # the seed does not change the split


def test_shards_processes_and_ranks_change_nothing(
    dataset: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--tokenizer", "bytes", *SMALL]
    use_small_shards(monkeypatch)
    monkeypatch.setattr(documents, "BLOCK", 7)
    monkeypatch.setattr(documents, "_ZSTD_BLOCK", 5)
    assert convert(source, tmp_path / "two", *args, workers=2) == 0
    assert len(list((tmp_path / "two" / ".work").rglob("*.tokens"))) > 20
    assert content(tmp_path / "two") == content(dataset)
    with ForkedProcesses(lambda: convert_as_rank(monkeypatch, 1, source, tmp_path / "ranks", *args), tmp_path / "rank 1"):
        assert convert_as_rank(monkeypatch, 0, source, tmp_path / "ranks", *args) == 0
    assert content(tmp_path / "ranks") == content(dataset)


def convert_as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, *args: object) -> int:
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", str(rank))
    return convert(*args)


def test_a_killed_run_resumes(dataset: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_shards(monkeypatch)
    out, args, work = tmp_path / "out", ["--tokenizer", "bytes", *SMALL], tmp_path / "out" / ".work"
    with ForkedProcesses(lambda: convert(source, out, *args), tmp_path / "stdout") as forks:
        while len(list(work.rglob("share_*.json"))) < 3 and forks.processes[0].is_alive():
            time.sleep(0.001)
    finished = list(work.rglob("share_*.json"))
    times = {path: path.stat().st_mtime_ns for path in finished}
    assert len(times) >= 3 and not (out / "train" / "index.json").is_file()
    assert convert(source, out, *args) == 0 and content(out) == content(dataset)
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    lost, *_ = sorted((out / "train").glob("*.h5"))
    lost.unlink()
    assert convert(source, out, *args) == 0 and content(out) == content(dataset)


def test_more_files_move_nothing_between_splits(source: Path, dataset: Path, tmp_path: Path) -> None:
    larger = shutil.copytree(source, tmp_path / "more")
    notes = {f"notes/{n}.txt": f"another {n} ".encode() * 9 for n in range(24, 60)}
    write_files(larger, notes | {"z.jsonl": json_lines([f"new {n}" for n in range(30)])})
    assert convert(larger, tmp_path / "out", "--tokenizer", "bytes", *SMALL) == 0
    for split, other in (("train", "validation"), ("validation", "train")):
        assert not set(documents_of(dataset, split)[:-1]) & set(documents_of(tmp_path / "out", other)[:-1])


def test_files_of_a_folder_are_held_out_together(tmp_path: Path) -> None:
    kinds = {f"family{n}/{name}.a3m": f">a\nMKV{letter}\n>b\nMRV{letter}\n".encode()
             for n, letter in enumerate("ACDEFGHIKLMN") for name in ("one", "two")}  # fmt: skip
    folder, out = write_files(tmp_path / "in", kinds), tmp_path / "out"
    assert convert(folder, out, "--tokenizer", "bytes", "--sequence", 4, "--held-out", 0.4, "--group", "folder") == 0
    validation, train = ({doc[3] for doc in documents_of(out, split)[:-1]} for split in ("validation", "train"))
    assert validation and train and not validation & train


def test_families_and_groups_are_held_out_together(tmp_path: Path) -> None:
    families = {f"{n}.a3m": "".join(f">{k}\nM{'KV' * n}{'A' * k}\n" for k in range(9)).encode() for n in range(12)}
    folder = write_files(tmp_path / "in", {**families, "g.jsonl": b"".join(
        json.dumps({"text": f"G{n % 5} {'x' * n}", "set": n % 5}).encode() + b"\n" for n in range(60))})  # fmt: skip
    assert convert(folder, tmp_path / "out", "--tokenizer", "bytes", *SMALL, "--group", "set") == 0
    for pattern in ("M(KV)*", "G[0-9]"):
        validation, train = (
            {re.match(pattern, doc)[0] for doc in documents_of(tmp_path / "out", split)[:-1] if re.match(pattern, doc)}  # type: ignore[index]
            for split in ("validation", "train"))  # fmt: skip
        assert validation and train and not validation & train


def test_files_may_be_named_for_validation_and_chosen_by_name(source: Path, tmp_path: Path) -> None:
    assert convert(source / "notes", tmp_path / "out", "--tokenizer", "bytes", "--sequence", 8, "--only", "*1*.txt",
                   "--validation", source / "a.jsonl") == 0  # fmt: skip
    assert {int(doc.split(":")[0][5:]) for doc in documents_of(tmp_path / "out", "train")[:-1]} <= {1, *range(10, 20), 21}
    assert set(documents_of(tmp_path / "out", "validation")[:-1]) <= set(LINES[:15])


def test_text_json_has_sources_and_tokenizer(dataset: Path, source: Path) -> None:
    meta = read_json(dataset / "text.json")
    assert meta["tokenizer"] == Tokenizer.byte_level().identity == Tokenizer.load(dataset).identity
    assert (meta["sequence"], meta["vocabulary"], meta["type"], meta["ending"]) == (T, 257, "uint16", [256])
    files = sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file() and path.name != ".hidden")
    sums = "".join(f"{store.digest(source / name)}  {name}\n" for name in files)
    assert meta["sources"][0]["files"] == len(files) and meta["sources"][0]["sha256"] == hashlib.sha256(sums.encode()).hexdigest()


PARAGRAPHS = "".join(f"Paragraph {n} of a story.\nIt has two lines – and a – dash.\n\n" for n in range(40))


@pytest.mark.parametrize(("name", "content", "begin"), [
    ("my.txt", PARAGRAPHS, "Paragraph "), ("windows.txt", PARAGRAPHS.replace("\n\n", "\r\n"), "Paragraph |It has "),
    ("line.txt.gz", PARAGRAPHS.replace("\n", " "), " "), ("one.txt", "–½" * 600, "[–½]"), ("p.fa", ">a\nMKVLAT\n" * 90, "MKVLAT"),
])  # fmt: skip
def test_the_end_of_a_lone_file_is_held_out(tmp_path: Path, name: str, content: str, begin: str) -> None:
    data = content.encode()
    write_files(tmp_path, {name: gzip.compress(data) if name.endswith("gz") else data})
    assert convert(tmp_path / name, tmp_path / "out", "--tokenizer", "bytes", "--sequence", 8, "--each", 999) == 0
    train, held = (documents_of(tmp_path / "out", split) for split in ("train", "validation"))
    text = "".join(re.findall("[A-Z]+", content[2:])) if name == "p.fa" else content
    lost = max(len(text.encode()) - len("".join(train + held).encode()), 0)
    assert text.startswith(train[0]) and "".join(held)[:90] in text and re.match(begin, held[0]) and lost < 3 * 8
    assert 0.02 < len("".join(held).encode()) / len(text.encode()) < 0.14


def test_few_lines_are_held_out_by_the_next_hashes_and_by_group(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"group {n // 3}: text {n % 3}, and some more", "of": n // 3}) for n in range(12)]
    write_files(tmp_path, {"few.jsonl": "\n".join(lines).encode()})
    assert convert(tmp_path / "few.jsonl", tmp_path / "out", "--tokenizer", "bytes", "--sequence", T, "--group", "of") == 0
    assert read_json(tmp_path / "out" / "text.json")["splits"]["validation"]["documents"] == 3
    assert len({document[:7] for document in documents_of(tmp_path / "out", "validation")[:-1]}) == 1


def test_a_failed_conversion_leaves_the_next_one_free(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": b"".join(json.dumps({"body": f"some text {n}" * 9}).encode() + b"\n" for n in range(60))})
    args = [tmp_path / "a.jsonl", tmp_path / "out", "--tokenizer", "train:290", "--sequence"]
    assert [convert(*args, 16), convert(*args, 5000, "--field", "body"), convert(*args, 16, "--field", "body")] == [2, 2, 0]
    assert read_json(tmp_path / "out" / "skipped.json")["unusable"] == {} and text.main(["check", str(tmp_path / "out")]) == 0
    assert convert(*args, 17, "--field", "body") == 2, "rows of other settings are there"


def test_bytes_of_rows_exclude_the_space_that_a_tokenizer_adds(tmp_path: Path) -> None:
    metaspace().save(tmp_path / "t")
    lines = [json.dumps({"text": f"plain words {n}, and more", "id": "why"}) for n in range(30)]
    write_files(tmp_path, {"a.jsonl": "\n".join(lines).encode()})
    for name, options in {"text": [], "answers": ["--prompt", "id", "--answer", "text"]}.items():
        args = ["--tokenizer", tmp_path / "t", "--sequence", 8, "--held-out", 0, "--each", 3, *options]
        assert convert(tmp_path / "a.jsonl", tmp_path / name, *args) == 0 and text.main(["check", str(tmp_path / name)]) == 0
        rows, texts = rows_of(tmp_path / name, "train"), documents_of(tmp_path / name, "train")
        first = metaspace().byte_lengths[rows[0]["tokens"][0]] - 1                     # it is no target
        expected = sum(max(len(each) - 4, 0) for each in texts) if options else len("".join(texts)) - first
        assert sum(row["bytes"] for row in rows) - expected in (0, 1)                  # of the last text, which is cut


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((Path(GOLDEN) / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {f"unused{n}": n for n in range(len(vocabulary), 70_000)}
    folder = shutil.copytree(GOLDEN, tmp_path / "large")
    (folder / "tokenizer.json").write_text(json.dumps(content))
    write_files(tmp_path / "in", {"a.txt": b"some words " * 50})
    assert convert(tmp_path / "in", tmp_path / "out", "--tokenizer", folder, "--sequence", 8, "--held-out", 0) == 0
    fields = FIELDS | {"tokens": store.Field("uint32", (9,))}
    rows = rows_of(tmp_path / "out", "train", fields)
    assert rows[0]["tokens"][0] == 1 and rows[0]["bytes"] == len(Tokenizer.load(GOLDEN).decode(rows[0]["tokens"][1:].tolist()))
    assert not (tmp_path / "out" / "validation").exists()


def test_a_long_text_in_chunks_has_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = "".join(f"  line {n}: é {'x' * (n % 5)}\n\n" + "\tmore 12345\nflush left\n" * (n % 3) for n in range(400))
    write_files(tmp_path / "in", {"a.txt": document.encode()})
    monkeypatch.setattr(documents, "TEXT_CHUNK", 100)
    monkeypatch.setattr(documents, "BLOCK", 33)
    assert len(list(documents.read_text(tmp_path / "in" / "a.txt"))) > 50
    assert convert(tmp_path / "in", tmp_path / "out", "--tokenizer", GOLDEN, "--sequence", 2, "--held-out", 0) == 0
    rows, tokenizer = rows_of(tmp_path / "out", "train", FIELDS | {"tokens": store.Field("uint16", (3,))}), Tokenizer.load(GOLDEN)
    expected = tokenizer.encode_document(document)
    assert [token for row in rows for token in row["tokens"][:2].tolist()] == expected[: 2 * len(rows)]
    assert "".join(documents.read_text(tmp_path / "in" / "a.txt")) == document


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.jsonl", json_lines(["one", "two\nlines", "é"]) + b'\n\n{"text": "last"}'), ("b.fa", FASTA), ("c.a3m", A3M + b">s\nMVV")],
)
def test_a_file_split_anywhere_has_each_document_once(tmp_path: Path, name: str, data: bytes) -> None:
    path = write_files(tmp_path, {name: data, f"{name}.gz": gzip.compress(data)}) / name

    def read(begin: int, end: int, path: Path = path) -> list[Any]:
        piece = documents.Piece(path, name, begin, end)
        return [(documents.count_before(piece) + line, item) for line, item in documents.read_documents(piece, [])]

    full = read(0, len(data))
    assert len(full) >= 3
    for offset in range(len(data) + 1):
        assert read(0, offset) + read(offset, len(data), path.with_name(f"{name}.gz")) == full


RECORDS = [{"id": str(n), "text": f'row {n}, "quoted"\n' * (n % 3) + "é"} for n in range(40)]


def table(delimiter: str) -> bytes:
    csv.writer(stream := io.StringIO(), delimiter=delimiter).writerows([["id", "text"], *(record.values() for record in RECORDS)])
    return stream.getvalue().encode("utf-8-sig")


LINES_OF_RECORDS = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
FORMS = {
    "a.csv": table(","), "a.TSV.gz": gzip.compress(table("\t")),
    "indented.json": json.dumps(RECORDS, indent=200).encode("utf-8-sig"),
    "compact.json.gz": gzip.compress(json.dumps(RECORDS, ensure_ascii=False).encode()), "lines.json": LINES_OF_RECORDS,
    "a.jsonl.xz": lzma.compress(LINES_OF_RECORDS), "a.jsonl.bz2": bz2.compress(LINES_OF_RECORDS),
    "B.JSONL.GZ": gzip.compress(LINES_OF_RECORDS), "plain_name.jsonl": gzip.compress(LINES_OF_RECORDS),
}  # fmt: skip


def read_file(path: Path) -> list[Any]:
    return [item for _, item in documents.read_documents(documents.Piece(path, path.name, 0, documents.file_size(path)[0]), [])]


@pytest.mark.parametrize("name", FORMS)
def test_tables_arrays_and_compressed_lines_have_a_document_for_each_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(documents, "BLOCK", 13)
    assert read_file(write_files(tmp_path, {name: FORMS[name]}) / name) == RECORDS


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [("a.csv", b"a,text\n1,b\n2\n", "another number of values than the columns ['a', 'text']"),
     ("a.csv", b'text\n"open\n', "after line 1: not a table of text"), ("a.csv", b"text\n\xff\n", "'utf-8' codec"),
     ("a.json", b'["a"]', "a JSON str, expected an object"), ("a.json", b'[{"a": 1},\n {"b"', "document 2: not JSON"),
     ("a.json", b"[" * 99_999, "document 1: not JSON"), ("a.jsonl", b"7z\xbc\xaf'\x1c", "compressed as .7z"),
     ("a.jsonl.xz", lzma.compress(b"{}\n" * 99)[:-9], "damaged or truncated")],
)  # fmt: skip
def test_unusable_tables_and_arrays_are_refused(tmp_path: Path, name: str, data: bytes, reason: str) -> None:
    path = write_files(tmp_path, {name: data}) / name
    try:
        reported = next(str(item) for item in read_file(path) if isinstance(item, documents.UnusableError))
    except DataError as problem:
        reported = str(problem)
        assert reported.startswith(f"{path}: ") and "\n" not in reported
    assert reason in reported


def test_a_text_that_turns_out_bad_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TEXT_CHUNK", 10)
    monkeypatch.setattr(documents, "BLOCK", 8)
    good = {f"{n}.txt": f"good {n}\n".encode() * 5 for n in (1, 3)}
    write_files(tmp_path / "in", {**good, "2.txt": b"some line\n" * 9 + b"\xff"})
    assert convert(tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes", "--sequence", 4, "--held-out", 0, "--bad", 0.5) == 0
    assert read_json(tmp_path / "out" / "text.json")["splits"]["train"]["tokens"] == 2 * 36
    assert documents_of(tmp_path / "out", "train")[0] in [data.decode() for data in good.values()]
    assert "some" not in "".join(documents_of(tmp_path / "out", "train"))


# ---- a trained tokenizer, the standard library


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert a small standard library to rows."""
    root = tmp_path_factory.mktemp("stdlib")
    files = {f"part{n}.py": f"def function_{n}(value):\n    return value + {n}\n".encode() * (n + 1) for n in range(30)}
    other = dict.fromkeys(("test/a.py", "site-packages/b.py", "idlelib/idle_test/c.py", "d.txt"), b"import qqqqqqqq\n" * 99)
    write_files(root, {**files, **other})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(root))
        assert text.main(["python", str(root.parent / "py"), "--sequence", "16", "--held-out", "0.3", "--tokenizer", "train:300",
                          "--workers", "1"]) == 0  # fmt: skip
    return root.parent / "py"


def test_the_library_excludes_tests_and_packages(python: Path) -> None:
    joined = " ".join(documents_of(python, "train") + documents_of(python, "validation"))
    assert "function_29" in joined and "qqqq" not in joined
    meta = read_json(python / "text.json")
    assert meta["vocabulary"] == 300 and meta["sources"][0]["files"] == 30 and meta["sources"][0]["name"].startswith("Python 3.")


def test_the_real_library_is_found() -> None:
    sources = [*text.library_sources()]
    names = {source.name for source in sources}
    assert {"argparse.py", "json/decoder.py", "asyncio/base_events.py"} <= names
    assert 4e6 < sum(source.path.stat().st_size for source in sources) < 2e7
    assert not [name for name in names if "/test/" in name or "packages" in name]


def test_a_tokenizer_is_trained_once_and_not_on_held_out_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "in", {"train.txt": b"plain words here " * 40, "held.txt": b"zyzzyva zyzzyva " * 40})
    options = ["--validation", tmp_path / "in" / "held.txt", "--tokenizer", "train:290", "--sequence", 8]
    assert convert(tmp_path / "in" / "train.txt", tmp_path / "out", *options) == 0
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert len(tokenizer.encode(" words")) < 3 and len(tokenizer.encode(" zyzzyva")) > 6
    monkeypatch.delattr(text, "train_tokenizer")
    assert convert(tmp_path / "in" / "train.txt", tmp_path / "out", *options) == 0


# ---- chats and answers


def check_answers(out: Path, tokenizer: Tokenizer, expected: Sequence[tuple[list[int], list[int]]]) -> None:
    """Assert that the rows have these documents, and ``spans`` their answers."""
    rows = rows_of(out, "train", ANSWERS)
    stream = [token for row in rows for token in row["tokens"][:-1].tolist()]
    mask, begin, remaining = list[int](), 0, [*expected]
    while begin < len(stream):
        (ids, part) = next(each for each in remaining if each[0][: len(stream) - begin] == stream[begin : begin + len(each[0])])
        remaining.remove((ids, part))
        mask, begin = mask + part, begin + len(ids)
    assert sum(mask) > 50
    for number, row in enumerate(rows[:-1]):
        part = mask[number * T : number * T + T + 1]
        part[0] = 0                                             # it belongs to the row before
        edges = [index for index, (a, b) in enumerate(pairwise([0, *part, 0])) if a != b]
        assert row["spans"].ravel().tolist() == edges
        assert row["bytes"] == sum(int(tokenizer.byte_lengths[token]) for token, inside in zip(row["tokens"], part) if inside)


@pytest.mark.parametrize(("name", "marker"), [(GOLDEN, 1), ("train:300", 1), ("bytes", 13)])
def test_messages_of_the_assistant_are_answers(tmp_path: Path, name: str, marker: int) -> None:
    """By the template of the tokenizer, or that of this project with role tokens, of a tokenizer that is trained, or text."""
    chats = [[{"role": "user", "content": "Q" * n}, {"role": "assistant", "content": f"yes {n}<|user|>"}] for n in range(20)]
    chats += [[*chats[3], {"role": "user", "content": "and"}, {"role": "assistant", "content": "no"}]]
    write_files(tmp_path / "in", {"c.jsonl": b"".join(json.dumps({"messages": chat}).encode() + b"\n" for chat in chats)})
    options = ["--sequence", T, "--held-out", 0, "--tokenizer", name, "--chat", "--each", 3]
    assert convert(tmp_path / "in", tmp_path / "out", *options) == 0
    tokenizer = Tokenizer.load(tmp_path / "out")
    expected = [(ids, mask) if ids[-1] == tokenizer.eos else (ids + tokenizer.end_tokens, mask + [0])
                for ids, mask in map(tokenizer.chat, chats)]  # fmt: skip
    check_answers(tmp_path / "out", tokenizer, expected)
    assert text.main(["check", str(tmp_path / "out")]) == 0
    assert len(tokenizer.encode("<|assistant|>", special=True)) == marker
    learned = tokenizer.decode([token for token, inside in zip(*expected[7]) if inside])
    assert learned == f"yes 7<|user|>{'<|end|>' if name == GOLDEN else '<|endoftext|>'}"


def test_an_answer_is_learned_with_its_end_and_a_question_is_not(tmp_path: Path) -> None:
    pairs = [("why " * n, "so " * (n % 5 + 1)) for n in range(20)]
    pq.write_table(pa.table({"q": [q for q, _ in pairs], "a": [a for _, a in pairs]}), tmp_path / "pairs.parquet")
    options = ["--sequence", T, "--held-out", 0, "--tokenizer", "bytes", "--prompt", "q", "--answer", "a"]
    assert convert(tmp_path / "pairs.parquet", tmp_path / "out", *options) == 0
    tokenizer = Tokenizer.byte_level()
    expected = [([*q.encode(), *a.encode(), 256], [0] * len(q) + [1] * (len(a) + 1)) for q, a in pairs]
    check_answers(tmp_path / "out", tokenizer, expected)


# ---- check


def test_check_prints_counts_duplicates_and_a_sample(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert text.main(["check", str(dataset), "--rows", "3"]) == 0
    output, meta = capsys.readouterr().out, read_json(dataset / "text.json")["splits"]
    assert f"train: rows {meta['train']['rows']:,}, tokens" in output
    assert output.count(".h5 row ") == 3 and "documents are copies" not in output and "are in train too" not in output
    write_files(tmp_path / "in", {f"{n}.txt": b"the very same " * 30 for n in range(20)} | {"x.txt": b"other " * 30})
    assert convert(tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes", *SMALL) == 0
    assert text.main(["check", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    assert "documents are duplicates" in output
    assert "documents of validation are in train too" in output


@pytest.mark.parametrize(("change", "error"), [
    (set_to("tokens", (2, 5), 300), "'tokens'"), (set_to("ends", 0, 0), "'ends'"), (set_to("documents", 0, 90), "ends, expected"),
    (set_to("tokens", (2, T), 7), "rows_000000.h5: row 3 does not begin with the last token of the row before"),
    (set_to("tokens", (6, T), 7), "rows_000001.h5: row 0 does not begin with the last token of the row before"),
    (set_to("ends", 0, 2), "a document ends with another token"), (set_to("bytes", 3, 9), "row 3: 'bytes' is 9, expected"),
])  # fmt: skip
def test_check_reports_the_fault_of_a_file(dataset: Path, tmp_path: Path, change: Any, error: str) -> None:
    assert check_fails(lambda command, out, *options: text.main([command, str(out)]), dataset, tmp_path / "out", change, error)


def test_check_names_another_tokenizer(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shutil.copytree(dataset, tmp_path / "out")
    Tokenizer.load(GOLDEN).save(out)
    assert text.main(["check", str(out)]) == 1
    assert f"{out / 'text.json'}: written with the tokenizer {Tokenizer.byte_level().identity[:12]}" in capsys.readouterr().out


# ---- unusable sources


def test_bad_lines_are_listed_with_file_and_line_for_any_shard_boundaries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_small_shards(monkeypatch)
    good = json_lines([f"text {n}" * 4 for n in range(90)]).splitlines(keepends=True)
    bad = {7: b"{not json\n", 20: b'{"other": 1, "id": 2}\n', 33: b'{"text": "\xff"}\n', 50: b'{"text": 5}\n', 51: b"[1]\n",
           60: b'{"text": "\\ud800"}\n'}  # fmt: skip
    mixed = [bad.get(n, line) for n, line in enumerate(good, 1)]
    write_files(tmp_path / "in", {"a.jsonl": b"".join(mixed), "b.txt": b"fine " * 40, "c.txt": b"one\ntwo \xe9\n",
                                  "d.txt": b"a\nb\0", "e.fa": b"what\n>x\nMK1\n>y\nMKV\n"})  # fmt: skip
    with gzip.open(tmp_path / "in" / "f.jsonl.gz", "wb") as file:
        file.write(b"".join(mixed))
    args = [tmp_path / "in", tmp_path / "out", "--tokenizer", "bytes", "--sequence", 8, "--held-out", 0]
    assert convert(*args) == 2
    error = capsys.readouterr().err
    assert "16 of 186 documents cannot be used, listed in" in error and "more than --bad 0.01: repair them, or allow more" in error
    assert "the first: " in error and "a.jsonl: line 7: not JSON" in error
    assert convert(*args, "--bad", 0.2) == 0
    cause = {Path(location).name: reason for location, reason in read_json(tmp_path / "out" / "skipped.json")["unusable"].items()}
    for name in ("a.jsonl", "f.jsonl.gz"):
        assert cause[f"{name}: line 20"] == "no field 'text'; it has other, id: name one with --field"
        assert cause[f"{name}: line 33"] == "byte 0xff is not UTF-8" and "a int in text, expected text" in cause[f"{name}: line 50"]
        assert cause[f"{name}: line 51"].startswith("a JSON list; expected an object") and "surrogate" in cause[f"{name}: line 60"]
    assert cause["c.txt"].startswith("line 2: byte 0xe9 is not UTF-8; convert it (iconv")
    assert cause["d.txt"].startswith("line 2: a NUL byte") and cause["e.fa: line 2"].startswith("'1' in a sequence")
    assert cause["e.fa: line 1"].startswith("'what' before any line with '>'")
    assert len(cause) == 16 and read_json(tmp_path / "out" / "text.json")["unusable"] == 16
    assert Counter(documents_of(tmp_path / "out", "train")[:-1])["MKV"] == 1


def halve(data: bytes) -> bytes:
    return data[: len(data) // 2]


def encode_table() -> bytes:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"body": ["a"] * 99}), buffer)
    return bytes(buffer.getvalue().to_pybytes())


REFUSED: dict[str, Any] = {
    "gzip cut off": ({"a.txt.gz": halve(gzip.compress(bytes(range(99)) * 99))}, [], "a.txt.gz: damaged or truncated"),
    "zst cut off": ({"a.jsonl.zst": zstandard.compress(bytes(range(99)) * 99)[:-3]}, [], "a.jsonl.zst: truncated within a frame"),
    "parquet cut off": ({"a.parquet": halve(encode_table())}, [], "a.parquet: not a complete Parquet file"),
    "column": ({"a.parquet": encode_table()}, [], "a.parquet: no column 'text'; it has body: name one with --field"),
    "no messages": ({"a.jsonl": b'{"messages": [{"role": "user", "content": "a"}]}'}, ["--chat", "--tokenizer", GOLDEN],
                    "a.jsonl: line 1: nothing that is an answer"),
    "refused by the template": ({"a.jsonl": b'{"messages": [{"role": "tool", "content": ""}]}'}, ["--chat", "--tokenizer", GOLDEN],
                                "tokenizer.json: chat template: unknown role: tool; more than --bad 0.01"),
    **load_json("refused/texts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_unusable_sources_are_refused_by_name(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, options, error = REFUSED[case]
    write_files(tmp_path / "in", files)
    tokenizer = [] if "--tokenizer" in options else ["--tokenizer", "bytes"]
    held_out = [] if "--held-out" in options else ["--held-out", 0]
    assert convert(tmp_path / "in", tmp_path / "out", "--sequence", T, *held_out, *tokenizer, *options) == 2
    check_error(capsys, error)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--sequence", 16], "sequence 32 (now 16)"), (["--seed", 9], "seed 3 (now 9)"), (["--tokenizer", GOLDEN], "tokenizer "),
        (["--held-out", 0.5], "held_out 0.3 (now 0.5)"),
    ],
)  # fmt: skip
def test_a_folder_made_with_other_settings_is_refused(
    dataset: Path, source: Path, capsys: pytest.CaptureFixture[str], options: list[Any], error: str
) -> None:
    before = content(dataset)
    assert convert(source, dataset, "--tokenizer", "bytes", *SMALL, *options) == 2
    output = capsys.readouterr().err
    assert f"{dataset}: was made with {error}" in output and "choose a new folder" in output and content(dataset) == before


def test_another_source_and_an_out_within_it_are_refused(dataset: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source / "a.jsonl", dataset, "--tokenizer", "bytes", *SMALL) == 2
    assert "sources 32 files" in capsys.readouterr().err
    assert convert(source, source / "out", "--tokenizer", "bytes") == 2
    assert "OUT lies within SOURCE" in capsys.readouterr().err and not (source / "out").exists()


def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE", 1000)
    monkeypatch.setattr(documents, "BLOCK", 100)
    write_files(tmp_path, {"a.jsonl": b'{"text": "a"}\n' + b"x" * 1200})
    with pytest.raises(DataError, match="a.jsonl: the line from byte 14 on is longer than"):
        list(documents.read_lines(tmp_path / "a.jsonl"))
