"""``hpcai bench NAME``: ours against a plain network of the same layers, in the same process, on the same input.

Times are CPU seconds of one thread (wall seconds on a GPU), medians of repeated steps that alternate between the two, so that
a busy machine slows both. The ratio is what counts. ``hpcai bench deepcam --help`` is about DeepCAM, ``unet3d --help`` about the 3D
U-Net, ``opencatalyst --help`` about DimeNet++, ``openfold --help`` about OpenFold, ``data --help`` about reading samples, ``step
--help`` about ways to make a step faster; ``hpcai bench all`` measures each of them briefly, in ten minutes.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

NAMES = ("cosmoflow", "deepcam", "unet3d", "opencatalyst", "openfold", "spatial", "data", "step", "all")
# What fits ten minutes on one GPU.
ALL = {
    "step": ["step", "--repeats", "5"],
    "step of 100 million parameters": ["step", "optimizer", "--repeats", "5", "--millions", "100"],
    "cosmoflow": ["cosmoflow", "--repeats", "3"],
    "deepcam": ["deepcam", "--repeats", "3", "--precision", "fp32", "bf16"],
    "unet3d": ["unet3d", "--repeats", "3", "--size", "128", "--precision", "fp32", "bf16"],
    "opencatalyst": ["opencatalyst", "--repeats", "3"],
    "openfold": ["openfold", "steps", "memory", "build", "--repeats", "1"],
    "data": ["data", "direct", "peers", "--repeats", "1", "--gib", "1"],
}


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("data", "deepcam", "opencatalyst", "openfold", "spatial", "step", "unet3d"):
        return int(import_module(f"hpcai.cli.bench_{argv[0]}").main(argv[1:]))
    if argv and argv[0] == "all":
        return _all("--json" in argv)
    parser = argparse.ArgumentParser(prog="hpcai bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="edges of the cube, cells")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="samples per step")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps of each network")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--memory", action="store_true", help="measure only the peak memory of training, one process each")
    parser.add_argument("--loop", action="store_true", help="measure only what fit costs around its steps")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    parser.add_argument("--one", choices=("ours", "plain"), help=argparse.SUPPRESS)
    words = parser.parse_args(argv)
    if words.one:  # the process that --memory starts
        print(json.dumps(_peak(words.one, words.sizes[0], words.batches[0], words.precision)))
        return 0
    found: dict[str, Any] = {"bench": words.name, "precision": words.precision, **_machine()}
    every = not (words.memory or words.loop)
    if every:
        found["steps"] = [_steps(size, batch, words.repeats, words.precision) for size in words.sizes for batch in words.batches]
    if words.memory or every:
        found["memory"] = [_memory(size, words.batches[0], words.precision) for size in words.sizes]
    if words.loop or every:
        found["loop"] = _loop(words.sizes[0], words.repeats)
    return finish(found, ("steps", "memory", "loop"), words.json)


def _all(quiet: bool) -> int:
    """Each benchmark in a process of its own; one that fails is told and the others go on."""
    found: dict[str, Any] = {}
    for name, words in ALL.items():
        code = f"import sys; from hpcai.cli.bench import main; sys.exit(main({[*words, '--json']!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        failed = done.returncode != 0 or not lines
        last = (done.stderr.strip().splitlines() or ["no word of why"])[-1]
        found[name] = {"failed": last} if failed else json.loads(lines[-1])
        if not quiet:
            print(f"{name}: {last if failed else json.dumps(found[name], indent=1)}", flush=True)
    print(json.dumps(found))
    return int(any("failed" in entry for entry in found.values()))


def _machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__, "device": device, "threads": 1, "load": round(os.getloadavg()[0], 1)}


def _setup(kind: str, size: int, batch: int, precision: str) -> Callable[[], None]:
    """A training step of one network, which waits for the device."""
    import torch

    from hpcai import dist
    from hpcai.models import cosmoflow
    from hpcai.settings import StepConfig
    from hpcai.train import Step

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    counts = torch.randint(0, 100, (batch, size, size, size, 4), dtype=torch.int16, device=device)
    target = torch.rand(batch, 4, device=device)
    cfg = cosmoflow.CosmoFlowConfig(size=size, dropout=0.0)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    if kind == "ours":
        step = Step(
            cosmoflow.CosmoFlow(cfg),
            cosmoflow.loss,
            StepConfig.model_validate({"optimizer": "sgd", "precision": precision}),
            dist.alone(device),
        )

        def ours() -> None:
            step(cosmoflow.Batch(counts, target))
            sync()

        return ours
    model = plain_network(size).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def plain() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            x = torch.log1p(counts.permute(0, 4, 1, 2, 3).float().contiguous())
            loss = torch.nn.functional.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        sync()

    return plain


def plain_network(size: int) -> Any:
    """The same layers as anybody writes them down: contiguous, one operation after the other."""
    from itertools import pairwise

    from torch import nn

    widths, layers = [4, 32, 64, 128, 256, 512], []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Conv3d(inputs, outputs, 3, padding=1), nn.LeakyReLU(0.3), nn.MaxPool3d(2)]
    dense = [
        nn.Linear(512 * (size // 32) ** 3, 128),
        nn.LeakyReLU(0.3),
        nn.Linear(128, 64),
        nn.LeakyReLU(0.3),
        nn.Linear(64, 4),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


def _steps(size: int, batch: int, repeats: int, precision: str) -> dict[str, Any]:
    times = _alternate({kind: _setup(kind, size, batch, precision) for kind in ("plain", "ours")}, repeats)
    cpu = {kind: statistics.median(t[0] for t in times[kind]) for kind in times}
    wall = {kind: statistics.median(t[1] for t in times[kind]) for kind in times}
    return {
        "size": size, "batch": batch, "plain_cpu_s": round(cpu["plain"], 4), "ours_cpu_s": round(cpu["ours"], 4),
        "ratio_cpu": round(cpu["plain"] / cpu["ours"], 3), "plain_wall_s": round(wall["plain"], 4),
        "ours_wall_s": round(wall["ours"], 4), "ratio_wall": round(wall["plain"] / wall["ours"], 3),
    }  # fmt: skip


def _alternate(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, wall seconds) of every repeat, after two that are not counted."""
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in runs}
    gc.collect()
    for repeat in range(repeats + 2):
        for kind, run in list(runs.items())[:: 1 if repeat % 2 else -1]:
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            if repeat >= 2:
                times[kind].append((time.process_time() - cpu, time.perf_counter() - wall))
    return times


