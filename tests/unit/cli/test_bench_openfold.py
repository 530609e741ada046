"""`hpcai bench openfold`: what it compares is the same network, and every part says what it measured."""

import json
from typing import Any

import pytest
import torch

from hpcai.cli import bench, bench_openfold
from hpcai.cli.bench_openfold import Case, alignment, batch, chain, network, plainly
from hpcai.errors import ConfigError
from hpcai.kernels import attention, gates, outer, room
from hpcai.models.openfold import evoformer, layers, loss, objective

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = Case(2, 16, 4, 6, 1)


def learnt(model: Any, features: Any) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(1)
    value = loss(model, features)["loss"]
    value.backward()
    return value.item(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("save", [False, True])
def test_the_plain_form_is_the_same_network(save: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network(CASE, save, tiny=True).double()
    features = {name: x.double() if x.is_floating_point() else x for name, x in batch(CASE).items()}
    monkeypatch.setattr(objective, "_CPU", 1)  # bytes: ours goes through distances row by row
    value, grads = learnt(model, features)
    assert len(grads) > 100 and sum(float(grad.norm()) > 1e-6 for grad in grads) > 0.8 * len(grads)
    called = []

    def refuse(*_: Any) -> None:
        raise AssertionError("a fused operation among plain ones")

    for kernel in (attention._Attention, gates._Gate, outer._Outer, layers._ChannelsFirst):
        monkeypatch.setattr(kernel, "apply", refuse)
    monkeypatch.setattr(objective, "checkpoint", refuse)
    for module in (attention, gates, outer):
        original = module.plain
        monkeypatch.setattr(module, "plain", lambda *given, original=original: called.append(original) or original(*given))
    with plainly():
        right, expected = learnt(model, features)
    assert value == pytest.approx(right, rel=1e-10) and len({*called}) == 3
    for mine, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)
    with pytest.raises(AssertionError, match="a fused operation"):
        learnt(model, features)


def test_what_was_plain_is_fused_again_after_an_error() -> None:
    before = evoformer.gate, evoformer.outer_product, objective.several
    with pytest.raises(ZeroDivisionError), plainly():
        assert evoformer.gate is gates.plain
        _ = 1 // 0
    assert before == (evoformer.gate, evoformer.outer_product, objective.several)


def test_both_forms_make_the_same_steps() -> None:
    losses = {}
    for form in [(kind, precision) for kind in ("plain", "ours") for precision in ("fp32", "bf16")]:
        run = bench_openfold._setup(form[0], CASE, form[1], tiny=True)
        torch.manual_seed(1)
        losses[form] = [float(run()) for _ in range(3)]
    wide = losses["plain", "fp32"]
    assert wide == pytest.approx(losses["ours", "fp32"], rel=1e-3) and wide[2] != wide[0]
    for kind in ("plain", "ours"):
        assert losses[kind, "bf16"] == pytest.approx(wide, rel=2e-2) and losses[kind, "bf16"] != pytest.approx(wide, rel=1e-6)


def test_a_ratio_above_1_is_in_our_favour(monkeypatch: pytest.MonkeyPatch) -> None:
    def alternate(runs: dict[str, Any], repeats: int) -> Any:
        assert list(runs) == ["plain", "ours"] and repeats == 3
        return {"plain": [(4.0, 9.0), (2.0, 9.0), (3.0, 9.0)], "ours": [(1.5, 7.0)] * 3}

    monkeypatch.setattr(bench, "_alternate", alternate)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    row = bench_openfold._steps(CASE, "fp32", False, 3, tiny=True)
    assert (row["plain_s"], row["ours_s"], row["plain_over_ours"]) == (3.0, 1.5, 2.0)


def test_fewer_blocks_come_with_one_for_extra_rows() -> None:
    model = network(Case(2, 16, 4, 6, 0))
    assert len(model.evoformer.blocks) == 2 and len(model.extra_msa_stack.blocks) == 1 and model.cfg.msa == 256
    assert model.template_embedder is None and all(parameter.any() for parameter in model.parameters())


def test_synthetic_features_are_whole() -> None:
    features = batch(CASE)
    assert features["msa_feat"].shape == (1, 4, 16, 49, 2) and features["extra_msa_mask"].all() and features["seq_mask"].all()
    import numpy as np

    draw = np.random.default_rng(0)
    made = chain(50, draw)
    rows = alignment(made, 300, draw)
    same = (rows.msa == made.aatype).mean()
    assert (rows.msa[0] == made.aatype).all() and not rows.deletions[0].any() and 0.5 < same < 0.75
    assert 0.015 < (rows.deletions > 0).mean() < 0.025


def test_parts_of_a_tiny_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["openfold", "steps", "build", "featurize", "--tiny", "--repeats", "1", "--samples", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert [(row["residues"], row["rows"], row["recycles"]) for row in found["steps"]] == [(16, "4 + 6", 0), (16, "4 + 6", 1)]
    if not torch.cuda.is_available():
        for row in found["steps"]:
            assert row["plain_over_ours"] == pytest.approx(row["plain_s"] / row["ours_s"], rel=0.05)
    assert found["build"]["parameters"] > 1e5
    whole, *parts = found["featurize"]
    assert whole["samples"] == 5 == sum(part["samples"] for part in parts) and parts[0]["depth"] == "100 to 464"
    assert 0 < whole["median_s"] <= whole["p90_s"] <= whole["p99_s"] <= whole["most_s"]
    assert lines[0].startswith("steps: openfold") and not {"memory", "fold"} & set(found)


def test_memory_and_fold_are_measured_apart(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    saved: list[bool] = []

    def here(words: list[str]) -> Any:
        asked.append(words)
        assert bench.main(words) == 0
        return json.loads(capsys.readouterr().out)

    def seen(case: Case, save: bool = False, tiny: bool = False) -> Any:
        saved.append(save)
        return network(case, save, tiny)

    monkeypatch.setattr(bench_openfold, "network", seen)
    monkeypatch.setattr(bench, "apart", here)  # without processes, which take ten seconds each
    words = ["openfold", "memory", "fold", "--tiny", "--json", "--case", "1", "12", "3", "5", "1"]
    assert bench.main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(words[1], words[-1], "--checkpoint" in words) for words in asked] == [
        ("memory", "plain", False), ("memory", "ours", False), ("memory", "ours", True),
        ("fold", "plain", False), ("fold", "ours", False),
    ]  # fmt: skip
    assert saved == [False, False, True, False, False]
    assert all(words[2:8] == ["--case", "1", "12", "3", "5", "1"] and "--tiny" in words for words in asked)
    row = found["memory"][0]
    assert row["ours_mb"] > 0 and row["ours_over_plain"] == pytest.approx(row["ours_mb"] / row["plain_mb"], abs=0.01)
    assert row["residues"] == 12 and row["rows"] == "3 + 5" and found["fold"][0]["ours_mb"] >= row["ours_mb"] > 50
    assert found["fold"][0]["ours_cpu_s"] >= 0 and len(found["fold"]) == 1


def test_a_plain_fold_computes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {kind: bench_openfold._fold_setup(kind, CASE, True) for kind in ("plain", "ours")}
    expected = runs["ours"]()
    for module, name, problem in ((attention, "_Attention", AttributeError), (room, "several", TypeError)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, None)
            assert runs["plain"]() == pytest.approx(expected, rel=1e-4)
            with pytest.raises(problem):
                runs["ours"]()


def test_what_a_gpu_cannot_do_is_said_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: Exception) -> str | float:
        def setup(*_: Any) -> Any:
            raise problem

        monkeypatch.setattr(bench_openfold, "_setup", setup)
        return bench_openfold._on_gpu("captured", CASE, "bf16", True, 1, True)

    assert isinstance(bench_openfold._on_gpu("ours", CASE, "fp32", True, 1, True), float)
    assert fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")) == "out of memory"
    assert fails(ConfigError("step.capture: the step cannot be captured: CUDA out of memory")) == "out of memory"
    assert fails(ConfigError("step.capture: no")) == "step.capture: no"
    with pytest.raises(ZeroDivisionError):
        fails(ZeroDivisionError())


def test_on_a_gpu_every_form_has_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"plain": 30.0, "ours": 20.0, "captured": 10.0}

    def on_gpu(kind: str, case: Case, precision: str, save: bool, repeats: int, tiny: bool) -> float | str:
        assert repeats == 2 and case == bench_openfold._GPU[0]
        return "out of memory" if kind == "plain" and not save else times[kind]

    monkeypatch.setattr(bench_openfold, "_on_gpu", on_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "_machine", lambda: {"torch": "2", "device": "none", "threads": 1, "load": 0.0})
    assert bench.main(["openfold", "steps", "--repeats", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [(row["precision"], row["checkpoint"]) for row in rows] == [
        ("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True),
    ]  # fmt: skip
    assert rows[0]["plain_ms"] == "out of memory" and rows[0]["plain_over_best"] == "" and rows[1]["plain_over_best"] == 3.0
    assert rows[1]["captured_ms"] == 10.0 and rows[1]["blocks"] == 48
