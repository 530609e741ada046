"""Chains, alignments and template hits of real files against the features that the public OpenFold makes of them."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hpcai.models.openfold.alignments import read_alignment, read_alignments, read_hhr
from hpcai.models.openfold.residues import ATOMS, LETTERS
from hpcai.models.openfold.structures import read_mmcif, write_structure
from tests.stored import arrays

needs_gemmi = pytest.mark.skipif(find_spec("gemmi") is None, reason="gemmi is not installed: structures are NOT compared")

# Residues, those with CA, resolution, oldest revision.
CHAINS = {
    "102m_A": (154, 154, 1.84, "1998-04-08"), "1k1a_A": (241, 228, 1.86, "2001-11-21"), "1psm_A": (38, 38, None, "1995-02-07"),
    "2q2k_A": (70, 45, 3.0, "2008-02-05"), "2q2k_B": (70, 44, 3.0, "2008-02-05"), "3u8v_A": (93, 83, 1.9, "2011-11-09"),
    "3u8v_B": (93, 83, 1.9, "2011-11-09"), "3zee_A": (84, 84, 6.1, "2013-10-16"), "4i6p_A": (88, 84, 2.9, "2013-07-17"),
    "4i6p_B": (88, 82, 2.9, "2013-07-17"), "4zey_A": (84, 84, 1.5, "2015-05-06"), "5zyh_A": (237, 228, 1.95, "2019-02-27"),
    "7zzx_B": (204, 202, 2.4, "2023-06-14"), "8f9h_A": (154, 151, 1.75, "2023-11-08"),
    **{f"5kc1_{chain}": (226, count, 2.2, "2016-10-05")
       for chain, count in zip("ABCDEFGHIJKL", (29, 57, 33, 51, 30, 61, 33, 53, 29, 58, 24, 60))},
}  # fmt: skip
# Rows and deletions.
ALIGNMENTS = {
    "102m_A/non_pairing.a3m": (98, 180), "1k1a_A/non_pairing.a3m": (3084, 13550), "5zyh_A/non_pairing.a3m": (323, 2545),
    "5zyh_A/pairing.a3m": (681, 4242), "7zzx_B/non_pairing.a3m": (4761, 19609), "8f9h_A/pairing.a3m": (771, 1314),
    "2q2k_A/uniref90_hits.sto": (16, 4), "6KWC_1/bfd_uniref_hits.a3m": (1428, 16948), "6KWC_1/mgnify_hits.sto": (1698, 12664),
    "query_SMBPlike/uniref90_hits.sto": (57, 3), "query_SMBPlike/bfd_uniclust_hits.a3m": (1024, 239),
}  # fmt: skip
HHBLITS = "ACDEFGHIKLMNPQRSTVWYX-"         # the order of raw.msa


@needs_gemmi
@pytest.mark.parametrize("name", ["5zyh_A", "2q2k_A"])
def test_a_chain_and_its_alignment_are_read_as_by_the_public_code(name: str, tmp_path: Path) -> None:
    """What the public code read of the original files, in files of our own writing."""
    golden, (entry, author) = arrays(f"openfold/features/{name}"), name.split("_")
    positions, mask = golden["det.all_atom_positions"], golden["det.all_atom_mask"]
    write_structure(tmp_path / f"{entry}.cif", golden["det.aatype"], positions, mask, np.ones_like(mask), chain=author)
    chain = read_mmcif(tmp_path / f"{entry}.cif", author).chains[author]
    assert chain.name == name and chain.sequence == golden["raw.sequence"].tobytes().decode()
    assert np.array_equal(chain.aatype, golden["raw.aatype"].argmax(1)) and np.array_equal(chain.aatype, golden["det.aatype"])
    assert np.array_equal(chain.positions, positions) and np.array_equal(chain.mask, mask)
    rows = [
        "".join("a" * int(lost) + HHBLITS[letter] for letter, lost in zip(letters, deletions))
        for letters, deletions in zip(golden["raw.msa"], golden["raw.deletion_matrix_int"])
    ]
    (tmp_path / "hits.a3m").write_text("".join(f">row {number}\n{row}\n" for number, row in enumerate(rows)))
    found = read_alignments([tmp_path / "hits.a3m"], chain.sequence)
    assert np.array_equal(found.msa, golden["det.msa"]) and np.array_equal(found.deletions, golden["raw.deletion_matrix_int"])


@needs_gemmi
@pytest.mark.originals
@pytest.mark.parametrize("name", ["5zyh_A", "2q2k_A"])
def test_the_original_files_of_a_chain_are_read_as_by_the_public_code(name: str, originals: Path) -> None:
    entry, author = name.split("_")
    golden = arrays(f"openfold/features/{name}")
    chain = read_mmcif(originals / "openfold" / "mmcif" / f"{entry}.cif", author).chains[author]
    assert chain.name == name and chain.sequence == golden["raw.sequence"].tobytes().decode()
    assert np.array_equal(chain.aatype, golden["raw.aatype"].argmax(1)) and np.array_equal(chain.aatype, golden["det.aatype"])
    assert np.array_equal(chain.positions, golden["det.all_atom_positions"])
    assert np.array_equal(chain.mask, golden["det.all_atom_mask"])
    assert chain.resolution == pytest.approx(float(golden["raw.resolution"][0]))
    # Made of the .a3m files alone.
    found = read_alignments(sorted((originals / "openfold" / "alignments" / name).glob("[bn]*.a3m")), chain.sequence)
    ours = np.array([(LETTERS + "X-").index(letter) for letter in HHBLITS])
    assert np.array_equal(found.msa, golden["det.msa"]) and np.array_equal(found.msa, ours[golden["raw.msa"]])
    assert np.array_equal(found.deletions, golden["raw.deletion_matrix_int"])


@needs_gemmi
@pytest.mark.originals
@pytest.mark.parametrize("entry", sorted({name.split("_")[0] for name in CHAINS}))
def test_the_chains_of_an_entry(entry: str, originals: Path) -> None:
    found = read_mmcif(originals / "openfold" / "mmcif" / f"{entry}.cif").chains.values()
    expected = {name: about for name, about in CHAINS.items() if name.startswith(entry)}
    counted = {c.name: (len(c.sequence), int(c.mask[:, ATOMS.index("CA")].sum()), c.resolution, str(c.release)) for c in found}
    assert counted == expected
    for chain in found:
        assert "X" not in chain.sequence
        bonds = np.linalg.norm(chain.positions[:, 0] - chain.positions[:, 1], axis=1)[chain.mask[:, :2].all(1)]
        assert (np.abs(bonds - 1.46) < 0.1).all()


@pytest.mark.originals
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_the_rows_and_deletions_of_an_alignment(name: str, originals: Path) -> None:
    path = originals / "openfold" / "alignments" / name
    found = read_alignment(path)
    assert (len(found), int(found.deletions.sum())) == ALIGNMENTS[name] and len(found.names) == len(found)
    assert (found.deletions >= 0).all() and (found.msa[0] < 20).all()


@needs_gemmi
@pytest.mark.originals
def test_an_alignment_belongs_to_the_chain_of_its_folder(originals: Path) -> None:
    for name in ("102m_A", "1k1a_A", "2q2k_A", "2q2k_B", "5zyh_A", "7zzx_B", "8f9h_A"):
        entry, author = name.split("_")
        chain = read_mmcif(originals / "openfold" / "mmcif" / f"{entry}.cif", author).chains[author]
        found = read_alignments(originals / "openfold" / "alignments" / name, chain.sequence)
        assert np.array_equal(found.msa[0], chain.aatype) and len({row.tobytes() for row in found.msa}) == len(found)


@needs_gemmi
@pytest.mark.originals
def test_the_hits_of_a_template_search(originals: Path) -> None:
    """Letters of the hits stand where the indices say in the sequences of the entries."""
    hits = read_hhr(originals / "openfold" / "alignments" / "query_SMBPlike" / "pdb70_hits.hhr")
    query = (originals / "openfold" / "fasta" / "query_SMBPlike.fasta").read_text().split("\n", 1)[1].replace("\n", "")
    assert [hit.name.split()[0] for hit in hits] == [
        "1HF9_B", "2CRB_A", "4ZEY_A", "3U8V_A", "1PSM_A", "5KC1_F", "5KC1_J", "3ZEE_A", "4I6P_A", "2Q2K_A"]  # fmt: skip
    assert [hit.aligned_columns for hit in hits] == [22, 20, 20, 32, 18, 17, 17, 15, 16, 17] and hits[0].sum_probs == 13.1
    for hit in hits:
        entry, author = hit.name.split()[0].lower().split("_")
        path, sides = originals / "openfold" / "mmcif" / f"{entry}.cif", [(query, hit.query, hit.query_indices)]
        if path.exists():
            chain = read_mmcif(path, author.upper()).chains[author.upper()]
            sides.append((chain.sequence, hit.hit, hit.hit_indices))
        for sequence, text, indices in sides:
            assert "".join("-" if index < 0 else sequence[index] for index in indices) == text
    assert len(read_hhr(originals / "openfold" / "alignments" / "6KWC_1" / "hhsearch_output.hhr")) == 60
