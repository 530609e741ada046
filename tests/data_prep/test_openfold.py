"""Protein chains: rows equal the output of the readers, for any number of processes and interruptions; each chain is converted
or listed. Templates are the structures of hits, without hits that leak the target."""

import gzip
import shutil
import time
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import h5py
import numpy as np
import pytest

from data_prep import chains, openfold, proteins
from hpcai.cli.check.examination import check_dataset
from hpcai.cli.check.findings import Options
from hpcai.cli.subprocesses import ForkedProcesses
from hpcai.data.hdf5 import Rows
from hpcai.models.openfold.alignments import Alignment, encode, read_alignments, read_hhr
from hpcai.models.openfold.features import FeatureConfig, featurize
from hpcai.models.openfold.residues import GAP, RESTYPES
from hpcai.models.openfold.structures import read_structure, write_structure
from hpcai.models.openfold.templates import read_templates, template_features
from tests.data_prep.prep_contract import (
    PrepContract,
    cache_results,
    check_fails,
    check_resumes_if_killed,
    content,
    field_types,
    read_json,
    runner,
    set_to,
)
from tests.proteins import random_chain
from tests.reference_data import load_json

pytest.importorskip("gemmi", reason="gemmi is not installed: the conversion of proteins is NOT tested")
FIELDS = field_types(chains.FIELDS)
PLAIN = ["--chains", "8", "--families", "4", "--each", "1", "--length", "16", "20", "--rows", "6", "--validation", "0.25",
         "--no-check"]  # fmt: skip
SMALL = [*PLAIN, "--templates", "1"]
run = runner(openfold)


def rows_of(out, split):
    rows = Rows(out / split, FIELDS)
    return {row["name"].decode(): row for row in map(rows.read, range(len(rows)))}


def chain_names(out):
    return {split: sorted(rows_of(out, split)) for split in ("train", "validation")}


# ---- a small library


def sequence(number):
    return "".join(RESTYPES[kind] for kind in random_chain(20 + number, number).aatype)


def add_structure(folder, name, number, day="2011-03-02", resolution=2.0, scale=1.0):
    chain, path = random_chain(20 + number, number), folder / "mmcif" / name[:2] / f"{name}.cif"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_structure(path, chain.aatype, scale * chain.positions, chain.mask, chain.bfactors, chain="A")
    release = f"\n_pdbx_audit_revision_history.revision_date {day}\n" if day else "\n"
    path.write_text(path.read_text() + f"{release}_refine.ls_d_res_high {resolution}\n_exptl.method 'X-RAY DIFFRACTION'\n")


def add_alignment(folder, name, text, rows=5):
    path = folder / "alignments" / name / "a3m" / "uniref90_hits.a3m"
    path.parent.mkdir(parents=True)
    others = [f">row {n}\n{text[:n]}aaaa{text[n:-n]}{'-' * n}\n" for n in range(1, rows)]
    path.write_text(f">query\n{text}\n" + "".join(others))
    return path


