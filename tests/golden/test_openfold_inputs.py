"""Chains and alignments read from real files equal the features of the public OpenFold."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from hpcai.models.openfold.alignments import read_alignments
from hpcai.models.openfold.structures import Chain, read_mmcif, write_structure
from tests.reference_data import load_arrays

needs_gemmi = pytest.mark.skipif(find_spec("gemmi") is None, reason="gemmi is not installed: structures are NOT compared")

HHBLITS = "ACDEFGHIKLMNPQRSTVWYX-"  # the order of raw.msa


def check_chain(path: Path, name: str) -> Chain:
    """Return the chain of a file, compared with the public code's features of the original file except for the resolution."""
    golden, author = load_arrays(f"openfold/features/{name}"), name.split("_")[1]
    chain = read_mmcif(path, author).chains[author]
    assert chain.name == name and chain.sequence == golden["raw.sequence"].tobytes().decode()
    assert np.array_equal(chain.aatype, golden["raw.aatype"].argmax(1)) and np.array_equal(chain.aatype, golden["det.aatype"])
    assert np.array_equal(chain.positions, golden["det.all_atom_positions"])
    assert np.array_equal(chain.mask, golden["det.all_atom_mask"])
    return chain


@needs_gemmi
@pytest.mark.parametrize("name", ["5zyh_A", "2q2k_A"])
def test_a_chain_and_its_alignment_are_read_as_by_the_public_code(name: str, tmp_path: Path) -> None:
    golden, path = load_arrays(f"openfold/features/{name}"), tmp_path / f"{name[:4]}.cif"
    positions, mask = golden["det.all_atom_positions"], golden["det.all_atom_mask"]
    write_structure(path, golden["det.aatype"], positions, mask, np.ones_like(mask), chain=name[-1])
    rows = [
        "".join("a" * int(count) + HHBLITS[letter] for letter, count in zip(letters, deletions))
        for letters, deletions in zip(golden["raw.msa"], golden["raw.deletion_matrix_int"])
    ]
    (tmp_path / "hits.a3m").write_text("".join(f">row {number}\n{row}\n" for number, row in enumerate(rows)))
    alignment = read_alignments([tmp_path / "hits.a3m"], check_chain(path, name).sequence)
    assert np.array_equal(alignment.msa, golden["det.msa"])
    assert np.array_equal(alignment.deletions, golden["raw.deletion_matrix_int"])


@needs_gemmi
@pytest.mark.originals
@pytest.mark.parametrize("name", ["5zyh_A", "2q2k_A"])
def test_the_original_files_of_a_chain_are_read_as_by_the_public_code(name: str, originals: Path) -> None:
    golden = load_arrays(f"openfold/features/{name}")
    chain = check_chain(originals / "openfold" / "mmcif" / f"{name[:4]}.cif", name)
    assert chain.resolution == pytest.approx(float(golden["raw.resolution"][0]))
    # The stored features come from the .a3m files only.
    alignment = read_alignments(sorted((originals / "openfold" / "alignments" / name).glob("[bn]*.a3m")), chain.sequence)
    assert np.array_equal(alignment.msa, golden["det.msa"])
    assert np.array_equal(alignment.deletions, golden["raw.deletion_matrix_int"])
