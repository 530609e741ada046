"""The OpenFold app: sampling, passes of a step, files of a run, folding, and refusals."""

import json
import pickle
import re
import shutil
from collections import Counter
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from apps.openfold.data import FIELDS, TEMPLATE_FIELDS, Chains, _check_lengths, _sampler, build_model, draw_passes, sampling_weights
from apps.openfold.fold import fold, read_fasta
from apps.openfold.settings import Config, FoldConfig
from hpcai import config, log
from hpcai.data import Rows
from hpcai.data.index import INDEX, write_index
from hpcai.data.sampler import Weighted
from hpcai.dist.launch import single_process
from hpcai.dist.mesh import Mesh
from hpcai.errors import CheckpointError, DataError
from hpcai.models.openfold import FeatureConfig, OpenFold, OpenFoldConfig, lddt
from hpcai.models.openfold.residues import ATOM_ORDER
from tests.apps.app_contract import AppContract
from tests.apps.app_runs import damage, metric_by_step, run_on_ranks
from tests.apps.small_apps import OPENFOLD as APP
from tests.ranks.launch import on_ranks
from tests.reference_data import load_json

pytest.importorskip("gemmi", reason="gemmi is not installed: the OpenFold app is NOT tested")
REPRODUCIBLE = ("model.rows.dropout=0", "model.pairs.dropout=0", "model.extra.msa.dropout=0", "model.extra.pairs.dropout=0",
         "model.structure.dropout=0", "step.precision=fp64", "train.steps=3")  # fmt: skip


def damage_data(data: Path, kind: str) -> None:
    def shift_letter(file: h5py.File) -> None:
        file["letters"][0] -= 1
        file["letters"][1] += 1

    if kind == "no templates":
        shutil.rmtree(data / "templates")
    damage(data, kind, {
        "nan": lambda file: file["positions"].__setitem__((3, 1), np.nan),
        "letter": lambda file: file["msa"].__setitem__(..., 30), "ragged": shift_letter,
        "query": lambda file: file["msa"].__setitem__(..., (file["msa"][...] + 1) % 20),
        "counts": lambda file: file["residues"].__setitem__(0, file["residues"][0] + 1),
    })  # fmt: skip


class TestContract(AppContract):
    exact = [*REPRODUCIBLE]
    damage_data = staticmethod(damage_data)

    def data_for_log(self, data: Path, folder: Path) -> Path:
        training = copy_with_release_dates(data, folder / "data", "train", [date(2020, 1, 1)] * 6)
        return copy_with_release_dates(training, folder / "both", "validation", [date(2021, 9, 17)] * 6)


def open_chains(data: Path, split: str = "train", **kwargs: Any) -> Chains:
    rows = Rows(data / split, FIELDS)
    cfg = FeatureConfig(crop=16, clusters=4, extra=5, templates=0, **kwargs)
    return Chains(rows, np.arange(len(rows)), cfg, seed=0)


# ---- files of a run


def test_structures_of_a_run_are_readable_by_other_programs(data: Path) -> None:
    import gemmi
    from Bio.PDB.MMCIFParser import MMCIFParser

    run = APP.cached_run(data)
    arrays = np.load(run / "structures.npz", allow_pickle=False)
    validation = {values["name"].decode(): values for values in map(Rows(data / "validation", FIELDS).read, range(6))}
    assert len(arrays["names"]) == 2 and set(arrays["names"]) <= set(validation)
    model, begin = OpenFold.load(run / "model.safetensors"), 0
    assert model.cfg == config.load(Config, run / "settings.yaml", []).model
    for name, count in zip(arrays["names"], arrays["residues"]):
        span, row = slice(begin, begin + count), validation[str(name)]
        begin += count
        np.testing.assert_array_equal(arrays["true"][span], row["positions"])
        path = run / "structures" / f"{name}.cif"
        chain = gemmi.read_structure(str(path))[0]["A"]
        parsed = MMCIFParser(QUIET=True).get_structure("one", path)[0]["A"]
        assert len(chain) == len(list(parsed)) == count
        for residue, other, plddt, positions in zip(chain, parsed, arrays["plddt"][span], arrays["predicted"][span]):
            assert residue.name == other.get_resname() and {round(atom.b_iso, 1) for atom in residue} == {round(float(plddt), 1)}
            np.testing.assert_allclose(residue["CA"][0].pos.tolist(), positions[ATOM_ORDER["CA"]], atol=2e-3)
        ca = [torch.from_numpy(arrays[kind][span][None, :, ATOM_ORDER["CA"]]) for kind in ("predicted", "true")]
        scores = 100 * lddt(*ca, torch.from_numpy(row["mask"][None, :, ATOM_ORDER["CA"]]).float(), per_residue=True)[0].numpy()
        np.testing.assert_allclose(arrays["lddt"][span], np.where(row["mask"][:, ATOM_ORDER["CA"]] > 0, scores, np.nan), rtol=1e-4)


