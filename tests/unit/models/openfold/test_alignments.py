"""Alignments and template hits: letters, insertions, order of files, errors with line numbers, time and memory."""

import gzip
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcai.errors import DataError
from hpcai.models.openfold import alignments
from hpcai.models.openfold.alignments import Alignment, encode, parse_a3m, parse_hhr, parse_stockholm, read_alignments
from hpcai.models.openfold.residues import GAP, RESTYPES, UNKNOWN
from tests.reference_data import DATA

A3M, STO, HHR = ((DATA / f"openfold/formats/small.{kind}").read_bytes() for kind in ("a3m", "sto", "hhr"))


def rows(alignment: Alignment) -> list[str]:
    return ["".join((RESTYPES + "X-")[code] for code in row) for row in alignment.msa]


def test_lower_case_letters_count_before_the_next_column() -> None:
    alignment = parse_a3m(A3M, "x.a3m")
    assert (len(alignment), rows(alignment)) == (3, ["ACDE", "A-CE", "ACDE"])
    assert alignment.deletions.tolist() == [[0, 0, 0, 0], [2, 0, 0, 1], [0, 0, 0, 3]]
    assert alignment.names == ["query", "one, with words", "two"]
    assert (alignment.msa.dtype, alignment.deletions.dtype) == (np.int8, np.int32)
    assert rows(parse_a3m(A3M.replace(b"\n", b"\r\n"), "x.a3m")) == rows(alignment)


@pytest.mark.parametrize("data", [
    b"#4\t1\n>101\nACDE\n>r\nA-DE\n\0", b">other\nAAA\n\0>101\nACDE\n>r\nA-DE\n\0>last\nCCCC\n",
    b"\xef\xbb\xbf>101\nACDE*\n>r\nA-\nDE*\n",
    b">ss_dssp\nCCHH\n>ss_pred P\nCEHC\n>ss_conf P\n0129\n>101\nACDE\n>Consensus\nacde\n>sa_dssp\n12??\n>r\nA-DE\n",
    b"# STOCKHOLM 1.0\n#=GF ID q\n\n101/1-4 AC\n#=GR 101/1-4 PP 9*\nr/2-9 A-\n#=GC RF xx\n\n101/1-4 DE\nr/2-9 DE\n#=GC RF xx\n//\n",
], ids=["NUL at the end", "blocks", "byte order mark, stops", "annotations", "Stockholm in a3m"])  # fmt: skip
def test_alignments_of_other_programs_are_read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "hits.a3m"
    for content in (data, gzip.compress(data)):         # gzip without .gz
        path.write_bytes(content)
        assert rows(read_alignments(path, "ACDE")) == ["ACDE", "A-DE"]


def test_empty_files_are_searches_without_hits_and_names_with_a_dot_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alignments._log_empty.cache_clear()
    for name, data in {"._b.a3m": b"\0\5\x16\7", "a.a3m": b"", "b.a3m": b">q\nACDE\n", "c.sto": b"\n"}.items():
        (tmp_path / name).write_bytes(data)
    for _ in range(2):
        assert rows(read_alignments(tmp_path)) == ["ACDE"]
    assert caplog.messages == [f"{name}: an empty file is a search without hits" for name in ("a.a3m", "c.sto")]
    (tmp_path / "b.a3m").write_bytes(b"")
    with pytest.raises(DataError, match="a.a3m: empty, as are all 3 files"):
        read_alignments(tmp_path)


def test_columns_where_the_query_has_a_gap_are_insertions() -> None:
    alignment = parse_stockholm(STO, "x.sto")
    assert (rows(alignment), alignment.names) == (["ACDE", "A-CE", "ACDE"], ["query", "one", "two"])
    assert alignment.deletions.tolist() == [[0, 0, 0, 0], [2, 0, 0, 1], [0, 0, 0, 3]]


