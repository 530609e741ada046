"""``hpcai bench gpu [PART ...]``: one GPU at the real work, at published configurations; on a CPU the same lines at tiny sizes.

    apps      the training step of each app, eager, captured and compiled, beside what others have published
    kernels   each kernel beside its peers, forward and backward, and how far it is from float64

Each case is measured in a process of its own, so that one that fails or hangs takes no other with it. ``--case`` measures here, and
prints what is known after every row: a process that is ended early has told what it found. Of a GPU the first that is visible is
taken (CUDA_VISIBLE_DEVICES).
"""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from hpcai import dist
from hpcai.cli.bench import gpu_clocks as clocks
from hpcai.cli.bench.timing import Row, apart, parser, print_tables

PARTS = {"apps": "gpu_steps", "kernels": "gpu_kernels"}
_SHOWN = (  # of a row in a table; the JSON has all
    "variant", "form", "dtype", "samples_s", "ms", "each_ms", "over", "asked", "of_rate", "gaps_percent", "host_ms", "peak_gb",
    "joules_per_sample", "loader_lost_percent", "forward_ms", "both_ms", "over_ours", "of_copy", "error",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    made = parser("gpu", __doc__)
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
        print("\n".join(_part(words.list).cases()))
        return 0
    if wrong := sorted(set(words.parts) - set(PARTS)):
        made.error(f"there is no part {wrong[0]!r}; expected some of {', '.join(PARTS)}")
    words.parts = words.parts or list(PARTS)
    every = {name: part for part in words.parts for name in _part(part).cases()}
    if wrong := sorted(set(words.case or ()) - set(every)):
        made.error(f"there is no case {wrong[0]!r} in {' or '.join(words.parts)}; expected some of {', '.join(every)}")
    known = dict.fromkeys(name for part in words.parts for name in _part(part).forms())
    if wrong := sorted(set(words.variants or ()) - set(known)):
        made.error(f"there is no variant {wrong[0]!r}; expected some of {', '.join(known)}")
    words.parts = sorted({every[name] for name in words.case or every})
    return _here(words, every) if words.case else _each_apart(words, every)


def _part(name: str) -> Any:
    return import_module(f"hpcai.cli.bench.{PARTS[name]}")


def _here(words: Any, every: dict[str, str]) -> int:
    """The cases that are asked for, in this process."""
    device = dist.alone().device
    found: Row = {"bench": "gpu", "part": " ".join(words.parts), **clocks.facts(device), "tiny": words.tiny, "rows": []}
    words.rates = {name: found[name] for name in ("matrix_tflops", "copy_gb_s")}
    for name in words.case:
        for row in _rows(name, every[name], words):
            found["rows"].append({"part": every[name], **row})
            if words.json:
                print(json.dumps(found), flush=True)
            else:
                print(f"{name}: {_brief(row)}", file=sys.stderr, flush=True)
    _finish(found, words)
    return 0  # rows say what failed


def _rows(name: str, part: str, words: Any) -> Iterator[Row]:
    """Rows of a case. Once a form has ruined the context of the GPU, which only a new process mends, the rest comes from one."""
    seen, ruined = set(), set()
    for row in _part(part).measure(name, words):
        yield row
        seen.add(_which(row))
        if "failed" in row and (why := clocks.lost()) is not None:
            # Steps that were measured are not measured again; kernels are, for they come again in another type.
            ruined = {_which(row)[0]} | {form for form, _ in seen if "variant" in row}
            rest = [form for form in words.variants or _part(part).forms() if form not in ruined]
            print(f"{name}: the GPU is lost to this process ({why}); the rest in another", file=sys.stderr, flush=True)
            if rest:
                yield from (more for more in _asked(name, part, words, rest)["rows"] if _which(more) not in seen)
            return


def _which(row: Row) -> tuple[Any, Any]:
    return row.get("variant", row.get("form")), row.get("dtype")


def _each_apart(words: Any, every: dict[str, str]) -> int:
    """All cases, each in a process of its own, one after the other."""
    found: Row = {"bench": "gpu", "part": " ".join(words.parts), "tiny": words.tiny, "rows": []}
    for name, part in every.items():
        said = _asked(name, part, words, words.variants)
        found = {**{key: value for key, value in said.items() if key not in ("part", "rows")}, **found}
        found["rows"] += said["rows"]
        if words.json:
            print(json.dumps(found), flush=True)
        for row in said["rows"]:
            print(f"{name}: {_brief(row)}", file=sys.stderr, flush=True)
    _finish(found, words)
    return int(all(_why_not(row) for row in found["rows"]) and any("failed" in row for row in found["rows"]))


def _asked(name: str, part: str, words: Any, forms: Sequence[str] | None) -> Row:
    """What another process found of a case, ``forms`` of it alone; if it ended badly its last row says why."""
    more = ["--variants", *forms] if forms else []
    sizes = ["--repeats", str(words.repeats), "--seconds", str(words.seconds), *(["--tiny"] if words.tiny else [])]
    said = apart(["gpu", part, "--case", name, "--json", *sizes, *more], limit=words.limit)
    bad = said.pop("failed", None)
    return said | {"rows": said.get("rows", []) + ([{"part": part, "case": name, "failed": bad}] if bad else [])}


def _finish(found: Row, words: Any) -> None:
    """Tables of what was measured, and what was not and why; JSON as the last line."""
    rows = found["rows"]
    if not words.json:
        tables: Row = {"threads": 1, "torch": torch.__version__, "device": "", "load": "", **found}
        measured = [row for row in rows if not _why_not(row)]
        for row in measured:
            tables.setdefault(row["case"], []).append({key: row[key] for key in _SHOWN if row.get(key) is not None})
        print_tables(tables, list(dict.fromkeys(row["case"] for row in measured)))
        print("\n".join(f"{row['case']}: {_brief(row)}" for row in rows if _why_not(row)))
    print(json.dumps(found))


def _why_not(row: Row) -> str | None:
    """Why a row has no times."""
    return row.get("failed") or row.get("left_out")


def _brief(row: Row) -> str:
    """A row as a line, while the others are measured."""
    shown = ("variant", "form", "dtype", "samples_s", "ms", "forward_ms", "both_ms", "left_out", "failed")
    return ", ".join(f"{key} {row[key]}" for key in shown if row.get(key) is not None)
