"""Calls that launch every Triton kernel: those of the benchmark at the sizes of published networks, those of language models, and
the other forms of kernels. Tensors are not initialized: where a launch only compiles its kernel, they take no memory."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hpcai.cli.bench.gpu_kernels import KERNELS, RandomInputs
from hpcai.kernels import activations, gates, philox_triton, rotary
from hpcai.kernels.float8_triton import quantize
from hpcai.kernels.fused_optimizer import Operands, Segments
from hpcai.kernels.fused_optimizer_triton import run
from hpcai.kernels.layernorm_triton import layer_norm
from hpcai.kernels.rmsnorm_triton import rms_norm
from hpcai.nn import BatchNorm, InstanceNorm

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class EmptyInputs(RandomInputs):
    """Inputs of the benchmark on the CPU without values."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.generator = torch.device("cpu"), dtype, None

    def __call__(self, *shape: int, wide: bool = False, fixed: bool = False, last: bool = False, scale: float = 1.0) -> Tensor:
        form = torch.contiguous_format if not last else torch.channels_last if len(shape) == 4 else torch.channels_last_3d
        x = torch.empty(shape, dtype=torch.float32 if wide else self.dtype, memory_format=form)
        return x.requires_grad_(not fixed)

    def mask(self, *shape: int) -> Tensor:
        return torch.empty(shape)


def calls(with_float8: bool) -> Iterator[tuple[Any, list[Any]]]:
    """Yield functions and their inputs."""
    for kernel in KERNELS:
        if kernel.name not in ("triangle", "outer", "float8"):  # matrix products are those of torch
            for size in kernel.sizes.values():
                inputs = [kernel.inputs(EmptyInputs(dtype), *(min(n, 1 << 20) for n in size)) for dtype in kernel.dtypes]
                yield from ((kernel.ours, each) for each in inputs)
    for x, y in ((BF16, BF16), (FP32, FP32), (FP32, BF16)):
        draw = EmptyInputs(x)
        for channels in (4096, 8192, 2048, 5120):
            yield rms_norm, [draw(8192, channels), draw(channels, wide=True), 1e-5, y]
        for channels in (128, 64, 256, 384):
            yield layer_norm, [draw(128, channels), *(draw(channels, wide=True) for _ in "wb"), 1e-5, y]
        for size, interleaved in ((128, False), (64, True), (64, False), (128, True)):
            angles = EmptyInputs(y)(2, 1, 4096, size, fixed=True)
            yield rotary.apply_rotary, [draw(1, 32, 4096, size), draw(1, 8, 4096, size), *angles, interleaved]
        yield activations.swiglu, [draw(4096, 14336), draw(4096, 14336)]
        for masks in ([], [draw.mask(256, 256, 1)]):
            yield gates.gate, [draw(256, 256, 128), draw(256, 256, 128), *masks]
        for norm in (InstanceNorm(64), InstanceNorm(64, activation="silu"), BatchNorm(64)):
            yield norm, [draw(2, 64, 48, 72, last=True)]
        yield BatchNorm(64, relu=True), [draw(2, 64, 48, 72, last=True), draw(2, 64, 48, 72, last=True)]
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2) if with_float8 else ():
            for rows, columns, scale in product((True, False), (True, False), (None, torch.empty(()))):
                if rows or columns:
                    yield quantize, [draw(8192, 4096, fixed=True), dtype, rows, columns, scale]
    for kind, dtype in (("bits", torch.int64), ("uniform", FP64), ("uniform", FP32), ("normal", FP64), ("normal", FP32)):
        yield philox_triton.run, [kind, 7, 0, 0, torch.empty(99, dtype=dtype)]
        yield philox_triton.run, [kind, *torch.ones(3, 9, dtype=torch.int64), torch.empty(9, 99, dtype=dtype)]
    (w, average), (g, m, copy), one = torch.empty(2, 4096), torch.empty(3, 4096, dtype=BF16), torch.ones(())
    segments = Segments([(0, 4096)], "cpu", 4096)
    after = {"bf16_copy": copy, "average": average, "average_rate": one, "seed": one.long()}
    inside = {**after, "segments": segments, "ratio": torch.ones(1)}
    forms: Any = ("adam", (w, w), after), ("inside", (m,), inside), ("outside", (m,), after), ("norms", (), {"segments": segments})
    for kind, moments, kwargs in forms:
        operands = Operands(w, g, moments, one, one, **kwargs)
        yield run, [operands, kind, one, one, (0.9, 0.999)]


def call(function: Any, inputs: list[Any]) -> None:
    """Call a function, and its backward pass if there is one."""
    result = function(*inputs)
    results = [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor) and x.requires_grad]
    if results:
        leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        torch.autograd.grad(results, leaves, [torch.empty_like(x) for x in results])
