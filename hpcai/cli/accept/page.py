"""The page of an acceptance: one self-contained HTML file in the style of `hpcai report`."""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from rich.console import Console

from hpcai.cli import apps
from hpcai.cli.accept.results import LOWER_IS_BETTER, Case, Measured, Results
from hpcai.cli.findings import pluralize
from hpcai.cli.report.document import card, details, figure_cards, header, html_page, lead, left_out_card, render_plot, table, tiles
from hpcai.cli.report.picture import Finding
from hpcai.cli.report.run import RunRecord, read_run
from hpcai.cli.report.step_time import NAMES, mean_parts
from hpcai.cli.report.theme import WIDTH, Plot, Theme, panel_title
from hpcai.dist.gpus import SHEETS
from hpcai.errors import DataError
from hpcai.json_file import check_fields, read_object
from hpcai.log import format_duration

SHOWN = 8  # of the slowest figures
_RESULTS = {"pass": "passed", "fail": "failed", "skip": "skipped"}
_EXPECTED = re.compile(r"[,;] expected ([^;]*)")
_MISSING = "–"
_MODES = "small target weak strong"
_OBJECT = partial(read_object, expected="a JSON object, as the test writes it", error=DataError)


class Acceptance:
    """The results with the files of their tests, and predictions."""

    def __init__(self, results: Results) -> None:
        self.results, self.left_out = results, list[str]()
        if results.path.suffix == ".xml":
            self.left_out.append("figures and files: a JUnit file has none, and counts skipped tests as passed; take the JSON file")
        self.workloads = sorted((case for case in results.cases if case.app), key=lambda case: (case.app, _MODES.find(case.mode)))
        self.parts = [case for case in results.cases if not case.app]
        self.runs = {case: run for case in self.workloads if (run := self.read(case, "run", read_run))}
        doctors = (self.read(case, "doctor.json") for case in self.parts if case.test == "HPCAI_ranks")
        self.doctor: dict[str, Any] = next(filter(None, doctors), {})
        self.members: list[dict[str, Any]] = self.doctor.get("members", [])
        names = [member["gpu"]["name"] for member in self.members if member.get("gpu")]
        self.gpu: str = names[0] if names else "CPUs" if self.members else "unknown devices"
        self.machine = next((name for name, sheet in SHEETS.items() if self.gpu in sheet["names"]), None)
        self.apps = list(dict.fromkeys(case.app for case in self.workloads))
        self.declared = {app: self._toml(app, "acceptance.toml").get("scaling", {}) for app in self.apps}
        self.curves: dict[tuple[str, str], list[tuple[int, float]]] = {}

    def read(self, case: Case, name: str, read: Callable[[Path], Any] = _OBJECT) -> Any:
        """Return what ``read`` returns of a file or a run in the folder of the test, or None without it."""
        try:
            return read(case.folder / name) if case.folder and (case.folder / name).exists() else None
        except DataError as error:
            self.left_out.append(str(error))

    def _toml(self, app: str, name: str) -> dict[str, Any]:
        path = apps.app_folder(app) / name
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def predict(self, path: Path, report: Callable[[str], object]) -> None:
        """Compute the curves of `hpcai plan`, and keep them in the file ``path``."""
        if self.machine is None:
            return
        from hpcai.cli.accept.scaling import compute_curves  # imports torch

        wanted = {}
        for app, mode in dict.fromkeys((case.app, case.mode) for case in self.runs if case.mode in ("weak", "strong")):
            cases = [case for case in self.runs if (case.app, case.mode) == (app, mode)]
            counts, run = [case.ranks for case in cases], self.runs[cases[0]]
            batch = run.setting("data.batch") or run.start.get("global_batch")  # a sample of the loader may be a block of a plan's
            gpus = sorted({*counts, *(2**n for n in range(max(counts).bit_length() + 1))})
            if batch and app in apps.with_part("plan"):
                yaml, overrides = self.declared[app].get("config", ""), self.declared[app].get("overrides", ())
                settings = yaml, tuple(word for word in overrides if "{" not in word)
                wanted[app, mode] = gpus, batch // (cases[0].ranks if mode == "weak" else 1), settings
        self.curves, problems = compute_curves(path, self.machine, wanted, report)
        self.left_out += [f"hpcai plan {app}, {mode} scaling: {problem}" for (app, mode), problem in problems.items()]

    def planned(self, case: Case) -> float | None:
        """Return the samples per second that `hpcai plan` predicts for the GPUs of the job."""
        return None if case.skipped else dict(self.curves.get((case.app, case.mode), ())).get(case.ranks)

    def published(self, case: Case) -> float | None:
        """Return the published rate of the same GPU, times the GPUs of the job."""
        rate = self._toml(case.app, "published.toml").get("rates", {}).get(self.declared[case.app].get("published"))
        if not rate or case.skipped or case.mode not in ("weak", "strong") or not re.search(rf"\b{rate['gpu']}\b", self.gpu):
            return None
        return float(rate["samples_per_s"] * case.ranks)


