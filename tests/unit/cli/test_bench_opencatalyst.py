"""`hpcai bench opencatalyst`: the form with triplets is the same network, and every part says what it measured."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

from hpcai.cli import bench, bench_opencatalyst
from hpcai.cli.bench_opencatalyst import _balance, _counts, graph_of, settings, slabs
from hpcai.errors import DataError
from hpcai.models.dimenet import DimeNet
from hpcai.models.dimenet.periodic import count_triplets, neighbours
from hpcai.models.dimenet.triplets import WithTriplets, edges_of, energy_and_forces

pytestmark = pytest.mark.usefixtures("one_thread")


def crystals() -> list[Atoms]:
    """Cells smaller than the cutoff, whose atoms are neighbours of their own images."""
    skewed = Atoms("PtNHAg", positions=[[0, 0, 0], [1.6, 0.3, 0.2], [2.1, 1.2, 0.5], [1.2, 2.4, 2.2]], pbc=True,
                   cell=[[4.1, 0.2, 0], [0.9, 4.5, 0.3], [0.4, -0.6, 5.2]])  # fmt: skip
    return [skewed, bulk("Al", "fcc", 4.05)]


def tiny(angles: str, **more: object):  # type: ignore[no-untyped-def]
    cfg = settings(angles, tiny=True).model_copy(update=more)
    torch.manual_seed(0)
    ours = DimeNet(cfg).double()
    for output in ours.output_blocks:
        torch.nn.init.normal_(output.lin.weight, 0, 0.2)
    return cfg, ours


@pytest.mark.parametrize("most", [None, 30])
@pytest.mark.parametrize("angles", ["detached", "conservative"])
def test_the_plain_form_is_the_same_network(angles: str, most: int | None) -> None:
    for structures, more in ((slabs(tiny=True), {}), (crystals(), {"cutoff": 6.0, "most": most, "spherical": 7, "radial": 6})):
        cfg, ours = tiny(angles, **more)
        plain = WithTriplets(cfg).double()
        plain.load_state_dict(ours.state_dict())
        graph = graph_of(structures, cfg)
        edges = edges_of(graph)
        n = len(edges.numbers)
        wanted = ours(graph)
        energy, forces = energy_and_forces(plain, graph.positions[:n], edges, angles == "detached")
        assert wanted.forces.abs().max() > 0.1
        assert torch.allclose(energy, wanted.energy, rtol=0, atol=1e-10)
        assert torch.allclose(forces, wanted.forces[:n], rtol=0, atol=1e-10)
        towards = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        (forces * towards).sum().backward()
        (wanted.forces[:n] * towards).sum().backward()
        for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None or not mine.grad.any(), name
            else:
                assert torch.allclose(mine.grad, theirs.grad, rtol=1e-9, atol=1e-9), name


def test_all_triplets_are_listed() -> None:
    structures, cfg = crystals(), settings(tiny=True).model_copy(update={"cutoff": 6.0, "most": 30})
    found = [neighbours(s.positions, s.cell.array, s.pbc, 6.0, 30) for s in structures]
    edges = edges_of(graph_of(structures, cfg))
    assert len(edges.ji) == sum(count_triplets(f, len(s)) for f, s in zip(found, structures)) == len(edges.kj)
    assert (edges.i[edges.kj] == edges.j[edges.ji]).all()
    assert len({*zip(edges.kj.tolist(), edges.ji.tolist())}) == len(edges.ji)


def test_parts_of_a_tiny_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_opencatalyst, "find_spec", lambda name: None)
    assert bench.main(["opencatalyst", "steps", "neighbours", "--tiny", "--repeats", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert [row["angles"] for row in found["steps"]] == ["detached", "conservative"]
    row = found["steps"][0]
    assert row["triplets"] > row["edges"] > row["atoms"] == 18 and "pyg_s" not in row
    assert row["plain_over_ours"] == pytest.approx(row["plain_s"] / row["ours_s"], rel=0.05)
    assert "torch_geometric is not installed" in found["left_out"]["left out"]
    assert found["neighbours"]["atoms"] == 9 and 0 < found["neighbours"]["edges"] <= found["neighbours"]["edges_in_cutoff"]
    assert lines[0].startswith("steps: opencatalyst") and not {"memory", "build", "balance"} & set(found)


def test_all_forms_start_from_the_same_loss() -> None:
    losses = {kind: float(bench_opencatalyst._setup(kind, "conservative", True)()) for kind in ("plain", "ours")}
    assert losses["plain"] == pytest.approx(losses["ours"], rel=1e-6)


def test_memory_and_build_of_a_tiny_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_opencatalyst, "find_spec", lambda name: None)
    asked = []

    def here(words: list[str]) -> float:
        asked.append(words)
        assert bench.main(words) == 0
        return float(json.loads(capsys.readouterr().out)["mb"])

    monkeypatch.setattr(bench, "peak_of", here)  # without processes, which take ten seconds each
    row = bench_opencatalyst._memory("detached", tiny=True)
    assert [words[-1] for words in asked] == ["plain", "ours"] and all("--tiny" in words for words in asked)
    assert row["ours_mb"] > 0 and row["ours_over_plain"] == pytest.approx(row["ours_mb"] / row["plain_mb"], abs=0.01)
    assert set(bench_opencatalyst._build(1)) == {"ours_s"}


def test_wall_time_of_a_tiny_network(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_opencatalyst, "find_spec", lambda name: None)
    kept: list[bool] = []
    monkeypatch.setattr("hpcai.dist.host.keep_memory", lambda: kept.append(True))  # not in this process

    def here(words: list[str]) -> Any:
        before = len(kept)
        assert bench.main(words) == 0 and len(kept) - before == (words[-1] == "app")
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(bench, "apart", here)
    row = bench_opencatalyst._wall(1, tiny=True)
    assert len(kept) == 2 and row["threads"] == torch.get_num_threads()
    assert row["plain_over_ours"] == pytest.approx(row["plain_script_s"] / row["ours_app_s"], rel=0.2)


def test_balance_of_the_counts_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train").mkdir()
    draw = np.random.default_rng(0)
    for name in "ab":
        with h5py.File(tmp_path / "train" / f"{name}.h5", "w") as file:
            file["triplets"] = draw.lognormal(10, 0.4, 600).astype(np.int64)
    assert bench.main(["opencatalyst", "balance", "--directory", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "left_out" not in found
    for row in found["balance"]:
        assert row["samples"] == 1200 and row["counts"] == str(tmp_path)
        assert row["none"] > 1.1 > row["frames"] >= 1 and 1.1 > row["triplets"] >= 1


def test_balance_says_where_counts_are_missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no train/\*.h5 with triplets; make them with: python -m data_prep.opencatalyst simulate"):
        _counts(tmp_path)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["other"] = np.zeros(3)
    with pytest.raises(DataError, match="a.h5: no dataset 'triplets'"):
        _counts(tmp_path)
    with pytest.raises(DataError, match="few: 100 frames, expected 128 at least for 8 copies"):
        _balance(np.ones(100), 8, "few")


def test_synthetic_counts_say_so() -> None:
    counts, source = _counts(None)
    assert source.startswith("synthetic") and 72 < (counts / 46**2).mean() < 74
    assert _balance(np.ones(256), 8)["none"] == _balance(np.ones(256), 8)["triplets"] == 1


def test_only_triplets_let_a_copy_take_fewer_frames() -> None:
    counts = np.ones(128)
    counts[5] = 40
    row, mean = _balance(counts, 8), 167 / 8
    assert row["none"] == row["frames"] == pytest.approx(55 / mean, abs=1e-4) and row["triplets"] == pytest.approx(
        40 / mean, abs=1e-4
    )
