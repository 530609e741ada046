"""Instance norm with its rectifier is torch's instance norm, then a rectifier, also of a volume that is cut."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.nn import InstanceNorm

KINDS = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Seam(nn.Module):
    """Adds nothing, as over an axis of one process, or what the other processes of several say: ``heard``."""

    def __init__(self, heard: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.heard, self.said = iter(heard or []), []  # type: ignore[var-annotated]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.said.append(value.clone())
        return value.add_(next(self.heard, 0))


def pair(ndim: int, channels: int, relu: bool, dtype: torch.dtype) -> tuple[Any, InstanceNorm]:
    theirs, ours = KINDS[ndim](channels, affine=True).to(dtype), InstanceNorm(channels, relu).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    assert list(theirs.state_dict()) == list(ours.state_dict()) == ["weight", "bias"]
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(norm: Any, x: torch.Tensor, dy: torch.Tensor, relu: bool = False) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    y = norm(x).relu() if relu else norm(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *norm.parameters()], dy)]


def plain(norm: Any, x: torch.Tensor, dy: torch.Tensor, relu: bool) -> list[torch.Tensor]:
    """``run`` in contiguous memory, because torch 2.13's gradient for one channels-last sample is wrong on a CPU."""
    return run(norm, x.contiguous(), dy.contiguous(), relu)


@pytest.mark.parametrize("shape", [(1, 5, 4, 3, 6), (3, 5, 4, 3, 6), (2, 5, 6, 4), (1, 3, 7), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("seam", [False, True])
def test_values_and_gradients_are_torchs(shape: tuple[int, ...], seam: bool) -> None:
    torch.manual_seed(0)
    for relu, last, dtype in itertools.product([False, True], [False, True], [torch.float64, torch.float32]):
        form = FORMATS.get(len(shape), torch.contiguous_format) if last else torch.contiguous_format
        theirs, ours = pair(len(shape), shape[1], relu, dtype)
        ours.total = Seam() if seam else ours.total  # type: ignore[assignment]
        for training in (True, False):
            ours.train(training)
            x, dy = ((c + torch.randn(shape, dtype=dtype)).contiguous(memory_format=form) for c in (3, 0))
            small = 1e-12 if dtype == torch.float64 else 3e-5
            found = run(ours, x, dy)
            for a, b in zip(found, plain(theirs, x, dy, relu), strict=True):
                torch.testing.assert_close(a, b, rtol=small, atol=small)
            assert found[0].stride() == found[1].stride() == x.stride(), "memory format is kept"
            for a, b in zip(run(ours, x, dy.contiguous()), found):
                torch.testing.assert_close(a, b, rtol=small, atol=small)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_a_cut_volume_is_the_whole_one_with_two_messages(batch: int, last: bool) -> None:
    torch.manual_seed(0)
    theirs, ours = pair(5, 4, True, torch.float64)
    x, dy = ((c + torch.randn(batch, 4, 5, 3, 2, dtype=torch.float64)) for c in (2, 0))
    cuts, form = (slice(0, 4), slice(4, 5)), torch.channels_last_3d if last else torch.contiguous_format
    said: list[list[torch.Tensor]] = [[], []]
    for _ in range(3):  # each round one message more is right, first that of the forward pass
        found, now = [], []
        for rank, cut in enumerate(cuts):
            ours.total = seam = Seam(said[1 - rank])  # type: ignore[assignment]
            found.append(run(ours, *(t[:, :, cut].contiguous(memory_format=form) for t in (x, dy))))
            now.append(seam.said)
        said = now
    assert [len(messages) for messages in said] == [2, 2]
    for i, expected in enumerate(plain(theirs, x, dy, True)):
        parts = [f[i] for f in found]
        torch.testing.assert_close(torch.cat(parts, 2) if i < 2 else sum(parts), expected, rtol=1e-12, atol=1e-12)


def test_one_voxel_in_the_whole_volume_is_refused() -> None:
    norm, one = InstanceNorm(3), torch.randn(2, 3, 1, 1, 1)
    with pytest.raises(ValueError, match="one value per channel"):
        norm(one)
    norm.total = Seam()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="one value per channel"):
        norm(one)
    norm.total = Seam([torch.ones(2 * 2 * 3 + 1, dtype=torch.float64)])  # type: ignore[assignment]
    assert norm(one).isfinite().all(), "another process has one more"
    with pytest.raises(ValueError, match=r"shape \[2, 4, 3, 3\]; expected \[B, 3"):
        norm(torch.zeros(2, 4, 3, 3))


def test_a_sum_over_no_axis_is_no_seam() -> None:
    norm, x = InstanceNorm(3), torch.randn(1, 3, 4, 4, 4)
    norm.total = Seam()  # type: ignore[assignment]
    norm.total.axes = ()  # type: ignore[assignment]
    norm(x)
    assert norm.total.said == []


@pytest.mark.parametrize("seam", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_bfloat16_input_has_float32_statistics_and_gradients_of_weights(batch: int, seam: bool) -> None:
    torch.manual_seed(0)
    x, dy = ((c + torch.randn(batch, 6, 10, 20, 10)).bfloat16().contiguous(memory_format=torch.channels_last_3d) for c in (100, 0))
    theirs, ours = pair(5, 6, True, torch.float64)
    ours = ours.float()
    ours.total = Seam() if seam else ours.total  # type: ignore[assignment]
    expected, found = plain(theirs, x.double(), dy.double(), True), run(ours, x, dy)
    assert [t.dtype for t in found] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for a, b in zip(found, expected):
        rough = a.dtype == torch.bfloat16
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-2 if rough else 1e-3, atol=3e-2 if rough else 2e-3)


@pytest.mark.parametrize("seam", [False, True])
def test_gradients_are_those_of_finite_differences(seam: bool) -> None:
    torch.manual_seed(0)
    norm = InstanceNorm(3, relu=True).double()
    norm.total = Seam() if seam else norm.total  # type: ignore[assignment]
    x = torch.randn(2, 3, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, w, c: torch.func.functional_call(norm, {"weight": w, "bias": c}, (a,)),
                                    (x, norm.weight, norm.bias))  # fmt: skip


@pytest.mark.parametrize("seam", [False, True])
def test_compiled_is_eager(seam: bool) -> None:
    torch.manual_seed(0)
    norm = InstanceNorm(4, relu=True)
    norm.total = Seam() if seam else norm.total  # type: ignore[assignment]
    x, dy = torch.randn(2, 2, 4, 5, 5, 5).unbind()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=not seam)
    for a, b in zip(run(compiled, x, dy), run(norm, x, dy), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seam", [False, True])
def test_a_large_channels_last_volume_loses_no_digits(seam: bool) -> None:
    """torch's batch norm adds its 262,144 rows up in float32, one after the other, and is wrong by 7e-5."""
    torch.manual_seed(0)
    theirs, ours = pair(5, 4, False, torch.float32)
    ours.total = Seam() if seam else ours.total  # type: ignore[assignment]
    x, dy = (c + torch.randn(1, 4, 64, 64, 64).contiguous(memory_format=torch.channels_last_3d) for c in (1.0, 0.3))
    expected = plain(theirs.double(), x.double(), dy.double(), False)
    # The gradient of weights is what is left of terms a thousand times as large.
    for a, b, small in zip(run(ours, x, dy), expected, (5e-6, 5e-6, 1e-4, 5e-6), strict=True):
        assert float((a.double() - b).abs().max()) < small * float(b.abs().max())
