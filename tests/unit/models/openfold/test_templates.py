"""Templates: which hits may be seen and which tell the answer, where their residues are, and what a network gets of them."""

import gzip
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcai.errors import DataError
from hpcai.models.openfold import FeatureConfig, OpenFold, OpenFoldConfig, read_templates
from hpcai.models.openfold.alignments import Hit, read_hhr
from hpcai.models.openfold.features import TEMPLATES, collate, featurize
from hpcai.models.openfold.residues import GAP, LETTERS, PLACE, UNKNOWN
from hpcai.models.openfold.structures import Chain, read_mmcif, write_structure
from hpcai.models.openfold.templates import chain_of, features_of, match, unusable
from tests import proteins

pytest.importorskip("gemmi", reason="gemmi is not installed: templates are NOT tested")
DAY = date(2020, 6, 1)

DRAW = np.random.default_rng(7)
QUERY = "".join(LETTERS[code] for code in DRAW.integers(0, 20, 40))
OTHER = "".join(LETTERS[code] for code in DRAW.integers(0, 20, 60))


def hit(query: str, text: str, first: int = 0, at: int = 0, name: str = "1ABC_A a protein; 1.9A {Homo}", **changes: Any) -> Hit:
    """Two aligned texts, which begin at residue ``first`` of the query and ``at`` of the template."""
    places = []
    for row, begin in ((query, first), (text, at)):
        there = np.array([letter != "-" for letter in row])
        places.append(np.where(there, begin - 1 + np.cumsum(there), -1))
    pairs = sum(a != "-" != b for a, b in zip(query, text))
    return replace(Hit(1, name, pairs, 3.5, query, text, *places), **changes)


@dataclass(frozen=True)
class Told:
    sequence: str
    release: date | None


def known(sequence: str = OTHER, release: date | None = date(2010, 1, 1)) -> Any:
    chain = Told(sequence, release)
    return {"1abc_A": chain, "2abc_A": chain, "1abc_a": Told("A" * 40, release)}.get


HIT = hit(QUERY[5:25], OTHER[30:50], 5, 30)


def reason(one: Hit = HIT, sequence: str = QUERY, chains: Any = None, **words: Any) -> str | None:
    """Why a hit is refused; None where it is taken."""
    found, reasons = match([one], sequence, chains or known(), **words)
    assert len(found) + len(reasons) == 1
    return None if found else next(iter(reasons.values()))


# ---- the rules


def test_a_template_of_the_same_entry_is_refused() -> None:
    assert reason() is None and reason(entry="5zyh") is None and reason(entry="11abc") is None
    assert "of the same entry as the query, 1abc" in str(reason(entry="1abc")) and reason(entry="1ABC") == reason(entry="1abc")
    assert reason(replace(HIT, name="1abc_a other"), entry="1ABC")


@pytest.mark.parametrize("days, taken", [(0, False), (-1, False), (59, False), (60, True), (61, True)])
def test_a_template_released_less_than_60_days_before_the_query_is_refused(days: int, taken: bool) -> None:
    chains = known(release=DAY - timedelta(days))
    assert (reason(chains=chains, before=DAY) is None) == taken and reason(chains=chains) is None
    assert taken or str(DAY - timedelta(days)) in str(reason(chains=chains, before=DAY))


def test_a_template_without_a_day_might_tell_the_answer() -> None:
    assert reason(chains=known(release=None)) is None
    assert "no day of release" in str(reason(chains=known(release=None), before=DAY))


@pytest.mark.parametrize("length, taken", [(40, True), (39, True), (38, False), (37, False)])
def test_a_copy_of_more_than_95_of_100_residues_is_refused(length: int, taken: bool) -> None:
    """38 of 40 residues are just 95 %; and only what is in the query letter by letter is a copy."""
    taken = not taken
    copy = QUERY[1 : 1 + length] if length < 40 else QUERY
    one = hit(copy, copy, QUERY.find(copy))
    assert (reason(one, chains=known(copy)) is None) == taken
    changed = ("A" if copy[0] != "A" else "G") + copy[1:]
    assert reason(hit(copy, changed, QUERY.find(copy)), chains=known(changed)) is None
    gap = copy[:9] + "-" + copy[9:]
    assert (reason(hit(gap, copy[:4] + "-" + copy[4:], QUERY.find(copy)), chains=known(copy)) is None) == taken, "without gaps"


