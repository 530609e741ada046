"""Benchmarks of the apps: all implementations are the same function, and switches replace the plain one."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import apps.deepcam.benchmarks as deepcam
from apps.openfold.benchmarks import Benchmark as Openfold
from hpcai import config, dist
from hpcai.cli import ablate, benchmarks
from hpcai.cli.bench import app as bench
from hpcai.cli.subprocesses import fork_processes
from hpcai.data.collate import tree_map
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.models.dimenet import loss
from hpcai.models.openfold import attention, evoformer, layers, objective
from hpcai.nn import BatchNorm, Conv2d, layernorm
from hpcai.parallel.axial import AllToAll
from hpcai.parallel.batchnorm import AllReduce
from hpcai.train.evaluation import InlineEvaluation, TrainingRanksEvaluation
from hpcai.train.step import Step
from tests.ranks.launch import on_ranks

SMALL = {
    "cosmoflow": ["model.size=32", "model.filters=4", "data.batch=1", "data.workers=1"],
    "deepcam": ["model.divide=8", "model.middle=1", "height=64", "width=96", "data.batch=1", "data.workers=1"],
    "diffusion": [
        "model.unet.channels=[8, 16]", "model.unet.attention=[cross, none]", "model.unet.heads=[1, 2]", "model.unet.blocks=1",
        "model.unet.groups=4", "model.unet.tokens=12", "side=8", "text=3", "data.batch=2", "data.workers=1",
    ],
    "llm": ["model.width=64", "model.heads=4", "model.inner=96", "model.layers=2", "model.vocabulary=96", "model.positions=64"],
    "unet3d": ["model.filters=[4, 8]", "model.window=[16, 16, 16]", "data.workers=1"],
    "opencatalyst": ["model.hidden=8", "model.output=8", "model.interaction=4", "model.blocks=1", "model.cutoff=3.6"],
    "openfold": [
        "model.blocks=1", "model.msa=16", "model.pair=8", "model.single=16", "model.structure.passes=2", "features.crop=12",
        "features.clusters=4", "features.extra=6",
    ],
}  # fmt: skip
# Tolerance of the gradient. DeepCAM's batch norms amplify rounding: torch's own is up to 1e-3 away from that in float64, and some
# processors differ from others by 1.2e-2.
TOLERANCE = {
    "cosmoflow": 1e-5, "diffusion": 1e-5, "llm": 1e-4, "deepcam": 3e-2, "unet3d": 1e-2, "opencatalyst": 1e-3, "openfold": 1e-3,
}  # fmt: skip
LOOP = {"fused optimizer", "garbage collection", "async evaluation"}
MESH = dist.single_process(torch.device("cpu"))
PLACES: set[tuple[Any, str]] = {
    (attention, "gated_attention"), (attention, "channels_first"), (evoformer, "gate"), (evoformer, "channels_first"),
    (evoformer, "outer_product"), (evoformer, "glu_halves"), (evoformer, "triangle_multiplication"), (layernorm, "layer_norm"),
    (evoformer, "map_chunks"), (layers, "map_chunks"), (objective, "chunk_size"),
}  # fmt: skip
OURS = {place: getattr(*place) for place in PLACES}  # of the network and its loss, that have a plain form
NONE: frozenset[str] = frozenset()

pytestmark = pytest.mark.usefixtures("one_thread")


def made(app: str, *words: str) -> tuple[benchmarks.Workload, Any]:
    subject = benchmarks.find_workload(app)
    return subject, config.load(subject.settings, None, [*SMALL[app], *words])


@pytest.mark.parametrize("app", SMALL)
def test_all_implementations_are_one_function(app: str) -> None:
    measured = bench.AppBenchmark(app, benchmarks.find_workload(app), SMALL[app])
    losses = {name: float(measured.training_step(name, SMALL[app])()) for name in measured.implementations(SMALL[app])}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["ours"]), rel=1e-4) and len(losses) >= 2


@pytest.mark.parametrize("app", SMALL)
def test_switches_change_no_numbers_and_the_loop_runs_with_all_of_them(app: str) -> None:
    subject, cfg = made(app)
    own = subject.available_switches(subject.complete_settings(cfg), MESH)
    found = []
    for on in (NONE, *([frozenset({name}) for name in own] if len(own) > 1 else []), own | LOOP):
        with subject.training(cfg, MESH, on) as training:
            found.append(training.loss_and_gradient())
            if on in (NONE, own | LOOP):
                with training.context():
                    training.run(1)
                assert training.step.count == 2, "one that is not timed and one"
    (value, gradient), *others = found
    assert gradient.isfinite().all() and gradient.norm() > 1e-3
    for own_value, flat in others:
        assert own_value == pytest.approx(value, rel=1e-5) and (flat - gradient).norm() < TOLERANCE[app] * gradient.norm()
    assert max(float((flat - gradient).norm()) for _, flat in others) > 0, "another way to add up"


def test_the_table_of_an_app(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["kernels", "fused optimizer"]
    words = ["cosmoflow", *SMALL["cosmoflow"], "--repeats", "1", "--steps", "1", "--json"]
    assert ablate.main([*words, "--only", *names]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [row["name"] for row in found["cumulative"]] == ["plain", *names] and len(found["switches"]) == 9
    assert all(row["error"] is None for row in found["cumulative"] + found["left_out"])


def _note(seen: list[bool], module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    if inputs[0][0, 0].numel() > 1:  # a pooled mean is both
        seen.append(inputs[0].is_contiguous())


@pytest.mark.parametrize("app", ["cosmoflow", "deepcam", "diffusion", "unet3d"])
def test_no_switch_is_plain_and_all_switches_are_ours(app: str) -> None:
    subject, cfg = made(app)
    own = subject.available_switches(subject.complete_settings(cfg), MESH)
    convolutions = (nn.Conv2d, nn.Conv3d)
    keys, kinds = [], []
    runs = (NONE, benchmarks.TorchOptimizerStep, InlineEvaluation, None), (own | LOOP, Step, TrainingRanksEvaluation, 1000)
    for on, step, scores, every in runs:
        with subject.training(cfg, MESH, on) as training:
            model: Any = training.step.model
            assert type(training.step) is step and type(training.scores) is scores and training.collector.every == every
            layers = [m for m in model.modules() if isinstance(m, convolutions) and m.kernel_size[0] > 1 and m.weight.shape[1] > 1]
            assert all(layer.weight.is_contiguous() == (on == NONE) for layer in layers)
            seen: list[bool] = []
            for layer in layers:
                layer.register_forward_pre_hook(partial(_note, seen))
            waited, results = [], training.scores.results
            training.scores.results = lambda wait=False: waited.append(wait) or results(wait)  # noqa: B023
            with training.context():
                training.run(1)
            assert True in waited, "an evaluation ends within its run"
            assert all(seen) if on == NONE else not any(seen), "memory of the activations"
            keys.append(list(model.state_dict()))
            kinds.append({type(m) for m in model.modules()})
    assert keys[0] == keys[1] and kinds[0] != kinds[1]


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_torch_optimizer_step_is_equivalent(optimizer: str) -> None:
    words = [f"step.optimizer={optimizer}", "step.ema_decay=0.9", "step.clip=0.05", "step.weight_decay=0.1", "model.dropout=0"]
    subject, cfg = made("cosmoflow", *words)
    found = []
    for on in (NONE, {"fused optimizer"}):
        with subject.training(cfg, MESH, frozenset(on)) as training, training.context():
            training.loss_and_gradient()
            first = [p.detach().clone() for p in training.step.model.parameters()]
            training.run(2)
            names = dict(training.step.model.named_parameters())
            found.append(({n: p.detach().clone() for n, p in names.items()}, dict(training.step.optimizer.averages())))
            assert not torch.equal(first[0], names["conv_seq.0.conv.weight"])
    for theirs, ours in zip(*found):
        for name in ours:
            torch.testing.assert_close(theirs[name], ours[name], rtol=1e-3, atol=2e-5)


def test_unavailable_switches_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "has_fast_bf16", lambda device: False)
    monkeypatch.setattr(benchmarks.shutil, "which", lambda name: None)
    subject, cfg = made("cosmoflow", "step.optimizer=lamb", "model.size=128")
    why = {switch.name: switch.why_not or "" for switch in subject.all_switches(cfg, MESH)}
    assert "full speed" in why["precision"] and "compiler" in why["compile"]
    assert "lamb" in why["fused optimizer"] and not why["kernels"]
    assert "no GPU" in why["capture"] and "single replica" in why["sharded optimizer"]
    subject, asked = made("cosmoflow", "step.precision=bf16")
    reasons = {s.name: s.why_not for s in subject.all_switches(asked, MESH)}
    assert reasons["precision"] is None, "asking for it gets it"


def test_unavailable_switches_of_deepcam(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> dict[str, str]:
        subject, cfg = made("deepcam", *words)
        return {switch.name: switch.why_not or "" for switch in subject.all_switches(cfg, MESH)}

    why = shown("batchnorm_group=2", "step.optimizer=lamb")
    assert "minutes" in why["compile"] and "one rank" in why["group batch norm"]
    assert "lamb" in why["fused optimizer"] and not why["kernels"]
    why = shown("step.compile=whole")
    assert not why["compile"] and not why["fused optimizer"]
    with pytest.raises(ConfigError, match="height is 100, expected a whole number >= 16 and a multiple of 16"):
        shown("height=100")
    with pytest.raises(ConfigError, match="'group-batch-norm' cannot be switched on here: one rank"):
        ablate.main(["deepcam", *SMALL["deepcam"], "--only", "group-batch-norm"])
    with pytest.raises(ConfigError, match="depth: no such key"):
        ablate.main(["deepcam", "depth=64"])
    assert ablate.main(["deepcam", *SMALL["deepcam"], "--repeats", "1", "--steps", "1", "--only", "kernels"]) == 0
    table = capsys.readouterr().out
    assert "+ kernels" in table and "- kernels" in table and "group batch norm: batchnorm_group=1" in table and "NOT AVAIL" in table


FIELDS = [
    "model.unet={inputs: 2, outputs: 2, field: 1, tokens: null, channels: [8, 16], blocks: 1, attention: [none, none]}",
    "model.unet={middle: self, heads: [1, 2], groups: 4, patch: 2, periodic: [true, true]}", "model.objective.prediction_type=flow",
    "model.sampler.method=heun", "side=16", "data.batch=2", "data.workers=1",
]  # fmt: skip
VOLUMES = [*FIELDS, "model.unet={dims: 3, periodic: [true, false, true]}", "side=8"]


def of_float64(subject: benchmarks.Workload, batch: Any, model: Any, on: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loss of training, and afterwards of evaluation, and gradients by name. In float64 there is no rounding to hide behind."""
    with subject.context(on):
        value = subject.loss(model, batch)["loss"]
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.eval()  # with the running statistics
        with torch.no_grad():
            return {"loss": value.detach(), "later": subject.loss(model, batch)["loss"]}, gradients


