"""``hpcai bench spatial``: a training step of the 3D U-Net whose volume is cut along its depth over processes of this machine.

Each number of ranks runs in processes of its own, one thread each (a GPU each where there are enough), in turns. Of each: wall
seconds of a step and how much faster than one rank that is; CPU seconds of the rank that needs most, as a share of those of one
rank, beside what the cost model says (docs/performance.md); the bytes that ranks send to one another, beside what the formula
says; and what a rank keeps for its backward pass, as a share of what one rank keeps. On a machine with fewer cores (or GPUs) than
ranks wall seconds mean nothing and are left out.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpcai.cli.bench.timing import finish, machine, parser


def main(argv: Sequence[str]) -> int:
    made = parser("spatial", __doc__)
    made.add_argument("--size", type=int, default=64, help="edge of the volume, voxels; 128 is that of MLPerf")
    made.add_argument("--divide", type=int, default=1, help="all widths by this, for a quick look")
    made.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    made.add_argument("--repeats", type=int, default=3, help="measured steps of each")
    made.add_argument("--rounds", type=int, default=1, help="turns of all numbers of ranks")
    made.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    made.add_argument("--one", type=Path, help="the file of one number of ranks, which another process waits for")
    words = made.parse_args(argv)
    if words.one:  # a process of one number of ranks
        words.one.write_text(json.dumps(_measure(words)))
        return 0
    runs: dict[int, list[dict[str, Any]]] = {ranks: [] for ranks in words.ranks}
    for _ in range(words.rounds):
        for ranks in words.ranks:
            runs[ranks].append(_launch(ranks, list(argv)))
    found: dict[str, Any] = {"bench": "spatial", "precision": words.precision, "size": words.size, **machine()}
    found["ranks"] = [_row(ranks, runs, words) for ranks in words.ranks]
    return finish(found, ("ranks",), words.json)


def _row(ranks: int, runs: dict[int, list[dict[str, Any]]], words: Any) -> dict[str, Any]:
    enough = ranks <= _places()
    seconds = {n: statistics.median(s for run in each for s in run["seconds"]) for n, each in runs.items()}
    first = runs[ranks][0]
    kept = runs[1][0]["kept"] if 1 in runs else None
    cpu = {n: statistics.median(s for run in each for s in run["cpu"]) for n, each in runs.items()}
    return {
        "ranks": ranks, "step_s": round(seconds[ranks], 3) if enough else None,
        "faster": round(seconds[1] / seconds[ranks], 3) if enough and 1 in runs else None,
        "cpu_share": round(cpu[ranks] / cpu[1], 3) if 1 in runs else None, "model": round(first["work"], 3),
        "sent_mb": round(first["sent"] / 1e6, 3), "formula_mb": round(first["formula"] / 1e6, 3), "messages": first["messages"],
        "kept_mb": round(first["kept"] / 1e6, 1), "share": round(first["kept"] / kept, 3) if kept else None,
    }  # fmt: skip


def _places() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def _launch(ranks: int, argv: list[str]) -> dict[str, Any]:
    """What the ranks found: their slowest times, the sum of what they sent, the most that one keeps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        started = []
        for rank, file in enumerate(files):
            code = f"import sys; from hpcai.cli.bench import main; sys.exit(main({['spatial', *argv, '--one', str(file)]!r}))"
            here = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
            env = {**os.environ, **{key: str(value) for key, value in here.items()}, "MASTER_ADDR": "127.0.0.1"}
            env["OMP_NUM_THREADS"] = "1"
            started.append(subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"bench spatial: ranks of {ranks} ended with {codes}; see what they wrote above")
        found = [json.loads(file.read_text()) for file in files]
    return {
        "seconds": [max(times) for times in zip(*(one["seconds"] for one in found))],
        "cpu": [max(times) for times in zip(*(one["cpu"] for one in found))], "work": found[0]["work"],
        "sent": sum(one["sent"] for one in found), "formula": found[0]["formula"], "kept": max(one["kept"] for one in found),
        "messages": max(one["messages"] for one in found),
    }  # fmt: skip