@pytest.mark.parametrize("length, aligned, taken", [(100, 10, False), (100, 11, True), (99, 10, True), (101, 10, False)])
def test_more_than_a_tenth_of_the_query_is_aligned(length: int, aligned: int, taken: bool) -> None:
    query = (QUERY * 3)[:length]
    one = hit(query[:20], OTHER[:20], aligned_columns=aligned)
    assert (reason(one, query) is None) == taken


@pytest.mark.parametrize("letters, taken", [(9, False), (10, True)])
def test_few_letters_tell_little(letters: int, taken: bool) -> None:
    one = hit(QUERY[:12], OTHER[:letters] + "-" * (12 - letters), aligned_columns=12)
    assert (reason(one) is None) == taken


def test_a_chain_that_is_not_there_or_cannot_be_read_is_refused_and_letters_of_chains_differ_in_case() -> None:
    def broken(name: str) -> None:
        raise DataError(f"{name}.cif: not whole\nat all")

    assert reason(replace(HIT, name="9XYZ_A a")) == "no structure of it is there"
    assert reason(chains=broken) == "1abc_A.cif: not whole at all"
    assert "of 20 letters are those of its structure" in str(reason(replace(HIT, name="1ABC_a a")))
    assert reason(refuse=lambda one: f"{one.name} is no good") == "1abc_A is no good"


@pytest.mark.parametrize("name, chain", [
    ("1ABC_A Some protein; 1.5A {Homo sapiens}", "1abc_A"), ("1abc_a", "1abc_a"), ("4V6X_AA x", "4v6x_AA"), ("", None),
    ("made_1_B x", "made_1_B"), ("_A x", None), ("1ABC", None), ("1ABC_ x", None), ("pdb|1abc|A x", None), (" \t", None),
])  # fmt: skip
def test_hits_are_named_as_chains_of_entries(name: str, chain: str | None) -> None:
    assert chain_of(replace(HIT, name=name)) == chain
    assert chain or "not named as a chain" in str(reason(replace(HIT, name=name)))


def test_the_best_come_first_and_equals_as_in_the_file() -> None:
    names = ("1abc_A", 2.0), ("2abc_A", 5.0), ("9zzz_A", 9.0), ("1abc_A", 5.0), ("9zzz_A", 1.0), ("2abc_A", 0.0)
    hits = [replace(HIT, index=number, name=name, sum_probs=probs) for number, (name, probs) in enumerate(names)]
    found, reasons = match(hits, QUERY, known())
    assert [(one.name, one.sum_probs) for one in found] == [("2abc_A", 5), ("1abc_A", 5), ("1abc_A", 2), ("2abc_A", 0)]
    assert list(reasons) == ["9zzz_A", "9zzz_A, hit 4"]
    assert [one.sum_probs for one in match(hits, QUERY, known(), most=2)[0]] == [5, 5]
    assert match(hits, QUERY, known(), most=0) == ([], {}) == match([], QUERY, known())
    for odd in (np.nan, np.inf, -1.0):
        found, reasons = match([replace(hits[0], sum_probs=odd), *hits[1:]], QUERY, known())
        assert len(found) == 3 and "Sum_probs=" in reasons["1abc_A"]


# ---- where the residues are


def places_of(one: Hit, sequence: str = OTHER) -> list[int]:
    found, reasons = match([one], QUERY, known(sequence))
    assert not reasons and found[0].places.shape == (40,)
    return list(found[0].places.tolist())


