"""What batch norm over a group of copies costs:  hpcai bench deepcam group"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from hpcai.cli.bench.timing import Row, alternate, on_ranks
from hpcai.nn import BatchNorm
from hpcai.parallel.batchnorm import group_batch_norm


def group_norms(cfg: Any, repeats: int) -> list[Row]:
    """Batch norm of four ranks: over each one's own samples, over the group, and as torch's SyncBatchNorm does it."""
    rows = []
    for shape in ((1, 128, 96, 144), (1, 728, 24, 36)):
        found = on_ranks(4, _norms, (shape, 5 * repeats))
        local, group, theirs = (statistics.median(row[i] for row in found) for i in range(3))
        rows.append({
            "layer": "x".join(map(str, shape)), "ranks": 4, "local_ms": round(1e3 * local, 3), "group_ms": round(1e3 * group, 3),
            "sync_ms": round(1e3 * theirs, 3), "group_overhead": round(group / local - 1, 3),
            "sync_overhead": round(theirs / local - 1, 3),
        })  # fmt: skip
    return rows


def _norms(mesh: Any, shape: tuple[int, ...], repeats: int) -> tuple[float, ...]:
    """CPU seconds of forward and backward of one batch norm with rectifier: alone, of the group, and as SyncBatchNorm does it."""
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn(shape).contiguous(memory_format=torch.channels_last)
    local, group = BatchNorm(shape[1], relu=True), nn.Sequential(BatchNorm(shape[1], relu=True))
    group_batch_norm(group, mesh, mesh["replicate"].size)
    theirs = synchronised(shape[1])

    def of(norm: nn.Module) -> Callable[[], None]:
        def run() -> None:
            torch_dist.barrier()  # what one rank waits for another is no cost of either
            began = time.process_time()
            x.grad = None
            norm(x).backward(dy)
            spent[norm].append(time.process_time() - began)

        return run

    spent: dict[nn.Module, list[float]] = {local: [], group: [], theirs: []}
    alternate({str(i): of(norm) for i, norm in enumerate(spent)}, repeats)
    return tuple(statistics.median(times[2:]) for times in spent.values())


def synchronised(channels: int) -> Any:
    """The steps of torch's SyncBatchNorm, which does not run on a CPU itself: every rank gathers the means, deviations and
    counts of all; backward one sum; then a rectifier as an operation of its own."""
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
            scratch = torch.zeros(x.shape[1])
            mean, variance = torch.batch_norm_update_stats(x, scratch, scratch.clone(), 0.0)
            own = torch.cat((mean, (variance + eps).rsqrt(), torch.tensor([x.numel() / x.shape[1]])))
            every = [torch.empty_like(own) for _ in range(torch_dist.get_world_size())]
            torch_dist.all_gather(every, own)
            means, invstds, counts = torch.stack(every).split((x.shape[1], x.shape[1], 1), 1)
            mean = (means * counts).sum(0) / counts.sum()
            variance = ((invstds**-2 - eps + (means - mean).square()) * counts).sum(0) / counts.sum()
            invstd = (variance + eps).rsqrt()
            ctx.save_for_backward(x, weight, mean, invstd, counts.sum())
            return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, eps=eps)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            x, weight, mean, invstd, count = ctx.saved_tensors
            _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
                dy, x, torch.ones_like(mean), mean, invstd**-2, mean, invstd, True, 0.0, (False, True, True)
            )
            both = torch.cat((by_weight, by_bias))
            torch_dist.all_reduce(both)
            a, b = (both / count).chunk(2)
            shape = (1, -1, 1, 1)
            scale = weight * invstd
            dx = dy * scale.view(shape) - x * (scale * invstd * a).view(shape) + (scale * (mean * invstd * a - b)).view(shape)
            return dx, by_weight, by_bias, None

    class Synchronised(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(Function.apply(x, self.weight, self.bias, self.eps))

    return Synchronised(channels)
