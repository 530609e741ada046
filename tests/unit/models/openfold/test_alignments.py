"""Alignments and template hits: what the letters mean, which files are refused and where, time and memory."""

import gzip
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.errors import DataError
from hpcai.models.openfold.alignments import Alignment, encode, parse_a3m, parse_hhr, parse_stockholm, read_alignments
from hpcai.models.openfold.residues import GAP, LETTERS, UNKNOWN

A3M = b"""#4\t1
>query
ACDE
>one, with words
aaA-CgEkk

>two
.AC
DfffE
"""
STO = b"""# STOCKHOLM 1.0
#=GS two DE some words

query --AC-
one   aaA-.
two   ..AC.

query D---E--
one   cG..EKK
two   DFFFE--
#=GC RF xxx
//
"""
HHR = b"""Query         q
Match_columns 9

 No Hit                             Prob
  1 1ABC_A a protein                 9.9

No 1
>1ABC_A a protein; with words
Probab=9.90  E-value=3e+02  Score=1.0  Aligned_cols=4  Identities=9%  Similarity=0.3  Sum_probs=3.5  Template_Neff=4.5

Q ss_pred             HHHHHHH
Q query             3 AC-D    5 (9)
Q Consensus         3 ac~d    5 (9)
                      .++|
T Consensus        10 ac~d   12 (41)
T 1ABC_A           10 ACG-   12 (41)
T ss_dssp             HHHH

Q query             6 KL    7 (9)
T 1ABC_A           13 KL   14 (41)

No 2
>2DEF_B
Probab=1.9  E-value=3e+02  Score=1.0  Aligned_cols=1  Identities=9%  Similarity=0.3  Sum_probs=0.5  Template_Neff=4.5
Q query             1 A    1 (9)
T 2DEF_B            1 W    1 (2)
"""


def text(found: Alignment) -> list[str]:
    return ["".join((LETTERS + "X-")[code] for code in row) for row in found.msa]


def test_lower_case_letters_count_before_the_next_column() -> None:
    found = parse_a3m(A3M, "x.a3m")
    assert (len(found), text(found)) == (3, ["ACDE", "A-CE", "ACDE"])
    assert found.deletions.tolist() == [[0, 0, 0, 0], [2, 0, 0, 1], [0, 0, 0, 3]]
    assert found.names == ["query", "one, with words", "two"]
    assert (found.msa.dtype, found.deletions.dtype) == (np.int8, np.int32)
    assert text(parse_a3m(A3M.replace(b"\n", b"\r\n"), "x.a3m")) == text(found)


def test_columns_where_the_query_has_a_gap_are_insertions() -> None:
    found = parse_stockholm(STO, "x.sto")
    assert (text(found), found.names) == (["ACDE", "A-CE", "ACDE"], ["query", "one", "two"])
    assert found.deletions.tolist() == [[0, 0, 0, 0], [2, 0, 0, 1], [0, 0, 0, 3]]


