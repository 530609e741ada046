"""What `hpcai ablate` switches in each app is what it says, and its numbers are those of the plain network."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from apps.cosmoflow import ablation as cosmoflow
from apps.deepcam import ablation as deepcam
from apps.opencatalyst import ablation as opencatalyst
from hpcai import config, dist
from hpcai.cli import ablate
from hpcai.data import Loader
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError
from hpcai.models.deepcam import Batch, DeepCam, loss
from hpcai.models.dimenet import DimeNet
from hpcai.models.dimenet.triplets import WithTriplets
from hpcai.nn import BatchNorm, Conv2d, Conv3d
from hpcai.parallel.batchnorm import Total
from hpcai.train import ablation
from hpcai.train.evaluation import Background, Here
from hpcai.train.step import Step
from hpcai.train.trial import ByTorch
from hpcai.train.trial import trial as trial_of
from tests.ranks.launch import on_ranks

SMALL = {
    "cosmoflow": ["model.size=32", "model.filters=4", "data.batch=1", "data.workers=1"],
    "deepcam": ["model.divide=8", "model.middle=1", "height=64", "width=96", "data.batch=1", "data.workers=1"],
}
# Of the gradient. DeepCAM's batch norms amplify rounding: torch's own is up to 1e-3 away from that in float64.
TOLERANCE = {"cosmoflow": 1e-5, "deepcam": 1e-2}
QUICK = ["kernels", "channels-last", "fused optimizer", "garbage collection", "direct I/O", "async evaluation"]
MESH = dist.alone(torch.device("cpu"))


pytestmark = pytest.mark.usefixtures("one_thread")


def measured(capsys: pytest.CaptureFixture[str], app: str, *words: str) -> dict[str, Any]:
    assert ablate.main([app, *SMALL[app], "--repeats", "1", "--steps", "1", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert all(row["error"] is None for row in found["cumulative"] + found["left_out"])
    return found


def numbers_agree(found: dict[str, Any]) -> None:
    for row in found["cumulative"] + found["left_out"]:
        if "precision" not in row["on"]:
            assert row["loss_difference"] < 1e-5 and row["gradient_difference"] < TOLERANCE[found["ablate"]], row["name"]


@pytest.mark.parametrize("app", SMALL)
def test_what_needs_no_compiler_is_on_the_table(app: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, app, "--only", *QUICK)
    assert [row["name"] for row in found["cumulative"]] == ["plain", *QUICK] and [r["name"] for r in found["left_out"]] == QUICK
    numbers_agree(found)
    assert max(row["gradient_difference"] for row in found["cumulative"]) > 0, "another way to add up"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says why a CPU cannot")
@pytest.mark.parametrize("app", SMALL)
def test_every_switch_that_is_here_and_why_the_others_are_not(app: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = measured(capsys, app, "--directory", str(tmp_path))
    switches = {switch["name"]: switch for switch in found["switches"]}
    assert len(switches) == {"cosmoflow": 10, "deepcam": 11}[app]
    here = [name for name, switch in switches.items() if not switch["why_not"]]
    assert {*QUICK, *(["compile"] if app == "cosmoflow" else [])} <= set(here)
    assert [row["name"] for row in found["left_out"]] == here
    assert "no GPU" in switches["capture"]["why_not"] and "one process" in switches["sharded optimizer"]["why_not"]
    numbers_agree(found)
    assert {path.name for path in tmp_path.iterdir()} == {"ablation.json", "ablation.png"}


def test_opencatalyst_with_and_without_triplets(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.hidden=8", "model.output=8", "model.interaction=4", "model.blocks=1", "model.cutoff=3.6", "data.workers=1"]
    names = ["no triplets", "fused optimizer", "direct I/O", "async evaluation"]
    words = ["opencatalyst", *small, "--repeats", "1", "--steps", "1", "--json", "--only", *names]
    assert ablate.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["cumulative"]] == ["plain", *names]
    for row in found["cumulative"] + found["left_out"]:
        assert row["error"] is None and row["loss_difference"] < 1e-5 and row["gradient_difference"] < 1e-3, row
    assert max(row["gradient_difference"] for row in found["cumulative"]) > 0
    cfg = config.load(opencatalyst.CONFIG, None, small)
    with opencatalyst.trial(cfg, MESH, frozenset()) as plain, opencatalyst.trial(cfg, MESH, frozenset(names)) as ours:
        assert type(plain.step.model) is WithTriplets and type(ours.step.model) is DimeNet
        assert set(plain.step.model.state_dict()) == set(ours.step.model.state_dict())
        assert plain.numerics()[0] > 1, "networks that say something"


def _note(seen: list[bool], module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    if inputs[0][0, 0].numel() > 1:  # a pooled mean is both
        seen.append(inputs[0].is_contiguous())


def test_plain_is_plain_and_all_is_ours_of_cosmoflow() -> None:
    cfg = config.load(cosmoflow.CONFIG, None, [*SMALL["cosmoflow"], "data.turn=true"])
    with cosmoflow.trial(cfg, MESH, frozenset()) as plain, cosmoflow.trial(cfg, MESH, frozenset(QUICK)) as ours:
        what = ((plain, cosmoflow._Whole, ByTorch, Here, None), (ours, Conv3d, Step, Background, 1000))
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
    cfg = config.load(cosmoflow.CONFIG, None, [*SMALL["cosmoflow"], *words])
    found = []
    for on in ({"direct I/O"}, {"direct I/O", "fused optimizer"}):
        with cosmoflow.trial(cfg, MESH, frozenset(on)) as trial, trial.around():
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
    cfg = config.load(cosmoflow.CONFIG, None, [*SMALL["cosmoflow"], "step.optimizer=lamb", "model.size=128", "data.batch=1000000"])
    why = {switch.name: switch.why_not or "" for switch in cosmoflow.switches(cfg, MESH)}
    assert "full speed" in why["precision"] and "compiler" in why["compile"] and "/dev/shm" in why["direct I/O"]
    assert "lamb" in why["fused optimizer"] and not why["kernels"]
    asked = config.load(cosmoflow.CONFIG, None, [*SMALL["cosmoflow"], "step.precision=bf16"])
    assert {s.name: s.why_not for s in cosmoflow.switches(asked, MESH)}["precision"] is None, "who asks for it gets it"


def shown(mesh: Mesh, *words: str) -> dict[str, str | None]:
    cfg = config.load(deepcam.CONFIG, None, [*SMALL["deepcam"], *words])
    return {switch.name: switch.why_not for switch in deepcam.switches(cfg, mesh)}


def test_why_deepcam_cannot_have_some_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    why = shown(MESH, "batchnorm_group=2", "step.optimizer=lamb")
    assert "minutes" in str(why["compile"]) and "one process" in str(why["group batch norm"])
    assert "lamb" in str(why["fused optimizer"]) and not why["kernels"]
    why = shown(MESH, "step.compile=whole")
    assert not why["compile"] and not why["fused optimizer"]
    with pytest.raises(ConfigError, match="height is 100, expected a whole number >= 16 and a multiple of 16"):
        shown(MESH, "height=100")
    with pytest.raises(ConfigError, match="'group-batch-norm' cannot be switched on here: one process"):
        ablate.main(["deepcam", *SMALL["deepcam"], "--only", "group-batch-norm"])
    with pytest.raises(ConfigError, match="depth: no such key"):
        ablate.main(["deepcam", "depth=64"])
    assert ablate.main(["deepcam", *SMALL["deepcam"], "--repeats", "1", "--steps", "1", "--only", "kernels"]) == 0
    table = capsys.readouterr().out
    assert "+ kernels" in table and "- kernels" in table and "group batch norm: batchnorm_group=1" in table and "NOT HERE" in table


def test_each_switch_alone_gives_deepcam_the_numbers_of_plain() -> None:
    cfg = config.load(deepcam.CONFIG, None, [*SMALL["deepcam"], "data.batch=2"])
    found = {}
    for name in ["plain", *QUICK]:
        with deepcam.trial(cfg, MESH, frozenset({name} & set(QUICK))) as trial:
            found[name] = trial.numerics()
    value, gradient = found["plain"]
    assert gradient.isfinite().all() and gradient.norm() > 0.1
    for name in QUICK:
        own, flat = found[name]
        if name in ("kernels", "channels-last"):
            assert own == pytest.approx(value, rel=1e-5) and (flat - gradient).norm() < TOLERANCE["deepcam"] * gradient.norm()
        else:
            assert own == value and torch.equal(flat, gradient), f"{name} has no part in them"


@pytest.mark.parametrize("skip", ["after", "before"])
def test_deepcam_s_arrangements_are_one_function(skip: str) -> None:
    """In float64 there is no rounding to hide behind."""
    cfg = config.load(deepcam.CONFIG, None, [*SMALL["deepcam"], f"model.skip={skip}"])
    columns = zip(*(deepcam._random(cfg, np.random.default_rng(i)) for i in range(2)))
    batch, found = Batch(*(torch.from_numpy(np.stack(column)) for column in columns)), []
    assert 0 < (batch.mask == 1).float().mean() < 0.05 and batch.mask.max() == 2
    for on in ([], ["kernels"], ["channels-last"], ["kernels", "channels-last"]):
        torch.manual_seed(0)
        model = deepcam._build(cfg, MESH, frozenset(on)).double()
        value = loss(model, batch)["loss"]
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.eval()  # with the running statistics
        with torch.no_grad():
            found.append(({"loss": value.detach(), "later": loss(model, batch)["loss"]}, gradients, model.state_dict()))
    for values, gradients, state in found[1:]:
        torch.testing.assert_close(values, found[0][0], rtol=1e-12, atol=0)
        assert list(state) == list(found[0][2]) and list(gradients) == list(found[0][1])
        for ours, theirs in ((gradients, found[0][1]), (state, found[0][2])):
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-8, atol=1e-10, check_stride=False)


def test_plain_is_plain_and_all_is_ours_of_deepcam() -> None:
    cfg = config.load(deepcam.CONFIG, None, SMALL["deepcam"])
    with deepcam.trial(cfg, MESH, frozenset()) as plain, deepcam.trial(cfg, MESH, frozenset(QUICK)) as ours:
        for trial, kinds, step, scores, every in (
            (plain, {deepcam._Contiguous, deepcam._Usual, deepcam._Plain}, ByTorch, Here, None),
            (ours, {DeepCam, BatchNorm, Conv2d}, Step, Background, 1000),
        ):
            model: Any = trial.step.model
            assert type(trial.step) is step and type(trial.scores) is scores and trial.around().every == every
            layers = [m for m in model.modules() if isinstance(m, DeepCam | BatchNorm | Conv2d)]
            assert {type(layer) for layer in layers} == kinds
            seen: list[bool] = []
            for layer in layers:
                layer.register_forward_pre_hook(partial(_note, seen))
            wide = [m.weight for m in layers if isinstance(m, Conv2d) and m.kernel_size != (1, 1) and m.weight.shape[1] > 1]
            assert all(weight.is_contiguous() == (trial is plain) for weight in wide)
            with trial.around():
                trial.run(1)
            assert len(seen) > len(layers), "of the activations; torch.cat of an expanded mean is contiguous, in each of two steps"
            assert all(seen) if trial is plain else seen.count(True) <= 2
            assert isinstance(trial.training, Loader) == (trial is ours)
        keys = [list(trial.step.model.state_dict()) for trial in (plain, ours)]
        assert keys[0] == keys[1]


def test_a_plain_convolution_of_strided_maps_ends_no_process() -> None:
    """oneDNN's gradient does, at this size (torch 2.13)."""
    code = """
import torch
from apps.deepcam.ablation import _Plain
from torch import nn
x = torch.randn(2, 8, 48, 72).contiguous(memory_format=torch.channels_last).requires_grad_()
plain = _Plain(8, 16, 1, 2, bias=False).to(memory_format=torch.channels_last)
y = plain(x)
y.square().sum().backward()
z = nn.functional.conv2d(x.detach().contiguous(), plain.weight, stride=2)
torch.testing.assert_close(y, z, check_stride=False)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode == 0, ended.stderr


def _group(mesh: Mesh) -> list[tuple[int, float, np.ndarray]]:
    torch.set_num_threads(1)
    cfg = config.load(deepcam.CONFIG, None, [*SMALL["deepcam"], "data.batch=4", "batchnorm_group=2"])
    assert {s.name: s.why_not for s in deepcam.switches(cfg, mesh)}["group batch norm"] is None
    found = []
    for on in ({"kernels"}, {"kernels", "group batch norm"}, {"group batch norm"}):
        with deepcam.trial(cfg, mesh, frozenset(on)) as trial:
            totals = sum(isinstance(module, Total) for module in trial.step.model.modules())
            value, gradient = trial.numerics()
            found.append((totals, value, gradient.numpy()))
    with trial_of(deepcam._APP, cfg, mesh, frozenset({"kernels", "group batch norm"})) as trial:
        value, gradient = trial.numerics()
    return [*found, (0, value, gradient.numpy())]


def test_copies_share_statistics_where_that_is_on() -> None:
    for own, group, without_kernels, unlike in on_ranks({"replicate": 2}, _group):
        assert own[0] == without_kernels[0] == 0 and group[0] > 20
        for other in (group, without_kernels):
            assert other[1] == pytest.approx(own[1], rel=1e-5)
            assert np.linalg.norm(other[2] - own[2]) < TOLERANCE["deepcam"] * np.linalg.norm(own[2]), "copies see the same maps"
        assert abs(unlike[1] - own[1]) > 1e-4, "other maps, other statistics"
