"""The Triton kernels of batch, group and instance norm, in Triton's interpreter, agree with their formulas."""

import pytest

from tests.slow.programs import run_program

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

PROGRAM = """
import itertools, pytest, random, sys, torch
from hpcai.kernels import batchnorm, batchnorm_triton as fused
from hpcai.nn import BatchNorm, GroupNorm, InstanceNorm
from hpcai.nn.groupnorm import PerSampleNorm
ULP = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # the interpreter truncates to bfloat16
FORM = {4: torch.channels_last, 5: torch.channels_last_3d}
def check_close(name, actual, expected, terms):
    over = (actual.double() - expected).abs() - 1e-6 * terms - ULP[actual.dtype] * (expected.abs() + 2**-14)
    same = (actual == expected) | (actual.isnan() & expected.isnan()) | (expected.isfinite() & (over <= 0))
    assert actual.shape == expected.shape and same.all(), (name, over.max())

def check_example(r, k):
    fused.PROGRAMS, fused.PARTS, fused.SECTOR = r.choice([1, 3, 12, 24]), r.choice([2, 256]), r.choice([8, 64, 64])
    channels, dtype = [1, 6, 8, 38, 48, 91, 160, 728][k % 8], [torch.float32, torch.bfloat16, torch.float16][k % 3]
    batch, *spatial = r.choice([(1, 1, 1), (7, 1, 1), (3, 5, 7), (2, 22, 25), (1, 1, 1, 1), (3, 3, 4, 5), (2, 7, 8, 9)])
    samples, group = r.choice([1, batch]), r.choice([n for n in (1, 1, 2, 7, 16, channels) if channels % n == 0])
    shape, dims, scale = (batch, channels, *spatial), [*[0] * (samples == 1), *range(2, 2 + len(spatial))], 10 ** r.uniform(-1, 1)
    away = scale * r.choice([0.0, 1.0, 1000.0 if dtype == torch.float32 else 3.0])
    offsets = away * (1 + torch.rand(channels, *[1] * len(spatial)))
    x, dy, y, residual = ((torch.randn(shape) * s + a).to(dtype).contiguous(memory_format=FORM[len(shape)])
                          for s, a in ((scale, offsets), (1.0, 0.1), (1.0, 0.0), (2.0, 0.0)))
    act, slope = r.choice([None, "relu", "leaky_relu", "silu"]), r.choice([0.01, 2.0])
    y = None if act in (None, "silu") else r.choice([None, y, y.trunc()])
    residual = r.choice([None, residual, residual.contiguous()])
    def exact(group):
        wide = x.double().reshape(samples, batch // samples, channels // group, -1)
        return wide.mean((1, 3)).flatten(), wide.var((1, 3), correction=0).flatten()
    (mean, variance), (exact_mean, exact_variance) = fused.moments(x, samples, group), exact(group)
    check_close("mean", mean, exact_mean, exact_variance.sqrt())
    check_close("variance", variance, exact_variance, (2 + 0.05 * away / scale) * exact_variance)
    mean, variance = (batchnorm.repeat_groups(t, group) for t in (mean, variance))
    (weight, bias), (a, b) = torch.randn(2, channels), torch.randn(2, samples * channels)
    for t in (x, dy, y, residual):
        if t is not None and r.random() < 0.3:
            t[0, -1].fill_(r.choice([torch.nan, torch.inf, -torch.inf]))
    for actual, expected in zip(fused.moments(x, samples, group), exact(group)):
        assert (actual.isfinite() == expected.isfinite()).all(), "non-finite values stay in their channel and sample"
    rule, over = batchnorm.NormParams(mean, variance, weight, bias, 1e-5, act, slope), [samples, channels] + [1] * len(spatial)
    M, P, Q, I = (t.double().view(over) for t in (mean, a, b, (variance + 1e-5).rsqrt()))
    W, B = (t.double().view(1, *over[1:]) for t in (weight, bias))
    N, added = (x.double() - M) * I, 0.0 if residual is None else residual.double()
    z, terms, rules = W * N + B, (W * N).abs() + B.abs(), (rule, rule._replace(act=None))
    y_ = fused.normalise(x, rule, residual)
    check_close("y", y_, batchnorm.apply_activation(z + added, act, slope), (terms + abs(added)) * max(slope, 1))
    if act in ("relu", "leaky_relu") and y is None:
        side = fused.normalise(x, rules[1], None)
        z = torch.where((side <= 0) == (z <= 0), z, side.double())  # forward and backward agree on the sign of values near 0
    before, actual = fused.sums(dy, x, y, rule)
    assert y is not None or before is dy, "a tensor that need not be saved was written"
    dz, point = dy.double(), z if y is None else y.double()
    if act == "silu":
        sigmoid = point.sigmoid()
        dz = dz * sigmoid * (1 + point * (1 - sigmoid))
    elif act:
        dz = torch.where(point <= 0, dz * slope if act == "leaky_relu" else 0.0, dz)
    bound = dy.double().abs() * (1 + terms) if act == "silu" else dz.abs()  # the derivative of silu is that at a rounded z
    check_close("dz", before, dy.double() if y is None else dz, bound)
    check_close("grad_weight", actual[0], (dz * N).sum(dims).flatten(), (bound * N.abs()).sum(dims).flatten())
    check_close("grad_bias", actual[1], dz.sum(dims).flatten(), bound.sum(dims).flatten())
    dz, rule = (dz, rule) if y is None else (before.double(), rules[1])
    dx = fused.grad_input(before, x, rule, a, b)
    check_close("dx", dx, I * (W * dz - Q - N * P), I * ((W * bound).abs() + Q.abs() + (N * P).abs()))
    assert all(t.dtype == dtype and t.is_contiguous(memory_format=FORM[t.ndim]) for t in (y_, before, dx))

class RecordedAllReduce(torch.nn.Module):
    def forward(self, tensor):
        self.sent.append(tensor.clone())
        return tensor.add_(next(self.received, 0))

def check_network(r, channels, processes, group):
    # A batch norm over the batches of all processes, or (``group`` channels) a norm of samples whose maps are sharded.
    reference = torch.nn.GroupNorm(channels // group, channels) if group else torch.nn.BatchNorm2d(channels)
    act, residual = r.choice([None, "relu", *["leaky_relu", "silu"] * (group > 0)]), r.choice(["none", "fixed", "trained"])
    make = {0: lambda: BatchNorm(channels, act == "relu"), 1: lambda: InstanceNorm(channels, act)}
    make = make.get(group, lambda: GroupNorm(channels // group, channels, act))
    torch.nn.init.uniform_(reference.double().weight, 0.5, 1.5), torch.nn.init.uniform_(reference.bias, -1, 1)
    x, plus, dy = (3 * torch.randn(4, channels, 5, 6).contiguous(memory_format=torch.channels_last) + c for c in (5, 0, 0))
    x, plus = x.requires_grad_(), None if group or residual == "none" else plus.requires_grad_(residual == "trained")
    def run(layer, rows):
        form = torch.contiguous_format if layer is reference else torch.channels_last
        leaves = [t.detach()[rows].to(layer.weight.dtype).contiguous(memory_format=form).requires_grad_(t.requires_grad)
                  for t in (x, plus) if t is not None]
        y = layer(*leaves) if layer is not reference else layer(leaves[0]) + (0 if plus is None else leaves[1])
        y = batchnorm.apply_activation(y, act, 0.01) if layer is reference else y
        y.backward(dy[rows].to(y.dtype))
        return [y, *(t.grad for t in leaves if t.requires_grad), layer.weight.grad, layer.bias.grad]
    shards = [slice(0, 3), slice(3, None)] if processes == 2 else [slice(None)]
    sent, rows = [[]] * processes, [(slice(None), slice(None), part) if group else part for part in shards]
    for _ in range(2 * processes - 1):  # on two processes each round has one more correct all-reduce, forward first
        layers = [make() for _ in rows]
        for layer, received in zip(layers, sent[::-1]):
            layer.load_state_dict(reference.state_dict())
            layer.all_reduce = RecordedAllReduce() if processes == 2 else layer.all_reduce
            layer.all_reduce.received, layer.all_reduce.sent = iter(received), []
        actual, sent = [run(layer, part) for layer, part in zip(layers, rows)], [layer.all_reduce.sent for layer in layers]
    for expected, *parts in zip(run(reference, slice(None)), *actual, strict=True):
        actual = sum(parts) if expected.ndim == 1 else torch.cat(parts, 2 if group else 0)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-4 if expected.ndim == 1 else 1e-5)  # 120 terms
    for (name, expected), layer in itertools.product(reference.named_buffers(), layers):
        torch.testing.assert_close(layer.get_buffer(name).double(), expected.double(), rtol=1e-6, atol=1e-6)
r, batchnorm._passes, _ = random.Random(7), lambda x: fused, torch.manual_seed(0)
times = int(sys.argv[1])  # 8 examples have every width, 24 each of them in every precision
PerSampleNorm._prefers_torch = lambda self, x: False
widths = (6, 91) * (times // 3) or (6,)
cases = [(channels, n, group) for channels in widths for n in (1, 2) for group in (0, 1, {6: 3, 91: 7}[channels])]
print(len([check_example(r, k) for k in range(8 * times)]), "examples", len([check_network(r, *case) for case in cases]))
with pytest.raises(ValueError, match="residual has shape"):
    fused.normalise(torch.ones(2, 1, 1, 1), batchnorm.NormParams(*torch.ones(4, 1), 0.1), torch.ones(1, 1, 1, 1))
"""


@pytest.mark.parametrize("times, networks", [(1, 6), pytest.param(9, 36, marks=pytest.mark.claim)])
def test_kernels_agree_with_formulas_over_random_shapes_and_options(times: int, networks: int) -> None:
    assert f"{8 * times} examples {networks}" in run_program(PROGRAM, str(times), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
