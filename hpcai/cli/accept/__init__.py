"""`hpcai accept --site NAME`: test a system with all workloads, and draw one page. Exit code 0: accepted; 1: not accepted.

ReFrame (https://reframe-hpc.readthedocs.io) runs the tests in slurm/reframe as jobs of the site. A workload trains on simulated
data: its values must be those of every machine, and its rates are compared with the references of the system. What workloads share
is measured by itself: ranks, network, disks, checkpoints, and a job that loses a rank and is started again.

    hpcai accept --site local --quick                  this machine, in minutes
    hpcai accept --site perlmutter --account m0000 --nodes 16
    ... --only ranks resume                            some tests
    ... --record 0.1                                   the figures become the references, with limits of 10 %

The same command continues a session that was cut off with the tests that are left.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hpcai.cli import make_parser
from hpcai.cli.script import list_sites, template_folder
from hpcai.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from hpcai.cli.accept.results import Results
    from hpcai.cli.accept.system import Figures

REFRAME = (4, 8), (5, 0)
"""The lowest version of ReFrame, and the version below which it must be."""
_PROGRAM = "from reframe.frontend.cli import main; main()"
_PATIENCE = 60.0  # seconds in which ReFrame cancels its jobs
_RECORDED = ("throughput", "time_to_target", "energy", "all_reduce", "all_to_all", "link_latency", "link_rate", "disk_write",
             "disk_read", "checkpoint_write")  # others have limits of their own, or none


def main(argv: Sequence[str]) -> int:
    parser = make_parser("accept", __doc__, sites=", ".join(["local", *list_sites()]))
    args = parser.parse_args(argv)
    if args.nodes < 1 or args.jobs < 1 or (args.per_node or 1) < 1 or (args.record or 0) < 0:
        parser.error("--nodes, --jobs and --per-node are at least 1, --record is at least 0")
    if not re.fullmatch(r"(?=\d)(\d+d)?(\d+h)?(\d+m)?(\d+s)?", args.pending):
        parser.error(f"--pending {args.pending} is not a time; expected days, hours, minutes and seconds, such as 1d12h or 30m")
    check_reframe()
    from hpcai.cli.accept import page, runs, system
    from hpcai.cli.accept.results import read_results

    output = (args.output or Path(f"acceptance-{Path(args.site).stem}")).absolute()
    references = system.references_file(args.site)
    config = system.describe_system(args, output)
    name = config["systems"][0]["name"]
    figures = system.read_references(references, name)
    output.mkdir(parents=True, exist_ok=True)
    kept, report = output / "passed.jsonl", output / "report.json"
    cases = runs.read_kept(kept)
    if cases:
        print(f"goes on with a session that was cut off: {len(cases)} tests passed before; remove {kept} to run them again")
    features = config["systems"][0]["partitions"][0]["features"]
    scales = [feature.removeprefix("scale_") for feature in features if feature.startswith("scale_")]
    session = {"reframe": config, "scales": scales, "references": figures, "kept": str(kept)}
    session["passed"] = [case["display_name"] for case in cases]
    (output / "session.json").write_text(json.dumps(session))
    report.unlink(missing_ok=True)
    code = _call_reframe(args, output / "session.json")
    if args.list:
        return code
    if not report.is_file():
        raise ConfigError(f"ReFrame ended with exit code {code} without a report; see its lines above and {output / 'reframe.log'}")
    if cases:
        content = json.loads(report.read_text())
        report.write_text(json.dumps(content | {"restored_cases": cases}))
    kept.unlink(missing_ok=True)
    results = read_results(report)
    if args.record is not None:
        system.write_references(references, name, record(results, args.record))
        print(f"references of {name}: {references}")
    pack_logs(results, output / "mlperf.tar.gz")
    passed, accepted = sum(case.passed for case in results.cases), results.tested and not results.failed
    print(f"{'accepted' if accepted else 'NOT accepted'}: {passed} of {len(results.tested)} tests passed")
    print(page.draw_page(results, output / "report.html"))
    return 0 if accepted else 1


def check_reframe() -> None:
    """Raise MissingExtraError without ReFrame, and ConfigError for another version."""
    try:
        version = metadata.version("reframe-hpc")
    except metadata.PackageNotFoundError:
        raise MissingExtraError("ReFrame is not installed: pip install 'hpcai-suite[acceptance]'") from None
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not REFRAME[0] <= numbers < REFRAME[1]:
        low, high = (".".join(map(str, numbers)) for numbers in REFRAME)
        raise ConfigError(f"ReFrame is {version}, expected {low} or later, below {high}: pip install 'hpcai-suite[acceptance]'")


def _call_reframe(args: argparse.Namespace, session: Path) -> int:
    folder = template_folder() / "reframe"
    command = [sys.executable, "-c", _PROGRAM, "-C", str(folder / "settings.py"), "-c", str(folder / "acceptance.py")]
    command += ["--nocolor", "-t", "quick$" if args.quick else "full$"]
    command += [word for name in args.only for word in ("-n", name.replace(" ", ""))]  # as ReFrame's names for filters
    command += ["--list" if args.list else "--run"]
    environ = {**os.environ, "HPCAI_ACCEPTANCE": str(session)}
    with subprocess.Popen(command, env=environ, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)  # it cancels its jobs
            process.wait(_PATIENCE)
            raise


def record(results: "Results", tolerance: float) -> "Figures":
    """Return the figures of tests that have passed, with limits on the side on which they would be worse."""
    from hpcai.cli.accept.results import LOWER_IS_BETTER

    figures: Figures = {}
    for case in results.cases:
        for name, figure in case.figures.items() if case.passed else ():
            limits = (None, tolerance) if name in LOWER_IS_BETTER else (-tolerance, None)
            if name in _RECORDED:
                figures.setdefault(case.title, {})[name] = (figure.value, *limits)
    return figures


def pack_logs(results: "Results", path: Path) -> None:
    """Pack the MLPerf logs of all runs with the checker's verdicts: SYSTEM/RUN/result_0.txt, verdict.json and settings.yaml."""
    with tarfile.open(path, "w:gz") as archive:
        for case in results.cases:
            folder = f"{results.system}/{re.sub('[ /]', '-', case.label)}"
            files = {"run/mlperf.log": "result_0.txt", "mlperf.json": "verdict.json", "run/settings.yaml": "settings.yaml"}
            for file, name in files.items():
                if case.folder and (case.folder / "mlperf.json").is_file() and (case.folder / file).is_file():
                    archive.add(case.folder / file, f"{folder}/{name}")
