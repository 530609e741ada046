"""``hpcai bench step [PART ...]``: what each way of making a step faster brings here, each against its plain form.

    optimizer    our update with its average in one pass against torch's Adam and averages; on a GPU the part of the copy rate
    capture      CUDA Graphs of a network of many small operations against the same step started one by one (GPU only)
    sharded      the time of a divided update on 4 ranks against the undivided one, and bytes that each rank sends
    evaluation   the time of a step while an evaluation goes on, beside it and on a rank of its own, against none

CPU times are CPU seconds of one thread where nothing else is said; those of a GPU are wall seconds. Medians of alternating runs.
"""

import itertools
import os
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import nn

from hpcai import dist
from hpcai.cli.bench import gpu_clocks
from hpcai.cli.bench.timing import Row, alternate, finish, machine, on_ranks, parse, parser
from hpcai.settings import StepConfig, TrainConfig
from hpcai.train import Step, fit


def main(argv: Sequence[str]) -> int:
    made = parser("step", __doc__)
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--millions", type=float, default=10.0, help="millions of parameters that are updated")
    measure = {"optimizer": _optimizer, "capture": _capture, "sharded": _sharded, "evaluation": _evaluation}
    words = parse(made, list(measure), argv)
    torch.set_num_threads(1)
    return finish({"bench": "step", **machine()} | {part: measure[part](words) for part in words.parts}, words.parts, words.json)


def _layers(millions: float) -> nn.Module:
    """Parameters in the sizes of CosmoFlow's five convolutions and three dense layers, about that many in all."""
    generator = torch.Generator().manual_seed(0)
    shares = [0.0004, 0.006, 0.023, 0.09, 0.36, 0.5, 0.02]
    sizes = [size for share in shares for size in (max(int(share * millions * 1e6), 64), 64)]
    return nn.ParameterList([torch.randn(size, generator=generator) for size in sizes])


def _updates(millions: float, **words: Any) -> tuple[Callable[[], None], int]:
    """Our update of a step, its gradients being there."""
    step = Step(_layers(millions), lambda model, batch: {}, StepConfig.model_validate({"optimizer": "adam", **words}), dist.alone())
    step.sums.zero()
    for row in step.sums.rows:
        gradient = row.gradient()
        if gradient is not None:
            gradient.normal_()
    for parameter in step.model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.randn_like(parameter)
    skip = torch.zeros((), device=step.mesh.device)
    step.optimizer.set_rate(1e-3)
    return (lambda: step.optimizer.step(None, skip)), sum(p.numel() for p in step.model.parameters())


def _optimizer(words: Any) -> list[Row]:
    device = dist.alone().device
    plain = _layers(words.millions).to(device)
    for parameter in plain.parameters():
        parameter.grad = torch.randn_like(parameter)
    means = [p.detach().clone() for p in plain.parameters()]
    fused = device.type == "cuda"  # on a GPU the fairer yardstick is torch's own fused kernel
    how: Row = {"fused": True} if fused else {"foreach": False}
    adam = torch.optim.Adam(plain.parameters(), lr=1e-3, **how)

    def theirs() -> None:
        adam.step()
        with torch.no_grad():
            if fused:
                torch._foreach_lerp_(means, list(plain.parameters()), 0.001)
            else:
                for mean, parameter in zip(means, plain.parameters()):
                    mean.lerp_(parameter, 0.001)

    ours, count = _updates(words.millions, average=0.999)
    runs = {"torch": theirs, "ours": ours}
    seconds = alternate(runs, words.repeats)
    what = "Adam(fused) and foreach averages" if fused else "Adam(foreach=False) and a loop of averages"
    rows = [{"against": what, "millions": round(count / 1e6, 1), "torch_ms": _ms(seconds["torch"]), "ours_ms": _ms(seconds["ours"]),
             "ratio": round(seconds["torch"] / seconds["ours"], 2)}]  # fmt: skip
    if device.type == "cuda":
        source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copied = 2 * source.nbytes / alternate({"copy": lambda: target.copy_(source)}, words.repeats)["copy"]
        # Read: weights, gradient, two moments, average; written: all but the gradient. bf16-params: a narrow gradient, and a narrow
        # copy of the weights is written.
        moved = {"ours": (5 + 4) * 4 * count, "ours, bf16-params": ((4 + 4) * 4 + 2 + 2) * count}
        narrow, _ = _updates(words.millions, average=0.999, precision="bf16-params")
        runs = {name: _recorded(run) for name, run in (("ours", ours), ("ours, bf16-params", narrow))}
        spent = alternate(runs, words.repeats)
        for name, size in moved.items():
            rate = size / spent[name]
            both = {"gb_s": round(rate / 1e9), "copy_gb_s": round(copied / 1e9)}
            rows.append({"what": name, **both, "part": round(rate / copied, 3)})
    return rows


