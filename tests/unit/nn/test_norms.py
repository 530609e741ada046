"""Norms equal those of torch, followed by a residual sum and an activation, with local and synchronised statistics."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.kernels import batchnorm
from hpcai.nn import BatchNorm, GroupNorm, InstanceNorm

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
BATCH = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d, 2: nn.BatchNorm1d}
ACTIVATIONS = (None, *batchnorm.ACTIVATIONS)
ACTS = {BatchNorm: ACTIVATIONS[:2], InstanceNorm: ACTIVATIONS, GroupNorm: ACTIVATIONS}
INSTANCE = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


class Seam(nn.Module):
    """An all-reduce over one rank, or over several that send ``received``."""

    def __init__(self, received: list[torch.Tensor] | None = None) -> None:
        super().__init__()
        self.received, self.sent = iter(received or []), []  # type: ignore[var-annotated]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.sent.append(value.clone())
        return value.add_(next(self.received, 0))


def pair(kind: type, ndim: int, act: str | None, dtype: torch.dtype, seam: bool = False, channels: int = 6, **kwargs: Any) -> Any:
    """Return torch's norm and hpcai's norm with equal weights."""
    torch_norm: nn.Module
    if kind is BatchNorm:
        torch_norm, norm = BATCH[ndim](channels, **kwargs), BatchNorm(channels, act == "relu", **kwargs)
    elif kind is InstanceNorm:
        torch_norm, norm = INSTANCE[ndim](channels, affine=True), InstanceNorm(channels, act)
    else:
        torch_norm, norm = nn.GroupNorm(2, channels, **kwargs), GroupNorm(2, channels, act, **kwargs)
    for parameter in torch_norm.to(dtype).parameters():
        nn.init.normal_(parameter)
    assert list(torch_norm.state_dict()) == list(norm.to(dtype).state_dict())
    norm.load_state_dict(torch_norm.state_dict())
    norm.all_reduce = Seam() if seam else norm.all_reduce
    return torch_norm, norm


def run(norm: Any, dy: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the output, the gradients of input, residual and weights, and the running statistics."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, residual) if t is not None]
    y = norm(*leaves)
    dy = dy.contiguous() if isinstance(norm, Reference) else dy
    return [t.detach().clone() for t in (y, *torch.autograd.grad(y, [*leaves, *norm.parameters()], dy), *norm.buffers())]


class Reference(nn.Module):
    """torch's norm, sum and activation in contiguous memory: with one channels-last sample torch 2.13 is wrong on a CPU."""

    def __init__(self, norm: nn.Module, act: str | None) -> None:
        super().__init__()
        self.norm, self.act = norm, act

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(x.contiguous())
        return batchnorm.apply_activation(y if residual is None else y + residual, self.act)


