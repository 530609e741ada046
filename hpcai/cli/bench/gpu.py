"""``hpcai bench gpu [PART ...]``: measure one GPU at published configurations; on a CPU the same code runs at tiny sizes.

    apps      the training step of each app, eager, captured and compiled, with published rates
    kernels   each kernel compared with its peers, forward and backward

Each case runs in its own process, so that a failure or hang affects no other case. ``--case`` measures in this process, and prints
the results so far after every row, so that a terminated process loses none. The first visible GPU is used (CUDA_VISIBLE_DEVICES).
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from hpcai import dist
from hpcai.cli import make_parser
from hpcai.cli.bench import timing
from hpcai.cli.bench.timing import Row, parse_parts, print_tables, run_in_subprocess

PARTS = {"apps": "gpu_steps", "kernels": "gpu_kernels"}
_COLUMNS = (  # columns of a table; the JSON has all keys
    "variant", "form", "dtype", "samples_s", "ms", "each_ms", "over", "asked", "of_rate", "gaps_percent", "host_ms", "peak_gb",
    "joules_per_sample", "loader_lost_percent", "forward_ms", "both_ms", "over_ours", "of_copy",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = make_parser("bench gpu", __doc__, parts=", ".join(PARTS))
    args = parse_parts(parser, list(PARTS), argv)
    args.tiny = args.tiny or not torch.cuda.is_available()
    if args.list:
        print("\n".join(_part_module(args.list).cases()))
        return 0
    part_of_case = {name: part for part in args.parts for name in _part_module(part).cases()}
    _check_names(parser, "case", args.case, part_of_case, f" in {' or '.join(args.parts)}")
    _check_names(parser, "variant", args.variants, dict.fromkeys(v for part in args.parts for v in _part_module(part).VARIANTS))
    args.parts = sorted({part_of_case[name] for name in args.case or part_of_case})
    result = _measure_here(args, part_of_case) if args.case else _measure_in_subprocesses(args, part_of_case)
    good, bad = ([row for row in result["rows"] if ("failed" in row or "left_out" in row) is wanted] for wanted in (False, True))
    if not args.json:
        tables: Row = {"threads": 1, "torch": torch.__version__, "device": "", "load": "", **result}
        for row in good:
            tables.setdefault(row["case"], []).append({key: row[key] for key in _COLUMNS if row.get(key) is not None})
        print_tables(tables, list(dict.fromkeys(row["case"] for row in good)))
        for row in bad:
            print(*(row[key] for key in ("case", "variant", "form", "dtype", "failed", "left_out") if key in row))
    print(json.dumps(result))
    return 0 if args.case else int(not good and any("failed" in row for row in bad))  # with --case the rows report failures


def _part_module(name: str) -> Any:
    return import_module(f"hpcai.cli.bench.{PARTS[name]}")


def _check_names(parser: Any, kind: str, names: Sequence[str] | None, known: Any, where: str = "") -> None:
    if unknown := sorted(set(names or ()) - set(known)):
        parser.error(f"there is no {kind} {unknown[0]!r}{where}; expected some of {', '.join(known)}")


def _measure_here(args: Any, part_of_case: dict[str, str]) -> Row:
    facts = timing.device_info(dist.single_process().device)
    result: Row = {"bench": "gpu", "part": " ".join(args.parts), **facts, "tiny": args.tiny, "rows": []}
    args.rates = {name: result[name] for name in ("matrix_tflops", "copy_gb_s")}
    for name in args.case:
        for row in _part_module(part_of_case[name]).measure(name, args):
            result["rows"].append({"part": part_of_case[name], **row})
            if args.json:
                print(json.dumps(result), flush=True)
    return result


def _measure_in_subprocesses(args: Any, part_of_case: dict[str, str]) -> Row:
    """Measure all cases in sequence, each in its own process; the last row of a failed one gives the reason."""
    result: Row = {"bench": "gpu", "part": " ".join(args.parts), "tiny": args.tiny, "rows": []}
    options = [*(["--variants", *args.variants] if args.variants else []), *(["--tiny"] if args.tiny else [])]
    arguments = ["--repeats", str(args.repeats), "--seconds", str(args.seconds), *options]
    for name, part in part_of_case.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        output = run_in_subprocess(["gpu", part, "--case", name, "--json", *arguments], limit=args.limit)
        error = output.pop("failed", None)
        result = {**{key: value for key, value in output.items() if key not in ("part", "rows")}, **result}
        result["rows"] += output.get("rows", []) + ([{"part": part, "case": name, "failed": error}] if error else [])
        if args.json:
            print(json.dumps(result), flush=True)
    return result
