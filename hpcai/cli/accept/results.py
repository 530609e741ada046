"""Results of ReFrame, from its JSON report or, without figures, its JUnit file."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpcai.cli import apps
from hpcai.cli.accept.runs import NEVER_STARTED
from hpcai.errors import DataError
from hpcai.json_file import check_fields, parse_object, read_regular

LOWER_IS_BETTER = ("deviation", "time_to_target", "energy", "loader_share", "link_latency", "job_end")
_EXPECTED = "a report of ReFrame 4.10 (--report-file or --report-junit)"
_REASON = re.compile(r"^(\w+: )?(sanity|performance) error: (failed to meet reference\(s\): )?")
_PARAMETER = re.compile(r"%(\w+)=(\S+)")
_DATA_VERSION = "4"                                      # before the point


class Measured(NamedTuple):
    """A figure of a test, its reference and the tolerances, as shares of the reference; None: there is none."""

    value: float
    unit: str
    reference: float | None = None
    lower: float | None = None
    upper: float | None = None
    ok: bool = True


@dataclass(frozen=True, eq=False)
class Case:
    """The last result of a test with its parameters on a partition."""

    title: str
    """as ReFrame displays it: HPCAI_bert %mode=weak %scale=1_node"""
    partition: str
    result: str
    reason: str = ""
    nodes: tuple[str, ...] = ()
    ranks: int = 0
    folder: Path | None = None
    """its files: of a passed test those that are kept"""
    output: str = ""
    """name of the job's output there"""
    figures: Mapping[str, Measured] = field(default_factory=dict)

    @property
    def test(self) -> str:
        return self.title.split()[0]

    @property
    def app(self) -> str:
        """The name of the app, or "" if the test is of a part of the machine."""
        name = self.test.removeprefix("HPCAI_")
        return name if name in apps.list_apps() else ""

    @property
    def mode(self) -> str:
        return dict(_PARAMETER.findall(self.title)).get("mode", "")

    @property
    def label(self) -> str:
        """The app or the part, and its parameters: ``bert weak 2 nodes``, ``bert weak 1/4 node``."""
        words = self.test.removeprefix("HPCAI_"), *(value for _, value in _PARAMETER.findall(self.title))
        return re.sub(r"\b1_(\d)_node", r"1/\1 node", " ".join(words)).replace("_", " ")

    @property
    def passed(self) -> bool:
        return self.result in ("pass", "xfail")

    @property
    def skipped(self) -> bool:
        return self.result == "skip"

    @property
    def failed(self) -> bool:
        return not self.passed and not self.skipped


@dataclass(frozen=True)
class Results:
    """The results of a session of ReFrame, in its order."""

    path: Path
    system: str
    cases: tuple[Case, ...]
    start: str
    seconds: float

    @property
    def failed(self) -> list[Case]:
        return [case for case in self.cases if case.failed]

    @property
    def tested(self) -> list[Case]:
        return [case for case in self.cases if not case.skipped]


def find_report(path: Path) -> Path | None:
    """Return the file of ReFrame that ``path`` is, or holds as report.json; None for other files and folders."""
    file = path / "report.json" if path.is_dir() else path
    try:
        content = read_regular(file) if file.suffix in (".json", ".xml") else b""
    except OSError:
        return None
    return file if b'"session_info"' in content or b'package="reframe"' in content else None


def read_results(path: Path) -> Results:
    """Return the last result of each case. Raises DataError for another file, or another version of ReFrame's report."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; expected {_EXPECTED}") from error
    if not content.lstrip().startswith(b"<"):
        report = parse_object(content, str(path), _EXPECTED, DataError)
        with check_fields(path, _EXPECTED, DataError):
            session = report["session_info"]
            version, time = str(session["data_version"]), str(session["time_start"])
            if version.partition(".")[0] != _DATA_VERSION:
                raise DataError(f"{path}: data_version is {version}, expected {_DATA_VERSION}.x; run the tests with ReFrame 4.10")
            rows = [*report.get("restored_cases", ()), *(row for run in report["runs"] for row in run["testcases"])]
            cases = [_json_case(row) for row in rows]
            when = f"{time[:4]}-{time[4:6]}-{time[6:8]} {time[9:11]}:{time[11:13]}"
            return _results(path, str(session["hostname"]), cases, when, float(session["time_elapsed"]))
    try:
        suites = ElementTree.fromstring(content).findall("testsuite[@package='reframe']")
    except ElementTree.ParseError as error:
        raise DataError(f"{path}: not XML ({error}); expected {_EXPECTED}") from None
    with check_fields(path, _EXPECTED, DataError):
        cases = [case for suite in suites for case in _junit_cases(suite)]
        session = suites[0].attrib
        return _results(path, session["hostname"], cases, session["timestamp"].replace("T", " ")[:16], float(session["time"]))


def _results(path: Path, host: str, cases: list[Case], start: str, seconds: float) -> Results:
    last = {(case.title, case.partition): case for case in cases}
    systems = dict.fromkeys(case.partition.partition(":")[0] for case in last.values())
    return Results(path, ", ".join(systems) or host, tuple(last.values()), start, seconds)


def _json_case(row: Mapping[str, Any]) -> Case:
    figures = {name.rpartition(":")[2]: Measured(value, unit, reference or None, lower, upper, result != "fail")
               for name, (value, reference, lower, upper, unit, result) in row["perfvalues"].items() if value is not None}
    folder = row["outputdir" if row["result"] in ("pass", "xfail") else "stagedir"]
    return Case(
        row["display_name"], f"{row['system']}:{row['partition']}", row["result"], _reason(row["fail_reason"]),
        tuple(row["job_nodelist"]), row["num_tasks"] or 1, folder and Path(folder), row["job_stdout"] or "", figures,
    )  # fmt: skip


def _junit_cases(suite: ElementTree.Element) -> Iterator[Case]:
    for case in suite.iter("testcase"):
        title, _, place = case.attrib["name"].rpartition(" @")
        failure = case.find("failure")
        result, reason = ("pass", "") if failure is None else ("fail", _reason(failure.text))
        yield Case(title, place.partition("+")[0], result, reason)


def _reason(text: str | None) -> str:
    """Return the text of an error without ReFrame's words before it: found, expected, and what to do."""
    if "maximum pending time exceeded" in (text or ""):
        return NEVER_STARTED
    return re.sub(r" \(l=(\S+), u=(\S+)\)", r" (\1 to \2)", _REASON.sub("", text or ""))
