"""``hpcai bench gpu [PART ...]``: one GPU at the real work, at published configurations; on a CPU the same lines at tiny sizes.

    apps      the training step of each app, eager, captured and compiled, beside what others have published
    kernels   each kernel beside its peers, forward and backward

Each case is measured in a process of its own, so that one that fails or hangs takes no other with it. ``--case`` measures here, and
prints what is known after every row: a process that is ended early has told what it found. Of a GPU the first that is visible is
taken (CUDA_VISIBLE_DEVICES).
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from hpcai import dist
from hpcai.cli.bench import gpu_clocks as clocks
from hpcai.cli.bench.timing import Row, make_parser, print_tables, run_in_subprocess

PARTS = {"apps": "gpu_steps", "kernels": "gpu_kernels"}
_COLUMNS = (  # of a row in a table; the JSON has all
    "variant", "form", "dtype", "samples_s", "ms", "each_ms", "over", "asked", "of_rate", "gaps_percent", "host_ms", "peak_gb",
    "joules_per_sample", "loader_lost_percent", "forward_ms", "both_ms", "over_ours", "of_copy",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    made = make_parser("gpu", __doc__)
    made.add_argument("parts", nargs="*", metavar="PART", help=f"one or more of {', '.join(PARTS)}; both if none is given")
    made.add_argument("--case", nargs="+", metavar="NAME", help="measure these cases alone, in this process")
    made.add_argument("--list", metavar="PART", choices=PARTS, help="print the names of a part's cases, one a line")
    made.add_argument("--variants", nargs="+", metavar="NAME", help="these variants of a step, or forms of a kernel, alone")
    made.add_argument("--tiny", action="store_true", help="sizes that take seconds; without a GPU always so")
    made.add_argument("--repeats", type=int, default=5, help="measured windows of each row")
    made.add_argument("--seconds", type=float, default=20.0, help="two windows of a row are enough after so long")
    made.add_argument("--limit", type=float, default=900.0, help="seconds after which the process of a case is ended")
    words = made.parse_args(argv)
    words.tiny = words.tiny or not torch.cuda.is_available()
    if words.list:
        print("\n".join(_part_module(words.list).cases()))
        return 0
    words.parts = words.parts or list(PARTS)
    _check_names(made, "part", words.parts, PARTS)
    every = {name: part for part in words.parts for name in _part_module(part).cases()}
    _check_names(made, f"case in {' or '.join(words.parts)}", words.case, every)
    _check_names(made, "variant", words.variants, dict.fromkeys(name for part in words.parts for name in _part_module(part).variants()))
    words.parts = sorted({every[name] for name in words.case or every})
    found = _measure_here(words, every) if words.case else _measure_in_subprocesses(words, every)
    good, bad = ([row for row in found["rows"] if ("failed" in row or "left_out" in row) is wanted] for wanted in (False, True))
    if not words.json:
        tables: Row = {"threads": 1, "torch": torch.__version__, "device": "", "load": "", **found}
        for row in good:
            tables.setdefault(row["case"], []).append({key: row[key] for key in _COLUMNS if row.get(key) is not None})
        print_tables(tables, list(dict.fromkeys(row["case"] for row in good)))
        for row in bad:
            print(*(row[key] for key in ("case", "variant", "form", "dtype", "failed", "left_out") if key in row))
    print(json.dumps(found))
    return 0 if words.case else int(not good and any("failed" in row for row in bad))  # rows of --case say what failed


def _part_module(name: str) -> Any:
    return import_module(f"hpcai.cli.bench.{PARTS[name]}")


def _check_names(made: Any, what: str, given: Sequence[str] | None, known: Any) -> None:
    if wrong := sorted(set(given or ()) - set(known)):
        kind, *where = what.split(" ", 1)
        made.error(f"there is no {kind} {wrong[0]!r}{''.join(f' {one}' for one in where)}; expected some of {', '.join(known)}")


def _measure_here(words: Any, every: dict[str, str]) -> Row:
    """The cases that are asked for, in this process."""
    facts = clocks.device_info(dist.alone().device)
    found: Row = {"bench": "gpu", "part": " ".join(words.parts), **facts, "tiny": words.tiny, "rows": []}
    words.rates = {name: found[name] for name in ("matrix_tflops", "copy_gb_s")}
    for name in words.case:
        for row in _part_module(every[name]).measure(name, words):
            found["rows"].append({"part": every[name], **row})
            if words.json:
                print(json.dumps(found), flush=True)
    return found


def _measure_in_subprocesses(words: Any, every: dict[str, str]) -> Row:
    """All cases, each in a process of its own, one after the other; of one that ended badly the last row says why."""
    found: Row = {"bench": "gpu", "part": " ".join(words.parts), "tiny": words.tiny, "rows": []}
    more = [*(["--variants", *words.variants] if words.variants else []), *(["--tiny"] if words.tiny else [])]
    sizes = ["--repeats", str(words.repeats), "--seconds", str(words.seconds), *more]
    for name, part in every.items():
        print(f"{name} ...", file=sys.stderr, flush=True)
        said = run_in_subprocess(["gpu", part, "--case", name, "--json", *sizes], limit=words.limit)
        bad = said.pop("failed", None)
        found = {**{key: value for key, value in said.items() if key not in ("part", "rows")}, **found}
        found["rows"] += said.get("rows", []) + ([{"part": part, "case": name, "failed": bad}] if bad else [])
        if words.json:
            print(json.dumps(found), flush=True)
    return found
