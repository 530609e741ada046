"""`hpcai report RUN`: render a run's directory as one self-contained page, RUN/report.html, with its plots in RUN/plots. `hpcai
report RUN RUN ...`: compare runs on one page: different settings, results, and overlaid curves. `hpcai report FILE`: the page of an
acceptance from ReFrame's report.json, the folder that holds it, or a JUnit file."""

import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from hpcai.cli import make_parser
from hpcai.errors import DataError
from hpcai.json_file import check_fields
from hpcai.lazy import attach
from hpcai.log import METRICS

FILE = "comparison.html"
__getattr__, __all__ = attach(__name__, {".run": ["read_run"]})
_EXPECTED = "events and settings as a run of this version writes them"


def draw_run(run: Path) -> Path:
    """Render the run in the directory ``run``, and return the path of the page. Raises DataError if there is no run."""
    from hpcai.cli.report import curves, document, read_run

    record = read_run(run)
    with check_fields(f"{run / METRICS} or settings.yaml", _EXPECTED, DataError):
        images = {plot: pictures for plot in curves.plots(record) if (pictures := document.render_plot(record.left_out, plot))}
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
    from hpcai.cli.report import comparison, document, read_run

    overview = comparison.Comparison([read_run(run) for run in runs])
    with check_fields(f"{METRICS} or settings.yaml of {', '.join(map(str, runs))}", _EXPECTED, DataError):
        names = overview.metrics()
        plots = comparison.plots(overview, names)
        images = {plot: pictures for plot in plots if (pictures := document.render_plot(overview.left_out, plot))}
        page = comparison.render_page(overview, comparison.columns(overview, names), images)
    path = output or overview.folder / FILE
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name a file that can be written, with --output") from error
    return path


def main(argv: Sequence[str]) -> int:
    from hpcai.cli.accept.results import find_report, read_results

    parser = make_parser("report", __doc__, metrics=METRICS, page=FILE)
    args = parser.parse_args(argv)
    runs = _run_folders(args.runs)
    if len(runs) == 1 and (accepted := find_report(runs[0])):
        from hpcai.cli.accept.page import draw_page

        path = draw_page(read_results(accepted), args.output or accepted.with_suffix(".html"))
    elif len(runs) == 1 and args.output is not None:
        parser.error(f"--output is for several runs; the page of {runs[0]} is {runs[0] / 'report.html'}")
    else:
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
