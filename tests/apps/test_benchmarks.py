"""Benchmarks of the apps: all implementations are the same function, and switches replace parts of the reference."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import apps.deepcam.benchmarks as deepcam
from apps.openfold.benchmarks import Benchmark as Openfold
from hpcai import dist
from hpcai.cli import benchmarks
from hpcai.cli.bench import app as bench
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
from tests.apps.app_runs import run_on_ranks
from tests.ranks.launch import on_ranks
from tests.reference_data import load_json

SMALL = load_json("small_benchmarks")
# Relative tolerance of the gradient. DeepCAM's batch norms amplify rounding: torch's gradient differs from that in float64 by up to
# 1e-3, and processors differ by up to 1.2e-2.
TOLERANCE = {
    "bert": 1e-4, "cosmoflow": 1e-5, "diffusion": 1e-5, "dlrm": 1e-5, "llm": 1e-4, "resnet": 3e-2, "retinanet": 1e-3, "rgat": 1e-4,
    "deepcam": 3e-2, "unet3d": 1e-2, "opencatalyst": 1e-3, "openfold": 1e-3,
}  # fmt: skip
LOOP = {"fused optimizer", "garbage collection", "async evaluation"}
MESH = dist.single_process(torch.device("cpu"))
TARGETS: set[tuple[Any, str]] = {
    (attention, "gated_attention"), (attention, "channels_first"), (evoformer, "gate"), (evoformer, "channels_first"),
    (evoformer, "outer_product"), (evoformer, "glu_halves"), (evoformer, "triangle_multiplication"), (layernorm, "layer_norm"),
    (evoformer, "map_chunks"), (layers, "map_chunks"), (objective, "chunk_size"),
}  # fmt: skip
ORIGINALS = {target: getattr(*target) for target in TARGETS}  # functions of the network and its loss with a reference form
FIELDS = [
    "model.unet={inputs: 2, outputs: 2, field: 1, tokens: null, channels: [8, 16], blocks: 1, attention: [none, none]}",
    "model.unet={middle: self, heads: [1, 2], groups: 4, patch: 2, periodic: [true, true]}", "model.objective.prediction_type=flow",
    "model.sampler.method=heun", "side=16", "data.batch=2", "data.workers=1",
]  # fmt: skip
NONE: frozenset[str] = frozenset()


def load_workload(app: str, *overrides: str) -> tuple[benchmarks.Workload, Any]:
    workload = benchmarks.find_workload(app)
    return workload, workload.load([*SMALL[app], *overrides])


@pytest.mark.parametrize(("app", "overrides"), SMALL.items())
def test_all_implementations_are_one_function(app: str, overrides: list[str]) -> None:
    measured = bench.AppBenchmark(app, benchmarks.find_workload(app), overrides)
    losses = {name: float(measured.training_step(name, overrides)()) for name in measured.implementations(overrides)}
    assert losses == pytest.approx(dict.fromkeys(losses, losses["ours"]), rel=1e-4) and len(losses) >= 2


@pytest.mark.parametrize("app", SMALL)
def test_switches_do_not_change_the_gradient_and_the_loop_runs_with_all_of_them(app: str) -> None:
    workload, cfg = load_workload(app)
    available = workload.available_switches(workload.complete_settings(cfg), MESH)
    results = []
    for on in (NONE, *([frozenset({name}) for name in available] if len(available) > 1 else []), available | LOOP):
        with workload.training(cfg, MESH, on) as training:
            results.append(training.loss_and_gradient())
            if on in (NONE, available | LOOP):
                with training.context():
                    training.run(1)
                assert training.step.count == 2, "one untimed and one timed step"
    (value, gradient), *others = results
    assert gradient.isfinite().all() and gradient.norm() > 1e-3
    for actual, actual_gradient in others:
        assert actual == pytest.approx(value, rel=1e-5) and (actual_gradient - gradient).norm() < TOLERANCE[app] * gradient.norm()
    differences = [float((actual_gradient - gradient).norm()) for _, actual_gradient in others]
    assert max(differences) > 0 or app == "dlrm", "another order of summation, but where the switch is one of the update"


def record_layout(contiguous: list[bool], module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    if inputs[0][0, 0].numel() > 1:  # a pooled mean has both layouts
        contiguous.append(inputs[0].is_contiguous())


@pytest.mark.parametrize("app", ["cosmoflow", "deepcam", "diffusion", "resnet", "retinanet", "unet3d"])
def test_layers_and_loop_follow_the_switches(app: str) -> None:
    workload, cfg = load_workload(app)
    available = workload.available_switches(workload.complete_settings(cfg), MESH)
    convolutions = (nn.Conv2d, nn.Conv3d)
    keys, kinds = [], []
    runs = (NONE, benchmarks.TorchOptimizerStep, InlineEvaluation, None), (available | LOOP, Step, TrainingRanksEvaluation, 1000)
    for on, step, scores, collect_every in runs:
        with workload.training(cfg, MESH, on) as training:
            model: Any = training.step.model
            assert type(training.step) is step and type(training.scores) is scores and training.collector.every == collect_every
            layers = [m for m in model.modules() if isinstance(m, convolutions) and m.kernel_size[0] > 1 and m.weight.shape[1] > 1]
            assert all(layer.weight.is_contiguous() == (on == NONE) for layer in layers)
            contiguous: list[bool] = []
            for layer in layers:
                layer.register_forward_pre_hook(partial(record_layout, contiguous))
            waited, results = [], training.scores.results
            training.scores.results = lambda wait=False: waited.append(wait) or results(wait)  # noqa: B023
            with training.context():
                training.run(1)
            assert True in waited, "an evaluation ends within its run"
            assert all(contiguous) if on == NONE else not any(contiguous), "memory layout of activations"
            keys.append(list(model.state_dict()))
            kinds.append({type(m) for m in model.modules()})
    assert keys[0] == keys[1] and kinds[0] != kinds[1]


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_torch_optimizer_step_is_equivalent(optimizer: str) -> None:
    overrides = [f"step.optimizer={optimizer}", "step.ema_decay=0.9", "step.clip=0.05", "step.weight_decay=0.1", "model.dropout=0"]
    workload, cfg = load_workload("cosmoflow", *overrides)
    states = []
    for on in (NONE, {"fused optimizer"}):
        with workload.training(cfg, MESH, frozenset(on)) as training, training.context():
            training.loss_and_gradient()
            first = [p.detach().clone() for p in training.step.model.parameters()]
            training.run(2)
            names = dict(training.step.model.named_parameters())
            states.append(({n: p.detach().clone() for n, p in names.items()}, dict(training.step.optimizer.averages())))
            assert not torch.equal(first[0], names["conv_seq.0.conv.weight"])
    for expected, actual in zip(*states):
        for name in actual:
            torch.testing.assert_close(expected[name], actual[name], rtol=1e-3, atol=2e-5)


def test_unavailable_switches_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "has_fast_bf16", lambda device: False)
    monkeypatch.setattr(benchmarks.shutil, "which", lambda name: None)
    workload, cfg = load_workload("cosmoflow", "step.optimizer=lamb", "model.size=128")
    reasons = {switch.name: switch.why_not or "" for switch in workload.all_switches(cfg, MESH)}
    assert "full speed" in reasons["precision"] and "compiler" in reasons["compile"]
    assert "lamb" in reasons["fused optimizer"] and not reasons["kernels"]
    assert "no GPU" in reasons["capture"] and "single replica" in reasons["sharded optimizer"]
    workload, bf16_cfg = load_workload("cosmoflow", "step.precision=bf16")
    bf16_reasons = {s.name: s.why_not for s in workload.all_switches(bf16_cfg, MESH)}
    assert bf16_reasons["precision"] is None, "an explicit setting is available"


def test_unavailable_switches_of_deepcam() -> None:
    def reasons_of(*overrides: str) -> dict[str, str]:
        workload, cfg = load_workload("deepcam", *overrides)
        return {switch.name: switch.why_not or "" for switch in workload.all_switches(cfg, MESH)}

    reasons = reasons_of("batchnorm_group=2", "step.optimizer=lamb")
    assert "minutes" in reasons["compile"] and "one rank" in reasons["group batch norm"]
    assert "lamb" in reasons["fused optimizer"] and not reasons["kernels"]
    reasons = reasons_of("step.compile=whole")
    assert not reasons["compile"] and not reasons["fused optimizer"]
    with pytest.raises(ConfigError, match="height is 100, expected a whole number >= 16 and a multiple of 16"):
        reasons_of("height=100")


VOLUMES = [*FIELDS, "model.unet={dims: 3, periodic: [true, false, true]}", "side=8"]


def evaluate(workload: benchmarks.Workload, batch: Any, model: Any, on: frozenset[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the losses in training and then in evaluation mode, and gradients by name. In float64 rounding hides no error."""
    with workload.context(on):
        value = workload.loss(model, batch)["loss"]
        value.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.eval()  # with the running statistics
        with torch.no_grad():
            return {"loss": value.detach(), "evaluation": workload.loss(model, batch)["loss"]}, gradients