def _peak(kind: str, size: int, batch: int, precision: str) -> dict[str, float]:
    run = _setup(kind, size, batch, precision)
    for _ in range(3):
        run()
    return {"mb": high_water()}


def high_water() -> float:
    """The most memory that this process has held so far, MB: of the GPU where there is one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    # Not getrusage, whose maximum a child takes over from its parent.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def _memory(size: int, batch: int, precision: str) -> dict[str, Any]:
    words = ["cosmoflow", "--sizes", str(size), "--batches", str(batch), "--precision", precision]
    peak = {kind: peak_of([*words, "--one", kind]) for kind in ("plain", "ours")}
    return {"size": size, "batch": batch, "plain_mb": round(peak["plain"]), "ours_mb": round(peak["ours"])}


def peak_of(words: Sequence[str]) -> float:
    return float(apart(words)["mb"])


def apart(words: Sequence[str]) -> dict[str, Any]:
    """What ``hpcai bench`` with these words prints last, in a process of its own."""
    code = f"import sys; from hpcai.cli.bench import main; sys.exit(main({list(words)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _loop(size: int, repeats: int) -> dict[str, Any]:
    """What ``fit`` costs around what a bare loop does: clearing gradients, forward, backward, update. CPU seconds of one step.

    Both are measured in the same steps: two separate loops differ by 5 % and more on their own, with the luck of the page tables.
    """
    import torch

    from hpcai import dist
    from hpcai.models import cosmoflow
    from hpcai.settings import StepConfig, TrainConfig
    from hpcai.train import Step, fit

    torch.set_num_threads(1)
    torch.manual_seed(0)
    cfg = cosmoflow.CosmoFlowConfig(size=size, dropout=0.0)
    counts = torch.randint(0, 100, (1, size, size, size, 4), dtype=torch.int16)
    batch = cosmoflow.Batch(counts, torch.rand(1, 4))
    step = Step(cosmoflow.CosmoFlow(cfg), cosmoflow.loss, StepConfig(optimizer="sgd"), dist.alone(torch.device("cpu")))
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments)
            finally:
                spent[0] += time.process_time() - began

        return call

    def bare(model: Any, part: Any) -> Any:
        values = cosmoflow.loss(model, part)
        values["loss"].backward()
        return values

    step.sums.zero = timed(step.sums.zero)
    step.forward_backward = timed(bare)
    step.optimizer.step = timed(step.optimizer.step)
    steps, rows = 25, []
    for repeat in range(repeats + 1):
        spent[0], began = 0.0, time.process_time()
        fit(step, [batch], TrainConfig(steps=steps, report_every=steps, collect_every=None))  # collects garbage once, at its start
        if repeat:
            rows.append((spent[0] / steps, (time.process_time() - began) / steps))
    inside, whole = (statistics.median(row[i] for row in rows) for i in (0, 1))
    ratio = statistics.median(w / i for i, w in rows)
    return {
        "size": size, "batch": 1, "inside_cpu_s": round(inside, 5), "fit_cpu_s": round(whole, 5),
        "overhead_percent": round(100 * (ratio - 1), 2),
    }  # fmt: skip


def print_tables(found: dict[str, Any], parts: Sequence[str]) -> None:
    """One table for each part of ``found``; the first has what was measured, and where, as its title."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    what = ", ".join(found[key] for key in ("bench", "precision") if key in found)
    title = f"{what}, torch {found['torch']}, {found['device']}, one thread, load {found['load']}"
    for name in parts:
        rows = found.get(name)
        if rows:
            rows = rows if isinstance(rows, list) else [rows]
            table = Table(title=f"{name}: {title}" if name == parts[0] else name, title_justify="left")
            for key in rows[0]:
                table.add_column(key.replace("_", " "), justify="right")
            for row in rows:
                table.add_row(*(str(value) for value in row.values()))
            console.print(table)


