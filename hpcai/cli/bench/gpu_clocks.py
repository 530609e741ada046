"""What ``hpcai bench gpu`` measures with: events, idle time between kernels, the machine's own rates, counted operations.

Without a GPU the same functions measure CPU seconds of small work, so that every line of a benchmark runs anywhere.
"""

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch.utils import flop_counter

from hpcai.cli.bench.timing import Row, machine_info, synchronize
from hpcai.kernels import triton_support
from hpcai.plan.paper import PRODUCTS

GAP_US = 20.0
"""A GPU that starts the next kernel of a graph leaves 1 to 2 us; what is longer waits for the host"""


def time_window(run: Callable[[int], object], count: int) -> list[float]:
    """Seconds of each of ``run(0)`` ... ``run(count - 1)``, during which the host waits for nothing: between events on a GPU, CPU
    seconds elsewhere."""
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
    """What this GPU multiplies and copies when it does nothing else, now: the yardsticks of all rows. Numbers are random, since a
    GPU draws less power, and so runs faster, on zeros."""
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
    """Median seconds of a run, of the fastest of three windows."""
    time_window(run, 5)
    return max(min(statistics.median(time_window(run, 20)) for _ in range(3)), 1e-9)


def device_info(device: torch.device) -> Row:
    """This machine, and what it can do at best."""
    found = {**machine_info(), "threads": torch.get_num_threads(), "triton": triton_support.MISSING or "there"}
    if device.type == "cuda":
        known = torch.cuda.get_device_properties(device)
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        found |= {"memory_gb": round(known.total_memory / 1e9, 1)}
        found |= {"capability": f"{known.major}.{known.minor}", "multiprocessors": known.multi_processor_count}
    return {**found, **peak_rates(device)}


def free_memory() -> None:
    """Give the memory of what nobody holds any more back to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def graph_bytes() -> int:
    """Memory that captured graphs hold for themselves: the segments of their pools."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(one["total_size"] for one in segments if tuple(one.get("segment_pool_id", (0, 0))) != (0, 0))


# ---- what a GPU did


def idle_shares(spans: Iterable[tuple[float, float]], above: float = GAP_US) -> tuple[float, float]:
    """The shares of the time from the first start to the last end in which nothing ran: in stretches longer than ``above``, and in
    all. ``spans``: start and end of each kernel and copy, microseconds, in any order; they may overlap."""
    gaps = rest = 0.0
    ordered = sorted(spans)
    end = ordered[0][0]
    for first, last in ordered:
        nothing = max(first - end, 0.0)
        rest += nothing
        gaps += nothing if nothing > above else 0.0
        end = max(end, last)
    whole = end - ordered[0][0]
    return (gaps / whole, rest / whole) if whole else (0.0, 0.0)


def profile(run: Callable[[int], object], count: int, most: int = 12) -> Row:
    """Idle shares of a GPU in ``count`` runs, and the kernels that cost most: name, milliseconds of a run, launches of a run."""
    if not torch.cuda.is_available():
        return {}
    synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for i in range(count):
            run(i)
        synchronize()
    # Not ``trace.events()``, which makes a Python object of each of 100,000 kernels.
    every = [e for e in trace.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in every if not e.is_user_annotation()]
    if not kernels:
        return {"left_out_trace": "the profiler saw no kernel: this machine gives no access to CUPTI"}
    gaps, rest = idle_shares((e.start_ns() / 1e3, (e.start_ns() + e.duration_ns()) / 1e3) for e in kernels)
    spent, launches = Counter[str](), Counter[str]()
    for e in kernels:
        spent[e.name()] += e.duration_ns()
        launches[e.name()] += 1
    costly = [[name[:120], round(ns / 1e6 / count, 4), round(launches[name] / count, 1)] for name, ns in spent.most_common(most)]
    shares = {"gaps_percent": round(100 * gaps, 3), "idle_percent": round(100 * rest, 3)}
    return {**shares, "launches": round(len(kernels) / count), "costly": costly}


# ---- work


def count_flops(run: Callable[[], object]) -> int:
    """Floating-point operations of matrix products, convolutions and attention in ``run``, an addition and a multiplication each.

    Meanwhile our kernels are their twins in torch's operations, which the counter sees; so those of Triton count as what they
    compute. What is computed again in a backward pass (checkpoints, logits of attention) counts each time. Sums, norms, gates,
    scatters and the update are not counted.
    """
    with _reference_kernels(), flop_counter.FlopCounterMode(display=False, custom_mapping=PRODUCTS) as counter:
        run()
    return int(counter.get_total_flops())


@contextmanager
def _reference_kernels() -> Iterator[None]:
    before = triton_support.MISSING
    triton_support.MISSING = "operations are counted"
    try:
        yield
    finally:
        triton_support.MISSING = before


def describe_error(problem: BaseException) -> str:
    """An error as one line of a table."""
    lines = str(problem).strip().splitlines()
    if isinstance(problem, torch.OutOfMemoryError) or "out of memory" in str(problem):
        return "out of memory"
    return f"{type(problem).__name__}: {lines[0] if lines else 'no word of why'}"[:300]