def test_every_letter_has_the_residue_that_alphafold_gives_it() -> None:
    like = dict(zip("BZUJO", "DECXX"))
    expected = [like.get(letter, letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    assert text(parse_a3m(b">q\nABCDEFGHIJKLMNOPQRSTUVWXYZ", "x")) == ["".join(expected)]
    assert encode("aRX").tolist() == [0, 1, UNKNOWN] and parse_a3m(b">q\nA\n>r\n-", "x").msa[1, 0] == GAP


@pytest.mark.parametrize(
    ("sequence", "says"),
    [("MKVL\n", r"character 5 of 5 is '\\n'"), (" MK", "character 1 of 3 is ' '"), ("MK-L", "character 3 of 4 is '-'"),
     ("MKL*", r"character 4 of 4 is '\*'.*a stop"), ("MK?", r"character 3 of 3 is '\?'.*X for an unknown"), ("M1", "'1'"),
     ("Mß", "'ß'"), ("MK:VL", "character 3 of 5 is ':'.*one by one"),
     (None, "found NoneType"), (b"MKVL", "found bytes"), (["M", "K"], "found list")],
)  # fmt: skip
def test_what_is_no_letter_of_a_sequence_is_refused(sequence: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "rows.a3m").write_text(">q\nMKVL\n")
    with pytest.raises(DataError, match=f"sequence: .*{says}"):
        encode(sequence)
    if sequence is not None:
        with pytest.raises(DataError, match=f"sequence: .*{says}"):
            read_alignments(tmp_path / "rows.a3m", sequence)


def test_a_hit_has_the_indices_of_both_sequences() -> None:
    first, second = parse_hhr(HHR, "x.hhr")
    assert (first.index, first.name, first.aligned_columns, first.sum_probs) == (1, "1ABC_A a protein; with words", 4, 3.5)
    assert (first.query, first.hit) == ("AC-DKL", "ACG-KL")
    assert first.query_indices.tolist() == [2, 3, -1, 4, 5, 6] and first.hit_indices.tolist() == [9, 10, 11, -1, 12, 13]
    assert (second.index, second.query, second.hit, second.hit_indices.tolist()) == (2, "A", "W", [0])
    assert parse_hhr(b"Query q\n\n No Hit  Prob\n", "x.hhr") == []


@pytest.mark.parametrize(("parse", "data", "message"), [
    (parse_a3m, b"", "line 1: empty"),
    (parse_a3m, b" \n\n", "line 1: empty"),
    (parse_a3m, b"# only words\n", "no line begins with '>'"),
    (parse_a3m, b"\nACDE\n>q\nACDE\n", "line 2: 'ACDE' before any line with '>'"),
    (parse_a3m, b">q\n>r\nAC\n", "line 1: the query, the first row, has no letters"),
    (parse_a3m, b">q\nACdE\n>r\nACE\n", "line 1: the query, the first row, has lower-case letters"),
    (parse_a3m, b">q\nAC-E\n>r\nACDE\n", "line 1: the query, the first row, has a gap at its column 3"),
    (parse_a3m, b">q\nACDE\n>r s\nACkE\n", "line 3: row 'r s' has 3 columns .lower-case letters aside., expected 4"),
    (parse_a3m, b">q\nACDE\n>r\nAC\nD*\n", r"line 5, column 2: '\*', expected letters"),
    (parse_a3m, b">q\nACDE\n>r\nA DE\n", "line 4, column 2: ' '"),
    (parse_a3m, b">q\nACDE\n>r\n\xc3\x84CD\n", "line 4, column 1: byte 0xc3"),
    (parse_a3m, b">q\nACDE\n\0>q\nACDE\n", "line 3: a NUL byte"),
    (parse_stockholm, b"", "line 1: empty"),
    (parse_stockholm, b">q\nACDE\n", "line 1: '>q', expected '# STOCKHOLM 1.0'"),
    (parse_stockholm, STO[:-3], "line 11: the file ends without '//'"),
    (parse_stockholm, b"# STOCKHOLM 1.0\n//\n", "line 2: no rows"),
    (parse_stockholm, STO.replace(b"one   cG..EKK\n", b""), "line 5: row 'one', .* has 5 columns in all, expected 12"),
    (parse_stockholm, STO.replace(b"DFFFE--", b"D FFE--"), "line 10: 'two   D FFE--', expected a name and a row"),
    (parse_stockholm, STO.replace(b"DFFFE--", b"DF7FE--"), "line 10, column 9: '7'"),
    (parse_stockholm, b"# STOCKHOLM 1.0\nq --\nr AC\n//\n", "line 2: the query, the first row, has only gaps"),
    (parse_stockholm, STO + STO, "line 13: '# STOCKHOLM 1.0' after '//'"),
    (parse_hhr, b"", "line 1: empty"),
    (parse_hhr, A3M, "line 1: '#4.t1', expected 'Query'"),
    (parse_hhr, HHR.replace(b"Sum_probs=3.5", b""), "line 7: not the head of a hit"),
    (parse_hhr, HHR.replace(b"KL    7", b"KL    8"), "line 19: 'Q query .* expected the name, the first residue"),
    (parse_hhr, HHR.replace(b"13 KL   14", b"13 KLM  15"), "line 20: 'T 1ABC_A .* as many columns in Q as in T"),
    (parse_hhr, HHR[:HHR.index(b"T 2DEF_B")], "line 22: hit 2 has 1 columns of the query and 0 of the template: it is cut off"),
])  # fmt: skip
def test_a_broken_file_is_refused_with_its_line(parse: Callable[[bytes, str], object], data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^x: .*{message}"):
        parse(data, "x")


def test_the_files_of_a_folder_come_in_one_order_without_duplicates(tmp_path: Path) -> None:
    written = {
        "bfd_uniclust_hits.a3m": b">q\nACDE\n>b\nWWWW\n>twice\nAC-E\n", "non_pairing.a3m": b">q\nACDE\n>n\nNNNN\n",
        "uniref90_hits.sto": b"# STOCKHOLM 1.0\nq ACD-E\nu AC-GE\n//\n", "pairing.a3m": b">q\nACDE\n>p\nPPPP\n",
        "uniprot_hits.sto": b"# STOCKHOLM 1.0\nq ACDE\np PPPP\n//\n", "hmm_output.sto": b"nothing", "pdb70_hits.hhr": HHR,
    }  # fmt: skip
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "mgnify_hits.a3m.gz").write_bytes(gzip.compress(b">q\nACXE\n>m\nMMMM\n"))
    found = read_alignments(tmp_path, "ACDE")
    assert found.names == ["q", "u", "q", "m", "b", "n"]                # the second q has an X, and so is another row
    assert text(found) == ["ACDE", "AC-E", "ACXE", "MMMM", "WWWW", "NNNN"] and found.deletions[1].tolist() == [0, 0, 0, 1]
    assert read_alignments([tmp_path / "non_pairing.a3m", tmp_path / "bfd_uniclust_hits.a3m"]).names == ["q", "n", "b", "twice"]


def test_an_alignment_of_another_chain_is_refused(tmp_path: Path) -> None:
    (tmp_path / "uniref90_hits.a3m").write_bytes(b">q\nACDE\n")
    (tmp_path / "mgnify_hits.a3m").write_bytes(b">q\nACKE\n")
    with pytest.raises(DataError, match="mgnify_hits.a3m: the query has K at residue 3, expected D .1 of 4 residues differ."):
        read_alignments(tmp_path)
    with pytest.raises(DataError, match="uniref90_hits.a3m: the query has 4 residues, expected 5"):
        read_alignments(tmp_path, "ACDEF")
    with pytest.raises(DataError, match="uniref90_hits.a3m: the query has A at residue 1, expected M"):
        read_alignments(tmp_path, "MCDE")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "short.a3m.gz").write_bytes(gzip.compress(A3M)[:-9])
    (tmp_path / "plain.a3m.gz").write_bytes(A3M)
    for name, message in (("short.a3m.gz", "ended"), ("plain.a3m.gz", "gzip"), ("none.a3m", "No such file"), (".", "directory")):
        with pytest.raises(DataError, match=f"^{tmp_path / name}: cannot be read: .*{message}"):
            read_alignments([tmp_path / name])
    for folder, message in ((tmp_path / "none", "No such file"), (tmp_path / "bare", "no alignments there")):
        (tmp_path / "bare").mkdir(exist_ok=True)
        with pytest.raises(DataError, match=f"^{folder}: {message}"):
            read_alignments(folder)


WIDE = b">q\n" + b"A" * 2_000_000 + b"\n"
INSERTED = b">q\nAC\n>r\nA" + b"g" * 2_000_000 + b"C\n"
LONG = b">q\nACDEF\n" + b">r1\nACaDE-\n" * 50_000
RAGGED = WIDE + b">r\nA\n" * 50_000
SPLIT = b">q\n" + b"A\n" * 250_000
BLOCKS = b"# STOCKHOLM 1.0\n" + b"q A-\nr AC\n\n" * 50_000 + b"//\n"
PIECES = HHR[:HHR.index(b"No 2")] + b"Q q 1 A 1 (1)\nT t 1 A 1 (1)\n" * 20_000


@pytest.mark.parametrize(("parse", "data"), [
    (parse_a3m, WIDE), (parse_a3m, INSERTED), (parse_a3m, LONG), (parse_a3m, RAGGED), (parse_a3m, SPLIT), (parse_stockholm, BLOCKS),
    (parse_hhr, PIECES),
], ids=["wide", "inserted", "long", "ragged", "split", "blocks", "pieces"])  # fmt: skip
def test_time_and_memory_grow_with_the_file_only(parse: Callable[[bytes, str], object], data: bytes) -> None:
    begin = time.process_time()
    try:
        parse(data, "x")
    except DataError:
        assert data is RAGGED
    assert time.process_time() - begin < 5              # under 1 s here; what is quadratic takes far longer
    tracemalloc.start()
    try:
        parse(data[:len(data) // 8], "x")
    except DataError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 100 * len(data) / 8


PIECE = st.sampled_from([
    b">", b"\n", b"\n>q\n", b"ACDE", b"acd", b"-", b".", b"*", b"#", b"//", b"# STOCKHOLM 1.0\n", b"q ACDE\n",
    b"r AC-E\n", b"Query\n", b"No 1\n", b">a\nAligned_cols=1 Sum_probs=1\n", b"Q q 1 A 1 (1)\n", b"T t 1 A 1 (1)\n",
    b"99999999999999999999", b"nan", b"\0", b"\xff", b"\r",
])  # fmt: skip


def same_or_refused(data: bytes) -> None:
    for parse in (parse_a3m, parse_stockholm, parse_hhr):
        try:
            found = parse(data, "x")
        except DataError as problem:
            assert str(problem).startswith("x: ")
            continue
        if isinstance(found, Alignment):
            assert found.msa.shape == found.deletions.shape == (len(found.names), found.msa.shape[1])
            assert ((found.msa >= 0) & (found.msa <= GAP)).all() and (found.deletions >= 0).all() and (found.msa[0] < GAP).all()


@settings(max_examples=200, deadline=2000)
@given(st.data())
def test_any_bytes_and_damaged_files_are_read_or_refused(data: st.DataObject) -> None:
    same_or_refused(data.draw(st.one_of(st.binary(max_size=200), st.lists(PIECE, max_size=25).map(b"".join))))
    whole = data.draw(st.sampled_from([A3M, STO, HHR]))
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(whole))] * 2)))
    same_or_refused(whole[:begin] + data.draw(st.binary(max_size=3)) + whole[end:])
    same_or_refused(whole[:end])
