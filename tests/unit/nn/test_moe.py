"""Routers, experts and their layer, against published routings and plain formulas."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpcai.errors import ConfigError
from hpcai.kernels import triton_support
from hpcai.kernels.activations import reference_swiglu
from hpcai.kernels.grouped_mm import grouped_linear
from hpcai.nn.matmul import convert_to_float8
from hpcai.nn.moe import Experts, MoE, Router, clipped_swiglu, sinkhorn, update_biases
from hpcai.plan.step_trace import traced_job
from hpcai.settings import StepConfig
from hpcai.train.auto_settings import enable_float8
from tests.ranks.test_expert import C, E, build_layer
from tests.ranks.test_tensor import OpRecorder
from tests.reference_data import load_tensors

N = 23


def identity_router(experts: int, top_k: int, **settings: Any) -> Router:
    """Return a router whose logits are its inputs."""
    router = Router(experts, experts, top_k, **settings).double()
    nn.init.eye_(router.weight)
    return router


def plain_experts(experts: Experts, x: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of all experts of each token.   x [N, C], weights [N, E] -> [N, C]"""

    def linear(x: Tensor, name: str) -> Tensor:
        y = torch.einsum("nec,eic->nei", x, getattr(experts, name))
        return y + getattr(experts, f"{name}_bias") if experts.has_bias else y

    gate, up = (linear(x[:, None].expand(-1, E, -1), name) for name in ("gate_proj", "up_proj"))
    hidden = clipped_swiglu(gate, up) if experts.has_bias else reference_swiglu(gate, up)
    return torch.einsum("ne,nec->nc", weights, linear(hidden, "down_proj"))


@pytest.mark.parametrize(("family", "normalize"), [("mixtral", True), ("qwen2moe", False)])
def test_routing_equals_the_published_one(family: str, normalize: bool) -> None:
    data = {name.split(".")[1]: x for name, x in load_tensors("llm/moe_routing").items() if name.startswith(family)}
    weights, experts = identity_router(data["logits"].shape[1], 2, normalize=normalize)(data["logits"])
    assert torch.equal(experts, data["experts"])
    torch.testing.assert_close(weights, data["weights"], rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["deepseek", "gpt-oss", "collapsed"])
@pytest.mark.parametrize("capacity", [None, 0.7, 3.0])
def test_a_layer_equals_a_plain_formula(capacity: float | None, kind: str) -> None:
    """Without the losses, which act in training only. Collapsed: two experts for all tokens, and none for the others."""
    layer, x = build_layer(kind).double().eval(), torch.randn(1, N, C, dtype=torch.float64, requires_grad=True)
    layer.capacity_factor, layer.shared_expert, layer.shared_expert_gate = capacity, None, None
    y, stats, (weights, chosen) = layer(x), layer.gate.stats, layer.gate(x[0])
    place = F.one_hot(chosen.flatten(), E).cumsum(0).gather(1, chosen.view(-1, 1)).view_as(chosen)
    kept = place <= (N if capacity is None else math.ceil(N * 2 / E * capacity))
    expected = plain_experts(layer.experts, x[0], torch.zeros(N, E).double().scatter(1, chosen, weights * kept))
    torch.testing.assert_close(y[0], expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(z.sin().sum(), [x, *layer.parameters()], retain_graph=True) for z in (y[0], expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-11)
    assert stats["dropped"].item() == pytest.approx(1 - kept.double().mean().item())
    assert stats["load"].tolist() == chosen.flatten().bincount(minlength=E).tolist()
    assert kind != "collapsed" or stats["load"].tolist() == [N, N, 0, 0, 0, 0]


@pytest.mark.parametrize("capacity", [None, 1.25])
def test_products_of_a_gpu_equal_the_loop_and_read_nothing(capacity: float | None) -> None:
    layer, x = build_layer("gpt-oss").bfloat16(), torch.randn(2, N, C, dtype=torch.bfloat16)
    layer.capacity_factor = capacity

    def outputs_and_gradients() -> list[Tensor]:
        y = layer(x)
        return [y, *torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y))]

    by_loop = outputs_and_gradients()
    with patch.object(triton_support, "on_cpu", lambda _: False), OpRecorder():  # which refuses reads of the device
        by_group = outputs_and_gradients()
    for actual, expected in zip(by_group, by_loop):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0.03 * expected.abs().max().item())


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_balances_the_training_only_and_has_no_gradient(k: int) -> None:
    logits = (torch.randn(2048, 8, generator=torch.Generator().manual_seed(0)).double() + torch.arange(8) / 2).requires_grad_()
    load = (logits + sinkhorn(logits)).softmax(-1).sum(0)
    assert (load * 8 / 2048 - 1).abs().max() < 0.05
    assert sinkhorn(1e4 * logits).isfinite().all()
    router = identity_router(8, k, score="sinkhorn", normalize=False)
    weights, experts = router(logits)
    expected = (logits.sigmoid() if k == 1 else logits.softmax(-1)).gather(1, experts)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), logits) for value in (weights, expected)))
    plain = logits.topk(k)[1]
    assert router.stats["load"].max() < 1.2 * 2048 * k / 8 < plain.flatten().bincount().max() / 1.5
    assert torch.equal(router.eval()(logits)[1], plain)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "softmax_after_topk"])
