"""Clocks, profiles, FLOP counts, memory, processes and tables shared by all benchmarks.

Without a GPU the same functions measure CPU seconds of small work, so that every benchmark runs anywhere.
"""

import argparse
import gc
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch

from hpcai.cli import tables
from hpcai.host_limits import read_text
from hpcai.kernels import triton_support

Row = dict[str, Any]

GAP_US = 20.0
"""A GPU leaves 1 to 2 us between two kernels of a graph; a longer gap waits for the host"""


def machine_info() -> Row:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__, "device": device, "threads": 1, "load": round(os.getloadavg()[0], 1)}


def synchronize() -> None:
    """Wait for the GPU to finish its work, if there is a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rotated_orders(count: int, repeats: int) -> list[list[int]]:
    """Return the order of ``count`` arrangements in each repeat, rotated so that the starts of the repeats are evenly spread."""
    firsts = [repeat * count // repeats for repeat in range(repeats)]
    return [[*range(first, count), *range(first)] for first in firsts]


def bootstrap_interval(ratios: Sequence[float], draws: int = 2000) -> dict[str, float]:
    """Return the median and its 95 % interval by the percentile bootstrap (Efron 1979), deterministic."""
    values = np.asarray(ratios)
    indices = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(np.median(values[indices], 1), (2.5, 97.5))
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}


def alternate(runs: Mapping[str, Callable[[], object]], repeats: int, clock: Callable[[], float] | None = None) -> dict[str, float]:
    """Return the median seconds of each run. Runs alternate, so that a busy machine slows all equally. The default clock is CPU
    time, on a GPU wall time. The first two runs of each are not counted."""
    clock = clock or (time.perf_counter if torch.cuda.is_available() else time.process_time)
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    for repeat in range(-2, repeats):
        for name, run in list(runs.items())[:: 1 if repeat % 2 else -1]:
            synchronize()
            start = clock()
            run()
            synchronize()
            if repeat >= 0:
                times[name].append(clock() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def time_window(run: Callable[[int], object], count: int) -> list[float]:
    """Return the seconds of each of ``run(0)`` ... ``run(count - 1)`` without a host wait in between: by CUDA events, or CPU
    seconds."""
    if not torch.cuda.is_available():
        marks = [time.process_time()]
        for i in range(count):
            run(i)
            marks.append(time.process_time())
        return [b - a for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    synchronize()
    events[0].record()
    for i in range(count):
        run(i)
        events[i + 1].record()
    synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def peak_rates(device: torch.device) -> Row:
    """Return the current matrix multiplication and copy rates of an otherwise idle GPU, the reference of all rows. Operands are
    random, since a GPU draws less power, and so runs faster, on zeros."""
    on_gpu = device.type == "cuda"
    side, size, dtype = (8192, 1 << 30, torch.bfloat16) if on_gpu else (128, 1 << 20, torch.float32)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randint(256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    multiply = _best(lambda i: torch.mm(a, b, out=product))
    copy = _best(lambda i: target.copy_(source))
    return {"matrix_tflops": round(2 * side**3 / multiply / 1e12, 3), "copy_gb_s": round(2 * size / copy / 1e9, 2)}


def _best(run: Callable[[int], object]) -> float:
    """Return the median seconds of a run in the fastest of three windows."""
    time_window(run, 5)
    return max(min(statistics.median(time_window(run, 20)) for _ in range(3)), 1e-9)


def device_info(device: torch.device) -> Row:
    """Return a description of this machine, and its peak rates."""
    info = {**machine_info(), "threads": torch.get_num_threads(), "triton": triton_support.MISSING or "there"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        info |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        info |= {"memory_gb": round(properties.total_memory / 1e9, 1)}
        info |= {"capability": f"{properties.major}.{properties.minor}", "multiprocessors": properties.multi_processor_count}
    return {**info, **peak_rates(device)}


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def graph_bytes() -> int:
    """Return the memory of the private pools of captured graphs, in bytes."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(segment["total_size"] for segment in segments if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0))


def idle_shares(spans: Iterable[tuple[float, float]], above: float = GAP_US) -> tuple[float, float]:
    """Return the shares of the time from the first start to the last end with no kernel running: in gaps longer than ``above``, and
    in total. ``spans``: start and end of each kernel and copy in microseconds, in any order; they may overlap."""
    gaps = idle = 0.0
    ordered = sorted(spans)
    end = ordered[0][0]
    for first, last in ordered:
        gap = max(first - end, 0.0)
        idle += gap
        gaps += gap if gap > above else 0.0
        end = max(end, last)
    total = end - ordered[0][0]
    return (gaps / total, idle / total) if total else (0.0, 0.0)


