"""Clocks, peaks of memory, processes and tables that all benchmarks share."""

import argparse
import gc
import json
import os
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

from hpcai.cli import tables

Row = dict[str, Any]


def machine_info() -> Row:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__, "device": device, "threads": 1, "load": round(os.getloadavg()[0], 1)}


def synchronize() -> None:
    """Return when the GPU has done what it was asked to; at once where there is none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rotated_orders(count: int, repeats: int) -> list[list[int]]:
    """The order of ``count`` arrangements in each repeat, rotated so that the repeats begin evenly spread over them."""
    firsts = [repeat * count // repeats for repeat in range(repeats)]
    return [[*range(first, count), *range(first)] for first in firsts]


def bootstrap_interval(ratios: Sequence[float], draws: int = 2000) -> dict[str, float]:
    """Median and its 95 % interval by the percentile bootstrap (Efron 1979): the same for the same ratios."""
    values = np.asarray(ratios)
    picks = np.random.default_rng(0).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(np.median(values[picks], 1), (2.5, 97.5))
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}


def time_alternately(
    runs: Mapping[str, Callable[[], object]], repeats: int, warm: int = 2, clock: Callable[[], float] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Median seconds of each run, in turns, so that a busy machine slows all alike: CPU seconds, or wall seconds on a GPU, unless a
    ``clock`` is given.

    The first ``warm`` runs of each are not counted.
    """
    clock = clock or (time.perf_counter if torch.cuda.is_available() else time.process_time)
    times: dict[str, list[float]] = {name: [] for name in runs}
    gc.collect()
    for repeat in range(repeats + warm):
        for name, run in list(runs.items())[:: 1 if repeat % 2 else -1]:
            synchronize()
            began = clock()
            run()
            synchronize()
            if repeat >= warm:
                times[name].append(clock() - began)
    return {name: statistics.median(each) for name, each in times.items()}


def peak_memory_mb() -> float:
    """The most memory that this process has held so far, MB: of the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    # Not getrusage, whose maximum a child takes over from its parent.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


def run_in_subprocess(words: Sequence[str], limit: float | None = None, environ: Mapping[str, str] = MappingProxyType({})) -> Row:
    """What ``hpcai bench`` with these words prints last, in a process of its own; with ``failed``, why that ended badly, or that it
    was ended after ``limit`` seconds."""
    command = [sys.executable, "-c", f"import sys; from hpcai.cli.bench import main; sys.exit(main({list(words)!r}))"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environ}, timeout=limit)
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return _last_json(said) | {"failed": f"ended after {limit:g} s"}
    if done.returncode or not done.stdout.strip():
        return _last_json(done.stdout) | {"failed": (done.stderr.strip().splitlines() or ["no word of why"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _last_json(said: str) -> Row:
    """The last object of what a process said before it ended badly, if there is a whole one."""
    for line in reversed(said.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            return found if isinstance(found, dict) else {}
    return {}


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of ``hpcai bench NAME``."""
    made = argparse.ArgumentParser(
        prog=f"hpcai bench {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print JSON alone")
    return made


def parse_parts(made: argparse.ArgumentParser, known: Sequence[str], argv: Sequence[str]) -> Any:
    """The words with ``parts``, which are all that are known where none is named."""
    made.add_argument("parts", nargs="*", metavar="PART", help=f"one or more of {', '.join(known)}; all of them if none is given")
    words = made.parse_args(argv)
    if wrong := sorted(set(words.parts) - set(known)):
        made.error(f"there is no part {wrong[0]!r}; expected some of {', '.join(known)}")
    words.parts = words.parts or list(known)
    return words


def print_results(found: Row, parts: Sequence[str], quiet: bool) -> int:
    """Print what was found: a table for each part, unless ``quiet``, and JSON as the last line."""
    if not quiet:
        print_tables(found, parts)
    print(json.dumps(found))
    return 0


def print_tables(found: Row, parts: Sequence[str]) -> None:
    """A table of the rows of each part; the first one says where they were measured."""
    threads = "one thread" if found["threads"] == 1 else f"{found['threads']} threads"
    title = f"{found['bench']}, torch {found['torch']}, {found['device']}, {threads}, load {found['load']}"
    for number, name in enumerate(part for part in parts if found.get(part)):
        rows = found[name] if isinstance(found[name], list) else [found[name]]
        keys = list(dict.fromkeys(key for row in rows for key in row))
        heads = [key.replace("_", " ") for key in keys]
        print(f"{name}: {title}" if number == 0 else f"\n{name}")
        print(*tables.lines(([row.get(key, "") for key in keys] for row in rows), heads, heads[:1]), sep="\n")
