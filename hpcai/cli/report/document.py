"""The page: one self-contained HTML file."""

import base64
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any, Literal

from hpcai import startup
from hpcai.cli.report.picture import Finding
from hpcai.cli.report.run import RunRecord, describe_error
from hpcai.cli.report.step_time import bars
from hpcai.cli.report.theme import DARK, LIGHT, Plot
from hpcai.log import format_bytes, format_duration, format_energy, format_number, format_rate, format_rates, format_reason

Images = Mapping[Plot, Sequence[tuple[bytes, bytes]]]    # light and dark PNG of each figure of a plot

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
MAX_CHECKPOINTS = 12                                                # in the table

STATE_CLASSES = {"finished": "good", "target": "good", "diverged": "bad"}  # others: warn


def _date(time: float) -> str:
    return (datetime.fromtimestamp(0, UTC) + timedelta(seconds=time)).strftime("%Y-%m-%d %H:%M UTC")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], kind: Literal["words", "numbers", "texts"] = "words") -> str:
    """Return an HTML table. All columns but the first of ``numbers`` are right-aligned; ``texts`` keep their line breaks."""

    def cells(row: Sequence[Any], tag: str) -> str:
        marks = ["", *(' class="n"' if kind == "numbers" else "" for _ in row[1:])]
        return "<tr>" + "".join(f"<{tag}{mark}>{escape(str(cell))}</{tag}>" for cell, mark in zip(row, marks)) + "</tr>"

    top = cells(head, "th") if any(head) else ""
    return f'<table class="{kind}">{top}{"".join(cells(row, "td") for row in rows)}</table>'


def card(title: str, body: str, note: str = "") -> str:
    faint = f'<div class="faint">{escape(note)}</div>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{faint}{body}</section>'


def details(title: str, body: str, note: str = "") -> str:
    """Return a card whose ``body`` is folded away, or "" without a body."""
    faint = f'<div class="faint">{escape(note)}</div>' if note else ""
    return f'<details class="card"><summary>{escape(title)}</summary>{faint}{body}</details>' if body else ""


def header(title: str, state: str, mark: str, below: str) -> str:
    badge = f'<span class="state {mark}">{escape(state)}</span>' if state else ""
    return f'<header><h1>{escape(title)}</h1>{badge}</header><div class="faint">{escape(below)}</div>'


def lead(finding: Finding) -> str:
    """Return the first card of a page: what was learnt."""
    sentence, number, meaning = map(escape, finding)
    return f'<section class="card lead"><p>{sentence}</p><b>{number}</b><span class="faint">{meaning}</span></section>'