def profile(run: Callable[[int], object], count: int, most: int = 12) -> Row:
    """Return the idle shares of a GPU in ``count`` runs, and the most expensive kernels: name, milliseconds and launches per
    run."""
    if not torch.cuda.is_available():
        return {}
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for i in range(count):
            run(i)
        synchronize()
    # Not ``trace.events()``, which creates a Python object for each of 100,000 kernels.
    events = [e for e in trace.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in events if not e.is_user_annotation()]
    if not kernels:
        return {"left_out_trace": "the profiler saw no kernel: this machine gives no access to CUPTI"}
    gaps, idle = idle_shares((e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3) for e in kernels)
    spent, launches = Counter[str](), Counter[str]()
    for e in kernels:
        spent[e.name()] += e.duration_ns()
        launches[e.name()] += 1
    top = [[name[:120], round(ns / 1e6 / count, 4), round(launches[name] / count, 1)] for name, ns in spent.most_common(most)]
    shares = {"gaps_percent": round(100 * gaps, 3), "idle_percent": round(100 * idle, 3)}
    return {**shares, "launches": round(len(kernels) / count), "costly": top}


def count_flops(run: Callable[[], object]) -> int:
    """Count the floating-point operations of matrix products, convolutions and attention in ``run``; a multiply-add is two.

    Our kernels are replaced by their reference implementations in torch, which the counter supports; so Triton kernels count as the
    operations that they compute. Recomputation in a backward pass (checkpoints, attention logits) counts each time. Reductions,
    norms, gates, scatters and the update are not counted.
    """
    from torch.utils.flop_counter import FlopCounterMode  # it and the next one would add to the peak memory of other benchmarks

    from hpcai.plan.step_trace import FLOP_FORMULAS

    reference_kernels = mock.patch.object(triton_support, "MISSING", "operations are counted")
    with reference_kernels, FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
        run()
    return int(counter.get_total_flops())


def describe_error(error: BaseException) -> str:
    """Return an error as one line of a table."""
    lines = str(error).strip().splitlines()
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return "out of memory"
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def peak_mb() -> float:
    """Return the peak memory of this process so far in MB: of the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    # Not getrusage, whose maximum a child inherits from its parent.
    peak = re.search(r"^VmHWM:\s*(\d+)", read_text(Path("/proc/self/status")), re.M)  # only Linux has it
    return int(peak[1]) * 1024 / 1e6 if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def run_in_subprocess(args: Sequence[str], limit: float | None = None, environ: Mapping[str, str] = MappingProxyType({})) -> Row:
    """Run ``hpcai bench`` with these arguments in its own process, and return the last JSON object that it prints. The key
    ``failed`` holds the error, or states the timeout after ``limit`` seconds."""
    command = [sys.executable, "-c", f"import sys; from hpcai.cli.bench import main; sys.exit(main({list(args)!r}))"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ}, timeout=limit)
    except subprocess.TimeoutExpired as timeout:
        output = timeout.stdout.decode(errors="replace") if isinstance(timeout.stdout, bytes) else timeout.stdout or ""
        return _last_json(output) | {"failed": f"killed after {limit:g} s"}
    if process.returncode or not process.stdout.strip():
        return _last_json(process.stdout) | {"failed": (process.stderr.strip().splitlines() or ["no message"])[-1]}
    return dict(json.loads(process.stdout.splitlines()[-1]))


def _last_json(output: str) -> Row:
    """Return the last complete JSON object in the output of a failed process, or {}."""
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            value = json.loads(line)
            return value if isinstance(value, dict) else {}
    return {}


def parse_parts(parser: argparse.ArgumentParser, known: Sequence[str], argv: Sequence[str]) -> Any:
    """Return the arguments with ``parts``; the default is all known parts."""
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.parts) - set(known)):
        parser.error(f"there is no part {unknown[0]!r}; expected some of {', '.join(known)}")
    args.parts = args.parts or list(known)
    return args


def print_results(result: Row, parts: Sequence[str], quiet: bool) -> int:
    """Print a table for each part, unless ``quiet``, and JSON as the last line."""
    if not quiet:
        print_tables(result, parts)
    print(json.dumps(result))
    return 0


def print_tables(result: Row, parts: Sequence[str]) -> None:
    """Print a table of the rows of each part; the title of the first describes the machine."""
    threads = "one thread" if result["threads"] == 1 else f"{result['threads']} threads"
    title = f"{result['bench']}, torch {result['torch']}, {result['device']}, {threads}, load {result['load']}"
    for index, name in enumerate(part for part in parts if result.get(part)):
        rows = result[name] if isinstance(result[name], list) else [result[name]]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        heads = [key.replace("_", " ") for key in keys]
        print(f"{name}: {title}" if index == 0 else f"\n{name}")
        print(*tables.lines(([row.get(key, "") for key in keys] for row in rows), heads, heads[:1]), sep="\n")
