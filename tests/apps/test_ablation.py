"""What `hpcai ablate cosmoflow` switches is what it says, and its numbers are those of the plain network."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apps.cosmoflow import ablation
from hpcai import config, dist
from hpcai.cli import ablate
from hpcai.data import Loader
from hpcai.nn.conv import Conv3d
from hpcai.train.scoring import Background, Here
from hpcai.train.step import Step

SMALL = ["model.size=32", "model.filters=4", "data.batch=1", "data.workers=1"]
QUICK = ["kernels", "channels-last", "fused optimizer", "garbage collection", "direct I/O", "async evaluation"]
MESH = dist.alone(torch.device("cpu"))


pytestmark = pytest.mark.usefixtures("one_thread")


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert ablate.main(["cosmoflow", *SMALL, "--repeats", "1", "--steps", "1", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert all(row["error"] is None for row in found["cumulative"] + found["left_out"])
    return found


def numbers_agree(found: dict[str, Any]) -> None:
    for row in found["cumulative"] + found["left_out"]:
        if "precision" not in row["on"]:
            assert row["loss_difference"] < 1e-5 and row["gradient_difference"] < 1e-5, row["name"]


def test_what_needs_no_compiler_is_on_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "--only", *QUICK)
    assert [row["name"] for row in found["cumulative"]] == ["plain", *QUICK] and [r["name"] for r in found["left_out"]] == QUICK
    numbers_agree(found)
    assert found["cumulative"][1]["gradient_difference"] > 0, "another way to add up"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says why a CPU cannot")
def test_every_switch_that_is_here_and_why_the_others_are_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = measured(capsys, "--directory", str(tmp_path))
    switches = {switch["name"]: switch for switch in found["switches"]}
    assert len(switches) == 10
    here = [name for name, switch in switches.items() if not switch["why_not"]]
    assert {*QUICK, "compile"} <= set(here) and [row["name"] for row in found["left_out"]] == here
    assert "no GPU" in switches["capture"]["why_not"] and "one process" in switches["sharded optimizer"]["why_not"]
    numbers_agree(found)
    assert {path.name for path in tmp_path.iterdir()} == {"ablation.json", "ablation.png"}


def _note(seen: list[bool], module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
    seen.append(inputs[0].is_contiguous())


def test_plain_is_plain_and_all_is_ours() -> None:
    cfg = config.load(ablation.CONFIG, None, [*SMALL, "data.turn=true"])
    with ablation.trial(cfg, MESH, frozenset()) as plain, ablation.trial(cfg, MESH, frozenset(QUICK)) as ours:
        what = ((plain, ablation._Whole, ablation._ByTorch, Here, None), (ours, Conv3d, Step, Background, 1000))
        for trial, conv, step, scores, every in what:
            model: Any = trial.step.model
            assert type(trial.step) is step and type(trial.scores) is scores and trial.around().every == every
            assert all(type(block.conv) is conv for block in model.conv_seq) and trial.cfg.model.dropout == 0
            assert all(block.conv.weight.is_contiguous() == (trial is plain) for block in model.conv_seq)
            model.conv_seq[0].conv.register_forward_pre_hook(partial(_note, seen := []))
            with trial.around():
                trial.run(1)
            assert seen[0] == (trial is plain), "of the activations"
            assert isinstance(trial.training, Loader) == (trial is ours)
        keys = [set(trial.step.model.state_dict()) for trial in (plain, ours)]
        assert keys[0] == keys[1]
    assert plain.training.loader is None, "its workers have ended"


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_torch_s_optimizer_makes_the_same_steps(optimizer: str) -> None:
    words = [f"step.optimizer={optimizer}", "step.average=0.9", "step.clip=0.05", "step.weight_decay=0.1", "model.dropout=0"]
    cfg = config.load(ablation.CONFIG, None, [*SMALL, *words])
    found = []
    for on in ({"direct I/O"}, {"direct I/O", "fused optimizer"}):
        with ablation.trial(cfg, MESH, frozenset(on)) as trial, trial.around():
            trial.numerics()
            first = [p.detach().clone() for p in trial.step.model.parameters()]
            trial.run(2)
            names = dict(trial.step.model.named_parameters())
            found.append(({n: p.detach().clone() for n, p in names.items()}, dict(trial.step.optimizer.averages())))
            assert not torch.equal(first[0], names["conv_seq.0.conv.weight"])
    for theirs, ours in zip(*found):
        for name in ours:
            torch.testing.assert_close(theirs[name], ours[name], rtol=1e-3, atol=2e-5)


def test_what_cannot_be_had_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "fast_bf16", lambda device: False)
    monkeypatch.setattr(ablation.shutil, "which", lambda name: None)
    cfg = config.load(ablation.CONFIG, None, [*SMALL, "step.optimizer=lamb", "model.size=128", "data.batch=1000000"])
    why = {switch.name: switch.why_not or "" for switch in ablation.switches(cfg, MESH)}
    assert "full speed" in why["precision"] and "compiler" in why["compile"] and "/dev/shm" in why["direct I/O"]
    assert "lamb" in why["fused optimizer"] and not why["kernels"]
    asked = config.load(ablation.CONFIG, None, [*SMALL, "step.precision=bf16"])
    assert {s.name: s.why_not for s in ablation.switches(asked, MESH)}["precision"] is None, "who asks for it gets it"
