"""``hpcai data check DIR`` looks a data set over before a job reads it.

It checks sizes and SHA-256 against index.json, schema and values of every row, samples that are there twice, batches and ranks,
files and stripes, and whether the disk feeds the GPUs. Exit code 0: nothing wrong; 1: errors (with --strict also warnings); 2: not
usable.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hpcai import log
from hpcai.cli.progress import shown
from hpcai.errors import HpcaiError

if TYPE_CHECKING:
    from hpcai.cli.check.findings import Finding, Outcome, Summary

SHOWN = 5
_NO_OPTIONS = ("directory", "strict", "json", "repair", "index")
INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    words = _parser().parse_args(argv)
    out: TextIO = sys.stderr if words.json == "-" else sys.stdout
    try:
        from hpcai.cli.check import Options, examine, repair, tabulate  # help and mistakes cost no numpy

        given = {name: value for name, value in vars(words).items() if name not in _NO_OPTIONS}
        options = Options(**given | {"ranges": dict(words.ranges)})
        with shown() as progress:
            outcome = examine(words.directory, options, progress=progress)
            if words.repair:
                done = repair(words.directory, outcome, progress=progress)
                for line in done or ["nothing to repair"]:
                    print(_printable(f"repair: {line}"), file=out)
                if done:
                    outcome = examine(words.directory, options, progress=progress)
            if words.index:
                for line in tabulate(words.directory, outcome, progress=progress):
                    print(_printable(f"index: {line}"), file=out)
                if any(finding.code == "table" or (finding.code == "index" and finding.repairable) for finding in outcome.findings):
                    outcome = examine(words.directory, options, progress=progress)
    except HpcaiError as problem:
        print(f"hpcai data check: {_printable(str(problem))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hpcai data check: interrupted; nothing was left behind", file=sys.stderr)
        return INTERRUPTED
    try:
        for line in report(outcome, words.strict):
            print(_printable(line), file=out)
        if words.json is not None:
            text = json.dumps(outcome.as_json(), indent=1, allow_nan=False)
            if words.json == "-":
                print(text)
            else:
                Path(words.json).write_text(text + "\n", encoding="utf-8")
        out.flush()
    except BrokenPipeError:  # ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    except OSError as problem:
        print(f"hpcai data check: --json {words.json}: cannot be written: {problem.strerror}", file=sys.stderr)
        return 2
    return int(outcome.failed(words.strict))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpcai data check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("directory", metavar="DIR", type=Path, help="a data set: train, validation, test in it, or *.h5 and *.npy themselves")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="sizes and headers only, no content")
    how.add_argument("--sample", type=int, metavar="N", help="read N random rows of each split, and no whole file")
    allowed = "values allowed; either may be left out"
    add("--range", dest="ranges", type=_range, action="append", default=[], metavar="FIELD=LOW:HIGH", help=allowed)
    add("--world", type=int, metavar="N", help="processes of the job")
    add("--batch", type=int, metavar="B", help="samples of a step, over all processes")
    add("--step-time", type=float, metavar="SECONDS", help="time of a step without waiting for data; needs --batch")
    add("--nodes", type=int, default=1, metavar="N", help="nodes that share the reading (1)")
    add("--seconds", type=float, default=3.0, help="time to measure each way of reading (3); 0 for none")
    add("--threads", type=int, default=4, metavar="N", help="files looked at at once (4)")
    add("--seed", type=int, default=0, help="of the random rows (0)")
    add("--strict", action="store_true", help="warnings count as errors")
    add("--json", metavar="FILE", help="findings and figures as JSON; - is standard output")
    add("--index", action="store_true", help="then write where all values lie beside index.json, so that jobs open no file for it")
    add("--repair", action="store_true", help="align and unpack files, make index.json where there is none; then check again")
    return parser


def _range(text: str) -> tuple[str, tuple[float | None, float | None]]:
    name, _, bounds = text.rpartition("=")
    low, colon, high = bounds.partition(":")
    try:
        if not name or not colon:
            raise ValueError
        return name, (_bound(low), _bound(high))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected FIELD=LOW:HIGH such as counts=0:32767 or target=:1") from None


def _bound(text: str) -> float | None:
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if value != value:
            raise ValueError from None
        return value


# ---- what is said


def report(outcome: "Outcome", strict: bool = False) -> Iterator[str]:
    """The splits, the findings by code with the first few of each, the figures, and the verdict: lines of text."""
    for split in outcome.splits:
        yield from _split(split, log.size(split.bytes))
    if outcome.splits:
        yield ""
    for (severity, code), group in groupby(outcome.findings, key=lambda finding: (finding.severity, finding.code)):
        findings = list(group)
        yield f"{severity}: {code} ({len(findings):,})"
        for finding in findings[:SHOWN]:
            yield f"  {_place(finding, outcome.directory)}: {finding.text}"
        if len(findings) > SHOWN:
            yield f"  and {len(findings) - SHOWN:,} more; --json FILE names all"
    if outcome.findings:
        yield ""
    yield from _figures(outcome.figures)
    counts = ", ".join(_many(outcome.count(severity), severity) for severity in ("error", "warning", "note"))
    samples, size = sum(split.samples for split in outcome.splits), log.size(outcome.figures["bytes"])
    seen = f"{outcome.figures['files']:,} files, {samples:,} samples, {size} in {outcome.figures['seconds']:,.1f} s"
    looked = "sizes and headers of " if outcome.options.quick else ""
    if outcome.options.sample is not None:
        looked = f"{outcome.options.sample:,} rows of each split of "
    word = "FAILED" if outcome.failed(strict) else "usable, with warnings" if outcome.count("warning") else "fine"
    yield f"{word}: {looked}{seen}; {counts}"


def _many(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _place(finding: "Finding", directory: Path) -> str:
    path = finding.path.relative_to(directory) if finding.path.is_relative_to(directory) else finding.path
    name = str(path) if path != Path(".") else str(directory)
    dataset = f" '{finding.dataset}'" if finding.dataset else ""
    return f"{name}{dataset}{'' if finding.row is None else f' row {finding.row}'}"


def _split(split: "Summary", size: str) -> Iterator[str]:
    name = "this folder" if split.name == "." else split.name
    aligned = "" if split.aligned is None else f", {split.aligned:.0%} of rows begin on a page"
    verified = f"SHA-256 of {split.verified:,} verified" if split.verified else "no SHA-256 verified"
    yield f"{name:<12}{_many(split.files, 'file')}, {_many(split.samples, 'sample')}, {size}, {verified}{aligned}"
    for field, kind in split.fields.items():
        yield f"{'':<12}{field}: {kind}"
    if (division := split.division) is not None:
        rest = f"drop leaves {division.left_out:,} out; pad makes {division.padded_batches:,}, repeating {division.repeated:,}"
        yield f"{'':<12}{_many(division.batches, 'batch').replace('batchs', 'batches')} of {division.batch:,} per epoch; {rest}"


def _figures(figures: Any) -> Iterator[str]:
    where = f", on {figures['file_system']}" if figures["file_system"] else ""
    yield f"{_many(figures['inodes'], 'inode')}, {figures['bytes_per_file'] / 2**20:,.2f} MiB per file{where}"
    rate = figures.get("rate")
    if not rate:
        return
    for mode in ("direct", "buffered"):
        found = rate[mode]
        if "problem" in found:
            yield f"random rows, {mode}: not measured: {found['problem']}"
            continue
        speed = f"{found['gb_per_s']:.3g} GB/s, {found['samples_per_s']:,.1f} samples/s"
        yield f"random rows, {mode}: {speed} ({found['bytes'] / 2**20:,.0f} MiB in {found['seconds']:.1f} s, cold)"
    if need := rate.get("needed_per_node"):
        yield f"needed by each node: {need['gb_per_s']:.3g} GB/s, {need['samples_per_s']:,.1f} samples/s"


def _printable(text: str) -> str:
    """Names come from files that nobody vouches for: no control character and no broken one reaches the terminal."""
    encoding = sys.stdout.encoding or "ascii"
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return text.encode(encoding, "backslashreplace").decode(encoding)