IN_FLOAT64 = [("deepcam", ["model.skip=after"]), ("deepcam", ["model.skip=before"]), ("unet3d", []),
              *(("diffusion", overrides) for overrides in ([], FIELDS, VOLUMES))]  # fmt: skip


@pytest.mark.parametrize(("app", "overrides"), IN_FLOAT64)
def test_all_switches_compute_one_function_in_float64(app: str, overrides: list[str]) -> None:
    workload = benchmarks.find_workload(app)
    own = [] if "side=8" in overrides or "side=16" in overrides else SMALL[app]
    cfg: Any = workload.complete_settings(workload.load([*own, "data.batch=2", *overrides]))
    batch: Any = workload.random_batch(cfg, range(2), MESH.device)
    if app == "deepcam":
        assert 0 < (batch.mask == 1).float().mean() < 0.05 and batch.mask.max() == 2
    own, results = workload.available_switches(cfg, MESH), []
    for on in (NONE, *(frozenset({name}) for name in own), own):
        torch.manual_seed(0)
        model = workload.build(cfg, MESH, on).double()
        results.append((*evaluate(workload, batch, model, on), model.state_dict()))
    for values, gradients, state in results[1:]:
        torch.testing.assert_close(values, results[0][0], rtol=1e-12, atol=0)
        for actual, expected in ((gradients, results[0][1]), (state, results[0][2])):
            assert list(actual) == list(expected)
            for name in actual:
                torch.testing.assert_close(actual[name], expected[name], rtol=1e-8, atol=1e-10, check_stride=False)


