"""Templates: selection of hits, rejection of those that reveal the answer, residue maps, and features from files."""

import gzip
from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcai.errors import DataError
from hpcai.models.openfold import read_templates
from hpcai.models.openfold.alignments import Hit
from hpcai.models.openfold.residues import ATOM_ORDER, GAP, RESTYPES
from hpcai.models.openfold.structures import Chain, write_structure
from hpcai.models.openfold.templates import parse_chain_name, rejection_reason, select_hits
from tests import proteins

pytest.importorskip("gemmi", reason="gemmi is not installed: templates are NOT tested")
DAY = date(2020, 6, 1)

DRAW = np.random.default_rng(7)
QUERY = "".join(RESTYPES[code] for code in DRAW.integers(0, 20, 40))
OTHER = "".join(RESTYPES[code] for code in DRAW.integers(0, 20, 60))


def new_hit(query: str, text: str, first: int = 0, at: int = 0, name: str = "1ABC_A a protein; 1.9A {Homo}", **changes: Any) -> Hit:
    """Return a hit of two aligned texts, which begin at residue ``first`` of the query and ``at`` of the template."""
    indices = []
    for row, begin in ((query, first), (text, at)):
        is_letter = np.array([letter != "-" for letter in row])
        indices.append(np.where(is_letter, begin - 1 + np.cumsum(is_letter), -1))
    pairs = sum(a != "-" != b for a, b in zip(query, text))
    return replace(Hit(1, name, pairs, 3.5, query, text, *indices), **changes)


@dataclass(frozen=True)
class ChainInfo:
    sequence: str
    release: date | None


def lookup(sequence: str = OTHER, release: date | None = date(2010, 1, 1)) -> Any:
    chain = ChainInfo(sequence, release)
    return {"1abc_A": chain, "2abc_A": chain, "1abc_a": ChainInfo("A" * 40, release)}.get


HIT = new_hit(QUERY[5:25], OTHER[30:50], 5, 30)


def reason(hit: Hit = HIT, sequence: str = QUERY, chains: Any = None, **kwargs: Any) -> str | None:
    """Return the reason why a hit is rejected, or None."""
    selected, reasons = select_hits([hit], sequence, chains or lookup(), **kwargs)
    assert len(selected) + len(reasons) == 1
    return None if selected else next(iter(reasons.values()))


# ---- the rules


def test_a_template_of_the_same_entry_is_rejected() -> None:
    assert reason() is None and reason(entry="5zyh") is None and reason(entry="11abc") is None
    assert "of the same entry as the query, 1abc" in str(reason(entry="1abc")) and reason(entry="1ABC") == reason(entry="1abc")


@pytest.mark.parametrize("days, taken", [(-1, False), (59, False), (60, True)])
def test_a_template_released_less_than_60_days_before_the_query_is_rejected(days: int, taken: bool) -> None:
    chains = lookup(release=DAY - timedelta(days))
    assert (reason(chains=chains, before=DAY) is None) == taken and reason(chains=chains) is None
    assert reason(chains=lookup(release=None)) is None
    assert "no day of release" in str(reason(chains=lookup(release=None), before=DAY)), "it may reveal the answer"


@pytest.mark.parametrize("length, taken", [(40, False), (39, False), (38, True)])
def test_a_copy_of_more_than_95_of_100_residues_is_rejected(length: int, taken: bool) -> None:
    """38 of 40 residues are exactly 95 %; only an identical segment of the query is a copy."""
    copy = QUERY[:length]
    assert (reason(new_hit(copy, copy), chains=lookup(copy)) is None) == taken
    gaps = new_hit(copy[:9] + "-" + copy[9:], copy[:4] + "-" + copy[4:])
    assert (reason(gaps, chains=lookup(copy)) is None) == taken, "without gaps"
    changed = ("A" if copy[0] != "A" else "G") + copy[1:]
    assert reason(new_hit(copy, changed), chains=lookup(changed)) is None


@pytest.mark.parametrize("letters, columns, taken", [(20, 4, False), (20, 5, True), (9, 12, False), (10, 12, True)])
def test_more_than_a_tenth_of_the_query_and_ten_letters_are_aligned(letters: int, columns: int, taken: bool) -> None:
    hit = new_hit(QUERY[:20], OTHER[:letters] + "-" * (20 - letters), aligned_columns=columns)
    assert (reason(hit) is None) == taken


def test_missing_and_unreadable_chains_are_rejected_and_names_are_case_sensitive() -> None:
    def broken(name: str) -> None:
        raise DataError(f"{name}.cif: truncated\nfile")

    assert reason(replace(HIT, name="9XYZ_A a")) == "its structure is missing"
    assert reason(chains=broken) == "1abc_A.cif: truncated file"
    assert "of 20 letters match its structure" in str(reason(replace(HIT, name="1ABC_a a")))


