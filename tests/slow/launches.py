"""Calls that launch every Triton kernel: those of the benchmark at the sizes of published networks, those of language models, and
the other forms. Inputs have no values: where kernels are only compiled, they take no memory."""

from itertools import product

import torch

from hpcai.cli.bench.gpu_kernels import KERNELS, RandomInputs
from hpcai.kernels import (
    activations,
    float8_triton,
    fused_optimizer,
    gates,
    graph_attention,
    layernorm_triton,
    philox_triton,
    rotary,
)  # fmt: skip
from hpcai.kernels.embedding_update_triton import update as update_table
from hpcai.kernels.fused_optimizer_triton import run as run_update
from hpcai.nn import BatchNorm, InstanceNorm

BF16, FP32, FP64, INT64 = torch.bfloat16, torch.float32, torch.float64, torch.int64


class EmptyInputs(RandomInputs):
    mask = staticmethod(torch.empty)

    def __init__(self, dtype):
        self.device, self.dtype, self.generator = torch.device("cpu"), dtype, None

    def __call__(self, *shape, wide=False, fixed=False, last=False, scale=1.0):
        form = torch.contiguous_format if not last else torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        return torch.empty(shape, dtype=FP32 if wide else self.dtype, memory_format=form).requires_grad_(not fixed)


def calls(arch):
    """Yield functions and their inputs."""
    for kernel in KERNELS:
        sizes = () if kernel.name in ("triangle", "outer", "float8") else kernel.sizes.values()
        for size, dtype in product(sizes, kernel.dtypes):
            yield kernel.ours, kernel.inputs(EmptyInputs(dtype), *(min(n, 1 << 20) for n in size))
    for x, y in ((BF16, BF16), (FP32, FP32), (FP32, BF16)):
        draw, matrix = EmptyInputs(x), torch.empty(8192, 4096, dtype=x)
        for c in (4096, 8192, 2048, 5120):
            yield layernorm_triton.rms_norm, [draw(8192, c), draw(c, wide=True), 1e-5, y]
        for c in (128, 64, 256, 384):
            yield layernorm_triton.layer_norm, [draw(128, c), draw(c, wide=True), draw(c, wide=True), 1e-5, y]
        for size, interleaved in product((128, 64), (False, True)):
            angles = torch.empty(2, 1, 4096, size, dtype=y)
            yield rotary.apply_rotary, [draw(1, 32, 4096, size), draw(1, 8, 4096, size), *angles, interleaved]
        yield activations.swiglu, [draw(4096, 14336), draw(4096, 14336)]
        yield from ((gates.gate, [draw(256, 256, 128), draw(256, 256, 128), *m]) for m in ([], [draw.mask(256, 256, 1)]))
        for norm, number in ((InstanceNorm(64), 1), (InstanceNorm(64, "silu"), 1), (BatchNorm(64, relu=True), 2)):
            yield norm, [draw(2, 64, 48, 72, last=True) for _ in range(number)]
        forms = ((True, True), (True, False), (False, True)) if arch != "80" else ()  # an A100 has no FP8
        for form, dtype, scale in product(forms, (torch.float8_e4m3fn, torch.float8_e5m2), (None, torch.empty(()))):
            yield float8_triton.quantize, [matrix, dtype, *form, scale]
        for shape in ((1024, 1024), (1024, 4, 128)):
            scores = torch.empty(1024, 4).requires_grad_(), torch.empty(256, 4).requires_grad_()
            yield graph_attention.graph_attention, [*scores, draw(*shape), torch.zeros(2, 4096, dtype=INT64)]
    for kind, dtype in (("bits", INT64), ("uniform", FP64), ("uniform", FP32), ("normal", FP64), ("normal", FP32)):
        yield philox_triton.run, [kind, 7, 0, 0, torch.empty(99, dtype=dtype)]
        yield philox_triton.run, [kind, *torch.ones(3, 9, dtype=INT64), torch.empty(9, 99, dtype=dtype)]
    (w, average), (g, m, low), scalar = torch.empty(2, 4096), torch.empty(3, 4096, dtype=BF16), torch.ones(())
    segments = fused_optimizer.Segments([(0, 4096)], "cpu", 4096)
    table, ids = torch.empty(1 << 20, 128), torch.empty(4096, 20, dtype=torch.int32)
    for state in (table, table[:, :1], None):
        yield update_table, [table, state, ids, table[:4096], scalar, scalar, scalar, 1e-8]
    kinds = ("adam", (w, w), None), ("adagrad", (w,), None), ("inside", (m,), segments), ("outside", (m,), None)
    for kind, moments, within in kinds:
        operands = fused_optimizer.Operands(w, g, moments, scalar, scalar, low, average, scalar, scalar.long(), segments=within)
        yield run_update, [operands, kind, scalar, scalar, (0.9, 0.999)]
    yield fused_optimizer.lars_norms, [w, g, segments], {"scale": scalar}


def call(function, inputs, kwargs=None):
    """Call a function, and its backward pass if there is one."""
    results = function(*inputs, **kwargs or {})
    results = [x for x in (results if isinstance(results, tuple) else [results]) if torch.is_tensor(x) and x.requires_grad]
    if results:
        leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
        torch.autograd.grad(results, leaves, [torch.empty_like(x) for x in results])
