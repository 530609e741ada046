"""The page of `hpcai accept`: ReFrame's reports are read, and the page says what failed, what was slow and where to look."""

import importlib
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import apps
from hpcai import cli
from hpcai.cli.accept import page, scaling
from hpcai.cli.accept.results import Case, find_report, read_results
from hpcai.cli.report import theme
from hpcai.cli.report.theme import LIGHT
from hpcai.errors import DataError
from tests.report_runs import visible_text, write_run

GPU = "NVIDIA H100 80GB HBM3"
SLOW_RANK = "rank 1 on node n2 computes at 48 % of the fastest; expected at least 90 %; drain the node, look at its clocks"
WRONG = "train.loss is 3.1, expected 1.2 within 2 %; evaluate.mae is 0.7, expected 0.6 within 2 %; compare with one rank"
GB, TOLERANCE = "GB/s", (-0.1, None)
ACCEPTANCE = '[scaling]\nconfig = "batch512.yaml"\noverrides = ["data.batch={batch}", "train.steps=30"]\npublished = "eos"\n'
PUBLISHED = '[rates.eos]\nsamples_per_s = 224.0\ngpu = "H100"\n'
PARTS = {"data": 0.009, "forward": 0.004, "backward": 0.006, "update": 0.001}


def case(folder: Path, name: str, result: str = "pass", reason: str = "", nodes: int = 1, **figures: Any) -> dict[str, Any]:
    """Return a test case as in ReFrame's report; ``figures``: (value, reference, lower, upper, unit, result)."""
    key = re.sub(r"\W+", "_", name)
    place = {"pass": "output", "skip": None}.get(result, "stage")
    row = {
        "display_name": name, "name": name, "system": "alpha", "partition": "gpu", "environ": "default", "result": result,
        "fail_phase": "sanity" if reason else None, "fail_reason": reason or None, "num_tasks": 4 * nodes,
        "job_nodelist": [f"n{n}" for n in range(1, nodes + 1)], "job_stdout": "rfm_job.out", "time_total": 95.0,
        "outputdir": str(folder / "output" / key), "stagedir": str(folder / "stage" / key),
        "perfvalues": {f"alpha:gpu:{figure}": list(values) for figure, values in figures.items()},
    }  # fmt: skip
    if place:
        (folder / place / key).mkdir(parents=True, exist_ok=True)
    else:
        row |= {"outputdir": None, "stagedir": None, "num_tasks": None, "job_stdout": None, "job_nodelist": []}
    return row


def workload(folder: Path, app: str, mode: str, nodes: int, rate: float, reference: float = 0) -> dict[str, Any]:
    """Return a test case of an app with a throughput, and write its run."""
    slow, ranks = rate < 0.9 * reference, 4 * nodes
    reason = f"throughput={rate} samples/s, expected {reference} (l={0.9 * reference}, u=inf)" if slow else ""
    row = case(
        folder, f"HPCAI_{app} %mode={mode} %scale={nodes}_node{'s'[: nodes > 1]}", "fail" if slow else "pass",
        reason and f"performance error: failed to meet reference(s): {reason}", nodes,
        throughput=(rate, reference, *(TOLERANCE if reference else (None, None)), "samples/s", "fail" if slow else "pass"),
        energy=(2.3 + nodes / 10, 0, None, None, "J", "pass"), loader_share=(4.0 + nodes, 0, None, None, "%", "pass"),
        deviation=(None, 0, None, None, "%", None),
    )  # fmt: skip
    start = {"kind": "start", "time": 1.79e9, "name": app, "world": ranks, "device": "cuda:0", "global_batch": 4 * ranks}
    start |= {"global_batch": 512} if mode == "strong" else {}
    steps = [{"kind": "train", "time": 1.79e9 + n, "step": n, "seconds": n / 9, "loss": 1 / n, "parts": PARTS} for n in (10, 20)]
    write_run(Path(row["stagedir" if slow else "outputdir"]) / "run", [start, *steps])
    return row