def test_residues_are_where_the_hit_says() -> None:
    assert places_of(HIT) == [-1] * 5 + [*range(30, 50)] + [-1] * 15
    repeated = OTHER[:20] * 3
    assert places_of(hit(QUERY[:15], repeated[22:37], 0, 22), repeated)[:15] == [*range(22, 37)], "not where they are first"
    gaps = hit(QUERY[:10] + "---" + QUERY[10:22], OTHER[4:8] + "--" + OTHER[8:27], 0, 4)
    assert places_of(gaps)[:22] == [4, 5, 6, 7, -1, -1, 8, 9, 10, 11, *range(15, 27)]


def test_residues_are_found_where_the_hit_counts_otherwise() -> None:
    moved = replace(HIT, hit_indices=HIT.hit_indices - 17)
    assert places_of(moved) == places_of(HIT)
    assert places_of(replace(HIT, hit_indices=HIT.hit_indices + 1000)) == places_of(HIT), "beyond the end"
    unknown = OTHER[:33] + "X" + OTHER[34:41] + "XX" + OTHER[43:]
    assert places_of(HIT, unknown) == places_of(moved, unknown) == places_of(HIT)
    assert places_of(hit(QUERY[5:25], "X" + OTHER[31:50], 5, 3)) == places_of(HIT)


def test_a_changed_chain_is_aligned_anew() -> None:
    """2 of 20 letters may differ; a chain that has more residues within costs nothing."""
    def other(letter: str) -> str:
        return "A" if letter != "A" else "G"

    two = OTHER[:35] + other(OTHER[35]) + OTHER[36:44] + other(OTHER[44]) + OTHER[45:]
    three = two[:39] + other(two[39]) + two[40:]
    assert places_of(HIT, two) == places_of(HIT) == places_of(replace(HIT, hit_indices=HIT.hit_indices - 9), two)
    assert reason(chains=known(three)) == "17 of 20 letters are those of its structure, expected 90% at least"
    longer = OTHER[:40] + "WWWW" + OTHER[40:]
    assert places_of(HIT, longer)[5:25] == [*range(30, 40), *range(44, 54)]
    shorter = OTHER[:40] + OTHER[41:]
    assert places_of(HIT, shorter)[5:25] == [*range(30, 40), -1, *range(40, 49)]
    for chain in ("", OTHER + "A" * 32708):
        assert reason(chains=known(chain)) == f"{len(chain)} residues, expected 1 to 32767"
    assert places_of(HIT, OTHER + "A" * 32707) == places_of(HIT)


@given(st.integers(0, 2**32), st.integers(12, 200), st.integers(0, 3))
def test_what_is_aligned_anew_goes_on_and_agrees(seed: int, length: int, changes: int) -> None:
    draw = np.random.default_rng(seed)
    chain = "".join(LETTERS[code] for code in draw.integers(0, 20, length))
    begin = int(draw.integers(0, length - 11))
    text = list(chain[begin : begin + 40])
    for _ in range(changes):
        at = int(draw.integers(len(text)))
        text[at : at + int(draw.integers(0, 3))] = [LETTERS[code] for code in draw.integers(0, 20, int(draw.integers(0, 3)))]
    one = hit(QUERY[: len(text)], "".join(text)[:40], 0, begin + 3, aligned_columns=20)
    found, _ = match([one], QUERY, known(chain))
    for each in found:
        there = each.places[each.places >= 0]
        pairs = [(one.hit[column], chain[each.places[column]]) for column in range(len(one.hit)) if each.places[column] >= 0]
        assert (np.diff(there) > 0).all() and there.max() < length
        assert sum(a == b for a, b in pairs) >= 0.9 * min(len(one.hit), length)
    assert changes or found