def draw_page(results: Results, path: Path) -> Path:
    """Write the page to ``path``, and the curves of `hpcai plan` to scaling.json beside it. Return ``path``."""
    with check_fields(f"{results.path} or files of its tests", "what the tests of hpcai accept write", DataError):
        acceptance = Acceptance(results)
        with Console(stderr=True).status("") as status:
            acceptance.predict(path.with_name("scaling.json"), status.update)
        strip, curves = (figure_cards({plot: pictures for plot in plots if (pictures := render_plot(acceptance.left_out, plot))})
                         for plots in (_strips(acceptance), _curves(acceptance)))
        state = ("not accepted", "bad") if results.failed or not results.tested else ("accepted", "good")
        skipped = [(case.label, case.partition) for case in results.cases if case.skipped]
        files = [(case.label, case.folder) for case in results.cases if case.folder]
        again = [f"hpcai accept --site {results.system} --only {case.test}" for case in results.failed or results.cases[:1]]
        page = html_page(f"{results.system}: {state[0]}", [
            header(results.system, *state, f"{results.start} · {acceptance.gpu} · {results.path}"),
            lead(_finding(results)), _failures(results), tiles(_tiles(acceptance)),
            _workloads(acceptance), strip, _parts(acceptance), curves, _mlperf(acceptance), _slow(acceptance), _system(acceptance),
            left_out_card(acceptance.left_out), details("Skipped tests", table(("", ""), skipped) if skipped else ""),
            details("Repeat a test", f"<pre>{escape(chr(10).join(dict.fromkeys(again)))}</pre>"),
            details("Files of the tests", table(("", ""), files) if files else ""),
        ])  # fmt: skip
    path.write_text(page, encoding="utf-8")
    return path


def _format(value: float | None, unit: str = "") -> str:
    """Return three significant digits, or all digits before the point; a dash for None."""
    return _MISSING if value is None else f"{value:,.0f} {unit}".strip() if value >= 100 else f"{value:.3g} {unit}".strip()


def _difference(value: float | None, reference: float | None) -> str:
    return _MISSING if value is None or not reference else f"{100 * (value / reference - 1):+.1f} %".replace("-", "−")


def _tolerance(figure: Measured) -> str:
    low, high = (None if bound is None else f"{100 * bound:+.0f} %".replace("-", "−") for bound in (figure.lower, figure.upper))
    return f"{low} to {high}" if low and high else f"≥ {low}" if low else f"≤ {high}" if high else ""


def _words(name: str) -> str:
    return re.sub("^all_(to_)?", lambda match: match[0].replace("_", "-"), name).replace("_", " ")


