"""The last layer of a language model: its cross entropy in parts is that of all logits."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.kernels import chunking
from hpcai.nn import lm_head as heads
from hpcai.nn.lm_head import IGNORE_INDEX, LMHead
from hpcai.plan.step_trace import traced_job


def whole(head: LMHead, hidden: Tensor, targets: Tensor) -> Tensor:
    wide = head(hidden).to(torch.promote_types(hidden.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view(targets.shape)


def given(dtype: torch.dtype = torch.float64) -> tuple[LMHead, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, targets = torch.randn(3, 7, 8, dtype=dtype, requires_grad=True), torch.randint(0, 11, (3, 7))
    targets[0, :2] = IGNORE_INDEX
    return LMHead(8, 11).to(dtype), hidden, targets, torch.randn(3, 7, dtype=torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("bytes", [1, 200, 1 << 20])
def test_parts_are_the_whole(bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "_CPU", bytes)  # a token at a time, four, all
    head, hidden, targets, above = given()
    found: list[tuple[Tensor, ...]] = []
    for way in (whole, LMHead.forward):
        value = way(head, hidden, targets)
        found.append((value.detach(), *torch.autograd.grad(value, (hidden, head.weight), above)))
    for own, right in zip(*found):
        torch.testing.assert_close(own, right, rtol=0, atol=1e-14)
    assert not found[1][0][0, :2].any() and not found[1][1][0, :2].any()


def test_under_autocast_products_are_narrow_and_sums_are_not() -> None:
    head, hidden, targets, above = given(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        own = head(hidden, targets)
        right = whole(head, hidden, targets)
    assert own.dtype == torch.float32
    torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5)
    by_own, by_right = (torch.autograd.grad(value, head.weight, above)[0] for value in (own, right))
    assert by_own.dtype == torch.float32
    torch.testing.assert_close(by_own, by_right, rtol=0.05, atol=0.05)


def test_a_target_that_is_no_word_costs_nan() -> None:
    head, hidden, targets, _ = given()
    targets[1, 1], targets[2, 2] = 11, -5
    found = head(hidden, targets)
    assert found[1, 1].isnan() and found[2, 2].isnan() and found.isnan().sum() == 2


def most(run: Callable[[], object]) -> int:
    """Bytes of all tensors at the fullest moment."""
    with traced_job(1, kernels=False) as paper, paper.fake_tensors():
        before = paper._bytes
        with paper.record() as record:
            run()
        return record.peak - before


@pytest.mark.parametrize("bytes", [heads._CPU, chunking._GPU])
def test_at_128k_words_a_fifth_of_the_memory_of_whole_logits_is_enough(bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, with the gradients, at the fullest moment: less than a fifth of one copy of all logits in float32."""
    monkeypatch.setattr(heads, "_CPU", bytes)  # parts of a CPU, and of a GPU
    words, tokens, channels = 128_256, 4096, 64

    def step() -> None:
        hidden, head = torch.empty(tokens, channels, requires_grad=True), LMHead(channels, words)
        head(hidden, torch.zeros(tokens, dtype=torch.int64)).sum().backward()

    assert most(step) < 0.2 * 4 * words * tokens


def test_a_weight_that_is_not_trained_has_no_gradient_nor_memory_for_one() -> None:
    head, hidden, targets, above = given()
    right = torch.autograd.grad(head(hidden, targets), hidden, above)[0]
    head.requires_grad_(False)
    with traced_job(1) as paper, paper.fake_tensors():
        wide, rows = LMHead(64, 4096).requires_grad_(False), torch.empty(8, 64, requires_grad=True)
        with paper.record() as record:
            before = paper._bytes
            wide(rows, torch.zeros(8, dtype=torch.int64)).sum().backward()
    assert record.peak - before < wide.weight.nbytes // 2
    assert torch.equal(torch.autograd.grad(head(hidden, targets), hidden, above)[0], right)