IN_FLOAT64 = [("deepcam", ["model.skip=after"]), ("deepcam", ["model.skip=before"]), ("unet3d", []),
              *(("diffusion", words) for words in ([], FIELDS, VOLUMES))]  # fmt: skip


@pytest.mark.parametrize(("app", "more"), IN_FLOAT64)
def test_arrangements_are_one_function_in_float64(app: str, more: list[str]) -> None:
    subject = benchmarks.find_workload(app)
    own = [] if "side=8" in more or "side=16" in more else SMALL[app]
    cfg: Any = subject.complete_settings(config.load(subject.settings, None, [*own, "data.batch=2", *more]))
    batch: Any = subject.random_batch(cfg, range(2), MESH.device)
    if app == "deepcam":
        assert 0 < (batch.mask == 1).float().mean() < 0.05 and batch.mask.max() == 2
    own, found = subject.available_switches(cfg, MESH), []
    for on in (NONE, *(frozenset({name}) for name in own), own):
        torch.manual_seed(0)
        model = subject.build(cfg, MESH, on).double()
        found.append((*of_float64(subject, batch, model, on), model.state_dict()))
    for values, gradients, state in found[1:]:
        torch.testing.assert_close(values, found[0][0], rtol=1e-12, atol=0)
        for ours, theirs in ((gradients, found[0][1]), (state, found[0][2])):
            assert list(ours) == list(theirs)
            for name in ours:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-8, atol=1e-10, check_stride=False)