def write_report(folder: Path) -> Path:
    """Write a report: passed, failed, slow and skipped tests, four scales, missing references, and a repeated test."""
    small = "HPCAI_toy %mode=small %scale=1_node"
    ranks = {"all_reduce": (38.2, 40.0, *TOLERANCE, GB, "pass"), "all_to_all": (11.9, 12.0, *TOLERANCE, GB, "pass"),
             "link_latency": (9.7, 8.0, None, 0.5, "us", "pass"), "link_rate": (44.1, 45.0, -0.1, 0.1, GB, "pass"),
             "slowest_rank": (48.0, 97.0, -0.07, None, "%", "fail"), "disk_write": (2.4, 0, None, None, GB, "pass"),
             "disk_read": (3.9, 0, None, None, GB, "pass")}  # fmt: skip
    rows = [
        case(folder, small, "fail", f"sanity error: {WRONG}"), case(folder, "HPCAI_toy %mode=small %scale=4_nodes", "fail", WRONG),
        case(folder, "HPCAI_toy %mode=small %scale=2_nodes", nodes=2, deviation=(0.31, 0, None, None, "%", "pass")),
        case(folder, "HPCAI_toy %mode=target %scale=1_node", time_to_target=(312.0, 300.0, None, 0.2, "s", "pass")),
        *(workload(folder, "toy", "weak", nodes, *rates) for nodes, *rates in
          ((1, 930.0, 900.0), (2, 1840.0, 1800.0), (4, 3590.0, 3600.0), (8, 5100.0, 7200.0))),
        *(workload(folder, "toy", "strong", n, rate) for n, rate in ((1, 910.0), (2, 1790.0), (4, 3400.0), (8, 6300.0))),
        case(folder, "HPCAI_toy %mode=weak %scale=16_nodes", "skip"),
        case(folder, "HPCAI_ranks", "fail", f"sanity error: {SLOW_RANK}", 8, **ranks),
        case(folder, "HPCAI_checkpoint", checkpoint_write=(7.3, 7.0, *TOLERANCE, GB, "pass")), case(folder, "HPCAI_resume"),
        case(folder, "HPCAI_killed_rank", job_end=(31.0, 60.0, None, 0.5, "s", "pass")),
    ]  # fmt: skip
    member = {"cpus": [*range(16)], "online": 64, "gpu": {"name": GPU}, "versions": {"torch": "2.13.0", "NCCL": "2.27.5"}}
    finding = {"severity": "error", "code": "pace", "place": "rank 1", "text": "computes at 48 % of the median"}
    doctor = {"title": "hpcai doctor: 32 ranks on 8 nodes, srun, 21.4 s", "findings": [finding],
              "members": [member | {"node": f"n{rank // 4 + 1}"} for rank in range(32)]}  # fmt: skip
    (folder / "stage/HPCAI_ranks/doctor.json").write_text(json.dumps(doctor))
    log = {"benchmark": "toy", "passed": False, "failed": ["global_batch_size", "train_samples"], "log": "run/mlperf.log"}
    (folder / "output/HPCAI_toy_mode_small_scale_2_nodes/mlperf.json").write_text(json.dumps(log))
    session = {"data_version": "4.2", "hostname": "login1", "time_start": "20261129T164905+0000", "time_elapsed": 2530.0}
    runs = [{"run_index": 0, "testcases": rows}, {"run_index": 1, "testcases": [case(folder, small)]}]
    (folder / "report.json").write_text(json.dumps({"session_info": session, "runs": runs, "restored_cases": []}))
    return folder / "report.json"


@pytest.fixture(scope="module", autouse=True)
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An app with a published rate and a plan."""
    folder = tmp_path_factory.mktemp("elsewhere") / "toy"
    folder.mkdir()
    for name, text in {"__init__.py": "", "plan.py": "", "acceptance.toml": ACCEPTANCE, "published.toml": PUBLISHED}.items():
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apps, "__path__", [*apps.__path__, str(folder.parent)])
        patch.setattr(theme, "DPI", 40)
        importlib.invalidate_caches()
        yield


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report whose page is drawn, with curves of 250 samples per second and GPU."""
    folder = tmp_path_factory.mktemp("accepted")
    write_report(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "curve", lambda app, mode, gpus, machine, batch, settings: [(n, 250.0 * n) for n in gpus])
        assert cli.main(["report", str(folder)]) == 0
    return folder