@pytest.mark.parametrize("overrides", [SMALL["diffusion"], FIELDS])
def test_the_network_of_diffusers_is_equal(overrides: list[str]) -> None:
    """Up to float32: diffusers embeds times in this precision."""
    pytest.importorskip("diffusers")
    workload = benchmarks.find_workload("diffusion")
    cfg: Any = workload.complete_settings(workload.load(overrides))
    batch: Any = workload.random_batch(cfg, range(2), MESH.device)
    torch.manual_seed(0)
    available = workload.available_switches(cfg, MESH)
    native: Any = workload.build(cfg, MESH, available).double()
    peer: Any = workload.peers["diffusers"].build(cfg, batch).model.double()
    peer.network.net.load_state_dict(native.network.state_dict())
    (expected, expected_gradients), (actual, gradients) = (evaluate(workload, batch, model, available) for model in (native, peer))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    for name, gradient in expected_gradients.items():
        assert gradient.norm() > 0 or name.endswith("to_k.bias")
        inner = name.replace("network.", "network.net.", 1)
        torch.testing.assert_close(gradients[inner], gradient, rtol=1e-2, atol=1e-6, check_stride=False)


def run_strided_conv() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 48, 72).contiguous(memory_format=torch.channels_last).requires_grad_()
    conv = deepcam._ReferenceConv(8, 16, 1, 2, bias=False).to(memory_format=torch.channels_last)
    y = conv(x)
    y.square().sum().backward()
    z = nn.functional.conv2d(x.detach().contiguous(), conv.weight, stride=2)
    torch.testing.assert_close(y, z, check_stride=False)