@pytest.mark.parametrize("change", [
    {"query": "A" + HIT.query[1:] if HIT.query[0] != "A" else "G" + HIT.query[1:]}, {"query_indices": HIT.query_indices + 1},
    {"query_indices": HIT.query_indices + 30}, {"query_indices": HIT.query_indices[::-1]}, {"query": HIT.query[1:]},
    {"hit": HIT.hit[:-1] + "-"}, {"hit_indices": HIT.hit_indices[1:]},
])  # fmt: skip
def test_hits_of_another_query_are_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="hit 1, '1ABC_A a protein"):
        match([replace(HIT, **change)], QUERY, known())
    with pytest.raises(DataError, match="sequence: character 1 of 40 is '-'"):
        match([HIT], "-" * 40, known())
    assert not match([replace(HIT, query="X" + HIT.query[1:])], QUERY, known())[1], "an unknown residue agrees with all"


# ---- what is seen


def test_features_are_those_of_the_residues_at_the_places() -> None:
    one, two = proteins.chain(30, 1), proteins.chain(12, 2)
    row = {"aatype": two.aatype.astype(np.int8), "positions": two.positions, "mask": two.mask.astype(np.uint8), "name": b"x"}
    places = np.array([[-1, 0, 29, -1, 7], [11, 10, -1, 0, -1]], np.int16)
    found = features_of([one, row], places, [3.5, 2.0])
    assert tuple(found) == TEMPLATES and [found[name].dtype for name in TEMPLATES] == [np.int64, *[np.float32] * 3]
    assert found["template_sum_probs"].tolist() == [[3.5], [2.0]]
    for number, chain in enumerate((one, two)):
        for residue, at in enumerate(places[number]):
            told = [found[name][number, residue] for name in TEMPLATES[:3]]
            if at < 0:
                assert told[0] == GAP and not told[1].any() and not told[2].any()
            else:
                assert told[0] == chain.aatype[at] and (told[2] == chain.mask[at]).all()
                assert (told[1] == chain.positions[at] * chain.mask[at, :, None]).all()
    none = features_of([], np.zeros((0, 5), np.int16), [])
    assert [none[name].shape for name in TEMPLATES] == [(0, 5), (0, 5, 37, 3), (0, 5, 37), (0, 1)]


@pytest.mark.parametrize("places, probs", [
    ([[0, 12]], [1]), ([[-2, 0]], [1]), ([[0.0, 1.0]], [1]), ([0, 1], [1]), ([[0, 1]], [1, 2]), ([[0, 1], [0, 1]], [1, 2]),
])  # fmt: skip
def test_places_that_a_chain_has_not_are_refused(places: Any, probs: list[float]) -> None:
    with pytest.raises(DataError, match="templates: "):
        features_of([proteins.chain(12)], places, probs)
    with pytest.raises(DataError, match=r"expected \[P\]"):
        features_of([replace(proteins.chain(12), mask=np.zeros((11, 37), np.float32))], [[0, 1]], [1])


def test_a_chain_without_backbone_or_with_a_jump_is_no_template() -> None:
    chain = replace(proteins.chain(20), mask=np.ones((20, 37), np.float32))
    assert unusable(chain) is None
    for atom in ("N", "CA", "C"):
        mask = chain.mask.copy()
        mask[:, PLACE[atom]] = 0
        assert unusable(replace(chain, mask=mask)) == "no residue has its backbone"
    positions = np.zeros((20, 37, 3), np.float32)
    positions[8:, :, 0] = 150
    assert unusable(replace(chain, positions=positions)) is None
    positions[8:, :, 0] = 150.1
    assert unusable(replace(chain, positions=positions)) == "150 angstrom from residue 8 to the next, 150 at most"
    for residue in (7, 8):
        mask = chain.mask.copy()
        mask[residue, PLACE["CA"]] = 0
        assert unusable(replace(chain, positions=positions, mask=mask)) is None, "only neighbours that are both seen"
    assert unusable({"aatype": chain.aatype, "positions": positions, "mask": np.zeros((20, 37), np.uint8)})


# ---- from files


