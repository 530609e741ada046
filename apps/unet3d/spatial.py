"""What cutting a volume along its depth costs and gains:  hpcai bench unet3d spatial [mesh.depth=8 step.precision=bf16 ...]"""

import math
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from hpcai import train
from hpcai.cli.bench.timing import Row, doublings, on_ranks
from hpcai.dist import Mesh
from hpcai.dist.collect import gather_objects
from hpcai.models.unet3d import Batch, UNet3D, loss, parallelize


def spatial(cfg: Any, repeats: int) -> list[Row]:
    """A training step of one volume of ``model.window``, cut over 1, 2 and 4 processes of this machine (1, 2, ... ``mesh.depth``
    where that is given), on one CPU thread each.

    Wall seconds of a step and how much faster than one rank that is; CPU seconds of the rank that needs most, as a share of those
    of one rank, beside the share by the cost model (docs/performance.md); the bytes that ranks send to one another, beside those
    by the formula; and the bytes that a rank keeps for its backward pass, also as a share of those of one rank. On a machine with
    fewer cores than ranks wall seconds mean nothing and are left out.
    """
    rows, alone = list[Row](), dict[str, float]()
    for ranks in doublings(cfg.mesh.depth if cfg.mesh.depth > 1 else 4):
        every = on_ranks(ranks, _measure, (cfg, repeats), {"replicate": 1, "depth": ranks})
        most = {what: max(one[what] for one in every) for what in ("wall", "cpu", "kept", "messages")}
        alone, enough = alone or most, ranks <= len(os.sched_getaffinity(0))
        rows.append({
            "ranks": ranks, "step_s": round(most["wall"], 3) if enough else None,
            "faster": round(alone["wall"] / most["wall"], 3) if enough else None,
            "cpu_share": round(most["cpu"] / alone["cpu"], 3), "model": round(every[0]["work"], 3),
            "sent_mb": round(sum(one["sent"] for one in every) / 1e6, 3), "formula_mb": round(every[0]["formula"] / 1e6, 3),
            "messages": most["messages"], "kept_mb": round(most["kept"] / 1e6, 1), "share": round(most["kept"] / alone["kept"], 3),
        })  # fmt: skip
    return rows


def _measure(mesh: Mesh, cfg: Any, repeats: int) -> Row:
    shape, world = cfg.model, mesh["depth"].size
    torch.manual_seed(0)
    model: Any = parallelize(UNet3D(shape), mesh)
    cut, step = model.total.cut, train.Step(model, loss, cfg.step, mesh)
    part, random = (slice(None), *cut.part(shape.window)), torch.Generator().manual_seed(1)
    image = torch.randn(1, *shape.window, generator=random)[part]
    label = torch.randint(0, len(shape.classes), (1, *shape.window), generator=random, dtype=torch.uint8)[part]
    kept: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(Batch(image, label))
    clocks = []
    for _ in range(repeats):
        before = cut.traffic.sent, cut.traffic.messages
        gather_objects(0, mesh.everyone)
        began = time.perf_counter(), time.process_time()
        step(Batch(image, label))
        clocks.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    wall, cpu = (statistics.median(each) for each in zip(*clocks))
    size = 4 if cfg.step.precision == "fp32" else 2
    return {
        "wall": wall, "cpu": cpu, "sent": cut.traffic.sent - before[0], "messages": cut.traffic.messages - before[1],
        "kept": sum(kept.values()), "formula": formula(shape, world, cut.least) * size, "work": work(shape, world, cut.least),
    }  # fmt: skip


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