def _measure(words: Any) -> dict[str, Any]:
    import torch

    from hpcai import dist, train
    from hpcai.dist.collect import gather_objects
    from hpcai.models import unet3d
    from hpcai.settings import StepConfig

    torch.set_num_threads(1)
    widths = tuple(n // words.divide for n in unet3d.UNet3DConfig().filters)
    cfg = unet3d.UNet3DConfig(filters=widths, window=(words.size,) * 3)
    world = int(os.environ["WORLD_SIZE"])
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
                seconds.append(_until_done(mesh.device) - began)
                cpu.append(time.process_time() - used)
            else:  # not timed: the first step, whose saved tensors are counted
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                    step(batch)
            sent, messages = cut.traffic.sent - before[0], cut.traffic.messages - before[1]
        size = 2 if words.precision == "bf16" else 4
        return {"seconds": seconds, "cpu": cpu, "sent": sent, "messages": messages, "kept": sum(kept.values()),
                "formula": formula(cfg, world, cut.least) * size, "work": work(cfg, world, cut.least)}  # fmt: skip


def _until_done(device: Any) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def work(cfg: Any, ranks: int, least: int = 2) -> float:
    """Multiplications of one rank for a step, as a share of all of them: a level that is cut is shared, one that is not is
    computed by each. The layer between the two is computed in parts."""
    depth, height, width = cfg.window
    widths = [*cfg.filters, cfg.filters[-1]]

    def layer(level: int, inputs: int, outputs: int, kernel: int, passes: int = 3) -> float:
        return passes * kernel * inputs * outputs * ((depth * height * width) >> 3 * level)

    shared = whole = 0.0
    for level, here in enumerate(widths):
        is_cut = ranks > 1 and depth >> level >= ranks * least
        above = layer(level, widths[level - 1] if level else cfg.channels, here, 27, 3 if level else 2)
        rest = layer(level, here, here, 27)
        if level < len(cfg.filters):
            up = layer(level, 2 * here, here, 27) + layer(level, here, here, 27)
            rest += up + layer(level + 1, widths[level + 1], here, 8)
        if level == 0:
            rest += layer(0, here, len(cfg.classes), 1)
        shared += above * (is_cut or depth >> level >= ranks > 1) + rest * is_cut
        whole += above * (not (is_cut or depth >> level >= ranks > 1)) + rest * (not is_cut)
    return (shared / ranks + whole) / (shared + whole)


def formula(cfg: Any, ranks: int, least: int = 2, batch: int = 1) -> int:
    """Numbers that the ranks of a 3D U-Net cut along its depth send to one another for one step, forward and backward, in all.

    A layer of stride 1 needs a slice from either neighbour, one of stride 2 from the one below; a transposed one and the last need
    none. The image has no gradient. The first level that is not cut is joined on every rank, as are its gradients.
    """
    if ranks == 1:
        return 0
    depth, height, width = cfg.window
    widths = [*cfg.filters, cfg.filters[-1]]

    def slices(level: int, channels: int) -> int:
        return (ranks - 1) * channels * (height >> level) * (width >> level) * batch

    total = 2 * slices(0, cfg.channels) + 4 * slices(0, widths[0])  # the first layer: forward only
    for level in range(1, len(widths)):
        fine, here = (depth >> up >= ranks * least for up in (level - 1, level))
        if here:
            total += 2 * slices(level - 1, widths[level - 1]) + 4 * slices(level, widths[level])
        elif fine:
            whole = (depth >> level) * (height >> level) * (width >> level) * batch
            if depth >> level >= ranks:  # computed in parts, then joined
                total += 2 * slices(level - 1, widths[level - 1]) + 2 * (ranks - 1) * widths[level] * whole
            else:
                total += 2 * (ranks - 1) * widths[level - 1] * 8 * whole
    for level in range(len(cfg.filters)):
        if depth >> level >= ranks * least:
            total += 4 * slices(level, 2 * widths[level]) + 4 * slices(level, widths[level])
    return total