def test_letters_have_the_residues_of_alphafold() -> None:
    aliases = dict(zip("BZUJO", "DECXX"))
    expected = [aliases.get(letter, letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    assert rows(parse_a3m(b">q\nABCDEFGHIJKLMNOPQRSTUVWXYZ", "x")) == ["".join(expected)]
    assert encode("aRX").tolist() == [0, 1, UNKNOWN] and parse_a3m(b">q\nA\n>r\n-", "x").msa[1, 0] == GAP


@pytest.mark.parametrize(("sequence", "message"), [
    ("MKVL\n", r"character 5 of 5 is '\\n'"), ("MK-L", "character 3 of 4 is '-'"), ("MKL*", r"character 4 of 4 is '\*'.*a stop"),
    ("MK?", r"character 3 of 3 is '\?'.*X for an unknown"), ("Mß", "'ß'"), ("MK:VL", "character 3 of 5 is ':'.*chains separately"),
    (b"MKVL", "found bytes"),
])  # fmt: skip
def test_invalid_characters_raise(sequence: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "rows.a3m").write_text(">q\nMKVL\n")
    for read in (encode, partial(read_alignments, tmp_path / "rows.a3m")):
        with pytest.raises(DataError, match=f"sequence: .*{message}"):
            read(sequence)


def test_a_hit_has_the_indices_of_both_sequences() -> None:
    first, second = parse_hhr(HHR, "x.hhr")
    assert (first.index, first.name, first.aligned_columns, first.sum_probs) == (1, "1ABC_A a protein; with words", 4, 3.5)
    assert (first.query, first.hit) == ("AC-DKL", "ACG-KL")
    assert first.query_indices.tolist() == [2, 3, -1, 4, 5, 6] and first.hit_indices.tolist() == [9, 10, 11, -1, 12, 13]
    assert (second.index, second.query, second.hit, second.hit_indices.tolist()) == (2, "A", "W", [0])
    assert parse_hhr(b"Query q\n\n No Hit  Prob\n", "x.hhr") == []


@pytest.mark.parametrize(("parse", "data", "message"), [
    (parse_a3m, b"", "line 1: empty"),
    (parse_a3m, b">q\nACDE\n>r s\nACkE\n", "line 3: row 'r s' has 3 columns .lower-case letters aside., expected 4"),
    (parse_a3m, b">q\nACDE\n>r\nAC\nD?\n", r"line 5, column 2: '\?', expected letters"),
    (parse_a3m, b">q\nACDE\n>r\nAC*\nDE\n", r"line 3: row 'r' has a stop \('\*'\) before its end"),
    (parse_a3m, b"<html>\n>q\nACDE\n", "line 1: '<html>' before any line with '>'; expected A3M .it seems to be an HTML page."),
    (parse_stockholm, b">q\nACDE\n", "line 1: '>q', expected '# STOCKHOLM 1.0'"),
    (parse_stockholm, STO.replace(b"one   cG..EKK\n", b""), "line 5: row 'one', .* has 5 columns in all, expected 12"),
    (parse_stockholm, STO.replace(b"DFFFE--", b"DF7FE--"), "line 10, column 9: '7'"),
    (parse_hhr, A3M, "line 1: '#4.t1', expected 'Query'"),
    (parse_hhr, HHR[:HHR.index(b"T 2DEF_B")], "line 22: hit 2 has 1 columns of the query and 0 of the template, so it is trunc"),
])  # fmt: skip
def test_a_broken_file_raises_with_its_line(parse: Callable[[bytes, str], object], data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^x: .*{message}"):
        parse(data, "x")


def test_the_files_of_a_folder_come_in_one_order_without_duplicates(tmp_path: Path) -> None:
    files = {
        "bfd_uniclust_hits.a3m": b">q\nACDE\n>b\nWWWW\n>twice\nAC-E\n", "non_pairing.a3m": b">q\nACDE\n>n\nNNNN\n",
        "uniref90_hits.sto": b"# STOCKHOLM 1.0\nq ACD-E\nu AC-GE\n//\n", "pairing.a3m": b">q\nACDE\n>p\nPPPP\n",
        "uniprot_hits.sto": b"# STOCKHOLM 1.0\nq ACDE\np PPPP\n//\n", "hmm_output.sto": b"nothing", "pdb70_hits.hhr": HHR,
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "mgnify_hits.a3m.gz").write_bytes(gzip.compress(b">q\nACXE\n>m\nMMMM\n"))
    alignment = read_alignments(tmp_path, "ACDE")
    assert alignment.names == ["q", "u", "q", "m", "b", "n"]                # the second q has an X, so it is no duplicate
    assert rows(alignment) == ["ACDE", "AC-E", "ACXE", "MMMM", "WWWW", "NNNN"] and alignment.deletions[1].tolist() == [0, 0, 0, 1]
    assert read_alignments([tmp_path / "non_pairing.a3m", tmp_path / "bfd_uniclust_hits.a3m"]).names == ["q", "n", "b", "twice"]


def test_an_alignment_of_another_chain_raises(tmp_path: Path) -> None:
    (tmp_path / "uniref90_hits.a3m").write_bytes(b">q\nACDE\n")
    (tmp_path / "mgnify_hits.a3m").write_bytes(b">q\nACKE\n")
    with pytest.raises(DataError, match="mgnify_hits.a3m: the query has K at residue 3, expected D .1 of 4 residues differ."):
        read_alignments(tmp_path)
    with pytest.raises(DataError, match="uniref90_hits.a3m: the query has 4 residues, expected 5"):
        read_alignments(tmp_path, "ACDEF")


LARGE: dict[str, tuple[Callable[[bytes, str], object], bytes]] = {
    "inserted": (parse_a3m, b">q\nAC\n>r\nA" + b"g" * 1_000_000 + b"C\n"),
    "long": (parse_a3m, b">q\nACDEF\n" + b">r1\nACaDE-\n" * 20_000),
    "split": (parse_a3m, b">q\n" + b"A\n" * 100_000),
    "blocks": (parse_stockholm, b"# STOCKHOLM 1.0\n" + b"q A-\nr AC\n\n" * 20_000 + b"//\n"),
    "pieces": (parse_hhr, HHR[:HHR.index(b"No 2")] + b"Q q 1 A 1 (1)\nT t 1 A 1 (1)\n" * 10_000),
}


@pytest.mark.parametrize("name", LARGE)
def test_time_and_memory_grow_with_the_file_only(name: str) -> None:
    parse, data = LARGE[name]
    tracemalloc.start()
    begin = time.process_time()
    parse(data, "x")
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 10 and peak < 100 * len(data)  # about 1 s here; quadratic time would be far more
