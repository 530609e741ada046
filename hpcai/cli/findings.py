"""Findings: the faults and remarks of a command that examines something, how they are shown, and the exit code that follows."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from hpcai.errors import DataError

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
FindingKinds = Mapping[str, tuple[Severity, str]]
"""Severity and text of each kind. A kind is CODE or CODE/CASE, and its text may hold ``str.format`` fields."""


@dataclass(frozen=True)
class Finding:
    """One fault, or one remark. ``place`` names the file or the ranks that ``text`` is about."""

    severity: Severity
    code: str
    place: str
    text: str


def describe(kinds: FindingKinds, kind: str, **words: Any) -> dict[str, Any]:
    """Return severity, code and text of a finding of ``kind``: keyword arguments of ``Finding``."""
    severity, text = kinds[kind]
    return {"severity": severity, "code": kind.partition("/")[0], "text": text.format(**words)}


def lines(findings: Sequence[Finding], shown: int = 5) -> Iterator[str]:
    """Yield the findings for a terminal, grouped by code in their order, with the first ``shown`` of each code."""
    for (severity, code), group in groupby(findings, key=lambda finding: (finding.severity, finding.code)):
        same = list(group)
        yield f"{severity}: {code} ({len(same):,})"
        yield from (f"  {finding.place}: {finding.text}" for finding in same[:shown])
        if len(same) > shown:
            yield f"  and {len(same) - shown:,} more; --json FILE names all"


def count(findings: Iterable[Finding], severity: Severity) -> int:
    return sum(finding.severity == severity for finding in findings)


def failed(findings: Iterable[Finding], strict: bool = False) -> bool:
    """Whether the exit code is 1: there are errors, or with ``strict`` warnings."""
    return any(finding.severity == "error" or (strict and finding.severity == "warning") for finding in findings)


def verdict(findings: Sequence[Finding], strict: bool = False) -> str:
    """Return ``FAILED``, ``usable, with warnings`` or ``fine``."""
    return "FAILED" if failed(findings, strict) else "usable, with warnings" if count(findings, "warning") else "fine"


def counts(findings: Sequence[Finding]) -> str:
    """Return ``1 error, 2 warnings, 0 notes``."""
    return ", ".join(pluralize(count(findings, severity), severity) for severity in SEVERITIES)


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return counts and findings as JSON values."""
    codes = Counter(finding.code for finding in findings)
    summary = {**{f"{name}s": count(findings, name) for name in SEVERITIES}, "codes": dict(sorted(codes.items()))}
    plain = [{name: str(value) if isinstance(value, Path) else value for name, value in asdict(one).items()} for one in findings]
    return {"summary": summary, "findings": plain}


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Return ``text`` without control characters and without what the terminal cannot encode: names come from other people's
    files."""
    plain = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
    encoding = sys.stdout.encoding or "ascii"
    return plain.encode(encoding, "backslashreplace").decode(encoding)


def write_json(where: Path | str, content: Mapping[str, Any]) -> None:
    """Write JSON to a file, or to standard output for ``-``. Raises DataError where it cannot be written."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    try:
        print(text, end="") if str(where) == "-" else Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{where} cannot be written: {error.strerror}; name another file") from error