def test_the_page_begins_with_what_failed_and_says_where_to_look(drawn: Path) -> None:
    html = (drawn / "report.html").read_text()
    titles = re.findall("<(?:h1|p|h2|summary)>([^<]+)", html)
    assert titles == [
        "alpha", "13 of 16 tests passed on 8 nodes, n1 to n8, in 0:42:10.", "What failed", "Workloads",
        "Figures and their references", "Parts", "Scaling", "MLPerf logs", "What was slow", "System and versions",
        "Skipped tests", "Repeat a test", "Files of the tests",
    ]  # fmt: skip
    text = visible_text(html)
    assert "alpha not accepted" in text and "13 / 16 tests passed" in text and "Left out" not in text
    assert (
        "toy weak 8 nodes where 8 nodes, n1 to n8 found throughput 5,100 samples/s expected 7,200 samples/s, ≥ −10 % output "
        f"{drawn}/stage/HPCAI_toy_mode_weak_scale_8_nodes/rfm_job.out repeat hpcai accept --site alpha --only HPCAI_toy" in text
    )
    assert "train.loss is 3.1; evaluate.mae is 0.7 expected 1.2 within 2 %; 0.6 within 2 % what to do compare with one" in text
    assert (
        "ranks where rank 1 on node n2 found rank 1 on node n2 computes at 48 % of the fastest expected at least 90 % "
        "what to do drain the node, look at its clocks output" in text
    )


def test_figures_are_beside_references_published_rates_and_the_plan(drawn: Path) -> None:
    text = visible_text((drawn / "report.html").read_text())
    for row in (
        "deviation % rate reference difference published plan to target J/sample loader %", "toy small 2 nodes passed 0.31 – –",
        "toy weak 8 nodes failed – 5,100 samples/s 7,200 −29.2 % 7,168 8,000 – 3.1 12",
        "toy target 1 node passed – – – – – – 0:05:12 – –",
        "toy strong 8 nodes passed – 6,300 samples/s – – 7,168 8,000 – 3.1 12", "toy weak 16 nodes skipped – – – – – – – – –",
        "ranks: all-to-all 11.9 GB/s 12 GB/s −0.8 % ≥ −10 %", "ranks: link rate 44.1 GB/s 45 GB/s −2.0 % −10 % to +10 %",
        "killed rank: job end 31 s 60 s −48.3 % ≤ +50 %", "resume passed – – –", "ranks: disk read 3.9 GB/s – – –",
        "toy small 2 nodes fails global_batch_size, train_samples",
        "ranks: slowest rank 48 % 97 %, reference 102 % – toy weak 8 nodes: throughput 5,100 samples/s 8,000 samples/s, plan 57 %"
        " waiting for data 45 %", f"devices 32 x {GPU}", "torch 2.13.0", "error rank 1: computes at 48 % of the median",
        "Skipped tests toy weak 16 nodes alpha:gpu", "workloads 0 of 1", "all-reduce 38.2 GB/s reference 40 GB/s",
    ):  # fmt: skip
        assert row in text, row
    keys = [json.loads(key)[1:] for key in json.loads((drawn / "scaling.json").read_text()) if key != "late"]
    counts, settings = [1, 2, 4, 8, 16, 32, 64], ["batch512.yaml", ["train.steps=30"]]
    assert sorted(keys) == [["h100", "toy", mode, counts, batch, settings] for mode, batch in (("strong", 512), ("weak", 4))]


def test_curves_and_strips_are_drawn(drawn: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        curve, slow = {("toy", "weak"): [(4, 1e3), (32, 8e3)]}, {("toy", "strong"): "takes long"}
        patch.setattr(scaling, "compute_curves", lambda *_: (curve, slow))
        acceptance = page.Acceptance(read_results(drawn / "report.json"))
        acceptance.predict(drawn / "none.json", str)
    assert acceptance.left_out == ["hpcai plan toy, strong scaling: takes long"]
    (panels,), (strips,) = page._curves(acceptance), page._strips(acceptance)
    (figure,) = panels.draw(LIGHT)
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    assert lines["weak"] == [[4, 232.5], [8, 230], [16, 224.375], [32, 159.375]] and [[4, 250.0], [32, 250.0]] in lines.values()
    workloads, parts = strips.draw(LIGHT)
    slow = [line.get_color() for line in workloads.axes[0].lines if line.get_marker() == "D"]
    assert slow == [LIGHT.second] and parts.axes[0].get_yticklabels()[0].get_text() == "ranks: all-reduce"


def test_without_the_name_of_the_gpu_there_are_points_alone(drawn: Path, tmp_path: Path) -> None:
    text = (drawn / "report.json").read_text().replace(str(drawn / "stage"), str(tmp_path))  # without doctor.json, and a failed run
    (tmp_path / "report.json").write_text(text)
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "mine.html")]) == 0
    shown = visible_text((tmp_path / "mine.html").read_text())
    assert "no data sheet of unknown devices" in shown and "difference to target J/sample" in shown, "nothing published, no plan"
    assert not (tmp_path / "scaling.json").exists() and "System and versions" not in shown