@pytest.mark.parametrize("words", [SMALL["diffusion"], FIELDS])
def test_the_network_of_diffusers_is_the_same(words: list[str]) -> None:
    """But for times, which it embeds in float32."""
    pytest.importorskip("diffusers")
    subject = benchmarks.find_workload("diffusion")
    cfg: Any = subject.complete_settings(config.load(subject.settings, None, words))
    batch: Any = subject.random_batch(cfg, range(2), MESH.device)
    torch.manual_seed(0)
    own = subject.available_switches(cfg, MESH)
    ours: Any = subject.build(cfg, MESH, own).double()
    theirs: Any = subject.peers["diffusers"].build(cfg, batch).model.double()
    theirs.network.net.load_state_dict(ours.network.state_dict())
    (wanted, right), (value, gradients) = (of_float64(subject, batch, model, own) for model in (ours, theirs))
    torch.testing.assert_close(value, wanted, rtol=1e-6, atol=0)
    for name, gradient in right.items():
        assert gradient.norm() > 0 or name.endswith("to_k.bias")
        inner = name.replace("network.", "network.net.", 1)
        torch.testing.assert_close(gradients[inner], gradient, rtol=1e-2, atol=1e-6, check_stride=False)


def _strided() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 48, 72).contiguous(memory_format=torch.channels_last).requires_grad_()
    plain = deepcam._ReferenceConv(8, 16, 1, 2, bias=False).to(memory_format=torch.channels_last)
    y = plain(x)
    y.square().sum().backward()
    z = nn.functional.conv2d(x.detach().contiguous(), plain.weight, stride=2)
    torch.testing.assert_close(y, z, check_stride=False)


