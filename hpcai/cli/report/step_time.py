"""Where the time of a step went: a bar of its parts for each run."""

from collections.abc import Mapping
from html import escape

from hpcai.cli.report.run import RunRecord
from hpcai.log import format_number

NAMES = {"data": "waiting for data", "forward": "forward", "backward": "backward", "pipeline": "forward and backward",
         "graph": "captured graph", "reduce": "gradient reduction", "update": "update", "evaluate": "evaluation", "save": "saving",
         "other": "rest"}  # fmt: skip
BETWEEN = ("evaluate", "save")  # parts between steps


def mean_parts(run: RunRecord) -> dict[str, float]:
    """Return the mean seconds per step of each part, or {} if no report has them.

    The first report of a start counts for evaluation and saving only, if there are others: it has compilation and connections.
    """
    reports: list[tuple[bool, int, Mapping[str, float]]] = []  # whether it is the first of a start, steps, parts
    rest: dict[str, float] = {}
    step, first = 0, True
    for event in run.events:
        parts = event.get("parts")
        if event["kind"] == "start":
            step, first = event.get("resumed_from") or 0, True
        elif event["kind"] == "train" and isinstance(parts, Mapping):
            reports.append((first, event["step"] - step, parts))
            step, first = event["step"], False
        elif event["kind"] == "stop" and isinstance(parts, Mapping):
            rest = {part: rest.get(part, 0.0) + seconds for part, seconds in parts.items()}
    steady = [report for report in reports if not report[0]] or reports

    def mean(part: str) -> float:
        counted = reports if part in BETWEEN else steady
        total = sum(steps * parts.get(part, 0.0) for _, steps, parts in counted) + rest.get(part, 0.0)
        return total / max(sum(steps for _, steps, _ in counted), 1)

    means = {part: mean(part) for part in NAMES} if reports else {}
    return {part: seconds for part, seconds in means.items() if seconds > 0}


def bars(runs: Mapping[str, RunRecord]) -> str:
    """Return a card with a bar for each labelled run that has parts, or ""."""
    rows = [_bar(label if len(runs) > 1 else "", parts) for label, run in runs.items() if (parts := mean_parts(run))]
    note = "Means over the run, of the first process; evaluation and saving are spread over all steps."
    title = f'<h2>Where the time of a step went</h2><div class="faint">{note}</div>'
    return f'<section class="card">{title}{"".join(rows)}</section>' if rows else ""


def _bar(label: str, parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    shares = {part: 100 * seconds / total for part, seconds in parts.items()}
    texts = {part: f"{share:.0f} %" if share >= 0.5 else "<1 %" for part, share in shares.items()}
    segments = [f'<i class="{part}" style="flex-grow:{share:.2f}">{texts[part] if share >= 12 else ""}</i>'
                for part, share in shares.items()]  # fmt: skip
    rows = [f'<li><i class="{part}"></i>{NAMES[part]} <b>{escape(texts[part])}</b> {format_milliseconds(seconds)}</li>'
            for part, seconds in parts.items()]  # fmt: skip
    title = f"<b>{escape(label)}</b>: " if label else ""
    head = f"<div>{title}{format_milliseconds(total)} for each step</div>"
    return f'<div class="parts">{head}<div class="bar">{"".join(segments)}</div><ul>{"".join(rows)}</ul></div>'


def format_milliseconds(seconds: float) -> str:
    """Format a time with three digits at most."""
    return f"{format_number(float(f'{1000 * seconds:.3g}'))} ms"