def test_a_torch_convolution_of_strided_maps_does_not_crash(tmp_path: Path) -> None:
    """oneDNN's backward pass crashes at this size (torch 2.13)."""
    codes, output = run_on_ranks(run_strided_conv, tmp_path / "output", 1)
    assert codes == [0], output


def test_samples_of_default_networks_are_random_and_other_networks_are_refused() -> None:
    workload = benchmarks.find_workload("diffusion")
    for case in workload.default_overrides(False):
        cfg = workload.complete_settings(workload.load(case))
        assert len(workload.random_sample(cfg, np.random.default_rng(0))) == 2
    with pytest.raises(ConfigError, match="model.unet is null; this benchmark has no other network"):
        workload.load(["model.unet=null", "model.dit={}"])


@pytest.mark.parametrize("angles", ["detached", "conservative"])
def test_the_network_of_pytorch_geometric_is_equal(angles: str) -> None:
    """PyTorch Geometric has zeros of Bessel functions in float32, and no bias in lin_up."""
    pytest.importorskip("torch_geometric")
    workload, cfg = load_workload("opencatalyst", f"model.angles={angles}", "data.batch=2", "model.spherical=3", "model.radial=3")
    batch: Any = tree_map(workload.random_batch(cfg, range(2), MESH.device), lambda x: x.double() if x.is_floating_point() else x)
    torch.manual_seed(0)
    native: Any = workload.build(cfg, MESH, frozenset({"no triplets"})).double()
    for output in native.output_blocks:
        torch.nn.init.zeros_(output.lin_up.bias)
    benchmark = workload.peers["pyg"].build(cfg, batch)
    peer: Any = benchmark.model.double()
    peer.net.load_state_dict({name: v for name, v in native.state_dict().items() if not name.endswith("lin_up.bias")})
    expected, actual = native(batch.graph), peer(batch.graph)
    assert torch.allclose(actual.energy, expected.energy, rtol=0, atol=1e-5)
    assert torch.allclose(actual.forces, expected.forces, rtol=0, atol=1e-5) and actual.forces.abs().max() > 0.05
    assert benchmark.loss(peer, batch)["loss"].item() == pytest.approx(loss(native, batch)["loss"].item(), rel=1e-5)


# ---- replicas that share statistics


class DistinctReplicas(deepcam.Benchmark):
    """Replicas have different maps when losses are compared."""

    def duplicate_replicas(self, cfg: Any) -> int:
        return 1


def compare_batch_norm_groups(mesh: Mesh) -> list[tuple[int, float, np.ndarray]]:
    workload, cfg = load_workload("deepcam", "data.batch=4", "batchnorm_group=2")
    assert {s.name: s.why_not for s in workload.switches(cfg, mesh)}["group batch norm"] is None
    results = []
    arrangements = ({"kernels"}, {"kernels", "group batch norm"}, {"group batch norm"}, {"kernels", "group batch norm"})
    for benchmark, on in zip((workload, workload, workload, DistinctReplicas()), arrangements):
        with benchmark.training(cfg, mesh, frozenset(on)) as training:
            all_reduces = sum(isinstance(module, AllReduce) for module in training.step.model.modules())
            value, gradient = training.loss_and_gradient()
            results.append((all_reduces, value, gradient.numpy()))
    return results


