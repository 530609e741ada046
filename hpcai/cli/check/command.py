"""``hpcai data check DIR`` checks a data set before a job reads it.

It checks sizes and SHA-256 against index.json, schema and values of every row, samples that are there twice, batches and ranks,
numbers of files, and whether the disk feeds the GPUs. Exit code 0: nothing wrong; 1: errors (with --strict also warnings); 2: not
usable.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcai import log
from hpcai.cli import findings, tables
from hpcai.cli.findings import pluralize, printable
from hpcai.cli.progress import show_progress
from hpcai.errors import HpcaiError
from hpcai.stop import show_to_reader

if TYPE_CHECKING:
    from hpcai.cli.check.findings import Outcome

_OWN_ARGUMENTS = ("directory", "strict", "json", "index")
INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    words = _parser().parse_args(argv)
    with redirect_stdout(sys.stderr if words.json == "-" else sys.stdout):
        try:
            outcome = _check(words)
        except HpcaiError as problem:
            print(f"hpcai data check: {printable(str(problem))}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("hpcai data check: interrupted; nothing was left behind", file=sys.stderr)
            return INTERRUPTED
        show_to_reader(lambda: print(*map(printable, report_lines(outcome, words.strict)), sep="\n"))
    if words.json is not None:
        findings.write_json(words.json, outcome.as_json())
    return int(outcome.failed(words.strict))


def _check(words: argparse.Namespace) -> "Outcome":
    from hpcai.cli.check import Options, check_dataset, write_indexes  # help and mistakes cost no numpy

    given = {name: value for name, value in vars(words).items() if name not in _OWN_ARGUMENTS}
    options, folder = Options(**given | {"ranges": dict(words.ranges)}), words.directory
    with show_progress() as progress:
        outcome = check_dataset(folder, options, progress=progress)
        if words.index:
            print(*(printable(f"index: {line}") for line in write_indexes(folder, outcome, progress=progress)), sep="\n")
            outcome = check_dataset(folder, options, progress=progress)
    return outcome


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcai data check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="a data set: train, validation, test in it, or *.h5 and *.npy themselves")
    add("--quick", action="store_true", help="sizes and headers only, no content")
    allowed = "values allowed; either may be left out"
    add("--range", dest="ranges", type=_range, action="append", default=[], metavar="FIELD=LOW:HIGH", help=allowed)
    add("--world", type=int, metavar="N", help="processes of the job")
    add("--batch", type=int, metavar="B", help="samples of a step, over all processes")
    add("--step-time", type=float, metavar="SECONDS", help="time of a step without waiting for data; needs --batch")
    add("--nodes", type=int, default=1, metavar="N", help="nodes that share the reading (1)")
    add("--seconds", type=float, default=3.0, help="time to measure each way of reading (3); 0 for none")
    add("--threads", type=int, default=4, metavar="N", help="files looked at at once (4)")
    add("--strict", action="store_true", help="warnings count as errors")
    add("--json", metavar="FILE", help="findings and figures as JSON; - is standard output")
    add("--index", action="store_true", help="make index.json where there is none, and a table of where all values lie, by which "
                                             "jobs open no file in vain; then check again")  # fmt: skip
    return parser


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
    """Yield the splits, the findings by code with the first few of each, the figures, and the verdict: lines of text."""
    yield from tables.lines(_splits(outcome))
    yield from findings.lines(outcome.findings)
    yield from _figures(outcome.figures)
    figures, samples = outcome.figures, sum(split.samples for split in outcome.splits)
    seen = f"{figures['files']:,} files, {samples:,} samples, {log.size(figures['bytes'])} in {figures['seconds']:,.1f} s"
    part = "sizes and headers of " if outcome.options.quick else ""
    yield f"{findings.verdict(outcome.findings, strict)}: {part}{seen}; {findings.counts(outcome.findings)}"


def _splits(outcome: "Outcome") -> Iterator[tuple[str, str]]:
    for split in outcome.splits:
        verified = f"SHA-256 of {split.verified:,} verified" if split.verified else "no SHA-256 verified"
        about = f"{pluralize(split.files, 'file')}, {pluralize(split.samples, 'sample')}, {log.size(split.bytes)}, {verified}"
        yield "this folder" if split.name == "." else split.name, about
        yield from (("", f"{field}: {kind}") for field, kind in split.fields.items())
        if (parts := split.division) is not None:
            rest = "drop leaves {left_out:,} out; pad makes {padded_batches:,}, repeating {repeated:,}"
            yield "", f"{{batches:,}} batches of {{batch:,}} per epoch; {rest}".format(**parts)


def _figures(figures: Any) -> Iterator[str]:
    where = f", on {figures['file_system']}" if figures["file_system"] else ""
    yield f"{figures['bytes_per_file'] / 2**20:,.2f} MiB per file{where}"
    rate = figures.get("rate") or {}
    for mode in ("direct", "buffered") if rate else ():
        found = rate[mode]
        text = f"not measured: {found.get('problem')}"
        if "problem" not in found:
            speed = f"{found['gb_per_s']:.3g} GB/s, {found['samples_per_s']:,.1f} samples/s"
            text = f"{speed} ({found['bytes'] / 2**20:,.0f} MiB in {found['seconds']:.1f} s, cold)"
        yield f"random rows, {mode}: {text}"
    if need := rate.get("needed_per_node"):
        yield f"needed by each node: {need['gb_per_s']:.3g} GB/s, {need['samples_per_s']:,.1f} samples/s"