def test_a_torch_convolution_of_strided_maps_does_not_crash(tmp_path: Path) -> None:
    """oneDNN's gradient does, at this size (torch 2.13)."""
    with fork_processes(_strided, tmp_path / "said") as forks:
        codes, said = forks.wait()
    assert codes == [0], said


def test_fields_are_supported_and_other_networks_are_refused() -> None:
    subject = benchmarks.find_workload("diffusion")
    cfg: Any = config.load(subject.settings, None, FIELDS)
    with subject.training(cfg, MESH, subject.available_switches(cfg, MESH) | LOOP) as training, training.context():
        training.run(1)
        assert training.step.count == 2
    for case in subject.default_overrides(False):
        cfg = subject.complete_settings(config.load(subject.settings, None, case))
        assert len(subject.random_sample(cfg, np.random.default_rng(0))) == 2
    with pytest.raises(ConfigError, match="model.unet is null; this benchmark has no other network"):
        config.load(subject.settings, None, ["model.unet=null", "model.dit={}"])


@pytest.mark.parametrize("angles", ["detached", "conservative"])
def test_the_network_of_pytorch_geometric_is_the_same(angles: str) -> None:
    """Its zeros of Bessel functions have float32's precision, and it has no bias in lin_up."""
    pytest.importorskip("torch_geometric")
    subject, cfg = made("opencatalyst", f"model.angles={angles}", "data.batch=2", "model.spherical=3", "model.radial=3")
    batch: Any = tree_map(subject.random_batch(cfg, range(2), MESH.device), lambda x: x.double() if x.is_floating_point() else x)
    torch.manual_seed(0)
    ours: Any = subject.build(cfg, MESH, frozenset({"no triplets"})).double()
    for output in ours.output_blocks:
        torch.nn.init.zeros_(output.lin_up.bias)
    form = subject.peers["pyg"].build(cfg, batch)
    theirs: Any = form.model.double()
    theirs.net.load_state_dict({name: v for name, v in ours.state_dict().items() if not name.endswith("lin_up.bias")})
    wanted, found = ours(batch.graph), theirs(batch.graph)
    assert torch.allclose(found.energy, wanted.energy, rtol=0, atol=1e-5)
    assert torch.allclose(found.forces, wanted.forces, rtol=0, atol=1e-5) and found.forces.abs().max() > 0.05
    assert form.loss(theirs, batch)["loss"].item() == pytest.approx(loss(ours, batch)["loss"].item(), rel=1e-5)


# ---- copies that share statistics


class Unlike(deepcam.Benchmark):
    """Each copy sees its own maps where numbers are compared."""

    def duplicate_replicas(self, cfg: Any) -> int:
        return 1


def _group(mesh: Mesh) -> list[tuple[int, float, np.ndarray]]:
    torch.set_num_threads(1)
    subject, cfg = made("deepcam", "data.batch=4", "batchnorm_group=2")
    assert {s.name: s.why_not for s in subject.switches(cfg, mesh)}["group batch norm"] is None
    found = []
    arrangements = ({"kernels"}, {"kernels", "group batch norm"}, {"group batch norm"}, {"kernels", "group batch norm"})
    for each, on in zip((subject, subject, subject, Unlike()), arrangements):
        with each.training(cfg, mesh, frozenset(on)) as training:
            totals = sum(isinstance(module, AllReduce) for module in training.step.model.modules())
            value, gradient = training.loss_and_gradient()
            found.append((totals, value, gradient.numpy()))
    return found