def tiles(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return tiles, each with a label, a value and a note."""
    cards = [f'<div class="card tile"><span class="faint">{escape(label)}</span><b>{escape(value)}</b>'
             f'<span class="faint">{escape(note)}</span></div>' for label, value, note in rows]
    return f'<div class="tiles">{"".join(cards)}</div>'


def run_state(run: RunRecord) -> tuple[str, str]:
    """Return the state of the run, and its CSS class."""
    stop = run.stop
    if not stop:
        return f"still running, last event {_date(run.events[-1]['time'])}", "live"
    return format_reason(stop), STATE_CLASSES.get(str(stop.get("reason")), "warn")


def _header(run: RunRecord) -> str:
    when = f"{_date(run.events[0]['time'])} to {_date(run.events[-1]['time'])}"
    return header(run.name, *run_state(run), f"{run.directory} · {when}")


def _tiles(run: RunRecord) -> str:
    last = (run.events_of("train") or run.events_of("stop") or [{}])[-1]
    rows = []
    name = run.metric
    if name and (best := run.best(name)):
        target = f", target {format_number(run.target(name))}" if run.target(name) is not None else ""
        rows.append((f"best validation {name}", format_number(best[1]), f"at step {best[0]:,}{target}"))
    rates = run.rates
    if (median := rates.pop("samples_per_second", None)) is not None:
        world = run.start.get("world") or 1
        each = f"; {format_rate(median / world)} per process" if world > 1 else ""
        rows.append(("throughput", format_rate(median), "; ".join([f"median{each}", *format_rates(rates)])))
    rows.append(("training time", format_duration(run.seconds), f"{last.get('samples') or 0:,} samples seen"))
    steps, planned = last.get("step") or 0, run.start.get("steps")
    share = f"{100 * steps / planned:.0f} % of the plan" if planned else ""
    rows.append(("steps", f"{steps:,}" + (f" / {planned:,}" if planned else ""), share))
    return tiles(rows)


def _results(run: RunRecord) -> str:
    rows = []
    for name in run.names("evaluate"):
        steps, values = run.series("evaluate", name)
        best, target = run.best(name), run.target(name)
        best_cells = (name, format_number(best[1]), f"{best[0]:,}") if best else (name, run.describe(name, math.nan), "")
        last = run.describe(name, values[-1]), f"{steps[-1]:,}"
        rows.append((*best_cells, *last, format_number(target) if target is not None else ""))
    return table(("metric", "best", "at step", "last", "at step", "target"), rows, "numbers") if rows else ""


def _facts(run: RunRecord) -> str:
    get, starts = run.start.get, run.events_of("start")
    last: dict[str, Any] = (run.events_of("train") or run.events_of("stop") or [{}])[-1]
    epochs = f"{round(last.get('epoch') or 0, 2):g}" + (f" of {round(get('epochs', 0), 2):g}" if get("epochs") else "")
    rows = [
        ("processes and device", f"{get('world', '?')} x {get('device', '?')}"),
        ("parameters", f"{get('parameters'):,}" if get("parameters") else "?"),
        ("epochs", epochs + (f", {get('steps_per_epoch'):,} steps each" if get("steps_per_epoch") else "")),
        ("global batch", get("global_batch", "?")),
        ("samples", f"{get('train_samples') or 0:,} for training, {get('validation_samples') or 0:,} for validation"),
        ("last training loss", f"{format_number(last.get('loss', '?'))} at step {last.get('step') or 0:,}"),
        ("starts", f"{len(starts)}" + "".join(f", resumed from step {start['resumed_from']:,}" for start in starts
                                              if start.get("resumed_from") is not None)),
    ]
    if (used := run.rates.get("mfu")) is not None:
        flops, peak = (get(name, math.nan) / 1e12 for name in ("flops_per_sample", "peak_flops"))
        text = f"{100 * used:.1f} % of {format_number(peak)} TFLOP/s (data sheet); {format_number(flops)} TFLOP a sample"
        rows.append(("model FLOPs utilization", f"{text}, {get('flops_convention')}"))
    if run.energy:
        recorded = len(run.events_of("energy"))
        part = f"; {recorded} of {len(starts)} starts" if recorded < len(starts) else ""
        rows.append(("energy", format_energy(run.energy) + part))
    rows += [("start", startup.format_parts(event.get("parts") or {})) for event in run.events_of("startup")[-1:]]
    return table(("", ""), rows)


def _checkpoints(run: RunRecord) -> str:
    rows = [(event.get("path", ""), f"{event.get('step') or 0:,}", format_bytes(event.get("bytes") or 0),
             f"{event.get('seconds') or 0:.2f} s", _date(event["time"])) for event in run.events_of("checkpoint")]
    last = f", the last {MAX_CHECKPOINTS} shown" if len(rows) > MAX_CHECKPOINTS else ""
    note = f"{len(rows)} written{last}; a run keeps the newest ones"
    body = table(("path", "step", "size", "took", "when"), rows[-MAX_CHECKPOINTS:], "numbers") if rows else ""
    return details("Checkpoints", body, note)


def render_page(run: RunRecord, images: Images) -> str:
    data = run.table
    notes = [(_date(event["time"]), f"{event['step']:,}" if event.get("step") is not None else "", event.get("text", ""))
             for event in run.events_of("note")]
    picture = {plot: figures for plot, figures in images.items() if plot.title == getattr(run.picture, "TITLE", None)}
    return html_page(run.name, [
        _header(run), lead(run.finding), figure_cards(picture), _tiles(run),
        figure_cards({plot: figures for plot, figures in images.items() if plot not in picture}),
        bars({run.name: run}), left_out_card(run.left_out),
        details(data.title, table(data.head, data.rows, "texts" if data.text else "numbers"), data.note) if data else "",
        details("Evaluations", _results(run)), details("The run", _facts(run)), _checkpoints(run),
        details("Notes", table(("when", "step", "what"), notes) if notes else ""),
        details("Settings", run.settings_text and f"<pre>{escape(run.settings_text)}</pre>"),
    ])


def render_plot(left_out: list[str], plot: Plot) -> list[tuple[bytes, bytes]] | None:
    """Return each figure of the plot in the light and in the dark theme, or None if it fails."""
    try:
        return list(zip(plot.png(LIGHT), plot.png(DARK)))
    except Exception as error:  # a failed plot is left out, and the page is still written
        left_out.append(f"{plot.title}: {describe_error(error)}")
        return None


def figure_cards(images: Images) -> str:
    """Return a card for each plot. Its figures, if several, are beside each other on a wide screen, else one under another."""

    def uri(png: bytes) -> str:
        return "data:image/png;base64," + base64.b64encode(png).decode()

    def card(plot: Plot, figures: Sequence[tuple[bytes, bytes]]) -> str:
        pictures = (f'<picture><source media="screen and (prefers-color-scheme: dark)" srcset="{uri(dark)}">'
                    f'<img src="{uri(light)}" alt="{escape(plot.title)}"></picture>' for light, dark in figures)
        return (f'<figure class="card{" wide" if len(figures) > 1 else ""}"><h2>{escape(plot.title)}</h2>'
                f'<figcaption>{escape(plot.caption)}</figcaption><div class="panels">{"".join(pictures)}</div></figure>')

    cards = "".join(card(plot, figures) for plot, figures in images.items())
    return f'<div class="plots">{cards}</div>' if cards else ""


def left_out_card(lines: Sequence[str]) -> str:
    """Return a card with the missing parts of the page and the reasons, or "" if none is missing."""
    return card("Left out", "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>") if lines else ""


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return a page of these parts; empty ones are skipped."""
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f"<title>{escape(title)}</title><style>\n{STYLE}</style></head>\n<body><main>\n" + "\n".join(filter(None, parts))
            + "\n</main></body></html>\n")