def parser_of_parts(name: str, text: str | None, parts: Sequence[str]) -> argparse.ArgumentParser:
    """Of ``hpcai bench NAME [PART ...]``; ``parts`` are all of them where none is named."""

    class Parts(argparse.Action):
        def __call__(self, parser: Any, space: argparse.Namespace, given: Any, option: str | None = None) -> None:
            unknown = [part for part in given if part not in parts]
            if unknown:
                parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(parts)}")
            space.parts = given or parts

    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"hpcai bench {name}", description=text, formatter_class=formatter)
    parser.add_argument("parts", nargs="*", default=parts, action=Parts, help="what is measured; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON alone")
    return parser


def finish(found: dict[str, Any], parts: Sequence[str], quiet: bool) -> int:
    if not quiet:
        print_tables(found, parts)
    print(json.dumps(found))
    return 0


def forward_backward(model: Any, loss: Callable[[], Any], device: Any, narrow: bool) -> Callable[[], Any]:
    """Forward and backward as a function that waits for the device and returns the loss; ``narrow``: in bfloat16."""
    import torch

    def run() -> Any:
        model.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            value = loss()
        value.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return value.detach()

    return run


def shares(run: Callable[[], Any], norm: str) -> dict[str, str]:
    """Shares of the time of one run, by kind of operation; ``norm`` is what its norms are called."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = {
        "convolution": ("convolution", "conv2d", "conv3d", "mm", "linear", "bmm"),
        norm: ("batch_norm", "_normalise", "relu", "threshold", "clamp_min", "_moments", "_sums", "_by_input", "_merge"),
        "copies and casts": ("copy_", "cat", "contiguous", "fill_", "zero_", "clone"),
    }
    run()
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]) as trace:
        run()
    parts, whole = dict.fromkeys([*kinds, "other"], 0.0), 0.0
    for event in trace.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        kind = next((kind for kind, words in kinds.items() if any(word in event.key.lower() for word in words)), "other")
        parts[kind] += spent
        whole += spent
    return {kind: f"{100 * part / whole:.1f} %" for kind, part in parts.items()}
