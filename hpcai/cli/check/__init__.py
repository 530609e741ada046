"""``hpcai data check DIR``: validate a data set before a job reads it.

It checks sizes and SHA-256 against index.json, schema and values of every row, duplicate samples, batches and ranks, numbers of
files, and whether the disk is fast enough for the GPUs. Exit code 0: no errors; 1: errors (or with --strict warnings); 2: unusable.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from hpcai import log
from hpcai.cli import make_parser, tables
from hpcai.cli.findings import counts, failed, lines, pluralize, printable, verdict, write_json
from hpcai.cli.progress import show_progress
from hpcai.errors import HpcaiError
from hpcai.stop import ignore_broken_pipe

if TYPE_CHECKING:
    from hpcai.cli.check.findings import Outcome

_OWN_ARGUMENTS = ("directory", "strict", "json", "index")


def main(argv: Sequence[str]) -> int:
    parser = make_parser("data check", __doc__)
    parser.add_argument("--range", dest="ranges", type=_range, action="append", default=[], metavar="FIELD=LOW:HIGH",
                        help="allowed values; either bound may be omitted")  # fmt: skip
    args = parser.parse_args(argv)
    with redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
        try:
            outcome = _check(args)
        except HpcaiError as error:
            print(f"hpcai data check: {printable(str(error))}", file=sys.stderr)
            return 2
        ignore_broken_pipe(lambda: print(*map(printable, report_lines(outcome, args.strict)), sep="\n"))
    if args.json is not None:
        write_json(args.json, outcome.as_json())
    return int(failed(outcome.findings, args.strict))


def _check(args: argparse.Namespace) -> "Outcome":
    from hpcai.cli.check.examination import check_dataset  # help and usage errors do not import numpy
    from hpcai.cli.check.findings import Options
    from hpcai.cli.check.indexing import write_indexes

    option_values = {name: value for name, value in vars(args).items() if name not in _OWN_ARGUMENTS}
    options, folder = Options(**option_values | {"ranges": dict(args.ranges)}), args.directory
    with show_progress() as progress:
        outcome = check_dataset(folder, options, progress=progress)
        if args.index:
            print(*(printable(f"index: {line}") for line in write_indexes(folder, outcome, progress=progress)), sep="\n")
            outcome = check_dataset(folder, options, progress=progress)
    return outcome


def _range(text: str) -> tuple[str, tuple[float | None, float | None]]:
    name, _, bounds = text.rpartition("=")
    low, colon, high = bounds.partition(":")
    try:
        if not name or not colon or "nan" in bounds.lower():
            raise ValueError
        return name, (float(low) if low else None, float(high) if high else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected FIELD=LOW:HIGH such as counts=0:32767 or target=:1") from None


def report_lines(outcome: "Outcome", strict: bool = False) -> Iterator[str]:
    """Yield the report as lines: the splits, the findings by code with the first few of each, the figures, and the verdict."""
    yield from tables.lines(_splits(outcome))
    yield from lines(outcome.findings)
    yield from _figures(outcome.figures)
    figures, samples = outcome.figures, sum(split.samples for split in outcome.splits)
    size = log.format_bytes(figures["bytes"])
    summary = f"{figures['files']:,} files, {samples:,} samples, {size} in {figures['seconds']:,.1f} s"
    scope = "sizes and headers of " if outcome.options.quick else ""
    yield f"{verdict(outcome.findings, strict)}: {scope}{summary}; {counts(outcome.findings)}"


def _splits(outcome: "Outcome") -> Iterator[tuple[str, str]]:
    for split in outcome.splits:
        verified = f"SHA-256 of {split.verified:,} verified" if split.verified else "no SHA-256 verified"
        contents = f"{pluralize(split.files, 'file')}, {pluralize(split.samples, 'sample')}, {log.format_bytes(split.bytes)}"
        yield "this folder" if split.name == "." else split.name, f"{contents}, {verified}"
        yield from (("", f"{field}: {kind}") for field, kind in split.fields.items())
        if (division := split.division) is not None:
            remainder_text = "drop leaves {left_out:,} out; pad makes {padded_batches:,}, repeating {repeated:,}"
            yield "", f"{{batches:,}} batches of {{batch:,}} per epoch; {remainder_text}".format(**division)


def _figures(figures: Any) -> Iterator[str]:
    file_system = f", on {figures['file_system']}" if figures["file_system"] else ""
    yield f"{figures['bytes_per_file'] / 2**20:,.2f} MiB per file{file_system}"
    rate = figures.get("rate") or {}
    for mode in ("direct", "buffered") if rate else ():
        result = rate[mode]
        text = f"not measured: {result.get('problem')}"
        if "problem" not in result:
            speed = f"{result['gb_per_s']:.3g} GB/s, {result['samples_per_s']:,.1f} samples/s"
            text = f"{speed} ({result['bytes'] / 2**20:,.0f} MiB in {result['seconds']:.1f} s, cold)"
        yield f"random rows, {mode}: {text}"
    if needed := rate.get("needed_per_node"):
        yield f"needed by each node: {needed['gb_per_s']:.3g} GB/s, {needed['samples_per_s']:,.1f} samples/s"