@pytest.mark.parametrize("name, chain", [
    ("1ABC_A Some protein; 1.5A {Homo sapiens}", "1abc_A"), ("1abc_a", "1abc_a"), ("made_1_B x", "made_1_B"), ("", None),
    ("_A x", None), ("1ABC_ x", None),
])  # fmt: skip
def test_hits_are_named_as_chains_of_entries(name: str, chain: str | None) -> None:
    assert parse_chain_name(replace(HIT, name=name)) == chain
    assert chain or "not named as a chain" in str(reason(replace(HIT, name=name)))


def test_hits_are_sorted_by_probability_and_ties_keep_the_order_of_the_file() -> None:
    names = ("1abc_A", 2.0), ("2abc_A", 5.0), ("9zzz_A", 9.0), ("1abc_A", 5.0), ("9zzz_A", 1.0), ("2abc_A", 0.0)
    hits = [replace(HIT, index=number, name=name, sum_probs=probs) for number, (name, probs) in enumerate(names)]
    selected, reasons = select_hits(hits, QUERY, lookup())
    assert [(hit.name, hit.sum_probs) for hit in selected] == [("2abc_A", 5), ("1abc_A", 5), ("1abc_A", 2), ("2abc_A", 0)]
    assert list(reasons) == ["9zzz_A", "9zzz_A, hit 4"]
    assert [hit.sum_probs for hit in select_hits(hits, QUERY, lookup(), most=2)[0]] == [5, 5]
    selected, reasons = select_hits([replace(hits[0], sum_probs=np.nan), *hits[1:]], QUERY, lookup())
    assert len(selected) == 3 and "Sum_probs=" in reasons["1abc_A"]


# ---- residue maps


def residue_map_of(hit: Hit, sequence: str = OTHER) -> list[int]:
    selected, reasons = select_hits([hit], QUERY, lookup(sequence))
    assert not reasons and selected[0].residue_map.shape == (40,)
    return list(selected[0].residue_map.tolist())


def test_residues_are_at_the_indices_of_the_hit() -> None:
    assert residue_map_of(HIT) == [-1] * 5 + [*range(30, 50)] + [-1] * 15
    repeated = OTHER[:20] * 3
    assert residue_map_of(new_hit(QUERY[:15], repeated[22:37], 0, 22), repeated)[:15] == [*range(22, 37)], "not the first repeat"
    gaps = new_hit(QUERY[:10] + "---" + QUERY[10:22], OTHER[4:8] + "--" + OTHER[8:27], 0, 4)
    assert residue_map_of(gaps)[:22] == [4, 5, 6, 7, -1, -1, 8, 9, 10, 11, *range(15, 27)]


def test_residues_are_found_if_the_hit_has_other_indices() -> None:
    moved = replace(HIT, hit_indices=HIT.hit_indices - 17)
    assert residue_map_of(moved) == residue_map_of(HIT)
    assert residue_map_of(replace(HIT, hit_indices=HIT.hit_indices + 1000)) == residue_map_of(HIT), "beyond the end"
    unknown = OTHER[:33] + "X" + OTHER[34:41] + "XX" + OTHER[43:]
    assert residue_map_of(HIT, unknown) == residue_map_of(moved, unknown) == residue_map_of(HIT)


def test_a_changed_chain_is_realigned() -> None:
    """2 of 20 letters may differ; insertions in the chain are free."""
    def substitute(letter: str) -> str:
        return "A" if letter != "A" else "G"

    two = OTHER[:35] + substitute(OTHER[35]) + OTHER[36:44] + substitute(OTHER[44]) + OTHER[45:]
    three = two[:39] + substitute(two[39]) + two[40:]
    assert residue_map_of(HIT, two) == residue_map_of(HIT) == residue_map_of(replace(HIT, hit_indices=HIT.hit_indices - 9), two)
    assert reason(chains=lookup(three)) == "17 of 20 letters match its structure, expected 90% at least"
    longer = OTHER[:40] + "WWWW" + OTHER[40:]
    assert residue_map_of(HIT, longer)[5:25] == [*range(30, 40), *range(44, 54)]
    shorter = OTHER[:40] + OTHER[41:]
    assert residue_map_of(HIT, shorter)[5:25] == [*range(30, 40), -1, *range(40, 49)]
    for chain in ("", OTHER + "A" * 32708):
        assert reason(chains=lookup(chain)) == f"{len(chain)} residues, expected 1 to 32767"
    assert residue_map_of(HIT, OTHER + "A" * 32707) == residue_map_of(HIT)


@pytest.mark.parametrize("change", [
    {"query_indices": HIT.query_indices + 1}, {"query_indices": HIT.query_indices[::-1]}, {"query": HIT.query[1:]},
    {"hit": HIT.hit[:-1] + "-"}, {"hit_indices": HIT.hit_indices[1:]},
])  # fmt: skip
def test_hits_of_another_query_are_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="hit 1, '1ABC_A a protein"):
        select_hits([replace(HIT, **change)], QUERY, lookup())
    assert not select_hits([replace(HIT, query="X" + HIT.query[1:])], QUERY, lookup())[1], "an unknown residue agrees with all"