# ---- folding


SEQUENCES = {"short": "MKVLAG", "long": "ACDEFGHIKLMNPQRSTVWYACDEF", "mid": "GGSGGSAKLMWY"}


def write_fasta(folder: Path, **extra: str) -> Path:
    items = (SEQUENCES | extra).items()
    (folder / "chains.fasta").write_text("".join(f">{name} of nobody\n{s[:8]}\n{s[8:]}\n" for name, s in items))
    return folder / "chains.fasta"


def fold_chains(mesh: Mesh, fasta: Path, out: Path, **settings: Any) -> list[str]:
    cfg = {"weights": str(fasta.parent / "tiny.safetensors"), "features.clusters": 4, "features.extra": 4, "recycles": 1} | settings
    overrides = [f"chains={fasta}", f"out={out}", *(f"{name}={value}" for name, value in cfg.items())]
    return fold(config.load(FoldConfig, None, overrides), mesh)


def read_atoms(path: Path) -> np.ndarray:
    import gemmi

    return np.array([[*a.pos.tolist(), a.b_iso] for r in gemmi.read_structure(str(path))[0]["A"] for a in r])


def test_chains_are_folded_on_a_mesh_as_on_one_rank_and_none_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    OpenFold(OpenFoldConfig.preset("tiny", template=None)).save(tmp_path / "tiny.safetensors")
    fasta, (single, parallel) = write_fasta(tmp_path), (tmp_path / name for name in ("single", "parallel"))
    assert fold_chains(single_process(), fasta, single) == [] and "3 of 3 chains to fold" in capsys.readouterr().out
    assert on_ranks({"replicate": 2, "axial": 2}, fold_chains, fasta, parallel) == [[]] * 4
    for name, sequence in SEQUENCES.items():
        actual, expected = (read_atoms(folder / f"{name}.cif") for folder in (parallel, single))
        assert len(expected) > 4 * len(sequence)
        np.testing.assert_allclose(actual, expected, atol=2e-2)  # a file has three digits, and pLDDT two
    assert sorted(path.name for path in parallel.iterdir()) == sorted(f"{name}.cif" for name in SEQUENCES), "no partial files"
    (single / "mid.cif").unlink()
    before = (single / "long.cif").stat().st_mtime_ns
    assert fold_chains(single_process(), fasta, single) == [] and "1 of 3 chains to fold" in capsys.readouterr().out
    assert (single / "long.cif").stat().st_mtime_ns == before
    (reason,) = fold_chains(single_process(), write_fasta(tmp_path, odd="MK1L"), single)
    assert "odd: sequence: character 3 of 4 is '1'" in reason and "odd: sequence" in capsys.readouterr().err


