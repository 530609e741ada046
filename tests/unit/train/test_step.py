"""Optimizer step: means over micro-batches are those of the global batch, NaN reaches no weights, and no step reads the device."""

from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist
from hpcai.dist.mesh import Mesh
from hpcai.errors import ConfigError, DataError, DivergedError
from hpcai.models.cosmoflow import Batch
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress
from hpcai.train.metrics import MetricSums, Value
from hpcai.train.step import Step, split
from tests.cpu_graph import NoHostRead
from tests.ranks.launch import on_ranks


def build_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(model: nn.Module, batch: torch.Tensor) -> dict:
    out = model(batch[:, :3])
    return {"loss": (out[:, 0] - batch[:, 3]).square().mean(), "worst": (out.sum(), len(batch))}


def make_batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def test_gradients_of_samples_may_be_clipped_separately() -> None:
    """Algorithm of the supplement of AlphaFold 2: gradients of samples are clipped, then averaged."""
    cfg = StepConfig(precision="fp64", clip=0.05, clip_per="sample", accumulate=8, optimizer="sgd", momentum=0.0, lr=1.0)
    step, data = Step(build_network(), loss, cfg, dist.single_process()), make_batch().double()
    before = [p.detach().clone() for p in step.model.parameters()]
    expected = [torch.zeros_like(p) for p in before]
    norms = []
    for row in data:
        grads = torch.autograd.grad(loss(step.model, row[None])["loss"], list(step.model.parameters()))
        norms.append(torch.cat([g.flatten() for g in grads]).norm().item())
        for total, g in zip(expected, grads):
            total += g * min(1, 0.05 / (norms[-1] + 1e-6)) / 8
    assert min(norms) < 0.05 < max(norms), "some are clipped and some are not"
    values = step(data)
    assert values["loss"].item() == pytest.approx(loss(build_network().double(), data)["loss"].item())
    for after, start, change in zip(step.model.parameters(), before, expected):
        torch.testing.assert_close(start - after, change, rtol=1e-9, atol=1e-14)


def test_clipping_per_sample_requires_micro_batches_of_one_sample() -> None:
    step = Step(build_network(), loss, StepConfig(clip=0.1, clip_per="sample", accumulate=2), dist.single_process())
    with pytest.raises(ConfigError, match=r"a micro-batch has 4; set step\.accumulate to the samples of a replica, 8"):
        step(make_batch())


def test_bf16_keeps_fp32_weights_and_differs_a_little() -> None:
    steps = {p: Step(build_network(), loss, StepConfig(precision=p), dist.single_process()) for p in ("fp32", "bf16")}
    losses = {p: step(make_batch())["loss"].item() for p, step in steps.items()}
    assert losses["bf16"] != losses["fp32"] and losses["bf16"] == pytest.approx(losses["fp32"], rel=2e-2)
    assert all(p.dtype == torch.float32 for p in steps["bf16"].model.parameters())


@pytest.mark.parametrize("cfg", [StepConfig(), StepConfig(optimizer="sgd", clip=1.0, accumulate=2, ema_decay=0.9)])
def test_nothing_is_read_from_the_device_inside_a_step(cfg: StepConfig) -> None:
    step, sums = Step(build_network(), loss, cfg, dist.single_process()), MetricSums()
    step(make_batch())
    with NoHostRead():
        for seed in range(3):
            sums.add(step(make_batch(seed), 1e-3 * seed), 8)


@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_nan_never_reaches_the_weights_and_is_reported_with_its_step_and_samples(where: str, optimizer: str) -> None:
    def bad(model: nn.Module, part: torch.Tensor) -> dict:
        values = loss(model, part)
        if part[0, 0] == 7:
            zero = next(model.parameters()).sum() * 0
            values["loss"] = values["loss"] + (torch.log(zero) if where == "loss" else torch.sqrt(zero))
        return values

    step = Step(build_network(), bad, StepConfig(optimizer=optimizer, weight_decay=0.1), dist.single_process())
    step(make_batch(0))
    step.check()
    good = [p.detach().clone() for p in step.model.parameters()]
    poisoned = make_batch(1)
    poisoned[0, 0] = 7
    for part in (poisoned, make_batch(2), poisoned):
        step(part)
    for p, q in zip(step.model.parameters(), good):
        assert torch.equal(p, q)
    message = {"loss": r"the loss is not finite on rank 0 \(sample of step 1\)", "gradient": "the gradient is not finite"}[where]
    with pytest.raises(DivergedError, match=f"step 2: {message}.*weights stay those of step 1"):
        step.check(lambda index: f"sample of step {index}")


