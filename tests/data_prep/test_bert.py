"""Rows of sequences for BERT: packing, masks, simulated families, and conversions of FASTA, SMILES and MLPerf's files."""

import gzip
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from data_prep import bert, proteins
from hpcai.models.bert.masking import MASK, SPECIAL, mask_tokens
from hpcai.models.openfold.residues import GAP


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_packing_loses_nothing_and_fills_rows(most: int) -> None:
    random = np.random.default_rng(most)
    lengths = np.append(random.integers(5, 513, 3000), [512] * 40)
    groups = bert.pack(lengths, 512, most)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    sizes = [lengths[group].sum() for group in groups]
    assert max(sizes) <= 512 and max(map(len, groups)) <= most
    bound = max(len(lengths) / most, lengths.sum() / 512)
    assert len(groups) <= 1.12 * max(bound, (lengths > 256).sum()), "near a lower bound of the number of rows"


def test_packing_of_equal_lengths() -> None:
    assert sorted(map(len, bert.pack([10] * 7, 32, 3))) == [1, 3, 3]
    assert sorted(map(len, bert.pack([8, 8], 20, 3))) == [2]


def test_masks_have_the_published_frequencies_and_depend_on_the_seed() -> None:
    tokens = np.zeros(4000, np.int64)
    tokens[:3990] = np.random.default_rng(0).integers(len(SPECIAL), 30, 3990)
    lengths = np.array([3000, 990, 0])
    masked, at, targets = mask_tokens(tokens, lengths, 30, 0.15, np.random.default_rng(1))
    count = 450 + 148
    assert (targets >= 0).sum() == count and len(set(at[:count])) == count and (at[:450] < 3000).all()
    np.testing.assert_array_equal(targets[:count], tokens[at[:count]])
    changed = masked[at[:count]]
    assert (changed == MASK).mean() == pytest.approx(0.8, abs=0.05)
    assert (changed == targets[:count]).mean() == pytest.approx(0.1, abs=0.04)
    untouched = np.setdiff1d(np.arange(4000), at[:count])
    np.testing.assert_array_equal(masked[untouched], tokens[untouched])
    assert not np.array_equal(at, mask_tokens(tokens, lengths, 30, 0.15, np.random.default_rng(2))[1])


def run(*arguments: str) -> int:
    return bert.main([*arguments, "--workers", "1"])


def rows(folder: Path, name: str) -> np.ndarray:
    parts = []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            parts.append(file[name][...])
    return np.concatenate(parts)


def test_simulated_families_have_profiles_and_contacts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = ["--families", "2", "--each", "1", "--sequences", "60", "--length", "20", "24", "--row", "64", "--validation", "0.2"]
    assert run("simulate", str(out), *sizes) == 0
    tokens, lengths, nats = (rows(out / "train", name) for name in ("tokens", "lengths", "nats"))
    held = rows(out / "validation", "lengths")
    assert (lengths > 0).sum() + (held > 0).sum() == 120 and (tokens[:, 0] == bert.CLS).all()
    letters = tokens >= len(SPECIAL)
    assert (nats[letters] > 0).all() and not nats[~letters].any()
    others, unseen = rows(out / "validation", "nats"), rows(out / "validation", "tokens") >= len(SPECIAL)
    assert nats[letters].mean() < np.log(20), "the profile knows the family"
    assert nats[letters].mean() > 0.92 * others[unseen].mean(), "a sequence is not in its own profile"
    contacts = rows(out / "families", "contacts")
    assert contacts.shape == (2, 26, 26) and (contacts == contacts.transpose(0, 2, 1)).all() and (contacts == 1).any()
    assert json.loads((out / "train/index.json").read_text())["baseline"] == "profile"


def test_settled_relatives_have_only_the_family_in_common() -> None:
    identity = []
    for settle in (0, 12):
        ((_, alignment),) = proteins.make_family(5, 1, 24, 40, settle)
        same = (alignment.msa[1:, None] == alignment.msa[1:]) & (alignment.msa[1:] < GAP)
        identity.append(same.mean(-1)[np.triu_indices(39, 1)])
    assert identity[0].max() > 0.6 > 0.5 > identity[1].max() and identity[1].mean() < identity[0].mean()