# ---- unusable chains


def test_a_chain_without_backbone_or_with_a_jump_is_no_template() -> None:
    chain = replace(proteins.random_chain(20), mask=np.ones((20, 37), np.float32))
    assert rejection_reason(chain) is None
    no_backbone, unresolved = chain.mask.copy(), chain.mask.copy()
    no_backbone[:, ATOM_ORDER["C"]] = 0
    assert rejection_reason(replace(chain, mask=no_backbone)) == "no residue has its backbone"
    positions = np.zeros((20, 37, 3), np.float32)
    positions[8:, :, 0] = 150
    assert rejection_reason(replace(chain, positions=positions)) is None
    positions[8:, :, 0] = 150.1
    assert rejection_reason(replace(chain, positions=positions)) == "150 angstrom from residue 8 to the next, 150 at most"
    unresolved[8, ATOM_ORDER["CA"]] = 0
    assert rejection_reason(replace(chain, positions=positions, mask=unresolved)) is None, "only neighbours that are both resolved"


# ---- from files


def format_hit(hit: Hit, first: int, at: int) -> str:
    ends = [begin + sum(letter != "-" for letter in row) for row, begin in ((hit.query, first), (hit.hit, at))]
    return (f"\nNo {hit.index}\n>{hit.name}\nProbab=9  E-value=1  Score=1  Aligned_cols={hit.aligned_columns}  Identities=9%  "
            f"Similarity=1  Sum_probs={hit.sum_probs}  Template_Neff=1\n\nQ query {first + 1} {hit.query} {ends[0]} (99)\n"
            f"T {hit.name.split()[0]} {at + 1} {hit.hit} {ends[1]} (99)\n")  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Write chains of 60 residues: 1abc and 3abc (gzipped, in a folder), 4abc with a jump; 2abc is damaged."""
    folder, chain = tmp_path / "mmcif", template_chain()
    (folder / "ab").mkdir(parents=True)
    for name, jump in (("1ABC", 0), ("ab/3abc", 0), ("4abc", 1000)):
        positions = chain.positions + np.where(np.arange(60) >= 20, jump, 0)[:, None, None]
        write_structure(folder / f"{name}.cif", chain.aatype, positions, chain.mask, chain.bfactors, chain="A")
        with (folder / f"{name}.cif").open("a") as file:
            file.write("\n_pdbx_audit_revision_history.revision_date 2010-01-01\n")
    packed = folder / "ab" / "3abc.cif"
    packed.with_suffix(".cif.gz").write_bytes(gzip.compress(packed.read_bytes()))
    (folder / "2abc.cif").write_text(packed.read_text()[:-900])
    packed.unlink()
    rows = [format_hit(replace(HIT, index=number, name=f"{name} x", sum_probs=number), 5, 30)
            for number, name in enumerate(("1ABC_A", "1ABC_B", "2ABC_A", "3ABC_A", "9XYZ_A", "4ABC_A"), 1)]  # fmt: skip
    (tmp_path / "hits.hhr").write_text("Query q\n" + "".join(rows))
    return tmp_path


def template_chain() -> Chain:
    """Return a chain with N, CA and C of residues 0 to 34 and of 40, and with N and CA of 45 and 52."""
    chain = proteins.random_chain(60, 3)
    aatype = np.array([RESTYPES.index(letter) for letter in OTHER])
    mask = np.zeros((60, 37), np.float32)
    mask[:35, :3] = mask[40, :3] = mask[[45, 52], :2] = 1
    return replace(chain, aatype=aatype, sequence=OTHER, mask=mask, positions=(chain.positions + 1) * mask[..., None])


def test_templates_are_read_from_files_and_damaged_ones_are_listed(library: Path) -> None:
    data, reasons = read_templates(library / "hits.hhr", QUERY, library / "mmcif", before=DAY)
    assert data["template_sum_probs"].tolist() == [[4], [1]] and set(reasons) == {"1abc_B", "2abc_A", "9xyz_A", "4abc_A"}
    assert "chain 'B' is not there" in reasons["1abc_B"] and "2abc.cif: " in reasons["2abc_A"]
    assert "angstrom from residue 20 to the next" in reasons["4abc_A"]
    index, chain = [*range(30, 50)], template_chain()
    for row in range(2):
        assert (data["template_aatype"][row, 5:25] == chain.aatype[index]).all() and (data["template_aatype"][row, :5] == GAP).all()
        assert (data["template_all_atom_mask"][row, 5:25] == chain.mask[index]).all()
        assert np.allclose(data["template_all_atom_positions"][row, 5:25], chain.positions[index], atol=1e-3)
    empty, rejected = read_templates(library / "hits.hhr", QUERY, library / "mmcif", entry="3ABC", before=date(2010, 1, 2))
    assert not len(empty["template_aatype"]) and "same entry" in rejected["3abc_A"] and "released 2010-01-01" in rejected["1abc_A"]
