"""The Triton kernels of batch norm: run by Triton's interpreter they are the formulas, and they compile for A100 and H100."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: the CUDA kernels are NOT tested")
pytestmark = pytest.mark.slow

FORMULAS = """
import itertools, pytest, random, sys, torch
from hpcai.kernels import batchnorm, batchnorm_triton as fused
from hpcai.nn import BatchNorm
ULP = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}  # the interpreter truncates to bfloat16
FORM = {4: torch.channels_last, 5: torch.channels_last_3d}
def near(name, found, expected, terms):
    over = (found.double() - expected).abs() - 1e-6 * terms - ULP[found.dtype] * (expected.abs() + 2**-14)
    same = (found == expected) | (found.isnan() & expected.isnan()) | (expected.isfinite() & (over <= 0))
    assert found.shape == expected.shape and same.all(), (name, over.max())

def example(r, k):
    fused.PROGRAMS, fused.PARTS, fused.SECTOR = r.choice([1, 3, 12, 24]), r.choice([2, 256]), r.choice([8, 64, 64])
    channels, whole = [1, 6, 8, 38, 48, 91, 160, 728][k % 8], [torch.float32, torch.bfloat16, torch.float16][k // 8 % 3]
    batch, *more = r.choice([(1, 1, 1), (7, 1, 1), (3, 5, 7), (2, 22, 25), (1, 1, 1, 1), (2, 3, 4, 5), (2, 7, 8, 9)])
    shape, dims, scale = (batch, channels, *more), [0, *range(2, 2 + len(more))], 10 ** r.uniform(-1, 1)
    away = scale * r.choice([0.0, 1.0, 1000.0 if whole == torch.float32 else 3.0])
    x, dy, y, plus = ((torch.randn(shape) * s + a).to(whole).contiguous(memory_format=FORM[len(shape)])
                      for s, a in ((scale, away), (1.0, 0.1), (1.0, 0.0), (2.0, 0.0)))
    y, plus, relu, keep = r.choice([None, y, y.trunc()]), r.choice([None, plus, plus.contiguous()]), *r.choices([False, True], k=2)
    (mean, variance), (weight, bias, a, b) = fused.moments(x), torch.randn(4, channels)
    exact, square = x.double().mean(dims), x.double().var(dims, correction=0)
    near("mean", mean, exact, square.sqrt())
    near("variance", variance, square, (2 + 0.05 * away / scale) * square)
    for t in (x, dy, y, plus):
        if t is not None and r.random() < 0.3:
            t[0, -1].fill_(r.choice([torch.nan, torch.inf, -torch.inf]))
    for found, expected in zip(fused.moments(x), (x.double().mean(dims), x.double().var(dims, correction=0))):
        assert (found.isfinite() == expected.isfinite()).all(), "what is not finite stays, in its channel"
    invstd, over = (variance + 1e-5).rsqrt(), [1, -1] + [1] * len(more)
    W, B, M, P, Q, V, I = (t.double().view(over) for t in (weight, bias, mean, a, b, variance, invstd))
    N, added = (x.double() - M) * (V + 1e-5).rsqrt(), 0.0 if plus is None else plus.double()
    z, expected = fused.normalise(x, mean, variance, weight, bias, 1e-5, plus, relu), W * N + B + added
    near("y", z, expected.relu() if relu else expected, (W * N).abs() + B.abs() + abs(added))
    rectified, by_weight, by_bias = fused.sums(dy, x, y, mean, invstd, keep)
    dz = dy if y is None else torch.ops.aten.threshold_backward(dy, y, 0)
    assert keep or rectified is dy, "what need not be kept was written"
    torch.testing.assert_close(rectified, dz if keep else dy, rtol=0, atol=0, equal_nan=True)
    wide, N = dz.double(), (x.double() - M) * I
    near("by weight", by_weight, (wide * N).sum(dims), (wide * N).abs().sum(dims))
    near("by bias", by_bias, wide.sum(dims), wide.abs().sum(dims))
    dx = fused.by_input(rectified, x, y, mean, invstd, weight, a, b)
    near("dx", dx, W * I * (wide - Q - N * P), (W * I).abs() * (wide.abs() + Q.abs() + (N * P).abs()))
    assert all(t.dtype == whole and t.is_contiguous(memory_format=FORM[t.ndim]) for t in (z, rectified, dx))

class Total(torch.nn.Module):
    def forward(self, message):
        self.said.append(message.clone())
        return message.add_(next(self.heard, 0))

def network(r, channels, processes):
    reference, relu, given = torch.nn.BatchNorm2d(channels).double(), r.random() < 0.6, r.choice(["none", "fixed", "trained"])
    torch.nn.init.uniform_(reference.weight, 0.5, 1.5), torch.nn.init.uniform_(reference.bias, -1, 1)
    x, plus, dy = (3 * torch.randn(4, channels, 5, 6).contiguous(memory_format=torch.channels_last) + c for c in (5, 0, 0))
    x, plus = x.requires_grad_(), None if given == "none" else plus.requires_grad_(given == "trained")
    def run(layer, rows):
        leaves = [None if t is None else t.detach()[rows].to(layer.weight.dtype).requires_grad_(t.requires_grad) for t in (x, plus)]
        y = layer(*leaves) if layer is not reference else layer(leaves[0]) + (0 if plus is None else leaves[1])
        y = y.relu() if layer is reference and relu else y
        y.backward(dy[rows].to(y.dtype))
        return [y, *(t.grad for t in leaves if t is not None and t.requires_grad), layer.weight.grad, layer.bias.grad]
    said, rows = [[]] * processes, [slice(0, 3), slice(3, 4)] if processes == 2 else [slice(0, 4)]
    for _ in range(2 * processes - 1):  # of two processes: each round one message more is right, first that of the forward pass
        layers = [BatchNorm(channels, relu) for _ in rows]
        for layer, heard in zip(layers, said[::-1]):
            layer.load_state_dict(reference.state_dict())
            layer.total = Total() if processes == 2 else layer.total
            layer.total.heard, layer.total.said = iter(heard), []
        found, said = [run(layer, part) for layer, part in zip(layers, rows)], [layer.total.said for layer in layers]
    for expected, *parts in zip(run(reference, slice(0, 4)), *found):
        found = sum(parts) if expected.ndim == 1 else torch.cat(parts)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    for (name, expected), layer in itertools.product(reference.named_buffers(), layers):
        torch.testing.assert_close(layer.get_buffer(name).double(), expected.double(), rtol=1e-6, atol=1e-6)
r, batchnorm._passes, _ = random.Random(7), lambda x: fused, torch.manual_seed(0)
times = int(sys.argv[1])  # 24 examples have every width in every precision
print(len([example(r, k) for k in range(24 * times)]), "examples", len([network(r, c, n) for c in (6, 91) * times for n in (1, 2)]))
with pytest.raises(ValueError, match="plus has shape"):
    fused.normalise(torch.ones(2, 1, 1, 1), *torch.ones(4, 1), 0.1, torch.ones(1, 1, 1, 1), True)
"""

COMPILED = """
import re, subprocess, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hpcai.kernels.batchnorm_triton import WARPS, variants
tool = triton.__path__[0] + "/backends/nvidia/bin/cuobjdump"
print("architecture|registers|stack|local|loads and stores|of single values|kernel")
for name, kernel, signature, constexprs in variants():
    attrs = {(i,): [["tt.divisibility", 16]] for i, x in enumerate(kernel.arg_names) if signature[x][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    for arch in map(int, sys.argv[2:]):
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": WARPS})
        open(sys.argv[1], "wb").write(made.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", sys.argv[1]], capture_output=True, text=True, check=True).stdout
        registers, stack, local = (int(re.search(rf"\\b{x}:(\\d+)", usage)[1]) for x in ("REG", "STACK", "LOCAL"))
        moves = re.findall(r"(?:ld|st)\\.global\\S*?(?:\\.(v[248]))?\\.b\\d+", made.asm["ptx"])
        single = len(moves) if "_merge" in name else 2 if "partial_" in kernel.arg_names else 0
        print(made.asm["ptx"].split(".target ")[1].split()[0], registers, stack, local, len(moves), moves.count(""), name, sep="|")
        assert stack == local == 0 and registers <= 128, f"{name} on {arch} spills, or two programs do not fit a multiprocessor"
        assert len(moves) >= 4 and moves.count("") == single, f"{name} on {arch} moves single elements"
"""


def run(program: str, *words: str, **environment: str) -> str:
    env = {**{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}, **environment}
    command, root = [sys.executable, "-W", "ignore", "-c", program, *words], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.claim)])
def test_kernels_are_the_formulas_over_random_shapes_and_options(times: int) -> None:
    assert f"{24 * times} examples {4 * times}" in run(FORMULAS, str(times), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize(("arch", "name"), [("90", "sm_90a"), pytest.param("80", "sm_80", marks=pytest.mark.claim)])
def test_every_kernel_compiles_without_spills_and_moves_whole_vectors(tmp_path: Path, arch: str, name: str) -> None:
    print(made := run(COMPILED, str(tmp_path / "cubin"), arch, TRITON_CACHE_DIR=str(tmp_path)))
    assert made.count(f"{name}|") + made.count(f"{name},|") == 20
