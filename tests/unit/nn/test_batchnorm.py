"""Batch norm with its sum and rectifier is torch's batch norm, then a sum, then a rectifier."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.kernels import batchnorm
from hpcai.nn import BatchNorm

SHAPES = [((2, 5, 6, 4), nn.BatchNorm2d), ((3, 7), nn.BatchNorm1d), ((2, 3, 4, 4, 6), nn.BatchNorm3d), ((4, 3, 5), nn.BatchNorm1d)]
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Seam(nn.Module):
    """Adds nothing, as over an axis of one process."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value


def pair(kind: Any, channels: int, relu: bool, dtype: torch.dtype, **words: Any) -> tuple[Any, BatchNorm]:
    theirs, ours = kind(channels, **words).to(dtype), BatchNorm(channels, relu, **words).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(norm: Any, x: torch.Tensor, plus: torch.Tensor | None, dy: torch.Tensor, relu: bool | None = None) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    plus = None if plus is None else plus.detach().clone().requires_grad_()
    norm.zero_grad()
    if relu is None:
        y = norm(x, plus)
    else:
        y = norm(x) if plus is None else norm(x) + plus
        y = torch.relu(y) if relu else y
    y.backward(dy)
    found = [y, x.grad, *([] if plus is None else [plus.grad]), *(p.grad for p in norm.parameters()), *norm.buffers()]
    return [t.detach().clone() for t in found if t is not None]


@pytest.mark.parametrize(("shape", "kind"), SHAPES, ids=str)
@pytest.mark.parametrize("seam", [False, True])
def test_values_gradients_and_statistics_are_torchs(shape: tuple[int, ...], kind: Any, seam: bool) -> None:
    torch.manual_seed(0)
    for relu, plus, last, dtype in itertools.product([False, True], [False, True], [False, True], [torch.float64, torch.float32]):
        form = FORMATS.get(len(shape), torch.contiguous_format) if last else torch.contiguous_format
        x, added, dy = (torch.randn(shape, dtype=dtype).contiguous(memory_format=form) for _ in range(3))
        theirs, ours = pair(kind, shape[1], relu, dtype)
        if seam:
            ours.total = Seam()  # type: ignore[assignment]
        for training in (True, True, False):
            theirs.train(training)
            ours.train(training)
            expected = run(theirs, 3 + x, added if plus else None, dy, relu)
            found = run(ours, 3 + x, added if plus else None, dy)
            assert len(found) == len(expected)
            small = 1e-10 if dtype == torch.float64 else 3e-5
            for a, b in zip(found, expected):
                torch.testing.assert_close(a, b, rtol=small, atol=small)
            assert found[0].stride() == x.stride(), "memory format is kept"


@pytest.mark.parametrize("words", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.5}], ids=str)
def test_options_of_torch(words: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs, ours = pair(nn.BatchNorm2d, 5, True, torch.float64, **words)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for training in (True, True, False):
        theirs.train(training)
        ours.train(training)
        x, dy = torch.randn(2, 3, 5, 4, 4, dtype=torch.float64)
        for a, b in zip(run(ours, x, None, dy), run(theirs, x, None, dy, True)):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seam", [False, True])
def test_bfloat16_input_has_float32_statistics_and_gradients_of_weights(seam: bool) -> None:
    torch.manual_seed(0)
    x = (100 + torch.randn(2, 6, 40, 50)).bfloat16().contiguous(memory_format=torch.channels_last)
    dy = torch.randn(x.shape).bfloat16().contiguous(memory_format=torch.channels_last)
    theirs, ours = pair(nn.BatchNorm2d, 6, True, torch.float64)
    ours = ours.float()
    ours.total = Seam() if seam else ours.total  # type: ignore[assignment]
    expected, found = run(theirs, x.double(), None, dy.double(), True), run(ours, x, None, dy)
    assert [t.dtype for t in found[:4]] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for a, b in zip(found, expected):
        rough = a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-2 if rough else 1e-3, atol=3e-2 if rough else 1e-3)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    norm = BatchNorm(3, relu=True).double()
    x, plus = (torch.randn(2, 3, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b, w, c: torch.func.functional_call(norm, {"weight": w, "bias": c}, (a, b)),
                                    (x, plus, norm.weight, norm.bias))  # fmt: skip


def test_moments_of_two_halves_are_those_of_the_whole() -> None:
    """A mean a thousand times the deviation costs no digits: the sums are of squares in float64."""
    torch.manual_seed(0)
    x = 1e3 + torch.randn(6, 4, 16, 16)
    halves = x[:2], x[2:]
    messages: list[torch.Tensor] = []
    for half in halves:
        batchnorm.moments(half, lambda message: messages.append(message.clone()) or message)  # type: ignore[func-returns-value]
    mean, variance, count = batchnorm.moments(halves[0], lambda message: message.copy_(messages[0] + messages[1]))
    assert count == 6 * 16 * 16
    torch.testing.assert_close(mean, x.double().mean((0, 2, 3)).float(), rtol=1e-6, atol=0)
    torch.testing.assert_close(variance, x.double().var((0, 2, 3), correction=0).float(), rtol=1e-4, atol=0)


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 4, 3, 3\]; expected \[B, 5"):
        BatchNorm(5)(torch.zeros(2, 4, 3, 3))


def test_compiled_is_eager() -> None:
    torch.manual_seed(0)
    norm = BatchNorm(4, relu=True)
    x, plus, dy = torch.randn(3, 2, 4, 5, 5).unbind()
    expected = run(norm, x, plus, dy)
    fresh = BatchNorm(4, relu=True)
    compiled = torch.compile(fresh, backend="aot_eager", fullgraph=True)
    found = run(compiled, x, plus, dy)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_group_is_not_traced_and_the_rest_is_compiled() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNorm(4, relu=True), nn.Conv2d(4, 2, 3))
    plain[1].total = Seam()
    x = torch.randn(2, 3, 8, 8)
    expected = plain(x)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    found = torch.compile(plain, backend="aot_eager")(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(plain, backend="aot_eager", fullgraph=True)(x)
    for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)
