"""The output layer of a language model: its chunked cross entropy equals that of all logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from hpcai.kernels import chunking
from hpcai.nn import lm_head
from hpcai.nn.lm_head import IGNORE_INDEX, LMHead
from hpcai.plan.step_trace import traced_job


def unchunked(head: LMHead, hidden: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(hidden, head.weight).to(torch.promote_types(hidden.dtype, torch.float32)).flatten(0, -2)
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    z_loss = head.z_loss * torch.where(targets.flatten() != IGNORE_INDEX, logits.logsumexp(-1) ** 2, 0)
    return (F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none") + z_loss).view(targets.shape)


def make_inputs(dtype: torch.dtype = torch.float64, **options: float) -> tuple[LMHead, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, targets = torch.randn(3, 7, 8, dtype=dtype, requires_grad=True), torch.randint(0, 11, (3, 7))
    targets[0, :2] = IGNORE_INDEX
    return LMHead(8, 11, **options).to(dtype), hidden, targets, torch.randn(3, 7, dtype=torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("extra", [{}, {"softcap": 0.7, "z_loss": 0.1}], ids=["plain", "softcap and z-loss"])
@pytest.mark.parametrize("is_sum", [True, False])
@pytest.mark.parametrize("size", [1, 4, 256])
def test_chunks_give_the_unchunked_loss_and_gradients(size: int, is_sum: bool, extra: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "_CPU", 1)
    monkeypatch.setattr(lm_head, "_CPU_TOKENS", size)
    head, hidden, targets, grad_output = make_inputs(**extra)
    if is_sum:
        grad_output = torch.tensor(-0.3, dtype=torch.float64).expand(3, 7)
    expected = unchunked(head, hidden, targets)
    value = head(hidden, targets)
    transformed, vjp = torch.func.vjp(lambda *x: functional_call(head, {"weight": x[1]}, (x[0], targets)), hidden, head.weight)
    gradients = torch.autograd.grad(expected, (hidden, head.weight), grad_output)
    for result in (transformed, *vjp(grad_output)), (value, *torch.autograd.grad(value, (hidden, head.weight), grad_output)):
        torch.testing.assert_close(result, (expected, *gradients), rtol=0, atol=1e-14)
    assert not value[0, :2].any() and not result[1][0, :2].any()


def test_a_soft_cap_bounds_logits_and_an_evaluation_reports_no_z_loss() -> None:
    head, hidden, targets, _ = make_inputs(softcap=0.7, z_loss=0.1)
    logits = head.eval()(hidden)
    torch.testing.assert_close(logits, 0.7 * torch.tanh(hidden @ head.weight.T / 0.7))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(head(hidden, targets).flatten(), expected)


def test_a_step_computes_logits_once_if_the_loss_is_a_sum() -> None:
    head, hidden, targets, grad_output = make_inputs()
    for weights, products in ((None, 3), (grad_output, 5)):
        with FlopCounterMode(display=False) as counter:
            losses = head(hidden, targets)
            (losses.sum() / 19 if weights is None else (losses * weights).sum()).backward()
        assert counter.get_total_flops() == products * 2 * 21 * 8 * 11


def test_passes_at_once_hold_one_gradient_of_the_weight_and_a_graph_can_be_used_twice() -> None:
    head, hidden, targets, _ = make_inputs()
    expected = torch.autograd.grad(head(hidden, targets).sum(), (hidden, head.weight))
    losses = [head(hidden, targets).sum() for _ in range(3)]  # micro-batches in a pipeline
    assert [loss.grad_fn.next_functions[0][0].gradients is None for loss in losses] == [False, True, True]
    for loss in losses * 2:
        result = torch.autograd.grad(loss, (hidden, head.weight), retain_graph=True)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-14)
    assert not lm_head._pending


def test_under_autocast_products_are_bf16_and_sums_are_float32() -> None:
    head, hidden, targets, grad_output = make_inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = head(hidden, targets)
        expected = unchunked(head, hidden, targets)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    grad_result, grad_expected = (torch.autograd.grad(value, head.weight, grad_output)[0] for value in (result, expected))
    assert grad_result.dtype == torch.float32
    torch.testing.assert_close(grad_result, grad_expected, rtol=0.05, atol=0.05)


def test_a_target_outside_the_vocabulary_gives_nan() -> None:
    head, hidden, targets, _ = make_inputs()
    targets[1, 1], targets[2, 2] = 11, -5
    results = head(hidden, targets)
    assert results[1, 1].isnan() and results[2, 2].isnan() and results.isnan().sum() == 2


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the bytes of all tensors."""
    with traced_job(1, kernels=False) as tracer, tracer.fake_tensors():
        before = tracer.bytes
        with tracer.record() as record:
            run()
        return record.peak - before


@pytest.mark.parametrize("bytes", [lm_head._CPU, chunking._GPU])
def test_with_a_vocabulary_of_128k_peak_memory_is_below_a_fifth_of_all_logits(bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of forward and backward pass, with gradients, is less than a fifth of one tensor of all logits in float32."""
    monkeypatch.setattr(lm_head, "_CPU", bytes)  # chunks of a CPU, and of a GPU
    vocab_size, tokens, channels = 128_256, 4096, 64

    def step() -> None:
        hidden, head = torch.empty(tokens, channels, requires_grad=True), LMHead(channels, vocab_size)
        head(hidden, torch.zeros(tokens, dtype=torch.int64)).sum().backward()

    assert peak_bytes(step) < 0.2 * 4 * vocab_size * tokens


def test_a_frozen_weight_has_no_gradient_and_no_memory_for_one() -> None:
    head, hidden, targets, grad_output = make_inputs()
    expected = torch.autograd.grad(head(hidden, targets), hidden, grad_output)[0]
    head.requires_grad_(False)
    with traced_job(1) as tracer, tracer.fake_tensors():
        wide, rows = LMHead(64, 4096).requires_grad_(False), torch.empty(8, 64, requires_grad=True)
        with tracer.record() as record:
            before = tracer.bytes
            wide(rows, torch.zeros(8, dtype=torch.int64)).sum().backward()
    assert record.peak - before < wide.weight.nbytes // 2
    assert torch.equal(torch.autograd.grad(head(hidden, targets), hidden, grad_output)[0], expected)
