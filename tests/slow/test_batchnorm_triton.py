"""The Triton kernels of the norms: run by Triton's interpreter they are the formulas."""


import pytest

from tests.slow.programs import run

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

FORMULAS = """
import itertools, pytest, random, sys, torch
from hpcai.kernels import batchnorm, batchnorm_triton as fused
from hpcai.nn import BatchNorm, GroupNorm, InstanceNorm
from hpcai.nn.groupnorm import PerSampleNorm
ULP = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # the interpreter truncates to bfloat16
FORM = {4: torch.channels_last, 5: torch.channels_last_3d}
def near(name, found, expected, terms):
    over = (found.double() - expected).abs() - 1e-6 * terms - ULP[found.dtype] * (expected.abs() + 2**-14)
    same = (found == expected) | (found.isnan() & expected.isnan()) | (expected.isfinite() & (over <= 0))
    assert found.shape == expected.shape and same.all(), (name, over.max())

def example(r, k):
    fused.PROGRAMS, fused.PARTS, fused.SECTOR = r.choice([1, 3, 12, 24]), r.choice([2, 256]), r.choice([8, 64, 64])
    channels, whole = [1, 6, 8, 38, 48, 91, 160, 728][k % 8], [torch.float32, torch.bfloat16, torch.float16][k % 3]
    batch, *more = r.choice([(1, 1, 1), (7, 1, 1), (3, 5, 7), (2, 22, 25), (1, 1, 1, 1), (3, 3, 4, 5), (2, 7, 8, 9)])
    samples, group = r.choice([1, batch]), r.choice([n for n in (1, 1, 2, 7, 16, channels) if channels % n == 0])
    shape, dims, scale = (batch, channels, *more), [*[0] * (samples == 1), *range(2, 2 + len(more))], 10 ** r.uniform(-1, 1)
    away = scale * r.choice([0.0, 1.0, 1000.0 if whole == torch.float32 else 3.0])
    apart = away * (1 + torch.rand(channels, *[1] * len(more)))
    x, dy, y, plus = ((torch.randn(shape) * s + a).to(whole).contiguous(memory_format=FORM[len(shape)])
                      for s, a in ((scale, apart), (1.0, 0.1), (1.0, 0.0), (2.0, 0.0)))
    act, slope = r.choice([None, "relu", "leaky_relu", "silu"]), r.choice([0.01, 2.0])
    y = None if act in (None, "silu") else r.choice([None, y, y.trunc()])
    plus = r.choice([None, plus, plus.contiguous()])
    def exact(group):
        wide = x.double().reshape(samples, batch // samples, channels // group, -1)
        return wide.mean((1, 3)).flatten(), wide.var((1, 3), correction=0).flatten()
    (mean, variance), (middle, square) = fused.moments(x, samples, group), exact(group)
    near("mean", mean, middle, square.sqrt())
    near("variance", variance, square, (2 + 0.05 * away / scale) * square)
    mean, variance = (batchnorm.repeat_groups(t, group) for t in (mean, variance))
    (weight, bias), (a, b) = torch.randn(2, channels), torch.randn(2, samples * channels)
    for t in (x, dy, y, plus):
        if t is not None and r.random() < 0.3:
            t[0, -1].fill_(r.choice([torch.nan, torch.inf, -torch.inf]))
    for found, expected in zip(fused.moments(x, samples, group), exact(group)):
        assert (found.isfinite() == expected.isfinite()).all(), "what is not finite stays, in its channel and its sample"
    rule, over = batchnorm.NormParams(mean, variance, weight, bias, 1e-5, act, slope), [samples, channels] + [1] * len(more)
    M, P, Q, I = (t.double().view(over) for t in (mean, a, b, (variance + 1e-5).rsqrt()))
    W, B = (t.double().view(1, *over[1:]) for t in (weight, bias))
    N, added = (x.double() - M) * I, 0.0 if plus is None else plus.double()
    z, terms, both = W * N + B, (W * N).abs() + B.abs(), (rule, rule._replace(act=None))
    y_ = fused.normalise(x, rule, plus)
    near("y", y_, batchnorm.apply_activation(z + added, act, slope), (terms + abs(added)) * max(slope, 1))
    if act in ("relu", "leaky_relu") and y is None:
        side = fused.normalise(x, both[1], None)
        z = torch.where((side <= 0) == (z <= 0), z, side.double())  # forward and backward have a value near 0 on the same side
    before, found = fused.sums(dy, x, y, rule)
    assert y is not None or before is dy, "what need not be kept was written"
    dz, given = dy.double(), z if y is None else y.double()
    if act == "silu":
        part = given.sigmoid()
        dz = dz * part * (1 + given * (1 - part))
    elif act:
        dz = torch.where(given <= 0, dz * slope if act == "leaky_relu" else 0.0, dz)
    loose = dy.double().abs() * (1 + terms) if act == "silu" else dz.abs()  # the slope of silu is that of a rounded z
    near("dz", before, dy.double() if y is None else dz, loose)
    near("by weight", found[0], (dz * N).sum(dims).flatten(), (loose * N.abs()).sum(dims).flatten())
    near("by bias", found[1], dz.sum(dims).flatten(), loose.sum(dims).flatten())
    dz, rule = (dz, rule) if y is None else (before.double(), both[1])
    dx = fused.grad_input(before, x, rule, a, b)
    near("dx", dx, I * (W * dz - Q - N * P), I * ((W * loose).abs() + Q.abs() + (N * P).abs()))
    assert all(t.dtype == whole and t.is_contiguous(memory_format=FORM[t.ndim]) for t in (y_, before, dx))

class Total(torch.nn.Module):
    def forward(self, message):
        self.said.append(message.clone())
        return message.add_(next(self.heard, 0))

def network(r, channels, processes, group):
    # A batch norm of a batch that processes share, or (``group`` channels) a norm of samples whose maps are cut.
    reference = torch.nn.GroupNorm(channels // group, channels) if group else torch.nn.BatchNorm2d(channels)
    act, given = r.choice([None, "relu", *["leaky_relu", "silu"] * (group > 0)]), r.choice(["none", "fixed", "trained"])
    make = {0: lambda: BatchNorm(channels, act == "relu"), 1: lambda: InstanceNorm(channels, act)}
    make = make.get(group, lambda: GroupNorm(channels // group, channels, act))
    torch.nn.init.uniform_(reference.double().weight, 0.5, 1.5), torch.nn.init.uniform_(reference.bias, -1, 1)
    x, plus, dy = (3 * torch.randn(4, channels, 5, 6).contiguous(memory_format=torch.channels_last) + c for c in (5, 0, 0))
    x, plus = x.requires_grad_(), None if group or given == "none" else plus.requires_grad_(given == "trained")
    def run(layer, rows):
        form = torch.contiguous_format if layer is reference else torch.channels_last
        leaves = [t.detach()[rows].to(layer.weight.dtype).contiguous(memory_format=form).requires_grad_(t.requires_grad)
                  for t in (x, plus) if t is not None]
        y = layer(*leaves) if layer is not reference else layer(leaves[0]) + (0 if plus is None else leaves[1])
        y = batchnorm.apply_activation(y, act, 0.01) if layer is reference else y
        y.backward(dy[rows].to(y.dtype))
        return [y, *(t.grad for t in leaves if t.requires_grad), layer.weight.grad, layer.bias.grad]
    cut = [slice(0, 3), slice(3, None)] if processes == 2 else [slice(None)]
    said, rows = [[]] * processes, [(slice(None), slice(None), part) if group else part for part in cut]
    for _ in range(2 * processes - 1):  # of two processes: each round one message more is right, first that of the forward pass
        layers = [make() for _ in rows]
        for layer, heard in zip(layers, said[::-1]):
            layer.load_state_dict(reference.state_dict())
            layer.all_reduce = Total() if processes == 2 else layer.all_reduce
            layer.all_reduce.heard, layer.all_reduce.said = iter(heard), []
        found, said = [run(layer, part) for layer, part in zip(layers, rows)], [layer.all_reduce.said for layer in layers]
    for expected, *parts in zip(run(reference, slice(None)), *found, strict=True):
        found = sum(parts) if expected.ndim == 1 else torch.cat(parts, 2 if group else 0)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4 if expected.ndim == 1 else 1e-5)  # 120 terms of 10
    for (name, expected), layer in itertools.product(reference.named_buffers(), layers):
        torch.testing.assert_close(layer.get_buffer(name).double(), expected.double(), rtol=1e-6, atol=1e-6)
r, batchnorm._passes, _ = random.Random(7), lambda x: fused, torch.manual_seed(0)
times = int(sys.argv[1])  # 8 examples have every width, 24 each of them in every precision
PerSampleNorm._prefers_torch = lambda self, x: False
every = (6, 91) * (times // 3) or (6,)
kinds = [(channels, n, group) for channels in every for n in (1, 2) for group in (0, 1, {6: 3, 91: 7}[channels])]
print(len([example(r, k) for k in range(8 * times)]), "examples", len([network(r, *kind) for kind in kinds]))
with pytest.raises(ValueError, match="residual has shape"):
    fused.normalise(torch.ones(2, 1, 1, 1), batchnorm.NormParams(*torch.ones(4, 1), 0.1), torch.ones(1, 1, 1, 1))
"""


@pytest.mark.parametrize("times, networks", [(1, 6), pytest.param(9, 36, marks=pytest.mark.claim)])
def test_kernels_are_the_formulas_over_random_shapes_and_options(times: int, networks: int) -> None:
    assert f"{8 * times} examples {networks}" in run(FORMULAS, str(times), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