def test_replicas_share_statistics_if_enabled() -> None:
    for own, group, without_kernels, distinct in on_ranks({"replicate": 2}, compare_batch_norm_groups):
        assert own[0] == without_kernels[0] == 0 and group[0] > 20
        for other in (group, without_kernels):
            assert other[1] == pytest.approx(own[1], rel=1e-5)
            assert np.linalg.norm(other[2] - own[2]) < TOLERANCE["deepcam"] * np.linalg.norm(own[2]), "replicas have the same maps"
        assert abs(distinct[1] - own[1]) > 1e-4, "other maps, other statistics"
    model = deepcam.Benchmark().build(load_workload("deepcam")[1], MESH, frozenset({"kernels"}))
    assert {type(module) for module in model.modules()} >= {BatchNorm, Conv2d}


# ---- sharded chains


def compare_sharding(mesh: Mesh) -> list[tuple[int, int, float, np.ndarray]]:
    workload, cfg = load_workload("openfold", "data.batch=2", f"mesh.axial={mesh['axial'].size}")
    available = workload.available_switches(cfg, mesh)
    assert "cut chains" in available
    results = []
    for on in (NONE, frozenset({"cut chains"}), available - {"cut chains"}, available | LOOP):
        with workload.training(cfg, mesh, on) as training:
            all_to_alls = sum(isinstance(module, AllToAll) for module in training.step.model.modules())
            value, gradient = training.loss_and_gradient()
            if on in (NONE, available | LOOP):
                with training.context():
                    training.run(1)
            results.append((all_to_alls, training.mesh["replicate"].size, value, gradient.numpy()))
    return results


def test_sharded_and_separate_chains_give_the_same_step() -> None:
    for reference, sharded, unsharded, combined in on_ranks({"axial": 2}, compare_sharding):
        assert reference[0] == unsharded[0] == 0 < sharded[0] == combined[0]
        assert reference[1] == unsharded[1] == 2 and sharded[1] == combined[1] == 1, "two replicas, or one that is sharded"
        for _, _, value, gradient in (sharded, unsharded, combined):
            assert value == pytest.approx(reference[2], rel=1e-5)
            assert np.linalg.norm(gradient - reference[3]) < 1e-3 * np.linalg.norm(reference[3])


def test_unavailable_switches_of_openfold() -> None:
    workload, cfg = load_workload("openfold")
    reasons = {each.name: each.why_not for each in workload.all_switches(cfg, MESH)}
    assert "those of torch" in str(reasons["layer norms"]) and "step.compile=blocks" in str(reasons["compile"]) and (
        "cut chains" not in reasons
    )
    assert {"attention", "gates", "triangles", "outer product", "parts"} <= workload.available_switches(cfg, MESH)
    switch = workload.switches(load_workload("openfold", "data.batch=3")[1], Mesh({"axial": 2}, 2))[-1]
    assert (switch.name, switch.why_not) == ("cut chains", "data.batch is 3, no multiple of 2 ranks")


def test_each_switch_of_openfold_changes_the_functions_called() -> None:
    workload, changed = Openfold(), {}
    for name in ("attention", "layer norms", "gates", "triangles", "outer product", "parts"):
        with workload.context(frozenset({name})):
            changed[name] = {target for target in TARGETS if getattr(*target).__module__ != "apps.openfold.benchmarks"
                          and not getattr(*target).__name__.startswith("reference")}  # fmt: skip
    assert all(changed.values()) and set().union(*changed.values()) == TARGETS
    assert sum(map(len, changed.values())) == len(TARGETS), "each function belongs to one switch"
    with workload.context(frozenset(changed)):
        assert all(getattr(*target) is function for target, function in ORIGINALS.items())


def test_each_switch_of_openfold_can_be_left_out_under_bfloat16() -> None:
    workload, cfg = load_workload("openfold", "step.precision=bf16")
    available, results = workload.available_switches(cfg, MESH), {}
    for name in ("", *available):
        with workload.training(cfg, MESH, available - {name} | {"precision"}) as training:
            results[name] = training.loss_and_gradient()
    for value, gradient in results.values():
        assert value == pytest.approx(results[""][0], rel=1e-2) and (gradient - results[""][1]).norm() < 0.3 * results[""][1].norm()
