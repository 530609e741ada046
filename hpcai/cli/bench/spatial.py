"""``hpcai bench spatial``: a training step of the 3D U-Net whose volume is cut along its depth over processes of this machine.

Each number of ranks runs in processes of its own, one thread each (a GPU each where there are enough), in turns. A row has wall
seconds of a step and how much faster than one rank that is; CPU seconds of the rank that needs most, as a share of those of one
rank, beside the share by the cost model (docs/performance.md); the bytes that ranks send to one another, beside those by the
formula; and the bytes that a rank keeps for its backward pass, as a share of those of one rank. On a machine with fewer cores (or
GPUs) than ranks wall seconds mean nothing and are left out.
"""

import math
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hpcai import dist, train
from hpcai.cli.bench.timing import Row, finish, machine, parser, processes, wait
from hpcai.dist.collect import gather_objects
from hpcai.models import unet3d
from hpcai.settings import StepConfig


def main(argv: Sequence[str]) -> int:
    made = parser("spatial", __doc__)
    made.add_argument("--size", type=int, default=64, help="edge of the volume, voxels; 128 is that of MLPerf")
    made.add_argument("--divide", type=int, default=1, help="all widths by this, for a quick look")
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    made.add_argument("--repeats", type=int, default=3, help="measured steps of each")
    made.add_argument("--rounds", type=int, default=1, help="turns of all numbers of ranks")
    made.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    words = made.parse_args(argv)
    runs: dict[int, list[Row]] = {ranks: [] for ranks in words.ranks}
    for _ in range(words.rounds):
        for ranks in words.ranks:
            runs[ranks].append(_launch(ranks, words))
    found: Row = {"bench": "spatial", "precision": words.precision, "size": words.size, **machine()}
    found["ranks"] = [_row(ranks, runs) for ranks in words.ranks]
    return finish(found, ("ranks",), words.json)


def _row(ranks: int, runs: dict[int, list[Row]]) -> Row:
    enough = ranks <= (torch.cuda.device_count() if torch.cuda.is_available() else len(os.sched_getaffinity(0)))
    seconds, cpu = (
        {n: statistics.median(s for run in each for s in run[clock]) for n, each in runs.items()} for clock in ("seconds", "cpu")
    )
    first = runs[ranks][0]
    kept = runs[1][0]["kept"] if 1 in runs else None
    return {
        "ranks": ranks, "step_s": round(seconds[ranks], 3) if enough else None,
        "faster": round(seconds[1] / seconds[ranks], 3) if enough and 1 in runs else None,
        "cpu_share": round(cpu[ranks] / cpu[1], 3) if 1 in runs else None, "model": round(first["work"], 3),
        "sent_mb": round(first["sent"] / 1e6, 3), "formula_mb": round(first["formula"] / 1e6, 3), "messages": first["messages"],
        "kept_mb": round(first["kept"] / 1e6, 1), "share": round(first["kept"] / kept, 3) if kept else None,
    }  # fmt: skip