def test_a_chain_that_cannot_be_folded_is_reported_and_the_others_are_folded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On four ranks together: one chain is too short, one has an invalid letter, and one rank cannot read one."""
    import apps.openfold.fold as command

    torch.manual_seed(0)
    OpenFold(OpenFoldConfig.preset("tiny", template=None)).save(tmp_path / "tiny.safetensors")
    fasta = write_fasta(tmp_path, tiny="MKV", odd="MK1LGGS", lost="GGSLKTW")
    problems = on_ranks({"axial": 4}, fold_with_error_on_rank_2, fasta, tmp_path / "out")
    assert problems == [problems[0]] * 4 and len(problems[0]) == 3
    reasons = {reason.split(":")[0]: reason for reason in problems[0]}
    assert "tiny: 3 residues for 4 ranks" in reasons["tiny"] and "character 3 of 7 is '1'" in reasons["odd"]
    assert reasons["lost"] == "lost: the disk of rank 2 is gone"
    assert sorted(path.stem for path in (tmp_path / "out").iterdir()) == sorted(SEQUENCES)
    monkeypatch.setattr(command, "fold", lambda *_: problems[0])
    with pytest.raises(SystemExit) as error:
        command.main(config.load(FoldConfig, None, ["chains=a.fasta"]))
    assert error.value.code == 1
    assert "error: 3 chains are not folded: " in capfd.readouterr().err


def fold_with_error_on_rank_2(mesh: Mesh, fasta: Path, out: Path) -> list[str]:
    from hpcai.models.openfold import folding

    prepare_features = folding.prepare_features

    def failing(model: Any, sequence: str, *args: Any, **kwargs: Any) -> Any:
        if mesh.rank == 2 and sequence == "GGSLKTW":
            raise DataError("the disk of rank 2 is gone")
        return prepare_features(model, sequence, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "prepare_features", failing)
        return fold_chains(mesh, fasta, out)


@pytest.mark.parametrize(("text", "message"), [
    ("", "has no chain"), ("MKV", "line 1: 'MKV' precedes"), (">a\nMK\n>a\nMK", "line 3: the name 'a' occurs twice"),
    (">a\n>b\nMK", "the chain a has no sequence"), ("\xff", "line 1: '\ufffd' precedes"),
    (">a\nM\xffK", "line 2: 'M\ufffdK', expected ASCII"), (">b\xe9\nMK", "the name 'b\ufffd' is no valid file name (ASCII, 245"),
    (f">{'c' * 246}\nMK", "is no valid file name"), (">a\n*\n", "the chain a has no sequence"),
])  # fmt: skip
def test_invalid_fasta_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.fasta").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=re.escape(message)):
        read_fasta(tmp_path / "x.fasta")
    with pytest.raises(DataError, match="cannot be read as FASTA"):
        read_fasta(tmp_path / "none.fasta")


def test_headers_of_fasta_hold_any_bytes_after_the_name(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf;by hand\r\n>a Prot\xc3\xa9ine \xff\xe2\x80\xa8\r\nMKTA\r\n;more\r\nYI*\r\n>%b\r\nMS\r\n"
    (tmp_path / "x.fasta").write_bytes(data % (b"b" * 245))
    assert read_fasta(tmp_path / "x.fasta") == [("a", "MKTAYI"), ("b" * 245, "MS")]


# ---- sampling


def test_each_number_of_passes_occurs_once_per_block_of_steps() -> None:
    for recycles in (0, 1, 3):
        passes = [draw_passes(5, step, recycles) for step in range(40 * (recycles + 1))]
        blocks = [passes[k : k + recycles + 1] for k in range(0, len(passes), recycles + 1)]
        assert all(sorted(block) == list(range(1, recycles + 2)) for block in blocks)
        assert recycles == 0 or len({tuple(block) for block in blocks}) > 1, "the order changes"
    assert [draw_passes(6, step, 3) for step in range(40)] != [draw_passes(5, step, 3) for step in range(40)]


def test_a_step_runs_the_number_of_passes_drawn_for_it(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In any order of samples, and after a resume."""
    import hpcai.models.openfold.model as model_module

    for order, begin in (("ready", 0), ("strict", 2)):
        passes: list[int] = []
        forward = model_module.OpenFold.forward

        def record_passes(self: Any, features: Any, passes: list[int] = passes, forward: Any = forward) -> Any:
            if self.training:
                passes.append(features["aatype"].shape[-1])
            return forward(self, features)

        run = tmp_path / f"{order}{begin}"
        overrides = f"data.order={order}", "features.recycles=3", "train.evaluate_every=9", "data.pictures=0"
        if begin:
            assert APP.run(data, run, *overrides, f"train.steps={begin}") == 0
        monkeypatch.setattr(model_module.OpenFold, "forward", record_passes)
        assert APP.run(data, run, *overrides, "train.steps=4") == 0
        monkeypatch.setattr(model_module.OpenFold, "forward", forward)
        assert passes == [draw_passes(0, step, 3) for step in range(begin, 4)]