@pytest.fixture
def library(tmp_path):
    """Write five entries: 5eee has no alignments, 3ccc is compressed, and the alignments of 1aaa are in a folder in upper case."""
    folder = tmp_path / "library"
    for number, name in enumerate(("1aaa", "2bbb", "3ccc", "4ddd", "5eee")):
        add_structure(folder, name, number)
        if name != "5eee":
            add_alignment(folder, f"{name.upper() if number == 0 else name}_A", sequence(number))
    path = folder / "mmcif" / "3c" / "3ccc.cif"
    path.with_name("3ccc.cif.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    (folder / "validation").write_text("4DDD_A\n")
    return folder


def add_hits(folder, name, own, hits, kind="hhr"):
    """Write hits (chain, number of its sequence, sum_probs): residues 3 to 15 of the query, aligned to 6 to 18 of the chain."""
    path = folder / "alignments" / name / kind / "pdb70_hits.hhr"
    path.parent.mkdir(exist_ok=True)
    text = f"Query {name}\n"
    for rank, (other, number, probs) in enumerate(hits, 1):
        query, letters = sequence(own)[2:15], sequence(number)[5:18]
        text += (f"\nNo {rank}\n>{other} a protein; 2A {{E. coli}}\nProbab=9  E-value=1  Score=1  Aligned_cols=13  Identities=9%  "
                 f"Similarity=1  Sum_probs={probs}\n\nQ {name} 3 {query} 15 (99)\nT {other} 6 {letters} 18 (99)\n")  # fmt: skip
    path.write_text(text)
    return path


HITS = [("2BBB_A", 1, 9), ("1AAA_A", 0, 3), ("9ZZZ_A", 2, 8), ("4DDD_A", 3, 7), ("5EEE_A", 4, 5), ("1AAA_A", 0, 4.5)]


@pytest.fixture
def hit_library(library):
    """Add hits. Those of 2bbb are itself, 4ddd of the same release date, an unknown chain, 1aaa (twice) and 5eee."""
    add_structure(library, "1aaa", 0, day="2009-01-01")
    add_structure(library, "5eee", 4, day="2010-12-01")
    add_hits(library, "2bbb_A", 1, HITS)
    add_hits(library, "4ddd_A", 3, [("1AAA_A", 0, 2)], kind="a3m")
    add_hits(library, "1AAA_A", 0, [("5EEE_A", 4, 5)])
    add_hits(library, "3ccc_A", 2, [("1AAA_A", 0, 5)]).write_text("Query 3ccc\n\nNo 1\n>1AAA_A x\n")
    return library


def templates_of(out, **kwargs):
    rows = Rows(out / "templates", field_types(chains.TEMPLATE_FIELDS), **kwargs)
    return [rows.read(row) for row in range(len(rows))]


def convert(library, out, *options, validation="validation", workers="1"):
    args = ["--structures", library / "mmcif", "--alignments", library / "alignments", out, *options]
    return run("convert", *args, *(["--validation", library / validation] if validation else []), workers=workers)


# ---- convert


@pytest.mark.originals
def test_rows_of_original_files_equal_the_output_of_the_readers(tmp_path, capsys, originals):
    source = originals / "openfold"
    (tmp_path / "validation").write_text("5zyh_A\n7ZZX_B\n")
    options = "--released-until", "2024-01-01", "--validation", tmp_path / "validation"
    assert run("convert", "--structures", source / "mmcif", "--alignments", source / "alignments", tmp_path / "out", *options) == 0
    stdout = capsys.readouterr().out
    assert "12 structures with 26 chains" in stdout and "7 chains have their own, 19 chains have none" in stdout
    splits = {split: rows_of(tmp_path / "out", split) for split in ("train", "validation")}
    assert set(splits["validation"]) == {"5zyh_A", "7zzx_B"} and len(splits["train"]) == 24
    assert read_json(tmp_path / "out" / "skipped.json") == {"unusable": {}, "filtered": {}}
    with_alignment = 0
    for name, row in (splits["train"] | splits["validation"]).items():
        entry, author = name.split("_")
        ref, folder = read_structure(source / "mmcif" / f"{entry}.cif", author).chains[author], source / "alignments" / name
        assert (row["aatype"] == ref.aatype).all() and (row["mask"] == ref.mask).all() and (row["positions"] == ref.positions).all()
        assert row["resolution"] == np.float32(ref.resolution or 0)
        assert date.fromordinal(date(1970, 1, 1).toordinal() + int(row["release"])) == ref.release
        msa, deletions = (row[kind].reshape(-1, len(ref.aatype)) for kind in ("msa", "deletions"))
        if folder.is_dir():
            aligned, with_alignment = read_alignments(folder, ref.sequence), with_alignment + 1
            assert (msa == aligned.msa).all() and (deletions == aligned.deletions).all() and len(msa) == len(aligned)
        else:
            assert (msa == encode(ref.sequence)).all() and len(msa) == 1 and not deletions.any()
    train = splits["train"]
    assert with_alignment == 7 and train["102m_A"]["cluster"] == train["8f9h_A"]["cluster"] and train["102m_A"]["cluster_size"] == 2
    assert train["5kc1_C"]["cluster_size"] == 12 and len({int(row["cluster"]) for row in train.values()}) == 9
    assert run("check", tmp_path / "out") == 0 and (tmp_path / "out" / "samples.png").read_bytes().startswith(b"\x89PNG")
    stdout = capsys.readouterr().out
    assert "26 samples against index.json: equal" in stdout and "validation: rows 2, clusters 2" in stdout


def test_pdb_files_are_read_and_files_of_other_machines_skipped(library, tmp_path, capsys):
    folder, alignments = library / "mmcif", library / "alignments"
    chain = random_chain(21, 1)
    write_structure(folder / "2bbb.pdb", chain.aatype, chain.positions, chain.mask, chain.bfactors)
    (folder / "pdb2bbb.ent").write_text("".join(row for row in open(folder / "2bbb.pdb") if not row.startswith("SEQRES")))
    (folder / "2bbb.pdb").unlink()
    assert convert(library, tmp_path / "out") == 2 and "an entry of this name is also in" in capsys.readouterr().err
    (folder / "2b" / "2bbb.cif").unlink()
    (folder / "3c" / "3ccc.cif.gz").rename(folder / "3ccc.cif")         # gzip without .gz
    rows = alignments / "2bbb_A" / "a3m"
    for path in (folder / "._1aaa.cif", folder / ".old/1aaa.cif", rows / "._b.a3m", rows / "._b.hhr"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\0\5\x16\7")
    (rows / "mgnify_hits.a3m").write_bytes(b"")
    assert convert(library, tmp_path / "out") == 0
    stdout = capsys.readouterr().out
    assert "5 structures with 5 chains; cannot be used: 0" in stdout
    assert "1 structures or chains are taken with an assumption, such as" in stdout and "2bbb.ent: chain A has no seq" in stdout
    assert read_json(tmp_path / "out" / "skipped.json")["unusable"] == {}
    row = rows_of(tmp_path / "out", "train")["2bbb_A"]
    assert (row["aatype"] == chain.aatype).all() and len(row["msa"]) == 5 * 21


def test_files_have_the_expected_format(library, tmp_path):
    assert convert(library, tmp_path / "out", "--each", "2") == 0
    index = read_json(tmp_path / "out" / "train" / "index.json")
    assert {name: (field["dtype"], tuple(field["shape"])) for name, field in index["fields"].items()} == FIELDS
    none = {"hits": 0, "places": 0}
    assert [(entry["rows"], entry["lengths"]) for entry in index["files"]] == [
        (2, {"residues": 20 + 21, "letters": 5 * (20 + 21), **none}), (2, {"residues": 22 + 24, "letters": 5 * 22 + 24, **none}),
    ]  # fmt: skip
    row = rows_of(tmp_path / "out", "train")["1aaa_A"]
    msa, deletions = (row[name].reshape(5, 20) for name in ("msa", "deletions"))
    assert (msa[0] == row["aatype"]).all() and (msa[3, -3:] == GAP).all() and deletions[3].tolist() == [0] * 3 + [4] + [0] * 16
    stats = read_json(tmp_path / "out" / "statistics.json")["splits"]
    assert [stats["train"]["depth"][name] for name in ("minimum", "mean", "maximum")] == [[1], [4], [5]]
    assert stats["validation"]["residues"]["mean"] == [23] and stats["train"]["clusters"] == 4 and stats["train"]["undated"] == 0


def test_workers_and_ranks_convert_to_the_same_bytes(hit_library, tmp_path, monkeypatch):
    library = hit_library
    assert convert(library, tmp_path / "alone", "--each", "1") == 0
    monkeypatch.setattr(openfold, "FILES_PER_SCAN", 2)
    assert convert(library, tmp_path / "two", "--each", "1", workers="2") == 0
    monkeypatch.setenv("PMI_SIZE", "2")
    with ExitStack() as stack:
        ranks = []
        for rank in "10":                           # rank 1 reaches files that rank 0 has not scanned
            monkeypatch.setenv("PMI_RANK", rank)
            call = lambda: convert(library, tmp_path / "ranks", "--each", "1")  # noqa: E731
            ranks.append(stack.enter_context(ForkedProcesses(call, tmp_path / rank)))
            while not (tmp_path / "ranks" / ".convert" / "recipe.json").is_file() and ranks[0].processes[0].is_alive():
                time.sleep(0.01)
        assert [rank.wait(60)[0] for rank in ranks] == [[0], [0]], [(tmp_path / rank).read_text() for rank in "01"]
    assert len(content(tmp_path / "alone")) == 5 + 2 + 3 + 2 + 1
    assert content(tmp_path / "two") == content(tmp_path / "alone") == content(tmp_path / "ranks")


def test_a_resumed_conversion_repeats_no_work(hit_library, tmp_path, monkeypatch, capsys):
    library, out, options = hit_library, tmp_path / "out", ("--each", "1")
    assert convert(library, out, *options) == 0
    before, calls = content(out), []
    monkeypatch.setattr(openfold, "read_structure", lambda path: calls.append(path.stem) or read_structure(path))
    monkeypatch.setattr(openfold, "read_hhr", lambda path: calls.append(path.parent.parent.name) or read_hhr(path))
    assert convert(library, out, *options) == 0 and not calls
    sorted(out.glob("train/*.h5"))[1].unlink()
    sorted(out.glob("templates/*.h5"))[1].unlink()
    (out / "validation" / ".records" / "chains_000000.h5.json").unlink()              # stopped between file and record
    assert convert(library, out, *options) == 0 and calls == ["2bbb", "4ddd", "5eee"] and content(out) == before
    calls.clear()
    assert convert(library, tmp_path / "other", *options) == 0
    sorted((out / ".convert").glob("hits_*"))[0].unlink()
    assert convert(library, out, *options) == 0 and content(out) == before
    capsys.readouterr()
    assert convert(library, out, *options, "--templates", "3") == 2 and "templates 20 (now 3)" in capsys.readouterr().err
    assert convert(library, out, *options, "--most", "2") == 2 and "most None (now 2)" in capsys.readouterr().err
    add_structure(library, "6fff", 5)
    assert convert(library, out, *options) == 2 and "structures 5 names" in capsys.readouterr().err and content(out) == before


def test_most_keeps_the_first_rows(library, tmp_path):
    assert convert(library, tmp_path / "all") == 0 and convert(library, tmp_path / "some", "--most", "3") == 0
    full, limited = (rows_of(tmp_path / name, "train")["2bbb_A"] for name in ("all", "some"))
    assert len(full["msa"]) == 5 * 21 and (full["msa"][: 3 * 21] == limited["msa"]).all() and len(limited["msa"]) == 3 * 21


def test_many_deletions_are_clipped(library, tmp_path):
    path, text = library / "alignments" / "2bbb_A" / "a3m" / "uniref90_hits.a3m", sequence(1)
    path.write_text(f">query\n{text}\n>long\n{text[:4]}{'a' * 300}{text[4:9]}{'g' * 254}{text[9:-1]}-\n")
    assert convert(library, tmp_path / "out") == 0
    deletions = rows_of(tmp_path / "out", "train")["2bbb_A"]["deletions"].reshape(2, -1)
    assert deletions[1, [4, 9]].tolist() == [255, 254] and deletions.sum() == 509


CHAIN = {"release": "2011-01-26", "resolution": 2.0, "resolved": 3, "sequence": "ACDEFGHIKL"}
@pytest.mark.parametrize("facts, verdict", load_json("chain_verdicts"))
def test_chains_are_filtered_as_by_mlperf(facts, verdict):
    facts = {"cluster": 0, **CHAIN, **facts}
    facts["release"] = facts["release"] and date.fromisoformat(facts["release"])
    validation, cluster = {"1abc_A" if facts.pop("listed") else "2abc_A"} if "listed" in facts else set(), facts.pop("cluster")
    options = openfold.parser().parse_args(["convert", "--structures", "a", "--alignments", "b", "c", "--clusters", "FILE"])
    chain = openfold.ScannedChain(Path("x"), "1abc_A", "1abc_A", entity="", usable=True, atoms=b"", **facts)
    assert openfold._split_or_reason(chain, cluster, options, validation).startswith(verdict)


def test_validation_is_selected_by_release_dates(library, tmp_path, capsys):
    add_structure(library, "6fff", 5, day="2021-10-01")
    add_structure(library, "7ggg", 6, day="2022-10-01")
    add_structure(library, "8hhh", 7, day=None)
    assert convert(library, tmp_path / "out", validation=None) == 0
    assert chain_names(tmp_path / "out") == {
        "train": ["1aaa_A", "2bbb_A", "3ccc_A", "4ddd_A", "5eee_A", "8hhh_A"], "validation": ["6fff_A"]}  # fmt: skip
    assert "1 chains without a release date are taken for training" in capsys.readouterr().out
    assert rows_of(tmp_path / "out", "train")["8hhh_A"]["release"] == -1
    assert list(read_json(tmp_path / "out" / "skipped.json")["filtered"]) == ["7ggg_A"]
    assert convert(library, tmp_path / "other", "--validation-from", "2021-09-16", validation=None) == 2
    assert "expected after --released-until 2021-09-16" in capsys.readouterr().err


def test_clusters_are_lines_of_chains_or_of_entities_or_equal_sequences(library, tmp_path, capsys):
    add_structure(library, "6fff", 1)
    out, lines = tmp_path / "out", library / "clusters"
    assert convert(library, out) == 0
    rows = rows_of(out, "train")
    assert rows["6fff_A"]["cluster"] == rows["2bbb_A"]["cluster"] and rows["6fff_A"]["cluster_size"] == 2
    assert rows["1aaa_A"]["cluster_size"] == 1 and rows["1aaa_A"]["cluster"] != rows["2bbb_A"]["cluster"]
    for kind, end in (("chains", "A"), ("entities", "1")):
        lines.write_text(f"1AAA_{end} 5EEE_{end} 9ZZZ_{end}\n2BBB_{end} 4DDD_{end}\n")
        capsys.readouterr()
        assert convert(library, tmp_path / kind, "--clusters", lines) == 0
        assert ("names entities" in (stdout := capsys.readouterr().out)) == (kind == "entities")
        assert "1 chains of training, such as 2bbb_A, share a cluster with validation" in stdout
        by_name = {name: (int(row["cluster"]), int(row["cluster_size"])) for name, row in rows_of(tmp_path / kind, "train").items()}
        assert by_name == {"1aaa_A": (0, 2), "5eee_A": (0, 2), "2bbb_A": (1, 1)}
        reasons = read_json(tmp_path / kind / "skipped.json")["filtered"]
        assert set(reasons) == {"3ccc_A", "6fff_A"} and "in no cluster of" in reasons["3ccc_A"]


def test_unusable_items_are_listed_and_skipped(library, tmp_path, capsys):
    for number, name in enumerate(("6fff", "7ggg"), 5):
        add_structure(library, name, number)
    path = library / "mmcif" / "6f" / "6fff.cif"
    path.write_text(path.read_text()[:-700].rsplit("\n", 1)[0] + "\nATOM 1 N")           # in the middle of a row
    add_alignment(library, "7ggg_A", sequence(0))
    add_structure(library, "8hhh", 8, scale=0.1)                                          # in nanometres
    a3m = library / "alignments" / "2bbb_A" / "a3m" / "uniref90_hits.a3m"
    a3m.write_text(a3m.read_text().replace("aaaa", "aa?a", 1))
    with (library / "validation").open("a") as file:
        file.write("9zzz_A\n")
    assert convert(library, tmp_path / "out") == 0
    assert chain_names(tmp_path / "out") == {"train": ["1aaa_A", "3ccc_A", "5eee_A"], "validation": ["4ddd_A"]}
    listed, stdout = read_json(tmp_path / "out" / "skipped.json"), capsys.readouterr().out
    assert set(listed["unusable"]) == {str(path), "2bbb_A", "7ggg_A", "8hhh_A"} and "9zzz_A" in listed["filtered"]
    assert "not a complete file" in listed["unusable"][str(path)] and "residues, expected 26" in listed["unusable"]["7ggg_A"]
    assert "N and CA are 0.146 angstrom apart at the median, expected 1.46" in listed["unusable"]["8hhh_A"]
    assert f"{a3m}: line 4, column" in listed["unusable"]["2bbb_A"]
    assert listed["unusable"]["2bbb_A"] in (last := stdout.splitlines()[-1]) and last.startswith("refused: 4 of 8 items: 1 such as")
    assert "excluded by the options: 1, 1 such as 9zzz_A: named in" in stdout and "in no structure" in stdout


def spoil_library(library, fault):
    (library / "mmcif" / "more").mkdir()
    if fault == "twice":
        shutil.copy(library / "mmcif" / "1a" / "1aaa.cif", library / "mmcif" / "more" / "1AAA.cif")
    elif fault == "others":
        shutil.rmtree(library / "alignments")
        add_alignment(library, "9zzz_A", sequence(0))
    elif fault == "unreadable":
        for path in library.glob("alignments/[123]*/*/*"):
            path.write_text("no a3m")
        shutil.rmtree(library / "mmcif" / "5e")
    elif fault == "short":
        for path in library.glob("mmcif/*/*.*"):
            path.write_text("data_x\nloop_\n_a.b\n_a.c\n1")
    else:
        shutil.rmtree(library / fault)
        if fault == "mmcif":
            (library / "mmcif").mkdir()


FAULTS = load_json("refused/protein_libraries")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unusable_library_is_refused(library, tmp_path, capsys, fault):
    spoil_library(library, fault)
    assert convert(library, tmp_path / "out") == 2
    assert (error := capsys.readouterr().err).startswith("error: ") and FAULTS[fault] in error
    assert not list(tmp_path.glob("out/train/index.json"))


def test_an_empty_split_is_refused_without_a_second_scan(library, tmp_path, capsys, monkeypatch):
    out, empty = tmp_path / "out", library / "empty"
    assert convert(library, out, validation=None) == 2
    assert "none of 5 chains is left for validation" in (error := capsys.readouterr().err) and "--validation FILE" in error
    monkeypatch.setattr(openfold, "scan_structures", pytest.fail)
    assert convert(library, out, "--resolution", "1") == 2
    assert "none of 5 chains is left for train, 1aaa_A because: 2 angstrom, --resolution 1" in capsys.readouterr().err
    empty.write_text("\n")
    assert convert(library, out, validation="empty") == 2 and "empty, expected" in capsys.readouterr().err
    assert convert(library, out) == 0 and chain_names(out)["validation"] == ["4ddd_A"]


# ---- templates


def test_hits_become_rows_of_the_structures_that_they_name(hit_library, tmp_path, capsys):
    out = tmp_path / "out"
    assert convert(hit_library, out, "--each", "1") == 0
    stdout = capsys.readouterr().out
    assert "templates: 2 of 5 chains have some, 0 at the median; 2 structures" in stdout
    stored, rows = templates_of(out), rows_of(out, "train") | rows_of(out, "validation")
    assert [entry["name"] for entry in stored] == [b"1aaa_A", b"5eee_A"]
    for entry in stored:
        chain = read_structure(hit_library / "mmcif" / entry["name"].decode()[:2] / f"{entry['name'].decode()[:4]}.cif").chains["A"]
        assert all((entry[name] == getattr(chain, name)).all() for name in ("aatype", "positions", "mask"))
        assert entry["resolution"] == 2 and entry["release"] == chains.days_since_epoch(chain.release)
    row = rows["2bbb_A"]
    assert row["hit_row"].tolist() == [1, 0, 0] and row["hit_sum_probs"].tolist() == [5, 4.5, 3] and row["hits"] == 3
    positions = row["hit_places"].reshape(3, 21)
    assert (positions == [-1, -1, *range(5, 18), *[-1] * 6]).all() and row["places"] == positions.size
    assert rows["4ddd_A"]["hit_row"].tolist() == [0] and all(not rows[f"{name}_A"]["hits"] for name in ("1aaa", "3ccc", "5eee"))
    expected, reasons = read_templates(hit_library / "alignments" / "2bbb_A" / "hhr" / "pdb70_hits.hhr", sequence(1),
                                       hit_library / "mmcif", entry="2bbb", before=date(2011, 3, 2))  # fmt: skip
    actual = template_features([stored[index] for index in row["hit_row"]], positions, row["hit_sum_probs"])
    assert set(reasons) == {"2bbb_A", "4ddd_A", "9zzz_A"} and all((expected[name] == actual[name]).all() for name in expected)
    statistics = read_json(out / "statistics.json")
    hits = statistics["splits"]["train"]["hits"]
    assert [hits[name] for name in ("minimum", "maximum", "mean")] == [[0], [3], [0.75]]
    assert statistics["templates"] == {"rows": 2}
    assert run("check", out, "--no-picture") == 0
    verdicts = {(finding.severity, finding.path.name) for finding in check_dataset(out, Options(seconds=0)).findings}
    assert verdicts <= {("warning", "templates")}, "hpcai data check only warns that templates is no split"


def test_hits_that_cannot_be_read_cost_the_templates_only(hit_library, tmp_path, capsys):
    other = hit_library / "alignments" / "4ddd_A" / "a3m" / "pdb70_hits.hhr"
    other.write_text(other.read_text().replace(sequence(3)[2:15], sequence(2)[2:15]))
    assert convert(hit_library, tmp_path / "out") == 0
    broken = hit_library / "alignments" / "3ccc_A" / "hhr" / "pdb70_hits.hhr"
    listed = read_json(tmp_path / "out" / "skipped.json")["unusable"]
    assert set(listed) == {str(broken), str(other)} and "is it of another chain" in listed[str(other)]
    assert f"{broken}: line 3: not the head of a hit" in listed[str(broken)] and "refused: 2 of 7 items" in capsys.readouterr().out
    assert chain_names(tmp_path / "out") == {"train": ["1aaa_A", "2bbb_A", "3ccc_A", "5eee_A"], "validation": ["4ddd_A"]}


def test_templates_are_limited_omitted_or_absent(hit_library, tmp_path):
    better = add_hits(hit_library, "2bbb_A", 1, [("1AAA_A", 0, 6)], kind=".")
    assert convert(hit_library, tmp_path / "two", "--templates", "1") == 0
    assert rows_of(tmp_path / "two", "train")["2bbb_A"]["hit_sum_probs"].tolist() == [6], "the best hit of both files"
    better.unlink()
    assert convert(hit_library, tmp_path / "one", "--templates", "1") == 0
    best = rows_of(tmp_path / "one", "train")["2bbb_A"]
    assert best["hit_row"].tolist() == [1] and best["hit_sum_probs"].tolist() == [5], "the best hit; 4ddd needs the other structure"
    assert convert(hit_library, tmp_path / "none", "--templates", "0") == 0 and not (tmp_path / "none" / "templates").exists()
    shutil.rmtree(hit_library / "alignments" / "2bbb_A" / "hhr")
    (hit_library / "alignments" / "4ddd_A" / "a3m" / "pdb70_hits.hhr").unlink()
    assert convert(hit_library, tmp_path / "empty") == 0 and not (tmp_path / "empty" / "templates").exists()
    for out in (tmp_path / "none", tmp_path / "empty"):
        assert run("check", out, "--no-picture") == 0
        assert not check_dataset(out, Options(seconds=0)).findings
        for reader in ("auto", "direct", "buffered", "memory", "hdf5"):
            rows = Rows(out / "train", FIELDS, reader=reader)
            row = rows.read(1)
            assert row["hits"] == row["places"] == len(row["hit_row"]) == len(row["hit_sum_probs"]) == len(row["hit_places"]) == 0
            assert row["hit_places"].dtype == np.int16 and row["hit_sum_probs"].dtype == np.float32 and len(row["aatype"]) == 21


def test_invalid_templates_are_excluded(hit_library, tmp_path):
    """5eee has no CA atoms; 1aaa has fewer than five atoms in its aligned residues."""
    for name, number, keep in (("5eee", 4, np.arange(37) != chains.CA), ("1aaa", 0, np.arange(37) < 3)):
        chain, path = random_chain(20 + number, number), hit_library / "mmcif" / name[:2] / f"{name}.cif"
        mask = np.ones_like(chain.mask) * keep
        mask[(5 if name == "1aaa" else 30) : 17] = 0                            # the last aligned residue has 3 atoms
        write_structure(path, chain.aatype, chain.positions + 1, mask, mask, chain="A")
        path.write_text(path.read_text() + "\n_pdbx_audit_revision_history.revision_date 2009-01-01\n")
    assert convert(hit_library, tmp_path / "out") == 0 and not (tmp_path / "out" / "templates").exists()


def test_a_duplicate_shares_its_alignment_and_hits(hit_library, tmp_path):
    add_structure(hit_library, "6fff", 1)
    add_structure(hit_library, "7ggg", 1, day="2009-02-20")
    add_structure(hit_library, "8hhh", 1, day=None)
    add_hits(hit_library, "2bbb_A", 1, [*HITS, ("8HHH_A", 1, 6)])
    (hit_library / "twins").write_text("6FFF_A 7ggg_A 8hhh_A 2bbb_A\n")
    assert convert(hit_library, tmp_path / "out", "--duplicates", hit_library / "twins") == 0
    rows = rows_of(tmp_path / "out", "train")
    assert (rows["6fff_A"]["msa"] == rows["2bbb_A"]["msa"]).all() and len(rows["6fff_A"]["msa"]) == 5 * 21
    names = {name: [templates_of(tmp_path / "out")[hit]["name"].decode() for hit in row["hit_row"]] for name, row in rows.items()}
    assert names["6fff_A"] == names["2bbb_A"] == ["5eee_A", "1aaa_A", "1aaa_A"], "without the chain of the same release date"
    assert names["7ggg_A"] == [], "the others were released 50 days before it, or later"
    assert names["8hhh_A"] == ["2bbb_A", "4ddd_A", "5eee_A", "1aaa_A", "1aaa_A"], "without a release date all but itself"


# ---- simulate and check


# Each family is simulated once.
family_cache = cache_results(proteins, "make_family")


def test_relatives_are_templates_with_equal_residue_numbers(dataset, tmp_path):
    stored, recipe = templates_of(dataset), openfold.Recipe(1, 2, (16, 20), 6, 1, 0.25, 0.0, 1)
    rows = rows_of(dataset, "train") | rows_of(dataset, "validation")
    assert len(rows) == len(stored) == 8
    for index, template in enumerate(stored):
        name = template["name"].decode()
        other = rows[name.replace("m0", "m?").replace("m1", "m0").replace("m?", "m1")]
        assert other["hit_row"].tolist() == [index] and other["hit_places"].tolist() == [*range(other["residues"])]
        assert other["hit_sum_probs"].tolist() == [(template["aatype"] == other["aatype"]).sum()]
        assert all(np.all(template[field] == rows[name][field]) for field in chains.TEMPLATE_FIELDS)
        assert recipe.make_family(index // 2)[index % 2]["name"].decode() == name
        msa = other["msa"].reshape(6, -1)
        templates = template_features([template], other["hit_places"][None], other["hit_sum_probs"])
        features = featurize("".join(RESTYPES[kind] for kind in other["aatype"]), Alignment(msa, np.zeros(msa.shape, np.int32), []),
                             templates, FeatureConfig(crop=None), passes=1, training=False)  # fmt: skip
        assert features["template_mask"].ravel().tolist() == [1, 0, 0, 0]
    wider = openfold.Recipe(1, 4, (16, 16), 2, 1, 0.25, 0.0, 2)
    family = wider.make_family(3)
    for member, each in enumerate(family):
        identities = [int((each["aatype"] == relative["aatype"]).sum()) for relative in family]
        hits = (each["hit_row"] - 12).tolist()
        assert [identities[other] for other in hits] == each["hit_sum_probs"].tolist() and member not in hits
        assert each["hit_sum_probs"].tolist() == sorted(identities[:member] + identities[member + 1 :], reverse=True)[:2]
    assert run("simulate", tmp_path / "plain", *PLAIN) == 0 and not (tmp_path / "plain" / "templates").exists()
    plain = rows_of(tmp_path / "plain", "train")
    assert all(not row["hits"] and (row["positions"] == rows[name]["positions"]).all() for name, row in plain.items())


def test_families_are_in_one_split(dataset):
    splits = {split: rows_of(dataset, split) for split in ("train", "validation")}
    numbers = {split: {int(row["cluster"]) for row in rows.values()} for split, rows in splits.items()}
    assert not numbers["train"] & numbers["validation"] and [len(numbers[split]) for split in numbers] == [3, 1]
    assert all(row["cluster_size"] == 2 for rows in splits.values() for row in rows.values())
    assert not (dataset / ".convert").exists()


class TestContract(PrepContract):
    run, small = staticmethod(run), SMALL


def test_a_killed_run_with_templates_resumes(dataset, tmp_path, monkeypatch):
    check_resumes_if_killed(run, SMALL, dataset, tmp_path, monkeypatch)


DAMAGE = {
    "the first row of the alignment differs from the chain at": set_to("msa", 3, 19), "'mask'": set_to("mask", (8, 0), 2),
    "'positions'": set_to("positions", (8, 1, 0), np.nan), "not 0 where 'mask' is": set_to("mask", (8, slice(None)), 0),
    "no residue has a CA": set_to("mask", slice(None), 0), "'letters'": set_to("letters", 0, 0),
    "hit 1 is row 8 of templates, which has 8 rows": set_to("hit_row", 0, 8), "'hit_row'": set_to("hit_row", 0, -1),
    "hit 1 is aligned to residues 0 to 99": set_to("hit_places", 5, 99), "'hit_places'": set_to("hit_places", 5, -2),
}  # fmt: skip


@pytest.mark.parametrize("text", DAMAGE)
def test_the_check_finds_damage(dataset, tmp_path, text):
    """The check reports impossible values also if the index has the new hash."""
    assert check_fails(run, dataset, tmp_path / "damaged", DAMAGE[text], text)


@pytest.mark.parametrize("text", ["SHA-256", "not in the folder"])
def test_the_check_finds_damaged_templates(dataset, tmp_path, capsys, text):
    path = shutil.copytree(dataset, tmp_path / "damaged") / "templates" / "families_000002.h5"
    if text == "not in the folder":
        path.unlink()
    else:
        with h5py.File(path, "r+") as file:
            file["positions"][3] += 1
    assert run("check", tmp_path / "damaged", "--no-picture") == 1
    assert f"wrong: {path}: " in (stdout := capsys.readouterr().out) and text in stdout


def test_an_unknown_file_among_templates_is_refused(dataset, tmp_path, capsys):
    out = shutil.copytree(dataset, tmp_path / "out")
    shutil.copy(out / "templates" / "families_000002.h5", out / "templates" / "more.h5")
    assert run("simulate", out, *SMALL) == 2 and "one of 1 files that this run would not make" in capsys.readouterr().err
