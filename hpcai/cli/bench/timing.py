"""Clocks, peak memory, processes and tables shared by all benchmarks."""

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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hpcai import cli
from hpcai.cli import tables
from hpcai.host_limits import read_text

Row = dict[str, Any]


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


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    parser = cli.make_parser(f"bench {name}", text)
    parser.add_argument("--json", action="store_true", help="print only JSON")
    return parser


def parse_parts(parser: argparse.ArgumentParser, known: Sequence[str], argv: Sequence[str]) -> Any:
    """Return the arguments with ``parts``; the default is all known parts."""
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one or more of {', '.join(known)}; all of them if none is given")
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