def _nodes(names: Sequence[str]) -> str:
    ordered = sorted(set(names), key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
    return ", ".join(ordered) if len(ordered) < 4 else f"{len(ordered)} nodes, {ordered[0]} to {ordered[-1]}"


def _finding(results: Results) -> Finding:
    passed, total = sum(case.passed for case in results.cases), len(results.tested)
    nodes = _nodes([node for case in results.cases for node in case.nodes])
    on = f" on {nodes}" if nodes else ""
    text = f"{passed} of {pluralize(total, 'test')} passed{on}, in {format_duration(results.seconds)}."
    return Finding(text, f"{passed} / {total}", "tests passed")


def _failures(results: Results) -> str:
    """Return a card with place, values and remedy of each failed test."""
    blocks = []
    for case in results.failed:
        reason, end, remedy = case.reason.rpartition("; ")
        if not end or remedy.startswith("expected "):
            reason, remedy = case.reason, ""
        measured, expected = _EXPECTED.sub("", reason), "; ".join(_EXPECTED.findall(reason))
        if bad := [(name, figure) for name, figure in case.figures.items() if not figure.ok and measured.startswith(f"{name}=")]:
            measured = ", ".join(f"{_words(name)} {_format(figure.value, figure.unit)}" for name, figure in bad)
            expected = ", ".join(f"{_format(figure.reference, figure.unit)}, {_tolerance(figure)}" for _, figure in bad)
        place = re.search(r"ranks? \d+(?:[, -]+\d+)*(?: on node [\w.-]+)?|node [\w.-]+", measured)
        rows = [("where", place[0] if place else _nodes(case.nodes)), ("found", measured or case.result), ("expected", expected),
                ("what to do", remedy), ("output", case.folder / case.output if case.folder else ""),
                ("repeat", f"hpcai accept --site {results.system} --only {case.test}")]
        blocks.append(f'<p><b class="bad">{escape(case.label)}</b></p>{table(("", ""), [row for row in rows if row[1]])}')
    return card("What failed", "".join(blocks)) if blocks else ""


def _tiles(acceptance: Acceptance) -> Iterator[tuple[str, str, str]]:
    failed = {case.app for case in acceptance.workloads if case.failed}
    if acceptance.apps:
        yield "workloads", f"{len(acceptance.apps) - len(failed)} of {len(acceptance.apps)}", "passed all their tests"
    figures = {name: figure for case in acceptance.parts for name, figure in case.figures.items()}
    for name in ("all_reduce", "slowest_rank", "checkpoint_write"):
        if name in figures:
            value, unit, reference, *_ = figures[name]
            yield _words(name), _format(value, unit), f"reference {_format(reference, unit)}" if reference else "no reference"


def _workloads(acceptance: Acceptance) -> str:
    rows = []
    for case in acceptance.workloads:
        figure = case.figures.get("throughput")
        rate, reference, unit = (figure.value, figure.reference, figure.unit) if figure else (None, None, "")
        names = ("deviation", "time_to_target", "energy", "loader_share")
        deviation, target, energy, loader = (figure.value if (figure := case.figures.get(name)) else None for name in names)
        rows.append([
            case.label, _RESULTS.get(case.result, case.result), _MISSING if deviation is None else f"{deviation:.2f}",
            _format(rate, unit), _format(reference), _difference(rate, reference),
            _format(acceptance.published(case)), _format(acceptance.planned(case)), format_duration(target) if target else _MISSING,
            _format(energy), _format(loader),
        ])  # fmt: skip
    head = ("", "result", "deviation %", "rate", "reference", "difference", "published", "plan", "to target", "J/sample",
            "loader %")  # fmt: skip
    kept = [n for n in range(len(head)) if n < 2 or any(row[n] != _MISSING for row in rows)]
    note = ("Deviation: the largest of a loss or metric from its expected value. Published: of one GPU of this kind, times the "
            "GPUs. Plan: hpcai plan. Loader: share of a step that waits for data.")
    body = table([head[n] for n in kept], [[row[n] for n in kept] for row in rows], "numbers")
    return card("Workloads", body, note) if rows else ""


def _parts(acceptance: Acceptance) -> str:
    rows: list[tuple[str, ...]] = []
    for case in acceptance.parts:
        for name, figure in case.figures.items():
            value, unit, reference, *_ = figure
            rows.append((f"{case.label}: {_words(name)}", _format(value, unit), _format(reference, unit),
                         _difference(value, reference), _tolerance(figure) if reference else _MISSING))
        if not case.figures:
            rows.append((case.label, _RESULTS.get(case.result, case.result), _MISSING, _MISSING, _MISSING))
    return card("Parts", table(("", "measured", "reference", "difference", "tolerance"), rows, "numbers")) if rows else ""


def _strips(acceptance: Acceptance) -> Iterator[Plot]:
    groups: list[dict[str, list[Measured]]] = [{}, {}]
    for case in (*acceptance.workloads, *acceptance.parts):
        for name, figure in case.figures.items():
            if figure.reference:
                label = f"{case.app or _words(case.test.removeprefix('HPCAI_'))}: {_words(name)}"
                groups[not case.app].setdefault(label, []).append(figure)
    if any(groups):
        caption = "Each measured figure divided by its reference, one point for each scale; the band is the tolerance."
        yield Plot("references", "Figures and their references", caption, partial(_draw_strips, [*filter(None, groups)]))


def _draw_strips(groups: Sequence[dict[str, list[Measured]]], theme: Theme) -> list[Figure]:
    drawn = []
    for group in groups:
        figure = Figure(figsize=(WIDTH, 0.55 + 0.24 * max(len(other) for other in groups)))
        axes = figure.subplots()
        for row, values in enumerate(group.values()):
            for value, _, reference, lower, upper, ok in values:
                low, high = (2 if bound is None else bound for bound in (-2 if lower is None else lower, upper))
                axes.barh(row, 100 * (high - low), 0.62, 100 * (1 + low), color=theme.grid, zorder=1)
                ratio, color = min(100 * value / (reference or 1), 195.0), theme.main if ok else theme.second
                axes.plot(ratio, row, "o" if ok else "D", color=color, markersize=5.5, zorder=3)
        ratios = [100 * value / (reference or 1) for values in group.values() for value, _, reference, *_ in values]
        axes.axvline(100, color=theme.faint, linewidth=1, zorder=2)
        axes.set(xlim=(min(75, *ratios) - 5, min(max(125, *ratios) + 5, 200)), yticks=range(len(group)), yticklabels=list(group))
        axes.set_ylim(max(len(other) for other in groups) - 0.4, -0.6)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f} %"))
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0, labelcolor=theme.ink)
        axes.spines[:].set_visible(False)
        drawn.append(figure)
    return drawn