def _launch(ranks: int, words: Any) -> Row:
    """What the ranks found: their slowest times, the sum of what they sent, the most that one keeps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": probe.getsockname()[1]}
    with processes(ranks) as pool:
        started = [pool.submit(_measure, place | {"RANK": rank, "LOCAL_RANK": rank}, words) for rank in range(ranks)]
        found = [rank.result() for rank in started]
    return {
        **found[0], **{clock: [max(times) for times in zip(*(one[clock] for one in found))] for clock in ("seconds", "cpu")},
        "sent": sum(one["sent"] for one in found), **{what: max(one[what] for one in found) for what in ("kept", "messages")},
    }  # fmt: skip


def _measure(place: dict[str, Any], words: Any) -> Row:
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    widths = tuple(n // words.divide for n in unet3d.UNet3DConfig().filters)
    cfg = unet3d.UNet3DConfig(filters=widths, window=(words.size,) * 3)
    world = place["WORLD_SIZE"]
    with dist.start({"replicate": 1, "depth": world}) as mesh:
        torch.manual_seed(0)
        model: Any = unet3d.parallelize(unet3d.UNet3D(cfg), mesh)
        cut = model.total.cut
        step = train.Step(model, unet3d.loss, StepConfig.model_validate({"optimizer": "sgd", "precision": words.precision}), mesh)
        part = cut.part(cfg.window)
        image = torch.randn(1, *cfg.window, generator=torch.Generator().manual_seed(1))[(slice(None), *part)]
        label = torch.randint(0, 3, (1, *cfg.window), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
        batch = unet3d.Batch(image.to(mesh.device), label[(slice(None), *part)].to(mesh.device))
        kept: dict[int, int] = {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor: Any) -> Any:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        seconds, cpu = [], []
        for repeat in range(words.repeats + 1):
            before = cut.traffic.sent, cut.traffic.messages
            gather_objects(0, mesh.everyone)
            began, used = time.perf_counter(), time.process_time()
            if repeat:
                step(batch)
                wait()
                seconds.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
            else:  # not timed: the first step, whose saved tensors are counted
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    step(batch)
            sent, messages = cut.traffic.sent - before[0], cut.traffic.messages - before[1]
        size = 2 if words.precision == "bf16" else 4
        return {"seconds": seconds, "cpu": cpu, "sent": sent, "messages": messages, "kept": sum(kept.values()),
                "formula": formula(cfg, world, cut.least) * size, "work": work(cfg, world, cut.least)}  # fmt: skip


def _layers(cfg: Any) -> Iterator[tuple[str, int, int, int]]:
    """Kind, level, inputs and outputs of each convolution of a 3D U-Net. A level has half the slices of the one above it."""
    widths = [*cfg.filters, cfg.filters[-1]]
    for level, here in enumerate(widths):
        yield ("down", level, widths[level - 1], here) if level else ("first", 0, cfg.channels, here)
        yield "same", level, here, here
        if level < len(cfg.filters):
            yield "up", level, widths[level + 1], here
            yield "same", level, 2 * here, here
            yield "same", level, here, here
    yield "point", 0, cfg.filters[0], len(cfg.classes)


_PRODUCTS = {"first": 2 * 27, "down": 3 * 27, "same": 3 * 27, "up": 3 * 8, "point": 3}
"""Products for each voxel, by kind of layer: those of its kernel, forward and for both gradients. The image has no gradient."""


def work(cfg: Any, ranks: int, least: int = 2) -> float:
    """Multiplications of one rank for a step, as a share of all of them: a level that is cut is shared, one that is not is
    computed by each. The layer between the two is computed in parts."""
    shared = whole = 0.0
    for kind, level, inputs, outputs in _layers(cfg):
        spent = _PRODUCTS[kind] * inputs * outputs * (math.prod(cfg.window) >> 3 * (level + (kind == "up")))
        if cfg.window[0] >> level >= ranks * (1 if kind in ("first", "down") else least):
            shared += spent
        else:
            whole += spent
    return (shared / ranks + whole) / (shared + whole)


def formula(cfg: Any, ranks: int, least: int = 2) -> int:
    """Numbers that the ranks of a 3D U-Net cut along its depth send to one another for one step, forward and backward, in all.

    A layer of stride 1 needs a slice from either neighbour, one of stride 2 from the one below; a transposed one and the last need
    none. The image has no gradient. The first level that is not cut is joined on every rank, as are its gradients.
    """
    depth, height, width = cfg.window

    def slices(level: int, channels: int) -> int:
        return (ranks - 1) * channels * (height >> level) * (width >> level)

    total = 0
    for kind, level, inputs, outputs in _layers(cfg):
        here, above = depth >> level, depth >> max(level - 1, 0)
        if kind == "first":
            total += 2 * slices(0, inputs)
        elif kind == "same" and here >= ranks * least:
            total += 4 * slices(level, inputs)
        elif kind == "down" and above >= ranks * least:
            total += 2 * slices(level - 1, inputs) * (1 if here >= ranks else above)
            if ranks <= here < ranks * least:  # computed in parts, then joined
                total += 2 * slices(level, outputs) * here
    return total
