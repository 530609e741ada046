"""`hpcai report RUN`: a run's directory as one page that needs no network, RUN/report.html, with its plots in RUN/plots.
`hpcai report RUN RUN ...`: what differs between runs, what came of each and their curves over one another, on one page."""

import argparse
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli.report import comparison
from hpcai.cli.report.curves import plots
from hpcai.cli.report.document import render_page
from hpcai.cli.report.run import describe_error, read_run
from hpcai.cli.report.theme import DARK, LIGHT, Plot
from hpcai.errors import DataError
from hpcai.log import METRICS


def draw_run(run: Path) -> Path:
    """Draws the run in the directory ``run`` and returns the page's path. Raises DataError where there is no run."""
    found = read_run(run)
    drawn = {plot: pictures for plot in plots(found) if (pictures := _render(found.left_out, plot))}
    folder = run / "plots"
    folder.mkdir(exist_ok=True)
    for plot, (light, _) in drawn.items():
        (folder / f"{plot.name}.png").write_bytes(light)
    path = run / "report.html"
    path.write_text(render_page(found, drawn), encoding="utf-8")
    return path


def compare_runs(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Draws several runs on one page, in the folder that holds them all unless ``output`` names its file, and returns its path.
    Raises DataError where one is no run, or the page cannot be written."""
    together = comparison.Comparison([read_run(run) for run in runs])
    names = together.metrics()
    drawn = {plot: pictures for plot in comparison.plots(together, names) if (pictures := _render(together.left_out, plot))}
    path = output or together.folder / comparison.FILE
    try:
        path.write_text(comparison.render_page(together, comparison.columns(together, names), drawn), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name a file that can be written, with --output") from error
    return path


def _render(left_out: list[str], plot: Plot) -> tuple[bytes, bytes] | None:
    """The plot on light and on dark paper."""
    try:
        return plot.png(LIGHT), plot.png(DARK)
    except Exception as error:  # numbers that no picture can be made of cost one picture, and never the page
        left_out.append(f"{plot.title}: {describe_error(error)}")
        return None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="hpcai report", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help=f"directory of a run, with {METRICS}")
    output = f"the page of several runs ({comparison.FILE} in the folder that holds them all)"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    words = parser.parse_args(argv)
    runs = _run_folders(words.runs)
    if len(runs) == 1 and words.output is not None:
        parser.error(f"--output is for several runs; the page of {runs[0]} is {runs[0] / 'report.html'}")
    path = draw_run(runs[0]) if len(runs) == 1 else compare_runs(runs, words.output)
    print(path)
    if words.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _run_folders(named: Sequence[Path]) -> list[Path]:
    """Each folder once. Files among several, as where a shell puts all of a folder for ``*``, are passed over, and told."""
    files = [path for path in named if path.is_file()] if len(named) > 1 else []
    if files:
        print(f"hpcai report: passed over, as no folders of runs: {', '.join(map(str, files))}", file=sys.stderr)
    folders = list({path.resolve(): path for path in named if path not in files}.values())
    if not folders:
        raise DataError(f"none of {len(named)} names is a directory; expected runs' directories, which hold {METRICS}")
    return folders
