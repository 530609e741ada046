"""``hpcai bench growth``: what grows with ranks, files, tensors and steps, act by act, and what that means at 2,048 ranks.

Light processes of this machine (gloo, one thread each) start, train, report, evaluate, save, resume and end, as a run does. For
each act, of the first and of the last rank: sockets (in place of the last, the rank that has most) and memory at its end, and what
one time of it takes: messages (calls of process groups, and words to the hub), KB that TCP sent, file operations (those that strace
sees, where it is there; otherwise Python's audit events, stat, and what HDF5 opens), KB that came from the disk, CPU milliseconds.
Then the simplest law that fits: a, one that levels off, a + c log n, a + b n, or both; "about" where none does; "!" where a rank
other than the first has work that grows with n.

Files, tensors and steps vary at two ranks. Of time and memory a growth is not seen that is within their noise; counts are exact.
`hpcai bench all` leaves this out.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from hpcai.cli.bench.growth.law import fit, short
from hpcai.cli.bench.growth.ledger import can_trace
from hpcai.cli.bench.growth.life import ACTS, Job, Measured, make_data, measured
from hpcai.cli.bench.timing import Row, machine, parser, print_tables


class Quantity(NamedTuple):
    """What is printed of a number of the ledger: in which unit, and how far from a law it may be, in parts of it and in units."""

    name: str
    of: str
    scale: float = 1.0
    part: float = 0.02
    units: float = 1.0


QUANTITIES = (
    Quantity("sockets", "sockets", part=0.0, units=2.5),
    Quantity("messages", "messages"),
    Quantity("KB sent", "bytes sent", 1e-3, part=0.2, units=0.3),
    Quantity("file ops", "file operations", part=0.05, units=5.0),
    Quantity("KB of disk", "bytes from disk", 1e-3, part=0.1, units=64.0),
    Quantity("CPU ms", "cpu seconds", 1e3, part=0.25, units=2.0),
    Quantity("memory MB", "memory", 1e-6, part=0.01, units=3.0),
)
AHEAD = {"ranks": (2048, 16384), "files": (100_000,), "tensors": (100_000,), "steps": (1_000_000,)}
_BASE = {"ranks": Job(), "files": Job(tensors=20), "tensors": Job(), "steps": Job(tensors=4)}
_COUNTS = {"ranks": [1, 2, 4, 8, 16, 32], "files": [10, 1000, 10_000], "tensors": [100, 1000, 10_000], "steps": [1000, 100_000]}
_BRIEFLY = {"ranks": [1, 2, 4, 8], "files": [10, 50, 250], "tensors": [10, 50, 250], "steps": [20, 100, 500]}


def main(argv: Sequence[str]) -> int:
    made = parser("growth", __doc__)
    for name, counts in _COUNTS.items():
        made.add_argument(f"--{name}", type=_counts, metavar="N,N,...", help=f"usually {','.join(map(str, counts))}; 0: not varied")
    made.add_argument("--quick", action="store_true", help="few of each, and small; file operations by Python alone")
    words = made.parse_args(argv)
    usual = _BRIEFLY if words.quick else _COUNTS
    sweeps = {name: usual[name] if getattr(words, name) is None else getattr(words, name) for name in _COUNTS}
    traces = not words.quick and can_trace()
    print("", end="", flush=True)  # what a fork would print again
    with tempfile.TemporaryDirectory(prefix="hpcai-growth-") as folder:
        found = {name: _varied(name, counts, Path(folder), words.quick, traces) for name, counts in sweeps.items() if counts}
    told = {"bench": "growth", **machine(), "files_by": "strace" if traces else "Python's audit events"}
    if words.json:
        print(json.dumps(told | found))
    else:
        _show(told, found)
    return 0


def _counts(text: str) -> list[int]:
    return sorted({int(word) for word in text.split(",")} - {0})


def _varied(name: str, counts: Sequence[int], folder: Path, quick: bool, traces: bool) -> list[Row]:
    """Rows of all acts, with one number varied and all others as they are."""
    base = replace(_BASE[name], tensors=20) if quick and name != "tensors" else _BASE[name]
    found: dict[int, Measured] = {}
    for count in counts:
        job = replace(base, **{name: count})
        split = folder / f"split-{job.files}"
        if not split.exists():
            make_data(folder, job.files)
        print(f"hpcai bench growth: {name} {count:,}", file=sys.stderr, flush=True)
        found[count] = measured(job, split, traces and name != "steps")
    return rows_of(name, found)


def rows_of(name: str, found: dict[int, Measured]) -> list[Row]:
    """For each act, quantity and rank: the numbers, their law, and what it says for larger counts."""
    rows = []
    for act in ACTS:
        for rank, side in (("0", "first"), ("last", "last")):
            for quantity in QUANTITIES:
                values = {n: getattr(one, side)[act][quantity.of] * quantity.scale for n, one in found.items()}
                rows.append({"act": act, "quantity": quantity.name, "rank": rank, **_told(name, quantity, values)})
    return rows


def _told(name: str, quantity: Quantity, values: dict[int, float]) -> Row:
    """One process alone has nobody to talk to: a law of ranks begins at two."""
    counted = {n: value for n, value in values.items() if name != "ranks" or n > 1 or len(values) == 1}
    law = fit(list(counted), list(counted.values()), quantity.part, quantity.units)
    told = {"text": str(law), **asdict(law)}
    ahead = {str(n): law.at(n) for n in AHEAD[name]}
    return {"values": {str(n): value for n, value in values.items()}, "law": told, "ahead": ahead}


def _show(told: Row, found: dict[str, list[Row]]) -> None:
    """A table for each act by ranks, and one for each other number with what grows."""
    shown: Row = dict(told)
    for act in ACTS:
        rows = [row for row in found.get("ranks", ()) if row["act"] == act and any(row["values"].values())]
        shown[f"{act}, by ranks"] = [_line(row) for row in rows]
    for name, rows in found.items():
        if name != "ranks":
            grown = [row for row in rows if row["law"]["line"] or row["law"]["log"]]
            shown[f"what grows with {name}"] = [{"act": row["act"], **_line(row)} for row in grown]
    print_tables(shown, [part for part in shown if part not in told])
    for name in (name for name, rows in found.items() if name != "ranks" and not shown[f"what grows with {name}"]):
        print(f"Nothing grows with {name} ({', '.join(f'{int(n):,}' for n in found[name][0]['values'])}).")
    print(f"File operations are those that {told['files_by']} saw. !: grows on a rank other than the first.")


def _line(row: Row) -> Row:
    law = row["law"]["text"] + (" !" if row["rank"] == "last" and row["law"]["line"] > 0 else "")
    values = {f"{int(n):,}": short(value) for n, value in row["values"].items()}
    ahead = {f"at {int(n):,}": short(value) for n, value in row["ahead"].items()}
    return {"quantity": row["quantity"], "rank": row["rank"], **values, "law": law, **ahead}
