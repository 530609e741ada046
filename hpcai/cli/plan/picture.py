"""The picture of a plan: minutes to the target by GPUs, and what a step goes to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hpcai.cli.plan.workload import Published
from hpcai.cli.report.theme import PALETTE

_INK, _FAINT, _GRID = "#1c2430", "#6b7685", "#e6e9ee"
_SHADES = ("#7db8da", "#2458d3", "#6d3bef", "#1c2430")  # darker: cut over more processes
_PARTS = (
    ("kernels_s", "kernels", "#2458d3"), ("launches_s", "their starts", "#9ec1e6"), ("messages_s", "messages", PALETTE[0]),
    ("idle_s", "idle stages", _FAINT), ("loader_s", "loader", PALETTE[2]),
)  # fmt: skip


def draw(found: dict[str, Any], published: Sequence[Published], path: Path) -> None:
    """``found`` as ``hpcai plan`` has it. Runs that were published on the same machine are diamonds."""
    rows = [one for each in found["jobs"].values() for one in each]
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(6, 5))
    ways = sorted({one["ways"] for one in rows})
    for number, cut in enumerate(ways):
        some = sorted((one["gpus"], one["minutes"]) for one in rows if one["ways"] == cut)
        name, shade = "whole" if cut == 1 else f"cut {cut} ways", _SHADES[min(number, len(_SHADES) - 1)]
        left.plot(*zip(*some), color=shade, marker="o", markersize=4, linewidth=1.8, label=name)
    runs = [(point.gpus, point.value) for point in published if point.what == "run" and point.machine == found["machine"]]
    if runs:
        left.plot(*zip(*runs), marker="D", color=PALETTE[0], markersize=7, linestyle="none", label="published")
    left.legend(frameon=False, fontsize=9, loc="lower left")
    left.set(xscale="log", yscale="log", xlabel=f"{found['machine'].upper()} that train", ylabel="minutes to the target")
    left.set_xticks(ticks := sorted({one["gpus"] for one in rows}), [f"{n:,}" for n in ticks])
    left.set_yticks(*_round(rows, published, found["machine"]))
    left.minorticks_off()
    left.margins(x=0.08, y=0.12)
    most = max(one["gpus"] for one in rows)
    shown = [one for one in rows if one["gpus"] == max((o["gpus"] for o in rows if o["ways"] == one["ways"]), default=most)]
    for y, one in enumerate(shown):
        begin = 0.0
        for key, _, color in _PARTS:
            right.barh(y, 1e3 * one[key], left=begin, color=color, height=0.6, linewidth=0)
            begin += 1e3 * one[key]
        right.text(begin, y, f"  {begin:,.0f} ms" if begin >= 100 else f"  {begin:.3g} ms", va="center", fontsize=9, color=_INK)
    names = [("whole" if one["ways"] == 1 else f"{one['ways']} ways") + f", {one['gpus']:,} GPUs" for one in shown]
    right.set_yticks(range(len(shown)), names)
    right.invert_yaxis()
    right.set_xlabel("ms of a step")
    right.margins(x=0.18)
    marks = [right.barh(0, 0, color=color) for _, _, color in _PARTS]
    where = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "columnspacing": 1.2, "handlelength": 1, "ncols": len(marks)}
    right.legend(marks, [name for _, name, _ in _PARTS], frameon=False, fontsize=9, **where)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9, colors=_FAINT)
        axes.grid(axis="both" if axes is left else "x", color=_GRID)
        axes.set_axisbelow(True)
    slower = f"kernels {found['slower']:.1f} times slower than the sheet's rates"
    figure.suptitle(f"{found['plan']} on {found['machine'].upper()}, planned: {slower}", x=0.01, ha="left", fontsize=11, color=_INK)
    figure.savefig(path, dpi=160, metadata={"Software": None})


def _round(rows: Sequence[dict[str, Any]], published: Sequence[Published], machine: str) -> tuple[list[float], list[str]]:
    """1, 2 and 5 times powers of ten that span what is drawn."""
    values = [one["minutes"] for one in rows] + [p.value for p in published if p.what == "run" and p.machine == machine]
    steps = [first * 10.0**power for power in range(-3, 6) for first in (1, 2, 5)]
    some = [step for step in steps if min(values) / 2 <= step <= max(values) * 2]
    return some, [f"{step:g}" for step in some]
