"""Findings: errors, warnings and notes of a command that checks something, their formatting, and the exit code."""

import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from hpcai.errors import DataError, escape_controls

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
FindingKinds = Mapping[str, tuple[Severity, str]]
"""Severity and text of each kind. A kind is CODE or CODE/CASE, and its text may contain ``str.format`` fields."""


def read_kinds(path: Path) -> FindingKinds:
    """Return the kinds of a TOML file, in its order: ``KIND = ["severity", "text"]``."""
    from pydantic import TypeAdapter  # --help needs none

    return TypeAdapter(FindingKinds).validate_python(tomllib.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Finding:
    """One error, warning or note. ``place`` names the file or the ranks that ``text`` describes."""

    severity: Severity
    code: str
    place: str
    text: str


def describe(kinds: FindingKinds, kind: str, **fields: Any) -> dict[str, Any]:
    """Return severity, code and text of a finding of ``kind``, as keyword arguments of ``Finding``."""
    severity, text = kinds[kind]
    return {"severity": severity, "code": kind.partition("/")[0], "text": text.format(**fields)}


def lines(findings: Sequence[Finding], shown: int = 5) -> Iterator[str]:
    """Yield the findings for a terminal, grouped by code in their order, with the first ``shown`` of each code."""
    for (severity, code), group in groupby(findings, key=lambda finding: (finding.severity, finding.code)):
        members = list(group)
        yield f"{severity}: {code} ({len(members):,})"
        yield from (f"  {finding.place}: {finding.text}" for finding in members[:shown])
        if len(members) > shown:
            yield f"  and {len(members) - shown:,} more; --json FILE names all"


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
    values = [{name: str(value) if isinstance(value, Path) else value for name, value in asdict(item).items()} for item in findings]
    return {"summary": summary, "findings": values}


def pluralize(count: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Return ``text``, which may come from untrusted files, with control and unencodable characters escaped."""
    encoding = sys.stdout.encoding or "ascii"
    return escape_controls(text, keep="").encode(encoding, "backslashreplace").decode(encoding)


def write_json(path: Path | str, content: Mapping[str, Any]) -> None:
    """Write JSON to a file, or to standard output for ``-``. Raises DataError if it cannot be written."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    try:
        print(text, end="") if str(path) == "-" else Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}; name another file") from error