def test_long_chains_of_small_clusters_are_drawn_most() -> None:
    np.testing.assert_allclose(sampling_weights(np.array([10, 256, 384, 900]), np.array([1, 4, 1, 9])), [0.5, 0.25, 0.75, 1 / 3])
    counts = Counter((Weighted(np.array([1.0, 3.0, 0.0]), 4000, 1, numbered=True).order(0) % 3).tolist())
    assert counts[2] == 0 and counts[1] / counts[0] == pytest.approx(3, rel=0.15)


def test_each_draw_of_a_chain_is_another_sample(data: Path) -> None:
    order, unnumbered = (Weighted(np.ones(3), 10, 1, numbered=numbered).order(0) for numbered in (True, False))
    np.testing.assert_array_equal(order % 3, unnumbered)
    for chain in range(3):
        assert (order[unnumbered == chain] // 3).tolist() == list(range((unnumbered == chain).sum()))
    source = open_chains(data)
    first, second = source.sample(0, 0), source.sample(len(source), 0)
    assert (first["index"] == second["index"]).all() and not np.array_equal(first["msa_feat"], second["msa_feat"])
    unpickled = pickle.loads(pickle.dumps(source))  # as with data.processes  # noqa: S301
    for sample in (source.sample(0, 0), unpickled.sample(0, 0)):
        assert sample.keys() == first.keys() and all(np.array_equal(sample[name], first[name]) for name in first)
    cfg = config.load(Config, APP.small_config, [*APP.quick_settings, "data.epoch=40"])
    indices = _sampler(cfg, source).order(3)
    assert len(set(indices.tolist())) == 40 and set((indices % len(source)).tolist()) == set(range(len(source)))
    once = _sampler(cfg.model_copy(update={"data": cfg.data.model_copy(update={"draw": "once"})}), source).order(3)
    assert sorted(once) == list(range(len(source)))
    validation = Chains(source.rows, source.subset, source.cfg, 0, training=False)
    np.testing.assert_array_equal(validation.sample(0, 0)["msa_feat"], validation.sample(0, 7)["msa_feat"])


def copy_with_release_dates(data: Path, folder: Path, split: str, days: list[date]) -> Path:
    shutil.copytree(data, folder)
    epoch, rows = date(1970, 1, 1), iter(days)
    for path in sorted((folder / split).glob("*.h5")):
        with h5py.File(path, "r+") as file:
            file["release"][...] = [(next(rows) - epoch).days for _ in range(len(file["release"]))]
    write_index(folder / split, json.loads((folder / split / INDEX).read_text()))
    return folder


def test_chains_are_selected_by_release_date(data: Path, tmp_path: Path) -> None:
    first = date(2021, 9, 14)
    folder = copy_with_release_dates(data, tmp_path / "data", "train", [first + timedelta(days=n) for n in range(6)])
    folder = copy_with_release_dates(folder, tmp_path / "both", "validation", [first + timedelta(days=n) for n in range(6)])
    overrides = ("data.released_until=2021-09-16", "data.validation_from=2021-09-17", "data.validation_until=2021-09-18")
    assert APP.run(folder, tmp_path / "run", *overrides, "train.steps=1") == 0
    start = next(e for e in log.read_metrics(tmp_path / "run" / "metrics.jsonl") if e["kind"] == "start")
    assert start["train_samples"] == 3 and start["validation_samples"] == 2


# ---- templates

TEMPLATES = ("model.template={channels: 8, blocks: 1, head: 4, heads: 2, pairs: {triangle: 8, head: 4, heads: 2, transition: 2}}",
             "features.templates=2")  # fmt: skip


def test_a_run_learns_from_templates_in_files(data: Path, tmp_path: Path) -> None:
    without = shutil.copytree(data, tmp_path / "without", ignore=shutil.ignore_patterns("templates"))
    for folder, name in ((data, "run"), (without, "other")):
        assert APP.run(folder, tmp_path / name, *TEMPLATES, "train.steps=3", "train.evaluate_every=9", "data.pictures=0") == 0
    losses, losses_without = (metric_by_step(tmp_path / name) for name in ("run", "other"))
    assert losses[1] == losses_without[1] and losses[3] != losses_without[3], "the template branch is zero at initialization"


def test_templates_are_aligned_structures_of_relatives(data: Path) -> None:
    rows, others = Rows(data / "train", FIELDS), Rows(data / "templates", TEMPLATE_FIELDS)
    cfg = FeatureConfig(crop=None, clusters=2, extra=2, templates=4, recycles=0)
    source = Chains(rows, np.arange(len(rows)), cfg, 0, others, training=False)
    for index in range(3):
        values, features = rows.read(index), source.sample(index, 0)
        assert features["template_mask"][:, 0].tolist() == [1, 1, 0, 0]
        for slot, row in enumerate(values["hit_row"]):
            other = others.read(int(row))
            np.testing.assert_array_equal(features["template_aatype"][slot, :, 0], other["aatype"])
            present = other["mask"] > 0
            positions = features["template_all_atom_positions"][slot, ..., 0][present]
            np.testing.assert_allclose(positions, other["positions"][present] - other["positions"][present].mean(0), atol=1e-3)
            assert not np.array_equal(other["positions"], values["positions"]), "a chain is not a template of itself"


# ---- initial weights


def test_a_run_starts_from_weights_of_a_file(data: Path, tmp_path: Path) -> None:
    native = APP.cached_run(data) / "model.safetensors"
    public = tmp_path / "public.pt"
    OpenFold.load(native).save(public, form="mlperf")
    overrides = (*REPRODUCIBLE, "train.steps=1", "data.pictures=0")
    for path in (native, public):
        assert APP.run(data, tmp_path / f"run-{path.stem}", f"start.weights={path}", *overrides) == 0
    first, second = (metric_by_step(tmp_path / f"run-{path.stem}")[1] for path in (native, public))
    assert first == pytest.approx(second, rel=1e-12) and abs(metric_by_step(APP.cached_run(data, *REPRODUCIBLE))[1] - first) > 0.01


@pytest.mark.parametrize("kind, text", [
    ("other", "has SHA-256"), ("shape", "of another network than the settings of model: size mismatch"), ("gone", "cannot be read"),
])  # fmt: skip
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, kind: str, text: str) -> None:
    path = tmp_path / "w.safetensors"
    if kind != "gone":
        OpenFold(OpenFoldConfig.preset("tiny")).save(path)
    start = {"weights": path, **({} if kind == "shape" else {"sha256": "0" * 64})}
    model = OpenFoldConfig.preset("tiny", **({"single": 48} if kind == "shape" else {}))
    with pytest.raises(CheckpointError, match=re.escape(text)):
        build_model(Config.model_validate({"start": start, "model": model}))