def _curves(acceptance: Acceptance) -> Iterator[Plot]:
    measured: dict[str, dict[str, list[Case]]] = {}
    for case in acceptance.workloads:
        if case.mode in ("weak", "strong") and "throughput" in case.figures:
            measured.setdefault(case.app, {}).setdefault(case.mode, []).append(case)
    machine, devices = acceptance.machine, acceptance.gpu
    lines = f"Lines: hpcai plan for {machine}." if machine else f"No lines, since hpcai plan has no data sheet of {devices}."
    caption = f"Rate of one GPU or rank: flat is perfect scaling. Points: measured. {lines}"
    if measured:
        yield Plot("scaling", "Scaling", caption, lambda theme: [_draw_curve(acceptance, *app, theme) for app in measured.items()])


def _draw_curve(acceptance: Acceptance, app: str, modes: dict[str, list[Case]], theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, 2.9))
    axes = figure.subplots()
    for mode, color, mark in (("weak", theme.main, "o"), ("strong", theme.second, "s")):
        points = sorted((case.ranks, case.figures["throughput"].value / case.ranks) for case in modes.get(mode, ()))
        if curve := acceptance.curves.get((app, mode)):
            axes.plot([n for n, _ in curve], [rate / n for n, rate in curve], color=color, linewidth=2, alpha=0.45)
        if points:
            axes.plot(*np.transpose(points), mark, color=color, markersize=6, label=mode)
    last = max((case for cases in modes.values() for case in cases), key=lambda case: case.ranks)
    planned, rate = acceptance.planned(last), last.figures["throughput"].value
    unit = pluralize(last.ranks, "GPU" if acceptance.machine else "rank")
    of_plan = f", {100 * rate / planned:.0f} % of the plan" if planned else ""
    panel_title(axes, app, f"{_format(rate, last.figures['throughput'].unit)} on {unit}{of_plan}", theme)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _format(y) if y else "0"))
    axes.set_ylim(0, 1.1 * axes.dataLim.y1)
    axes.set_xlabel("GPUs" if acceptance.machine else "ranks")
    axes.legend(loc="lower left", ncols=2)
    return figure


def _mlperf(acceptance: Acceptance) -> str:
    rows = []
    for case in acceptance.workloads:
        if log := acceptance.read(case, "mlperf.json"):
            rules = ", ".join(log.get("failed") or ())
            rows.append((case.label, "passes" if log["passed"] else "fails", rules or log["log"]))
    note = "A small run breaks rules about sizes and targets. mlperf.tar.gz beside this page has the logs."
    return card("MLPerf logs", table(("", "checker", "failed rules, or log"), rows), note) if rows else ""


def _slow(acceptance: Acceptance) -> str:
    """Return the slowest figures relative to their references or to the plan."""
    rows = []
    for case in acceptance.results.cases:
        for name, figure in case.figures.items():
            expected = {"reference": figure.reference, "plan": acceptance.planned(case) if name == "throughput" else None}
            for source, value in expected.items():
                if value and figure.value:
                    slower = figure.value / value if name in LOWER_IS_BETTER else value / figure.value
                    rows.append((slower, case, name, figure, f"{_format(value, figure.unit)}, {source}"))
    slowest = [row for row in sorted(rows, key=lambda row: -row[0]) if row[0] > 1.02][:SHOWN]
    cells = [(f"{case.label}: {_words(name)}", _format(figure.value, figure.unit), expected, f"{100 * (slower - 1):.0f} %",
              _longest_part(acceptance.runs.get(case))) for slower, case, name, figure, expected in slowest]
    note = "The part of a step that takes most is where to look; hpcai report draws the run, whose folder is below."
    body = table(("", "measured", "expected", "worse by", "most of a step"), cells, "numbers")
    return card("What was slow", body, note) if cells else ""


def _longest_part(run: RunRecord | None) -> str:
    parts = mean_parts(run) if run else {}
    name = max(parts, key=lambda part: parts[part], default="")
    return f"{NAMES[name]} {100 * parts[name] / sum(parts.values()):.0f} %" if parts else _MISSING


def _system(acceptance: Acceptance) -> str:
    if not acceptance.members:
        return ""
    first, ranks, nodes = acceptance.members[0], len(acceptance.members), [member["node"] for member in acceptance.members]
    rows = [("nodes", _nodes(nodes)), ("devices", f"{ranks} x {acceptance.gpu}" if first["gpu"] else acceptance.gpu),
            ("CPUs", f"{len(first['cpus'])} of {first['online']} for the first rank"), *first["versions"].items(),
            *((item["severity"], f"{item['place']}: {item['text']}") for item in acceptance.doctor.get("findings", ()))]
    return card("System and versions", table(("", ""), rows), acceptance.doctor.get("title", ""))
