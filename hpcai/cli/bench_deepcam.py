"""``hpcai bench deepcam [PART ...]``: a training step of DeepCAM against a plain network of the same layers.

    steps    forward and backward of ours and of the plain network (contiguous, one operation after the other), in turns
    memory   the peak of each, in a process of its own
    group    batch norm of four ranks: over each one's own samples, over the group, and as torch's SyncBatchNorm does it
    profile  where the time of our step goes, by kind of operation

Times are CPU seconds of one thread (wall seconds on a GPU), medians. ``--precision auto`` is what an app takes; the plain network
is then measured in float32 too, as somebody who writes it down first would run it.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

PARTS = ("steps", "memory", "group", "profile")


def main(argv: Sequence[str]) -> int:
    from hpcai.cli.bench import _machine, finish, parser_of_parts

    parser = parser_of_parts("deepcam", __doc__, PARTS)
    parser.add_argument("--maps", nargs="+", default=["384x576"], help="cells of a map, HEIGHTxWIDTH")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2], help="maps per step")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each network")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), nargs="+", default=["fp32", "auto"])
    parser.add_argument("--one", choices=("ours", "plain"), help=argparse.SUPPRESS)
    words = parser.parse_args(argv)
    sizes = [tuple(int(n) for n in text.split("x")) for text in words.maps]
    if words.one:  # the process that memory starts
        print(json.dumps({"mb": _peak(words.one, sizes[0], words.batches[0], words.precision[0])}))
        return 0
    parts = words.parts
    found: dict[str, Any] = {"bench": "deepcam", **_machine()}
    if "steps" in parts:
        found["steps"] = [
            _steps(size, batch, words.repeats, precision)
            for size in sizes for batch in words.batches for precision in words.precision
        ]  # fmt: skip
    if "memory" in parts:
        found["memory"] = [_memory(size, words.batches[0], words.precision[0]) for size in sizes]
    if "group" in parts:
        found["group"] = _group(words.repeats)
    if "profile" in parts:
        found["profile"] = [_profile(sizes[0], words.batches[0], precision) for precision in words.precision]
    return finish(found, PARTS, words.json)


def plain_network(seed: int = 0) -> Any:
    """The same layers and weights as anybody writes them down: contiguous, torch's own, one operation after the other."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from hpcai.models.deepcam import DeepCam
    from hpcai.nn import BatchNorm, Conv2d, ConvTranspose2d

    class Usual(BatchNorm):
        def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
            y = nn.BatchNorm2d.forward(self, x)
            y = y if plus is None else y.add_(plus)
            return F.relu(y, inplace=True) if self.relu else y

    class Contiguous(DeepCam):
        def scaled(self, fields: Tensor) -> Tensor:
            return super().scaled(fields).contiguous()

        def forward(self, x: Tensor) -> Tensor:
            features, low = self.xception_features(x)
            return self.upsample(self.bottleneck(features), self.bn2(self.conv2(low)))

    torch.manual_seed(seed)
    model = Contiguous()
    for layer in model.modules():
        if type(layer) is Conv2d:
            layer.__class__ = nn.Conv2d
        elif type(layer) is ConvTranspose2d:
            layer.__class__ = nn.ConvTranspose2d
        elif type(layer) is BatchNorm:
            layer.__class__ = Usual
    return model.to(memory_format=torch.contiguous_format)


def _setup(kind: str, size: tuple[int, ...], batch: int, precision: str) -> Callable[[], None]:
    """Forward and backward of one network, which wait for the device."""
    import torch

    from hpcai.cli.bench import forward_backward
    from hpcai.models import deepcam
    from hpcai.train.choices import fast_bf16

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    narrow = precision == "bf16" or (precision == "auto" and kind == "ours" and fast_bf16(device))
    generator = torch.Generator().manual_seed(1)
    fields = torch.rand(batch, *size, 16, generator=generator).to(device)
    mask = torch.randint(0, 3, (batch, *size), dtype=torch.uint8, generator=generator).to(device)
    torch.manual_seed(0)
    model = (deepcam.DeepCam() if kind == "ours" else plain_network()).to(device)
    return forward_backward(model, lambda: deepcam.loss(model, deepcam.Batch(fields, mask))["loss"], device, narrow)


def _steps(size: tuple[int, ...], batch: int, repeats: int, precision: str) -> dict[str, Any]:
    import torch

    from hpcai.cli.bench import _alternate

    times = _alternate({kind: _setup(kind, size, batch, precision) for kind in ("plain", "ours")}, repeats)
    clock = int(torch.cuda.is_available())
    spent = {kind: statistics.median(t[clock] for t in rows) for kind, rows in times.items()}
    return {
        "map": "x".join(map(str, size)), "batch": batch, "precision": precision, "plain_s": round(spent["plain"], 3),
        "ours_s": round(spent["ours"], 3), "ratio": round(spent["plain"] / spent["ours"], 3),
    }  # fmt: skip


def _peak(kind: str, size: tuple[int, ...], batch: int, precision: str) -> int:
    from hpcai.cli.bench import high_water

    run = _setup(kind, size, batch, precision)
    for _ in range(2):
        run()
    return round(high_water())


def _memory(size: tuple[int, ...], batch: int, precision: str) -> dict[str, Any]:
    from hpcai.cli.bench import peak_of

    text = "x".join(map(str, size))
    words = ["deepcam", "--maps", text, "--batches", str(batch), "--precision", precision]
    peak = {f"{kind}_mb": round(peak_of([*words, "--one", kind])) for kind in ("plain", "ours")}
    return {"map": text, "batch": batch, "precision": precision, **peak}


def _group(repeats: int) -> list[dict[str, Any]]:
    from hpcai.cli.bench_step import _on_ranks

    rows = []
    for shape in ((1, 128, 96, 144), (1, 728, 24, 36)):
        found = _on_ranks(4, _norms, (shape, 5 * repeats))
        local, group, theirs = (statistics.median(row[i] for row in found) for i in range(3))
        rows.append({
            "layer": "x".join(map(str, shape)), "ranks": 4, "local_ms": round(1e3 * local, 3), "group_ms": round(1e3 * group, 3),
            "sync_ms": round(1e3 * theirs, 3), "group_overhead": round(group / local - 1, 3),
            "sync_overhead": round(theirs / local - 1, 3),
        })  # fmt: skip
    return rows


def _norms(mesh: Any, shape: tuple[int, ...], repeats: int) -> tuple[float, ...]:
    """CPU seconds of forward and backward of one batch norm with rectifier: alone, of the group, and as SyncBatchNorm does it."""
    import torch
    import torch.distributed as torch_dist
    from torch import nn

    from hpcai.cli.bench import _alternate
    from hpcai.nn import BatchNorm
    from hpcai.parallel.batchnorm import group_batch_norm

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
    _alternate({str(i): of(norm) for i, norm in enumerate(spent)}, repeats)
    return tuple(statistics.median(times[2:]) for times in spent.values())


def synchronised(channels: int) -> Any:
    """The steps of torch's SyncBatchNorm, which does not run on a CPU itself: every rank gathers everybody's mean, deviation and
    count; backward one sum; then a rectifier as an operation of its own."""
    import torch
    import torch.distributed as torch_dist
    from torch import Tensor, nn

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


def _profile(size: tuple[int, ...], batch: int, precision: str) -> dict[str, Any]:
    """Shares of the time of one step of ours, by kind of operation."""
    from hpcai.cli.bench import shares

    return {"precision": precision, **shares(_setup("ours", size, batch, precision), "batch norm and rectifier")}