def _recorded(run: Callable[[], None]) -> Callable[[], None]:
    """``run`` as a CUDA Graph, which takes as long as its kernels: started one by one, small ones wait for the host."""
    graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        run()
    torch.cuda.current_stream().wait_stream(beside)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def small_operations(blocks: int = 24, channels: int = 64) -> Any:
    """A stack of normalisations, gates and small products, such as batch 1 of OpenFold: a GPU waits for the host between them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate = nn.LayerNorm(channels), nn.Linear(channels, channels)
            self.query, self.key, self.value = (nn.Linear(channels, channels, bias=False) for _ in range(3))
            self.out, self.wide = nn.Linear(channels, channels), nn.Linear(channels, 4 * channels)
            self.narrow = nn.Linear(4 * channels, channels)
            self.norm2 = nn.LayerNorm(channels)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            heads = [layer(y).unflatten(-1, (4, -1)).transpose(-2, -3) for layer in (self.query, self.key, self.value)]
            weights = torch.softmax(heads[0] @ heads[1].transpose(-1, -2) * (channels // 4) ** -0.5, -1)
            y = (weights @ heads[2]).transpose(-2, -3).flatten(-2)
            x = x + self.out(y * torch.sigmoid(self.gate(x)))
            return x + self.narrow(torch.relu(self.wide(self.norm2(x))))

    return nn.Sequential(*(Block() for _ in range(blocks)))


def _capture(words: Any) -> list[Row]:
    if not torch.cuda.is_available():
        return [{"left out": "there is no GPU"}]
    mesh = dist.alone()
    batch = torch.randn(1, 64, 64, device=mesh.device)
    steps, runs = 20, {}
    for how in ("none", "forward", "whole"):
        torch.manual_seed(0)
        cfg = StepConfig.model_validate({"precision": "bf16-params", "capture": how, "average": 0.999})
        step = Step(small_operations(), lambda model, x: {"loss": model(x).float().square().mean()}, cfg, mesh)
        runs[how] = partial(_several, step, batch, steps)
    seconds = {how: value / steps for how, value in alternate(runs, words.repeats).items()}
    row: Row = {f"{how}_ms": _ms(value) for how, value in seconds.items()}
    row |= {"forward_over_none": round(seconds["none"] / seconds["forward"], 2)}
    row |= {"whole_over_none": round(seconds["none"] / seconds["whole"], 2)}
    trace = gpu_clocks.traced(lambda i: runs["whole"](), 1)
    return [row | {name: trace[name] for name in ("gaps_percent", "idle_percent", "launches", "left_out_trace") if name in trace}]


def _several(step: Any, batch: Any, count: int) -> None:
    for _ in range(count):
        step(batch)


def _sharded(words: Any) -> list[Row]:
    ranks, given = 4, (words.millions, words.repeats)
    found = {shard: on_ranks(ranks, _share_of_update, (shard, *given)) for shard in ("none", "optimizer")}
    whole, divided = (statistics.median(seconds for seconds, _ in answers) for answers in found.values())
    sent = statistics.mean(sent for _, sent in found["optimizer"])
    return [{
        "ranks": ranks, "millions": words.millions, "whole_ms": _ms(whole), "divided_ms": _ms(divided),
        "ratio": round(divided / whole, 3), "sent_over_parameters": round(sent, 3), "expected": 2 * (ranks - 1) / ranks,
    }]  # fmt: skip


def _share_of_update(mesh: Any, shard: str, millions: float, repeats: int) -> tuple[float, float]:
    """CPU seconds of an update on this rank, and bytes sent over bytes of the parameters in a whole step."""
    step = Step(_layers(millions), lambda model, batch: {}, StepConfig.model_validate({"average": 0.999, "shard": shard}), mesh)
    skip, spent = torch.zeros(()), []
    step.optimizer.set_rate(1e-3)
    for _ in range(repeats + 2):
        torch_dist.barrier()
        began = time.thread_time()
        step.optimizer.step(None, skip)
        spent.append(time.thread_time() - began)
    torch_dist.barrier()
    before = bytes_sent()
    for _ in range(3):
        step.sums.zero()
        step.sums.finish()
        step.sums.spread()
        step.sums.settle()
    torch_dist.barrier()
    size = sum(p.nbytes for p in step.model.parameters())
    return statistics.median(spent[2:]), (bytes_sent() - before) / 3 / size


def bytes_sent() -> int:
    """Bytes that this process's TCP sockets have sent and had acknowledged."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                        info = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        count += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
        except OSError:
            continue
    return count


def _evaluation(words: Any) -> list[Row]:
    ways: dict[str, tuple[int, dict[str, int]]] = {
        "none": (1, {}), "wait": (1, {}), "background": (1, {}), "elsewhere": (2, {"evaluate": 1})
    }  # fmt: skip
    found: dict[str, list[tuple[float, float]]] = {how: [] for how in ways}
    for _ in range(3):  # one after the other, and what else the machine does only adds: the shortest of each
        for how, (world, sizes) in ways.items():
            found[how].append(on_ranks(world, _steps_beside, (how, 40), sizes)[0])
    step, total = ({how: min(each[i] for each in runs) for how, runs in found.items()} for i in (0, 1))
    return [
        {"evaluation": how, "step_ms": _ms(step[how]), "over_none": round(step[how] / step["none"], 3),
         "all_over_none": round(total[how] / total["none"], 3)} for how in ways if how != "none"
    ]  # fmt: skip


def _steps_beside(mesh: Any, how: str, steps: int) -> tuple[float, float]:
    """Median wall seconds of a step, and of all; the accelerator is emulated: it computes 50 ms while the host sleeps."""
    times: list[float] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> Row:
        times.append(time.perf_counter())
        time.sleep(0.05)
        return {"loss": model(batch).square().mean()}

    def metric(model: nn.Module, batch: torch.Tensor) -> Row:
        time.sleep(0.05)
        return {"error": (model(batch).square().sum(), len(batch))}

    step = Step(nn.Linear(512, 512), loss, StepConfig(), mesh)
    data, held_out = [torch.randn(8, 512)] * 10, [torch.randn(8, 512)] * 5
    cfg = TrainConfig.model_validate({"steps": steps, "evaluate": "background" if how == "background" else "wait"})
    given: Row = {} if how == "none" else {"validation": held_out, "evaluate": metric}
    fit(step, data, cfg, **given)
    gaps = sorted(b - a for a, b in itertools.pairwise(times))
    return (statistics.median(gaps), times[-1] - times[0]) if gaps else (0.0, 0.0)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
