"""A bar of the parts of a step for each run, to see where its time went."""

from collections.abc import Mapping
from html import escape
from itertools import pairwise

import numpy as np

from hpcai.cli.report.run import RunRecord
from hpcai.log import BETWEEN, format_decimal

NAMES = {"data": "waiting for data", "forward": "forward", "backward": "backward", "pipeline": "forward and backward",
         "graph": "captured graph", "reduce": "gradient reduction", "update": "update", "evaluate": "evaluation", "save": "saving",
         "other": "rest"}  # fmt: skip
UNITS = ("µs", "ms", "s")


def mean_parts(run: RunRecord) -> dict[str, float]:
    """Return the mean seconds per step of each part, or {} if no report has them.

    The first report of a start counts for evaluation and saving only, if there are others: it has compilation and connections.
    """
    events = [event for event in run.events if event["kind"] == "start" or "parts" in event]
    first = {after.get("step") for before, after in pairwise(events) if before["kind"] == "start"}
    counts = np.diff([0, *(event["step"] for event in run.events_of("train"))]).tolist()
    reports = [(count, event) for count, event in zip(counts, run.events_of("train")) if "parts" in event]
    steady = [report for report in reports if report[1]["step"] not in first] or reports

    def mean(part: str) -> float:
        counted = reports if part in BETWEEN else steady
        total = sum(count * event["parts"].get(part, 0.0) for count, event in counted)
        total += sum(event["parts"].get(part, 0.0) for event in events if event["kind"] == "stop")
        return float(total / max(sum(count for count, _ in counted), 1))

    return {part: seconds for part in NAMES if reports and (seconds := mean(part)) > 0}


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
    rows = [f'<li><i class="{part}"></i>{NAMES[part]} <b>{escape(texts[part])}</b> {format_decimal(1e6 * seconds, *UNITS)}</li>'
            for part, seconds in parts.items()]  # fmt: skip
    title = f"<b>{escape(label)}</b>: " if label else ""
    head = f"<div>{title}{format_decimal(1e6 * total, *UNITS)} for each step</div>"
    return f'<div class="parts">{head}<div class="bar">{"".join(segments)}</div><ul>{"".join(rows)}</ul></div>'