CASES = [
    (BatchNorm, (2, 6, 6, 4)), (BatchNorm, (3, 6)), (BatchNorm, (2, 6, 4, 4, 6)), (BatchNorm, (4, 6, 3)),
    (InstanceNorm, (1, 6, 4, 3, 6)), (InstanceNorm, (3, 6, 4, 3, 6)), (InstanceNorm, (2, 6, 6, 4)), (InstanceNorm, (1, 6, 7)),
    (InstanceNorm, (2, 6, 7)),
    (GroupNorm, (1, 6, 4, 3, 6)), (GroupNorm, (3, 6, 4, 3, 6)), (GroupNorm, (2, 6, 6, 4)), (GroupNorm, (2, 6, 7)),
    (GroupNorm, (2, 6)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape"), CASES, ids=str)
@pytest.mark.parametrize("seam", [False, True])
def test_values_gradients_and_statistics_equal_torch(kind: Any, shape: tuple[int, ...], seam: bool) -> None:
    torch.manual_seed(0)
    sums = [False, True] if kind is BatchNorm else [False]
    for act, residual, channels_last, dtype in itertools.product(ACTS[kind], sums, [False, True], [torch.float64, torch.float32]):
        form = FORMATS.get(len(shape), torch.contiguous_format) if channels_last else torch.contiguous_format
        x, added, dy = ((c + torch.randn(shape, dtype=dtype)).contiguous(memory_format=form) for c in (3, 0, 0))
        torch_norm, norm = pair(kind, len(shape), act, dtype, seam)
        inputs = (x, added) if residual else (x,)
        tolerance = 1e-12 if dtype == torch.float64 else 3e-5
        for training in (True, True, False) if kind is BatchNorm else (True,):
            norm.train(training)
            expected, actual = run(Reference(torch_norm.train(training), act), dy, *inputs), run(norm, dy, *inputs)
            for a, b in zip(actual, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            assert actual[0].stride() == actual[1].stride() == x.stride(), "the memory format is that of the input"
        for a, b in zip(run(norm, dy.contiguous(), *inputs), actual, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "kwargs"), [
    *((BatchNorm, kwargs) for kwargs in ({"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.5})),
    (GroupNorm, {"affine": False}), (GroupNorm, {"eps": 0.5}),
], ids=str)  # fmt: skip
def test_options_of_torch(kind: Any, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    torch_norm, norm = pair(kind, 4, "relu", torch.float64, **kwargs)
    for training in (True, True, False):
        norm.train(training)
        x, dy = (t.contiguous(memory_format=torch.channels_last) for t in torch.randn(2, 3, 6, 4, 4, dtype=torch.float64))
        for a, b in zip(run(norm, dy, x), run(Reference(torch_norm.train(training), "relu"), dy, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seam", [False, True])
@pytest.mark.parametrize("kind, shape", [
    (BatchNorm, (2, 6, 40, 50)), (InstanceNorm, (1, 6, 10, 20, 10)), (InstanceNorm, (2, 6, 10, 20, 10)),
    (GroupNorm, (2, 6, 10, 20, 10)),
], ids=str)  # fmt: skip
def test_bf16_input_has_float32_statistics_and_gradients_of_weights(kind: Any, shape: tuple[int, ...], seam: bool) -> None:
    for act, form in itertools.product(ACTS[kind], (FORMATS[len(shape)], torch.contiguous_format)):
        torch.manual_seed(0)
        x, dy = ((c + torch.randn(shape)).bfloat16().contiguous(memory_format=form) for c in (100, 0))
        torch_norm, norm = pair(kind, len(shape), act, torch.float64, seam)
        expected, actual = run(Reference(torch_norm, act), dy.double(), x.double()), run(norm.float(), dy, x)
        assert [t.dtype for t in actual[:4]] == [torch.bfloat16] * 2 + [torch.float32] * 2
        for a, b in zip(actual, expected, strict=True):
            tolerance = (2e-2, 3e-2) if a.dtype == torch.bfloat16 else (1e-3, 2e-3)
            if a.ndim == 1 and act == "silu":
                tolerance = 1e-2, 0.2  # sums of 4,000 or 8,000 gradients in bfloat16
            torch.testing.assert_close(a.double(), b.double(), rtol=tolerance[0], atol=tolerance[1])


LOCAL_AND_SYNCHRONISED = list(itertools.product((BatchNorm, InstanceNorm, GroupNorm), (False, True)))


def make_inputs(kind: Any, *shape: int, **kwargs: Any) -> list[torch.Tensor]:
    """Return an input, and for a batch norm a residual."""
    return [t.contiguous(memory_format=FORMATS[len(shape)]) for t in torch.randn(2 if kind is BatchNorm else 1, *shape, **kwargs)]


@pytest.mark.parametrize("kind, seam", LOCAL_AND_SYNCHRONISED)
def test_compiled_is_eager(kind: Any, seam: bool) -> None:
    """Synchronised statistics cause a graph break."""
    torch.manual_seed(0)
    for act in ACTS[kind] if kind is GroupNorm and not seam else ACTS[kind][-1:]:
        torch._dynamo.reset()
        (_, norm), dy = pair(kind, 5, act, torch.float32, seam), torch.randn(2, 6, 4, 5, 5)
        inputs = make_inputs(kind, 2, 6, 4, 5, 5)
        start = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
        expected = run(norm, dy, *inputs)
        norm.load_state_dict(start)
        for a, b in zip(run(torch.compile(norm, backend="aot_eager", fullgraph=not seam), dy, *inputs), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    if seam:
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(norm, backend="aot_eager", fullgraph=True)(*inputs)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", [InstanceNorm, GroupNorm])
@pytest.mark.parametrize("act", ["relu", "silu"])
def test_a_sharded_volume_has_the_norm_of_the_full_one(kind: Any, act: str, batch: int, channels_last: bool) -> None:
    torch.manual_seed(0)
    torch_norm, norm = pair(kind, 5, act, torch.float64)
    x, dy = ((c + torch.randn(batch, 6, 5, 3, 2, dtype=torch.float64)) for c in (2, 0))
    shards, form = (slice(0, 4), slice(4, 5)), torch.channels_last_3d if channels_last else torch.contiguous_format
    sent: list[list[torch.Tensor]] = [[], []]
    for _ in range(3):  # each iteration corrects the input of one more all-reduce, beginning with that of the forward pass
        results, sums = [], []
        for rank, shard in enumerate(shards):
            norm.all_reduce = seam = Seam(sent[1 - rank])
            results.append(run(norm, *(t[:, :, shard].contiguous(memory_format=form) for t in (dy, x))))
            sums.append(seam.sent)
        sent = sums
    values = 2 * batch * (6 if kind is InstanceNorm else 2)
    assert [[tensor.numel() for tensor in tensors] for tensors in sent] == [[values + 1, values]] * 2, "two all-reduces"
    for i, expected in enumerate(run(Reference(torch_norm, act), dy, x)):
        parts = [f[i] for f in results]
        torch.testing.assert_close(torch.cat(parts, 2) if i < 2 else sum(parts), expected, rtol=1e-12, atol=1e-12)


def test_wrong_shapes_and_a_volume_of_one_voxel_raise() -> None:
    for norm in (BatchNorm(5), InstanceNorm(5), GroupNorm(5, 5)):
        with pytest.raises(ValueError, match=r"shape \[2, 4, 3, 3\]; expected \[B, 5"):
            norm(torch.zeros(2, 4, 3, 3))
    voxel = torch.randn(2, 5, 1, 1, 1)
    for norm in (InstanceNorm(5), GroupNorm(5, 5)):
        for all_reduce in (norm.all_reduce, Seam()):
            norm.all_reduce = all_reduce  # type: ignore[assignment]
            with pytest.raises(ValueError, match="one value per channel"):
                norm(voxel)
        norm.all_reduce = Seam([torch.ones(2 * 2 * 5 + 1, dtype=torch.float64)])  # type: ignore[assignment]
        assert norm(voxel).isfinite().all(), "another rank has one more element"
    assert GroupNorm(1, 5)(voxel).isfinite().all(), "five channels are five elements"


@pytest.mark.parametrize(("make", "message"), [
    (lambda: GroupNorm(4, 6), "6 channels cannot make 4 groups; give a number that divides 6"),
    (lambda: GroupNorm(0, 6), "cannot make 0 groups"),
    (lambda: GroupNorm(2, 6, "gelu"), "activation is 'gelu'; expected None or one of relu, silu"),
])  # fmt: skip
def test_invalid_arguments_raise(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", [InstanceNorm, GroupNorm])
def test_a_nan_stays_in_its_sample(kind: Any, channels_last: bool) -> None:
    torch.manual_seed(0)
    form = torch.channels_last_3d if channels_last else torch.contiguous_format
    x, dy = (t.contiguous(memory_format=form) for t in torch.randn(2, 3, 6, 2, 3, 4))
    for act in ACTS[kind]:
        _, norm = pair(kind, 5, act, torch.float32)
        expected = run(norm, dy, x)
        bad = x.clone()
        bad[1, 2, 0, 0, 0] = torch.nan
        for a, b in zip(run(norm, dy, bad)[:2], expected):
            assert a[1].isnan().any() and torch.equal(a[::2], b[::2])


@pytest.mark.parametrize("act", ["silu", "relu"])
def test_only_the_input_is_saved_for_silu_and_the_output_for_a_rectifier(act: str) -> None:
    norm, x = InstanceNorm(6, act), torch.randn(2, 6, 4, 4, 4).contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = norm(x)
    large = [t.data_ptr() for t in saved if t.numel() == x.numel()]
    assert large == [x.data_ptr()] if act == "silu" else sorted(large) == sorted((x.data_ptr(), y.data_ptr()))
