"""`hpcai report RUN`: a run's directory as one page that needs no network, RUN/report.html, with its plots in RUN/plots."""

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli.report.curves import plots
from hpcai.cli.report.document import page
from hpcai.cli.report.run import Record, read, reason
from hpcai.cli.report.theme import DARK, LIGHT, Plot
from hpcai.log import METRICS


def draw(run: Path) -> Path:
    """Draws the run in the directory ``run`` and returns the page's path. Raises DataError where there is no run."""
    found = read(run)
    drawn = {plot: pictures for plot in plots(found) if (pictures := _pictures(found, plot))}
    folder = run / "plots"
    folder.mkdir(exist_ok=True)
    for plot, (light, _) in drawn.items():
        (folder / f"{plot.name}.png").write_bytes(light)
    path = run / "report.html"
    path.write_text(page(found, drawn), encoding="utf-8")
    return path


def _pictures(run: Record, plot: Plot) -> tuple[bytes, bytes] | None:
    """The plot on light and on dark paper."""
    try:
        return plot.png(LIGHT), plot.png(DARK)
    except Exception as error:  # numbers that no picture can be made of cost one picture, and never the page
        run.left_out.append(f"{plot.title}: {reason(error)}")
        return None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcai report", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help=f"directory of a run, with {METRICS}")
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    words = parser.parse_args(argv)
    path = draw(words.run)
    print(path)
    if words.open:
        webbrowser.open(path.resolve().as_uri())
    return 0