def test_a_junit_file_has_results_and_reasons_alone(tmp_path: Path) -> None:
    cases = (
        '<testcase name="HPCAI_toy %mode=small %scale=1_node @alpha:gpu+default" time="1.2"/>'
        '<testcase name="HPCAI_ranks @alpha:gpu+default" time="1"><failure message="sanity">sanity: sanity error: '
        f"{SLOW_RANK}</failure></testcase>"
    )
    path = tmp_path / "junit.xml"
    path.write_text(f'<testsuites><testsuite package="reframe" hostname="x" timestamp="2026-11-29T16:49:05" time="61">{cases}'
                    "</testsuite></testsuites>")  # fmt: skip
    results = read_results(path)
    assert [(case.label, case.result, case.reason) for case in results.cases] == [
        ("toy small 1 node", "pass", ""), ("ranks", "fail", SLOW_RANK)]  # fmt: skip
    text = visible_text(page.draw_page(results, tmp_path / "page.html").read_text())
    assert "1 of 2 tests passed, in 0:01:01" in text and "Left out figures and files: a JUnit file" in text


def test_a_part_of_a_node_is_a_fraction() -> None:
    assert Case("HPCAI_bert %mode=weak %scale=1_4_node", "alpha:gpu", "pass").label == "bert weak 1/4 node"


@pytest.mark.parametrize(("content", "reason"), [
    ('{"session_info": {"data_version": "5.0", "time_start": ""}}', "is 5.0, expected 4.x; run the tests with ReFrame 4.10"),
    ('{"session_info": {"data_version": "4.2", "time_start": ""}}', "has no 'runs'; expected a report of ReFrame"),
    ('{"session_info": ', "not JSON"), ('<a package="reframe"', "not XML"), ('<a package="reframe"/>', "expected a report"),
])  # fmt: skip
def test_other_files_are_refused(content: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / ("a.xml" if content.startswith("<") else "a.json")
    path.write_text(content)
    with pytest.raises(DataError, match=re.escape(reason)):
        read_results(path)
    assert cli.main(["report", str(path)]) == 2 and reason in capsys.readouterr().err
    path.write_text("{}")
    assert find_report(path) is None and cli.main(["report", str(path)]) == 2
    assert "is not a directory; expected a run's directory" in capsys.readouterr().err


def test_curves_need_no_known_samples_to_the_target_and_leave_out_what_does_not_divide() -> None:
    weak = scaling.curve("cosmoflow", "weak", [1, 2, 2048], "h100", 4)
    assert [count for count, _ in weak] == [1, 2, 2048], "batches of 4 to 8,192"
    assert weak[0][1] == pytest.approx(273.3, rel=0.01) and 0.9 < weak[2][1] / 2048 / weak[0][1] < 1
    assert [count for count, _ in scaling.curve("cosmoflow", "strong", [1, 3, 4, 1024], "h100", 512)] == [1, 4]
    assert scaling.curve("align", "weak", [1], "h100", 4) == [], "an app without a plan"


@pytest.mark.timeout(60)
def test_curves_are_kept_and_slow_ones_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(app: str, *_: Any) -> list[tuple[int, float]]:
        time.sleep(60 if app == "slow" else 0)
        return [(1, 2.0 if app == "fast" else {}[app])]

    monkeypatch.setattr(scaling, "curve", fake)
    monkeypatch.setattr(scaling, "count_cpus", lambda: 3)
    wanted = {(app, "weak"): ([1], 4, scaling.DEFAULT) for app in ("slow", "fast", "broken")}
    started, lines = time.monotonic(), list[str]()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as a process blocks it that waits for signals in a thread
    try:
        curves, problems = scaling.compute_curves(tmp_path / "scaling.json", "h100", wanted, lines.append, seconds=2.0)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    assert curves == {("slow", "weak"): [], ("fast", "weak"): [(1, 2.0)], ("broken", "weak"): []}
    assert time.monotonic() - started < 20
    assert problems == {("slow", "weak"): "takes longer than 2 s, start it by itself", ("broken", "weak"): "'broken'"}
    assert lines[0] == "hpcai plan: curves of slow, fast, broken, for at most 2 s"
    late = json.loads((tmp_path / "scaling.json").read_text())["late"]
    assert [json.loads(key)[2] for key in late] == ["slow", "broken"], "the last ones next time"
    monkeypatch.setattr(scaling, "curve", None)
    fast = {("fast", "weak"): wanted["fast", "weak"]}
    assert scaling.compute_curves(tmp_path / "scaling.json", "h100", fast, lines.append) == ({("fast", "weak"): [(1, 2.0)]}, {})