def test_replicas_share_statistics_if_enabled() -> None:
    for own, group, without_kernels, unlike in on_ranks({"replicate": 2}, _group):
        assert own[0] == without_kernels[0] == 0 and group[0] > 20
        for other in (group, without_kernels):
            assert other[1] == pytest.approx(own[1], rel=1e-5)
            assert np.linalg.norm(other[2] - own[2]) < TOLERANCE["deepcam"] * np.linalg.norm(own[2]), "copies see the same maps"
        assert abs(unlike[1] - own[1]) > 1e-4, "other maps, other statistics"
    model = deepcam.Benchmark().build(made("deepcam")[1], MESH, frozenset({"kernels"}))
    assert {type(module) for module in model.modules()} >= {BatchNorm, Conv2d}


# ---- chains that are cut


def _cut(mesh: Mesh) -> list[tuple[int, int, float, np.ndarray]]:
    torch.set_num_threads(1)
    subject, cfg = made("openfold", "data.batch=2", f"mesh.axial={mesh['axial'].size}")
    whole = subject.available_switches(cfg, mesh)
    assert "cut chains" in whole
    found = []
    for on in (NONE, frozenset({"cut chains"}), whole - {"cut chains"}, whole | LOOP):
        with subject.training(cfg, mesh, on) as training:
            moves = sum(isinstance(module, AllToAll) for module in training.step.model.modules())
            value, gradient = training.loss_and_gradient()
            if on in (NONE, whole | LOOP):
                with training.context():
                    training.run(1)
            found.append((moves, training.mesh["replicate"].size, value, gradient.numpy()))
    return found


def test_sharded_and_separate_chains_give_the_same_step() -> None:
    for plain, cut, ours, both in on_ranks({"axial": 2}, _cut):
        assert plain[0] == ours[0] == 0 < cut[0] == both[0]
        assert plain[1] == ours[1] == 2 and cut[1] == both[1] == 1, "copies, of the same batch"
        for _, _, value, gradient in (cut, ours, both):
            assert value == pytest.approx(plain[2], rel=1e-5)
            assert np.linalg.norm(gradient - plain[3]) < 1e-3 * np.linalg.norm(plain[3])


def test_unavailable_switches_of_openfold() -> None:
    subject, cfg = made("openfold")
    why = {switch.name: switch.why_not for switch in subject.all_switches(cfg, MESH)}
    assert "those of torch" in str(why["layer norms"]) and "step.compile=blocks" in str(why["compile"]) and "cut chains" not in why
    assert {"attention", "gates", "triangles", "outer product", "parts"} <= subject.available_switches(cfg, MESH)
    cut = subject.switches(made("openfold", "data.batch=3")[1], Mesh({"axial": 2}, 2))[-1]
    assert (cut.name, cut.why_not) == ("cut chains", "data.batch is 3, no multiple of 2 ranks")


def test_each_switch_of_openfold_changes_the_functions_called() -> None:
    subject, seen = Openfold(), {}
    for name in ("attention", "layer norms", "gates", "triangles", "outer product", "parts"):
        with subject.context(frozenset({name})):
            seen[name] = {place for place in PLACES if getattr(*place).__module__ != "apps.openfold.benchmarks"
                          and not getattr(*place).__name__.startswith("reference")}  # fmt: skip
    assert all(seen.values()) and set().union(*seen.values()) == PLACES
    assert sum(map(len, seen.values())) == len(PLACES), "each place belongs to one switch"
    with subject.context(frozenset(seen)):
        assert all(getattr(*place) is function for place, function in OURS.items())


def test_each_switch_of_openfold_can_be_left_out_under_bfloat16() -> None:
    subject, cfg = made("openfold", "step.precision=bf16")
    own, found = subject.available_switches(cfg, MESH), {}
    for name in ("", *own):
        with subject.training(cfg, MESH, own - {name} | {"precision"}) as training:
            found[name] = training.loss_and_gradient()
    for value, gradient in found.values():
        assert value == pytest.approx(found[""][0], rel=1e-2) and (gradient - found[""][1]).norm() < 0.3 * found[""][1].norm()
