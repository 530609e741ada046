"""`hpcai report RUN`: render a run's directory as one self-contained page, RUN/report.html, with its plots in RUN/plots. `hpcai
report RUN RUN ...`: compare runs on one page: different settings, results, and overlaid curves."""

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcai.cli import make_parser
from hpcai.errors import DataError
from hpcai.json_file import check_fields
from hpcai.lazy import attach
from hpcai.log import METRICS

if TYPE_CHECKING:
    from hpcai.cli.report.theme import Plot

FILE = "comparison.html"
__getattr__, __all__ = attach(__name__, {".run": ["read_run"]})
_EXPECTED = "events and settings as a run of this version writes them"


def draw_run(run: Path) -> Path:
    """Render the run in the directory ``run``, and return the path of the page. Raises DataError if there is no run."""
    from hpcai.cli.report import curves, document, read_run

    record = read_run(run)
    with check_fields(f"{run / METRICS} or settings.yaml", _EXPECTED, DataError):
        images = {plot: pictures for plot in curves.plots(record) if (pictures := _render(record.left_out, plot))}
        page = document.render_page(record, images)
    folder = run / "plots"
    folder.mkdir(exist_ok=True)
    for plot, figures in images.items():
        for number, (light, _) in enumerate(figures, 1):
            (folder / f"{plot.name}{f'-{number}' if number > 1 else ''}.png").write_bytes(light)
    path = run / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def compare_runs(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Render several runs on one page, in their common parent folder or in the file ``output``, and return its path. Raises
    DataError if one is no run, or the page cannot be written."""
    from hpcai.cli.report import comparison, read_run

    overview = comparison.Comparison([read_run(run) for run in runs])
    with check_fields(f"{METRICS} or settings.yaml of {', '.join(map(str, runs))}", _EXPECTED, DataError):
        names = overview.metrics()
        images = {plot: pictures for plot in comparison.plots(overview, names) if (pictures := _render(overview.left_out, plot))}
        page = comparison.render_page(overview, comparison.columns(overview, names), images)
    path = output or overview.folder / FILE
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name a file that can be written, with --output") from error
    return path


def _render(left_out: list[str], plot: "Plot") -> list[tuple[bytes, bytes]] | None:
    """Return each figure of the plot in the light and in the dark theme, or None if it fails."""
    from hpcai.cli.report.run import describe_error
    from hpcai.cli.report.theme import DARK, LIGHT

    try:
        return list(zip(plot.png(LIGHT), plot.png(DARK)))
    except Exception as error:  # a failed plot is left out, and the page is still written
        left_out.append(f"{plot.title}: {describe_error(error)}")
        return None


def main(argv: Sequence[str]) -> int:
    parser = make_parser("report", __doc__, metrics=METRICS, page=FILE)
    args = parser.parse_args(argv)
    runs = _run_folders(args.runs)
    if len(runs) == 1 and args.output is not None:
        parser.error(f"--output is for several runs; the page of {runs[0]} is {runs[0] / 'report.html'}")
    path = draw_run(runs[0]) if len(runs) == 1 else compare_runs(runs, args.output)
    print(path)
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    return 0


def _run_folders(paths: Sequence[Path]) -> list[Path]:
    """Return each folder once. Files among several paths, as from a shell's ``*``, are skipped with a message."""
    files = [path for path in paths if path.is_file()] if len(paths) > 1 else []
    if files:
        print(f"hpcai report: skipped, since they are not folders of runs: {', '.join(map(str, files))}", file=sys.stderr)
    folders = list({path.resolve(): path for path in paths if path not in files}.values())
    if not folders:
        raise DataError(f"none of {len(paths)} names is a directory; expected runs' directories, which hold {METRICS}")
    return folders