def test_balance_and_z_loss_act_in_the_backward_pass_as_a_term_for_each_token(score: Any) -> None:
    logits = torch.randn(N, E, dtype=torch.float64, requires_grad=True)
    plain, router = (identity_router(E, 2, score=score, **losses) for losses in ({}, {"balance_loss": 0.3, "z_loss": 0.02}))
    probabilities = logits.sigmoid() / logits.sigmoid().sum(1, keepdim=True) if score == "sigmoid" else logits.softmax(1)
    load = plain(logits)[1].flatten().bincount(minlength=E).double() / (2 * N)
    penalty = 0.3 * E * (load * probabilities.mean(0)).sum() + 0.02 * logits.logsumexp(1).square().mean()
    terms = plain(logits)[0].sin().sum() + N * penalty, router(logits)[0].sin().sum()
    expected, actual = (torch.autograd.grad(term, logits)[0] for term in terms)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(router.stats["entropy"], torch.special.entr(probabilities).sum(1).mean().detach())


def test_a_bias_moves_once_per_optimizer_step_by_the_load_of_all_micro_batches() -> None:
    layer, load = build_layer("deepseek"), torch.zeros(E, dtype=torch.int64)
    for part in torch.randn(3, 2, N, C):
        checkpoint(layer, part, use_reentrant=False).sum().backward()  # a recomputed forward pass does not count
        load += layer.gate.stats["load"]
    assert torch.equal(layer.gate.counts, load)
    assert layer.gate.state_dict().keys() == {"weight", "e_score_correction_bias"}
    update_biases([layer.gate])
    assert torch.equal(layer.gate.e_score_correction_bias, 0.05 * (load.double().mean() - load).sign().float())
    layer.eval()(part).sum().backward()
    assert not layer.gate.counts.any(), "an evaluation does not count"


@pytest.mark.parametrize(("settings", "message"), [
    ({"groups": 4}, "2 of 6 experts, in 1 of 4 groups"), ({"score": "sinkhorn", "balance_loss": 0.1}, "balances by itself"),
    ({"bias_update_rate": 0.1}, "no correction"), ({"groups": 6, "top_groups": 6}, "of two experts or more"),
])  # fmt: skip
def test_a_router_refuses_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Router(C, E, 2, **settings)


@pytest.mark.skipif(triton_support.MISSING is not None, reason=f"kernels cannot be compiled: {triton_support.MISSING}")
@pytest.mark.parametrize(("capacity", "dtype"), [(None, torch.float32), (1.25, torch.float16)])  # torch multiplies bfloat16
def test_a_step_of_a_gpu_reads_no_value_and_a_plan_counts_its_products(capacity: float | None, dtype: torch.dtype) -> None:
    with traced_job(1) as tracer, tracer.fake_tensors(), tracer.record() as record:
        layer = build_layer("gpt-oss")
        layer.capacity_factor = capacity
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            y = layer(torch.randn(2, N, C, requires_grad=True))
        y.sum().backward()
    rows = 2 * N * 2 if capacity is None else E * math.ceil(2 * N * 2 / E * capacity)
    assert [event.flops for event in record.events if event.name == "_grouped_mm"] == [2 * rows * C * 16] * 9
    assert [event.name for event in record.events].count("_combine") == 2, "of outputs, and of gradients of tokens"


def test_products_of_groups_have_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(size, generator=draw).double().requires_grad_() for size in ((7, 3), (4, 5, 3), (4, 2, 3)))
    ends = torch.tensor([3, 3, 4, 7], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda x, *weights: grouped_linear(x, ends, weights), (x, *weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_in_fp8_equals_a_linear_layer_in_fp8(dtype: torch.dtype) -> None:
    linear, x = nn.Linear(32, 48, bias=False), torch.randn(20, 32).to(dtype).requires_grad_()
    convert_to_float8(linear, "linear")
    results = [linear(x), grouped_linear(x, torch.tensor([20], dtype=torch.int32), [linear.weight[None]], float8=True)[0]]
    gradients = [torch.autograd.grad(y, (x, linear.weight), x.detach()[:, :1].expand_as(y)) for y in results]
    for actual, expected in zip(*[(y, *grads) for y, grads in zip(results, gradients)]):
        torch.testing.assert_close(actual, expected, rtol=1e-5 if actual.dtype == torch.float32 else 2.0**-7, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_fp8_is_close_to_one_without(dtype: torch.dtype) -> None:
    """FP8 is enabled by ``step.matmul``; empty experts have gradients of zero."""
    layer = MoE(Router(64, 4, 2, bias=True), Experts(64, 32, 4, bias=True))
    x = torch.randn(1, 40, 64, dtype=dtype, requires_grad=True)
    layer.gate.bias.data[0] = -99.0
    layer.float8 = True  # type: ignore[assignment]
    results = []
    for matmul in ("precision", "fp8"):
        messages = enable_float8(layer, StepConfig(matmul=matmul), torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = layer(x)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *layer.experts.parameters()], x.detach().cos().to(y.dtype))])
    assert messages[0].startswith("step.matmul: 0 linear layers and 1 mixtures of experts use FP8; cpu emulates its rounding")
    assert not torch.equal(results[0][0], results[1][0])
    for base, fp8 in zip(*results):
        assert fp8.dtype == base.dtype and (fp8 - base).norm() < 0.12 * base.norm()
    assert not results[1][2][0].any()


def test_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cfg, gpu = build_layer("mixtral"), StepConfig(matmul="fp8"), torch.device("cuda")
    layer.float8 = True  # type: ignore[assignment]
    layer.shared_expert = layer.shared_expert_gate = None
    with pytest.raises(ConfigError, match=r"experts.gate_proj has a weight of \[16, 8\] on this process: expected multiples of 16"):
        enable_float8(layer, cfg, torch.device("cpu"))
    monkeypatch.setattr("hpcai.kernels.float8.is_supported", lambda device: True)
    monkeypatch.setattr(triton_support, "MISSING", "there is no gcc")
    with pytest.raises(ConfigError, match="but experts needs kernels: there is no gcc"):
        enable_float8(layer, cfg, gpu)