def test_an_infinite_loss_with_a_finite_gradient_is_reported_as_such() -> None:
    step = Step(build_network(), lambda model, x: {"loss": loss(model, x)["loss"] + torch.inf}, StepConfig(), dist.single_process())
    before = [p.detach().clone() for p in step.model.parameters()]
    step(make_batch(0))
    assert not all(map(torch.equal, step.model.parameters(), before))
    with pytest.raises(DivergedError, match="the loss is not finite on rank 0; its gradient is finite and changed the weights"):
        step.check()


def test_weights_and_statistics_are_averaged_and_restored() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    step = Step(model, loss, StepConfig(ema_decay=0.5, optimizer="sgd", lr=0.1), dist.single_process())

    def state() -> dict[str, torch.Tensor]:
        return {name: t.clone() for name, t in model.state_dict().items() if t.is_floating_point()}

    mean = state()
    for seed in range(3):
        step(make_batch(seed))
        mean = {name: 0.5 * mean[name] + 0.5 * t for name, t in state().items()}
    live = state()
    with step.average.applied():
        torch.testing.assert_close(state(), mean)
    torch.testing.assert_close(state(), live, rtol=0, atol=0)
    snapshot = {name: t for name, t in step.snapshot().items() if name in mean}
    torch.testing.assert_close(snapshot, mean)


def test_split_keeps_the_kind_of_batch_and_refuses_uneven_parts() -> None:
    parts = split(Batch(torch.arange(4), torch.arange(8).reshape(4, 2)), 2)
    assert isinstance(parts[1], Batch) and parts[1].counts.tolist() == [2, 3]
    assert split({"a": torch.arange(2)}, 2)[1]["a"].tolist() == [1]
    with pytest.raises(DataError, match="a batch of 3 samples per rank does not split into 2 micro-batches"):
        split(torch.arange(3), 2)
    with pytest.raises(DataError, match="a batch holds a str"):
        split(("x",), 2)


def test_a_loss_without_loss_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"returned \['mae'\]; expected a scalar tensor named 'loss' among them, or"):
        Step(build_network(), lambda m, b: {"mae": m(b[:, :3]).mean()}, StepConfig(), dist.single_process())(make_batch())


LENGTHS = (1, 3, 2, 1)  # counted tokens of four samples


def token_loss(model: nn.Module, part: torch.Tensor) -> dict[str, Value]:
    """Return sum and count over the counted tokens of samples [B, T, 4]. The last channel is their number in the sample."""
    mask = (torch.arange(part.shape[1]) < part[:, :1, 3]).to(part.dtype)
    error = model(part[..., :3]).square().sum(-1)
    return {"loss": ((error * mask).sum(), mask.sum())}


def two_mean_loss(model: nn.Module, part: torch.Tensor, counts: torch.Tensor | None = None) -> dict[str, Value]:
    """Return the mean over tokens plus twice a mean over samples."""
    sample_means, (tokens, samples) = model(part[..., :3]).mean((1, 2)).sum(), count_terms(part) if counts is None else counts
    return {"loss": token_loss(model, part)["loss"][0] / tokens + 2 * sample_means / samples}


def count_terms(part: torch.Tensor) -> torch.Tensor:
    return torch.stack((part[:, 0, 3].sum(), torch.tensor(float(len(part)), dtype=part.dtype)))


def make_uneven_batch() -> torch.Tensor:
    part = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    part[..., 3] = torch.tensor(LENGTHS, dtype=torch.float64)[:, None]
    return part


def run_step(mesh: Mesh, two_means: bool, accumulate: int, clip: float | None) -> tuple[list[float], float]:
    """Return weights and loss of a step in which all replicas have the same number of samples."""
    torch.manual_seed(0)
    cfg = StepConfig(precision="fp64", optimizer="sgd", lr=0.1, momentum=0.0, weight_decay=0.0, clip=clip, accumulate=accumulate)
    step = Step(nn.Linear(3, 2), two_mean_loss if two_means else token_loss, cfg, mesh, counts=count_terms if two_means else None)
    axis = mesh["replicate"]
    values = step(make_uneven_batch().chunk(axis.size)[axis.rank])
    sums = MetricSums()
    sums.add(values, 1)
    return [w for p in step.model.parameters() for w in p.detach().flatten().tolist()], sums.reduce(axis, mesh.device)["loss"]


@pytest.mark.parametrize("two_means, clip", [(False, None), (False, 0.05), (True, None), (True, 0.05)])
def test_a_mean_over_tokens_is_that_of_the_global_batch(two_means: bool, clip: float | None) -> None:
    torch.manual_seed(0)
    model, part = nn.Linear(3, 2).double(), make_uneven_batch()
    value: Any = (two_mean_loss if two_means else token_loss)(model, part)["loss"]
    value = value if two_means else value[0] / value[1]
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)
    assert clip is None or norm > clip
    torch.optim.SGD(model.parameters(), 0.1).step()
    expected = [w for p in model.parameters() for w in p.flatten().tolist()]
    for accumulate in (1, 2, 4):
        for ranks in (1, 2) if accumulate < 4 else (1,):
            for weights, loss in on_ranks({"replicate": ranks}, run_step, two_means, accumulate, clip):
                assert weights == pytest.approx(expected, abs=1e-12) and loss == pytest.approx(value.item(), abs=1e-12)