def test_fasta_is_tokenized_and_the_unusable_is_counted(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "a.fa.gz"
    source.write_bytes(gzip.compress(b">a\nMKVL\nAA*\n>b\nACJDE\n>c\n" + b"M" * 40 + b"\n>d\nACDEX\n"))
    assert run("convert", str(source), str(tmp_path / "out"), "--row", "30", "--validation", "0") == 0
    output = capsys.readouterr().out
    assert "refused: 2 of 3 items" in output and "unknown letters J" in output and "longer than a row of 30 tokens" in output
    tokens, lengths = rows(tmp_path / "out/train", "tokens"), rows(tmp_path / "out/train", "lengths")
    text = "".join(bert.RESIDUES[token] for token in tokens[0][: lengths.sum()] if token >= len(SPECIAL))
    assert sorted(lengths[0].tolist()) == [0, 7, 8] and text in ("MKVLAAACDEX", "ACDEXMKVLAA")


def test_smiles_have_the_vocabulary_of_the_training_set(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.smi").write_text("CCO ethanol\n\nC[C@@H](N)C(=O)O\nc1ccccc1Br\nCQ\n")
    assert run("convert", str(tmp_path / "in"), str(tmp_path / "out"), "--row", "40", "--validation", "0") == 0
    assert "unknown letters Q" in capsys.readouterr().out
    vocabulary = json.loads((tmp_path / "out/train/index.json").read_text())["vocabulary"]
    assert {"[C@@H]", "Br", "c", "1"} <= set(vocabulary) and "B" not in vocabulary
    assert (rows(tmp_path / "out/train", "lengths") > 0).sum() == 3


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"a.fa": ""}, "no sequence can be used"), ({"a.txt": "x"}, "no .fasta"),
        ({"a.fa": ">a\nA\n", "b.smi": "C\n"}, "both residues and"),
    ],
)
def test_sources_without_sequences_are_refused(files: dict[str, str], text: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_text(content)
    assert run("convert", str(tmp_path / "in"), str(tmp_path / "out")) == 2
    assert text in capsys.readouterr().err


def test_mlperf_rows(tmp_path: Path, capsys: Any) -> None:
    """Packed rows for training and padded ones for validation, both with their masks."""
    stored: dict[str, Any] = {
        "input_ids": [[2, 7, 8, 3, 2, 9, 3], [2, 7, 7, 3]], "segment_ids": [[0, 0, 1, 1, 0, 1, 1], [0] * 4],
        "masked_lm_positions": [[1, 5], [2]], "masked_lm_ids": [[70, 90], [70]], "next_sentence_labels": [[1, 0], [1]],
        "packed_input_len": [[4, 3, 0], [5]], "packed_masked_lm_len": [[1, 1, 0], [1]],
    }  # fmt: skip
    for split in ("train", "validation"):
        (tmp_path / "in" / split).mkdir(parents=True)
        with h5py.File(tmp_path / "in" / split / "part.hdf5", "w") as file:
            for name, values in stored.items():
                if split == "train":
                    data = file.create_dataset(name, (2,), h5py.vlen_dtype(np.int16))
                    for row, value in enumerate(values):
                        data[row] = value
                elif "packed" not in name and name != "next_sentence_labels":
                    file[name] = np.array([[*values[0][:4], 0, 0] if name in ("input_ids", "segment_ids") else [values[0][0], 0]])
                elif name == "next_sentence_labels":
                    file[name] = np.array([1], np.int8)
    assert run("mlperf", str(tmp_path / "in"), str(tmp_path / "out"), "--row", "8") == 2
    assert "row 1: 1 sequences of 5 tokens, 4 tokens, 1 masked" in capsys.readouterr().err
    assert run("mlperf", str(tmp_path / "in"), str(tmp_path / "out"), "--row", "8", "--skip-bad") == 0
    expected = {
        "tokens": [2, 7, 8, 3, 2, 9, 3, 0], "lengths": [4, 3, 0], "types": [0, 0, 1, 1, 0, 1, 1, 0], "next_sentence": [1, 0, -1],
        "masked": [1, 5, 0, 0], "targets": [70, 90, -1, -1],
    }  # fmt: skip
    for name, value in expected.items():
        assert rows(tmp_path / "out/train", name).tolist() == [value], name
    held = {name: rows(tmp_path / "out/validation", name)[0].tolist() for name in expected}
    assert (held["lengths"], held["targets"], held["next_sentence"]) == ([4, 0, 0], [70, -1, -1, -1], [1, -1, -1])