def text_of(one: Hit, first: int, at: int) -> str:
    ends = [begin + sum(letter != "-" for letter in row) for row, begin in ((one.query, first), (one.hit, at))]
    return (f"\nNo {one.index}\n>{one.name}\nProbab=9  E-value=1  Score=1  Aligned_cols={one.aligned_columns}  Identities=9%  "
            f"Similarity=1  Sum_probs={one.sum_probs}  Template_Neff=1\n\nQ query {first + 1} {one.query} {ends[0]} (99)\n"
            f"T {one.name.split()[0]} {at + 1} {one.hit} {ends[1]} (99)\n")  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Chains of 60 residues: 1abc and 3abc (packed, in a folder), both with all atoms; 2abc is damaged."""
    (tmp_path / "mmcif" / "ab").mkdir(parents=True)
    chain = made()
    for path in (tmp_path / "mmcif" / "1ABC.cif", tmp_path / "mmcif" / "ab" / "3abc.cif"):
        write_structure(path, chain.aatype, chain.positions, chain.mask, chain.bfactors, chain="A")
        path.write_text(path.read_text() + "\n_pdbx_audit_revision_history.revision_date 2010-01-01\n")
    packed = tmp_path / "mmcif" / "ab" / "3abc.cif"
    packed.with_suffix(".cif.gz").write_bytes(gzip.compress(packed.read_bytes()))
    (tmp_path / "mmcif" / "2abc.cif").write_text(packed.read_text()[:-900])
    packed.unlink()
    (tmp_path / "mmcif" / "notes.cif.txt").write_text("no structure")
    rows = [text_of(replace(HIT, index=number, name=f"{name} x", sum_probs=number), 5, 30)
            for number, name in enumerate(("1ABC_A", "1ABC_B", "2ABC_A", "3ABC_A", "9XYZ_A"), 1)]  # fmt: skip
    (tmp_path / "hits.hhr").write_text("Query q\n" + "".join(rows))
    return tmp_path


def made() -> Chain:
    """A chain with N, CA and C of residues 0 to 34 and of 40, and with N and CA of 45 and 52."""
    chain = proteins.chain(60, 3)
    aatype = np.array([LETTERS.index(letter) for letter in OTHER])
    mask = np.zeros((60, 37), np.float32)
    mask[:35, :3] = mask[40, :3] = mask[[45, 52], :2] = 1
    return replace(chain, aatype=aatype, sequence=OTHER, mask=mask, positions=(chain.positions + 1) * mask[..., None])


def test_templates_are_read_from_files_and_the_damaged_are_told(library: Path) -> None:
    found, reasons = read_templates(library / "hits.hhr", QUERY, library / "mmcif", before=DAY)
    assert found["template_sum_probs"].tolist() == [[4], [1]] and set(reasons) == {"1abc_B", "2abc_A", "9xyz_A"}
    assert "chain 'B' is not there" in reasons["1abc_B"] and "2abc.cif: " in reasons["2abc_A"]
    at, chain = [*range(30, 50)], made()
    for row in range(2):
        assert (found["template_aatype"][row, 5:25] == chain.aatype[at]).all() and (found["template_aatype"][row, :5] == GAP).all()
        assert (found["template_all_atom_mask"][row, 5:25] == chain.mask[at]).all()
        assert np.allclose(found["template_all_atom_positions"][row, 5:25], chain.positions[at], atol=1e-3)
    assert len(read_templates(str(library / "hits.hhr"), QUERY, str(library / "mmcif"), most=1)[0]["template_aatype"]) == 1
    same, why = read_templates(library / "hits.hhr", QUERY, library / "mmcif", entry="3ABC", before=date(2010, 1, 2))
    assert not len(same["template_aatype"]) and "same entry" in why["3abc_A"] and "released 2010-01-01" in why["1abc_A"]


def test_only_what_is_needed_is_read(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    seen = lambda path, chain: read.append(path.name) or read_mmcif(path, chain)  # noqa: E731
    monkeypatch.setattr("hpcai.models.openfold.templates.read_mmcif", seen)
    hits = [*read_hhr(library / "hits.hhr"), *read_hhr(library / "hits.hhr")]
    read_templates(hits, QUERY, library / "mmcif", most=1)
    assert read == ["3abc.cif.gz"]
    read_templates(hits, QUERY, library / "mmcif", entry="1abc")
    assert sorted(read[1:]) == ["2abc.cif", "2abc.cif", "3abc.cif.gz"]


@pytest.mark.parametrize("first, taken", [(30, True), (35, True), (41, False)])
def test_five_atoms_are_seen_at_least(library: Path, first: int, taken: bool) -> None:
    """12 residues from 35 on have 3 + 2 atoms, those from 41 on 2 + 2."""
    text = text_of(hit(QUERY[:12], OTHER[first : first + 12], 0, first), 0, first)
    (library / "few.hhr").write_text("Query q\n" + text)
    found, reasons = read_templates(library / "few.hhr", QUERY, library / "mmcif")
    assert len(found["template_aatype"]) == taken and (taken or reasons["1abc_A"].startswith("4 atoms of its aligned"))


def test_a_chain_that_can_be_no_template_is_told(library: Path) -> None:
    chain = made()
    positions = chain.positions.copy()
    positions[20:] += 1000
    write_structure(library / "mmcif" / "1ABC.cif", chain.aatype, positions, chain.mask, chain.bfactors, chain="A")
    assert "angstrom from residue 20 to the next" in read_templates(library / "hits.hhr", QUERY, library / "mmcif")[1]["1abc_A"]


def test_a_folder_or_hits_that_are_not_there_are_an_error(library: Path) -> None:
    with pytest.raises(DataError, match="none: no such folder"):
        read_templates(library / "hits.hhr", QUERY, library / "none")
    with pytest.raises(DataError, match="no.hhr: cannot be read"):
        read_templates(library / "no.hhr", QUERY, library / "mmcif")
    with pytest.raises(DataError, match="is it of another chain"):
        read_templates(library / "hits.hhr", OTHER[:40], library / "mmcif")
    (library / "empty.hhr").write_text("Query q\n")
    found, reasons = read_templates(library / "empty.hhr", QUERY, library / "mmcif")
    assert not reasons and found["template_all_atom_positions"].shape == (0, 40, 37, 3)


# ---- damage

indices = st.lists(st.integers(-3, 70), max_size=30).map(lambda values: np.array(values, np.int64))
texts = st.text("ACDEFGHIKLMNPQRSTVWYXB-acd.*é", max_size=30)


@given(st.fixed_dictionaries({}, optional={
    "index": st.integers(), "name": st.text() | st.just("1abc_a"), "aligned_columns": st.integers(), "sum_probs": st.floats(),
    "query": texts, "hit": texts, "query_indices": indices, "hit_indices": indices,
}))  # fmt: skip
@settings(max_examples=500)
def test_a_hit_with_anything_in_it_is_told_and_nothing_else(changes: dict[str, Any]) -> None:
    try:
        found, reasons = match([HIT, replace(HIT, **changes)], QUERY, known(), entry="5zyh", before=DAY)
    except DataError:
        return
    assert len(found) + len(reasons) == 2
    features_of([proteins.chain(60)] * len(found), np.array([one.places for one in found]), [one.sum_probs for one in found])


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_columns_that_are_changed_everywhere_do_no_harm(seed: int) -> None:
    """A parser hands on texts of one length, with the indices that fit them."""
    draw = np.random.default_rng(seed)
    text = "".join(draw.choice([*"ACDX-"], 30))
    at = int(draw.integers(0, 70))
    one = hit(QUERY[:30], text, 0, at, aligned_columns=30)
    found, _ = match([one], QUERY, known("".join(draw.choice([*"ACDX"], int(draw.integers(1, 60))))))
    assert all((each.places < 60).all() for each in found)


# ---- original files, and a network


@pytest.mark.originals
def test_original_hits_are_at_their_letters(originals: Path) -> None:
    """What the public code keeps of them, and where (compared once, to the last bit of positions and masks)."""
    real = originals / "openfold"
    file, text = real / "alignments/query_SMBPlike/pdb70_hits.hhr", (real / "fasta/query_SMBPlike.fasta").read_text()
    sequence = "".join(line for line in text.splitlines() if not line.startswith(">"))
    found, reasons = read_templates(file, sequence, real / "mmcif")
    hits = {chain_of(one): one for one in read_hhr(file)}
    names = ["3u8v_A", "4zey_A", "1psm_A", "3zee_A", "4i6p_A", "2q2k_A"]
    assert set(reasons) == {"1hf9_B", "2crb_A", "5kc1_F", "5kc1_J"} and "0 atoms" in reasons["5kc1_F"]
    assert found["template_sum_probs"].ravel().tolist() == [np.float32(hits[name].sum_probs) for name in names]
    for row, name in enumerate(names):
        entry, author = name.split("_")
        one, chain = hits[name], read_mmcif(real / "mmcif" / f"{entry}.cif", author).chains[author]
        columns = zip(one.query_indices.tolist(), one.hit_indices.tolist(), one.hit)
        aligned = {at: (letter, place) for at, place, letter in columns if at >= 0 and place >= 0}
        assert len(aligned) == one.aligned_columns
        for residue in range(len(sequence)):
            if residue not in aligned:
                assert found["template_aatype"][row, residue] == GAP and not found["template_all_atom_mask"][row, residue].any()
                continue
            letter, place = aligned[residue]
            assert chain.sequence[place] == letter == LETTERS[found["template_aatype"][row, residue]]
            assert (found["template_all_atom_mask"][row, residue] == chain.mask[place]).all()
            assert (found["template_all_atom_positions"][row, residue] == chain.positions[place]).all()
    early, why = read_templates(file, sequence, real / "mmcif", before=date(2012, 7, 31))
    assert early["template_sum_probs"].ravel().tolist() == [np.float32(hits[n].sum_probs) for n in ("3u8v_A", "1psm_A", "2q2k_A")]
    assert "released 2015-05-06" in why["4zey_A"]


@pytest.mark.usefixtures("one_thread")
def test_a_network_sees_templates() -> None:
    """Four of a real chain, on the residues that they share with it by place."""
    chain, rows = proteins.real("3u8v_A"), proteins.alignment(proteins.real("3u8v_A"), 9)
    sequence, length = chain.sequence, len(chain.sequence)
    others = [proteins.real(name) for name in ("102m_A", "1k1a_A", "5zyh_A", "7zzx_B")]
    found = {f"template_{name}": np.stack([getattr(one, part)[:length] for one in others])
             for name, part in (("aatype", "aatype"), ("all_atom_positions", "positions"), ("all_atom_mask", "mask"))}  # fmt: skip
    found["template_sum_probs"] = np.array([[9.0], [7], [5], [3]], np.float32)
    cfg = FeatureConfig(crop=None, clusters=4, extra=4, templates=4, recycles=0)
    torch.manual_seed(0)
    model = OpenFold(OpenFoldConfig.preset("tiny")).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)           # what is zero at first would hide the templates
    seen = []
    for templates in (found, None):
        arrays = featurize(sequence, rows, templates, cfg, training=False)
        assert arrays["template_mask"][..., 0].tolist() == [1.0 * (templates is not None)] * 4
        batch = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in collate([arrays]).items()}
        with torch.no_grad():
            seen.append(model(batch).positions)
    assert seen[0].isfinite().all() and (seen[0] - seen[1]).abs().max() > 1e-3
    cfg = FeatureConfig.preset("evaluation", clusters=4, extra=4)
    assert model.fold(sequence, rows, templates=found, recycles=0, cfg=cfg).positions.shape == (93, 37, 3)
    assert UNKNOWN not in arrays["aatype"]