def test_a_batch_without_counted_tokens_changes_no_weights() -> None:
    cfg = StepConfig(precision="fp64", optimizer="sgd", weight_decay=0.0)
    step = Step(nn.Linear(3, 2).double(), token_loss, cfg, dist.single_process())
    before = [p.detach().clone() for p in step.model.parameters()]
    step(make_uneven_batch() * torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    step.check()
    assert all(torch.equal(p, b) for p, b in zip(step.model.parameters(), before))


def measure_drift(precision: str, **overrides) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    """Return the change of a layer's weights over 200 small steps: of the model's parameters and of the float32 masters."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    start = model.weight.detach().clone()
    cfg = StepConfig(precision=precision, optimizer="adamw", lr=1e-5, **overrides)
    target = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))

    def distance(model: nn.Module, part: torch.Tensor) -> dict:
        return {"loss": (model(part).float() - target).square().mean()}

    step = Step(model, distance, cfg, dist.single_process())
    part = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    for _ in range(200):
        step(part, 1e-5)
    masters = step.optimizer.weights()["weight"]
    assert isinstance(masters, torch.Tensor)
    return model.weight.detach().float() - start, masters - start


def test_bf16_weights_with_masters_follow_fp32() -> None:
    expected = measure_drift("fp32")[1]
    assert expected.abs().mean() > 1e-3
    for overrides in ({}, {"moments": "bf16"}):
        live, masters = measure_drift("bf16-params", **overrides)
        assert (masters - expected).norm() < 0.2 * expected.norm() and (masters - expected).abs().max() < 1e-3
        assert (live - expected).abs().max() < 2e-3, "the model's weights are the rounded masters"


def test_bf16_params_leaves_running_statistics_and_their_layers_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    step = Step(
        model, lambda m, b: {"loss": m(b).float().square().mean()},
        StepConfig(precision="bf16-params", accumulate=2), dist.single_process(),
    )
    for seed in range(3):
        step(make_batch(seed))
    step.check()
    assert [p.dtype for p in model.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    assert all(w.dtype == torch.float32 for w in step.optimizer.weights().values())  # type: ignore[union-attr]
    gradients = [row.gradient() for row in step.reducer.flat_parameters]
    assert all(g.dtype == torch.float32 for g in gradients), "gradients of micro-batches are accumulated in float32"


@pytest.mark.parametrize("kwargs", [{"precision": "fp32"}, {"precision": "bf16-params", "moments": "bf16"}, {"optimizer": "lamb"}])
def test_a_checkpoint_goes_from_one_precision_to_another(tmp_path, kwargs: dict) -> None:  # type: ignore[no-untyped-def]
    step = Step(build_network(), loss, StepConfig(ema_decay=0.9, precision="bf16-params"), dist.single_process())
    for seed in range(3):
        step(make_batch(seed))
    Checkpoints(tmp_path, CheckpointConfig(), step.mesh).save(step, Progress(step=3))
    other = Step(build_network(), loss, StepConfig(ema_decay=0.9, **kwargs), dist.single_process())
    Checkpoints(tmp_path, CheckpointConfig(), other.mesh).resume(other)
    for kind in ("weights", "averages"):
        for name, value in getattr(step.optimizer, kind)().items():
            assert torch.equal(getattr(other.optimizer, kind)()[name], value)
    for name, live in other.model.named_parameters():
        assert torch.equal(live, other.optimizer.weights()[name].to(live.dtype)), "the model computes with the loaded weights"
    assert other.optimizer.count == 3
    for name, value in step.optimizer.state().items():
        torch.testing.assert_close(other.optimizer.state()[name].float(), value.float(), rtol=1e-2, atol=1e-12)


def test_auto_precision_depends_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles, expected in ((False, "fp32"), (True, "bf16")):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda t=tiles: t)
        step = Step(build_network(), loss, StepConfig(precision="auto"), dist.single_process(torch.device("cpu")))
        assert step.cfg.precision == expected and step.messages[0].startswith(f"step.precision: {expected}, since cpu ")


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
def test_parameters_with_replaced_storage_are_trained(precision: str) -> None:
    steps = [Step(build_network(), loss, StepConfig(precision=precision, ema_decay=0.9), dist.single_process()) for _ in range(2)]
    for seed in range(3):
        for step in steps:
            step(make_batch(seed))
        for parameter in steps[1].model.parameters():
            parameter.data = parameter.data.clone()
    for a, b in zip(*(step.model.parameters() for step in steps)):
        assert torch.equal(a, b)