# ---- logs, refusals


@pytest.mark.parametrize(("ranks", "overrides", "text"), load_json("refused/axial_sizes"))
def test_an_axial_size_that_does_not_fit_is_refused(data: Path, tmp_path: Path, ranks: int, overrides: str, text: str) -> None:
    codes, output = run_on_ranks(APP.command(data, tmp_path / "run", *overrides.split()), tmp_path / "output", ranks)
    assert codes == [2] * ranks and text in output and "Traceback" not in output, output
    assert not (tmp_path / "run" / "settings.yaml").exists()


def test_a_chain_that_is_too_short_to_be_sharded_is_named_before_training(data: Path) -> None:
    rows = Rows(data / "validation", FIELDS)
    _check_lengths(rows, np.arange(6), int(rows.column("residues").min()))
    with pytest.raises(DataError, match=r"validation/\S+ row \d+: \d+ residues for the 99 ranks of mesh.axial; take"):
        _check_lengths(rows, np.arange(6), 99)


def test_a_chain_that_cannot_be_read_is_replaced_and_logged(data: Path, tmp_path: Path) -> None:
    damage_data(shutil.copytree(data, tmp_path / "data"), "nan")
    assert APP.run(tmp_path / "data", tmp_path / "run", "data.on_bad_sample=skip", "data.pictures=0", "train.steps=3") == 0
    notes = [e["text"] for e in log.read_metrics(tmp_path / "run" / "metrics.jsonl") if e["kind"] == "note"]
    skipped = [text for text in notes if "is skipped" in text]
    assert len(skipped) == 1 and re.search(r"train/\S+\.h5: row 0 of 'positions' holds NaN or infinity", skipped[0]), notes
    assert any(text.endswith("samples skipped so far") for text in notes)
