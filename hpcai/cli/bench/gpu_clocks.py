"""Measurements of ``hpcai bench gpu``: CUDA events, idle time between kernels, peak rates of the machine, FLOP counts.

Without a GPU the same functions measure CPU seconds of small work, so that every benchmark runs anywhere.
"""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from unittest import mock

import torch
from torch.utils import flop_counter

from hpcai.cli.bench.timing import Row, machine_info, synchronize
from hpcai.kernels import triton_support
from hpcai.plan.step_trace import FLOP_FORMULAS

GAP_US = 20.0
"""A GPU leaves 1 to 2 us between two kernels of a graph; a longer gap waits for the host"""


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


# ---- the machine


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
    """Collect garbage, and return cached memory to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def graph_bytes() -> int:
    """Return the memory of the private pools of captured graphs, in bytes."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(segment["total_size"] for segment in segments if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0))


# ---- profiles


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


# ---- FLOPs


def count_flops(run: Callable[[], object]) -> int:
    """Count the floating-point operations of matrix products, convolutions and attention in ``run``; a multiply-add is two.

    Our kernels are replaced by their reference implementations in torch, which the counter supports; so Triton kernels count as the
    operations that they compute. Recomputation in a backward pass (checkpoints, attention logits) counts each time. Reductions,
    norms, gates, scatters and the update are not counted.
    """
    reference_kernels = mock.patch.object(triton_support, "MISSING", "operations are counted")
    with reference_kernels, flop_counter.FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as counter:
        run()
    return int(counter.get_total_flops())


def describe_error(error: BaseException) -> str:
    """Return an error as one line of a table."""
    lines = str(error).strip().splitlines()
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return "out of memory"
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
