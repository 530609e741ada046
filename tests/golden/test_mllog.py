"""The MLPerf log of a run passes the checkers of MLPerf HPC 3.0 and Training 4.0 to 6.1, and fails without a required key."""

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcai import config, dist, train
from hpcai.errors import ConfigError, DataError
from hpcai.log import Event
from hpcai.mllog import PREFIX, Benchmark, MlperfLog, judge_checkpoint
from tests.reference_data import load_json

APPS = Path(__file__).resolve().parents[2] / "apps"
compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")

SETTINGS = load_json("mllog/small_run")["settings"]
START = load_json("mllog/small_run")["start"]


class Case(NamedTuple):
    """A benchmark: its rules, settings (a file of its app), steps per epoch (None: by data.epoch), metric after each epoch of a
    successful run, expected entries of the log, and keys that the checker does not require."""

    rules: str
    yaml: str
    steps: int | None
    metrics: list[float]
    expected: dict[str, Any]
    optional: list[str]
    start: dict[str, Any] = {}


CASES = {name: Case(**case) for name, case in load_json("mllog/cases").items()}
SCORES = [{"fid": 120.0, "clip_cosine": 0.1}, {"fid": 90.0, "clip_cosine": 0.15}, {"fid": 70.0, "clip_cosine": 0.17}]


def app_name(name: str) -> str:
    return CASES[name].yaml.partition("/")[0] or name


def load_benchmark(name: str) -> Benchmark:
    app = import_module(f"apps.{app_name(name)}.mlperf")
    result: Benchmark = app.BENCHMARKS[name] if hasattr(app, "BENCHMARKS") else app.BENCHMARK
    return result


def write_run_log(path: Path, name: str, metrics: list[float], *overrides: str, reason: str = "target", first_epoch: int = 0,
                  echo: Any = None, stop: bool = True, **start: Any) -> int:
    """Write the events of a run from ``first_epoch`` to its stop, as the training loop does, and return the steps per epoch."""
    case, time = CASES[name], 1000.0 + 100 * first_epoch
    settings = SETTINGS
    if case.yaml:
        kind = import_module(f"apps.{app_name(name)}.settings").Config
        settings = config.load(kind, APPS / case.yaml, overrides).model_dump(mode="json")
    batch = settings["data"]["batch"]
    steps = case.steps or settings["data"]["epoch"] // batch
    log, benchmark = MlperfLog(path, load_benchmark(name), echo), load_benchmark(name)
    log.write(Event("note", time - 5, {"text": "the model is built"}))
    case_fields = {"settings": settings, "global_batch": batch, "steps_per_epoch": steps, **case.start}
    case_fields["steps"] = settings["train"].get("steps") or 37 * steps
    unscored = (settings["train"].get("evaluate_from") or 1) - 1
    log.write(Event("start", time, START | case_fields | start))
    for epoch, value in enumerate(metrics, start=first_epoch):
        position = {"step": steps * (epoch + 1 + unscored), "epoch": epoch + 1.0 + unscored}
        log.write(Event("epoch", time, {"epoch": epoch, "step": steps * epoch}))
        log.write(Event("train", time + 8, position | {"loss": 0.1, "dice": 0.5}))
        score = {"loss" if benchmark.goals else benchmark.metric: value}
        log.write(Event("evaluate", time + 10, position | {"samples": 9, "seconds": 2.0} | score))
        log.write(Event("checkpoint", time + 11, {"step": position["step"], "path": "x", "seconds": 0.1, "bytes": 1}))
        time += 12
    if stop:
        fields = {"step": position["step"], "reason": reason, "seconds": 1.0, "target_reached": reason == "target"}
        log.write(Event("stop", time, fields))
    log.close()
    return steps


def judge_checkpoints(path: Path, scores: list[dict[str, float]]) -> list[bool]:
    """Write the log of a run of Stable Diffusion, and judge its checkpoints in order."""
    steps = write_run_log(path, "stable_diffusion", [0.3, 0.25, 0.2])
    benchmark = load_benchmark("stable_diffusion")
    return [judge_checkpoint(path, benchmark, steps * n, 1001.0 + 10 * n, each, 30_000) for n, each in enumerate(scores, 1)]


def complies(path: Path, name: str) -> bool:
    usage, rules = CASES[name].rules.split()
    return bool(compliance.main(str(path), f"{usage}_{rules}/common.yaml", compliance.make_checker(usage, rules, True, False))[0])


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(PREFIX)) for line in path.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_checker_passes_a_run_and_reports_each_missing_key(name: str, tmp_path: Path) -> None:
    path, case = tmp_path / "mlperf.log", CASES[name]
    if name == "stable_diffusion":
        assert judge_checkpoints(path, SCORES) == [False, True, True]
    else:
        write_run_log(path, name, case.metrics)
    assert complies(path, name)
    entries = read_log(path)
    points = {record["key"]: record["value"] for record in entries if record["event_type"] == "POINT_IN_TIME"}
    for key, value in case.expected.items():
        assert points[key] == (value if isinstance(value, str) else pytest.approx(value)), key
    assert name != "cosmoflow" or points.keys() == case.expected.keys()
    for key in sorted({record["key"] for record in entries}):
        lines = [line for line in path.read_text().splitlines() if f'"key": "{key}"' not in line]
        path.with_name("less.log").write_text("\n".join(lines))
        assert complies(path.with_name("less.log"), name) == (key in case.optional), key


@pytest.mark.parametrize(("name", "value"), [("cosmoflow", 0.125), ("unet3d", 0.907), ("llama31_8b", 3.31), ("flux1", 0.5861)])
def test_a_missed_target_is_aborted_and_does_not_comply(name: str, value: float, tmp_path: Path) -> None:
    write_run_log(tmp_path / "mlperf.log", name, [CASES[name].metrics[0], value], reason="finished")
    assert read_log(tmp_path / "mlperf.log")[-1]["metadata"]["status"] == "aborted"
    assert not complies(tmp_path / "mlperf.log", name)


@pytest.mark.parametrize(("name", "interval"), [("llama31_8b", 12_288), ("llama2_70b_lora", 384), ("flux1", 262_144)])
def test_samples_are_counted_and_the_convergence_is_read(name: str, interval: int, tmp_path: Path) -> None:
    write_run_log(path := tmp_path / "mlperf.log", name, CASES[name].metrics)
    samples = [record["metadata"]["samples_count"] for record in read_log(path) if record["key"] == "eval_accuracy"]
    assert samples == [interval, 2 * interval, 3 * interval]
    if name == "flux1":
        rcp = import_module("mlperf_logging.rcp_checker.rcp_checker")  # compares with the reference's convergence
        assert rcp.read_submission_file(str(path), "6.1.0", False) == (0, 3 * interval, 1024, name)


def test_the_lines_of_a_run(tmp_path: Path) -> None:
    path, echo = tmp_path / "mlperf.log", io.StringIO()
    write_run_log(path, "cosmoflow", [0.2, 0.123], echo=echo)
    assert echo.getvalue() == path.read_text()
    spans = [[r["key"], r["time_ms"], r["metadata"].get("epoch_num")] for r in read_log(path) if r["event_type"] != "POINT_IN_TIME"]
    assert spans == load_json("mllog/spans")
    assert read_log(path)[-1]["metadata"]["status"] == "success"


def test_a_resumed_run_has_one_header_and_every_epoch_once(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    write_run_log(path, "cosmoflow", [0.3, 0.25], reason="signal")
    write_run_log(path, "cosmoflow", [0.2], first_epoch=2, stop=False, resumed_from=4)
    assert read_log(path)[-1]["metadata"] == {"status": "aborted", "epoch_num": 3, "step_num": 6}, "an error ended the run"
    write_run_log(path, "cosmoflow", [0.21, 0.12], first_epoch=2, resumed_from=4)  # the third epoch of the second run is lost
    entries = read_log(path)
    for key in ("epoch_start", "epoch_stop"):
        assert [record["metadata"]["epoch_num"] for record in entries if record["key"] == key] == [1, 2, 3, 4]
    assert [r["value"] for r in entries if r["key"] == "eval_error"] == [0.3, 0.25, 0.21, 0.12]
    assert [r["metadata"]["status"] for r in entries if r["key"] == "run_stop"] == ["success"] and complies(path, "cosmoflow")
    log = MlperfLog(path, load_benchmark("cosmoflow"))  # resumes in the second epoch
    log.write(Event("start", 2000.0, START | {"settings": SETTINGS, "global_batch": 32, "steps_per_epoch": 2, "resumed_from": 3}))
    log.write(Event("epoch", 2000.0, {"epoch": 1, "step": 3}))
    epochs = [(r["key"], r["metadata"]["epoch_num"]) for r in read_log(path) if r["key"].startswith("epoch")]
    assert epochs == [("epoch_start", 1), ("epoch_stop", 1), ("epoch_start", 2)]
    log.close()


def test_an_error_in_a_real_run_ends_its_log(tmp_path: Path) -> None:
    report = f"report={{directory: {tmp_path}, sinks: [mlperf]}}"
    cfg = config.load(import_module("apps.unet3d.settings").Config, APPS / "unet3d/configs/small.yaml", [report])
    with pytest.raises(RuntimeError), train.Run("unet3d", cfg, dist.single_process(), load_benchmark("unet3d")) as run:
        run.reports.emit("start", **START | {"settings": run.settings, "global_batch": 1, "steps_per_epoch": 2})
        run.reports.emit("epoch", epoch=0, step=0)
        raise RuntimeError
    keys = [(record["key"], record["metadata"].get("status")) for record in read_log(tmp_path / "mlperf.log")]
    assert keys[-2:] == [("epoch_stop", None), ("run_stop", "aborted")]


@pytest.mark.parametrize("seconds", [3.0, 9.0])
def test_background_evaluation_complies(tmp_path: Path, seconds: float) -> None:
    """Results, and the end of the run, are logged in a later epoch with the step of the evaluated weights."""
    log = MlperfLog(path := tmp_path / "mlperf.log", load_benchmark("cosmoflow"))
    log.write(Event("start", 1000.0, START | {"settings": SETTINGS, "global_batch": 32, "steps_per_epoch": 2}))
    for epoch in range(3):
        time, step = 1000.0 + 10 * epoch, 2 * epoch
        log.write(Event("epoch", time, {"epoch": epoch, "step": step}))
        if epoch:
            scores = {"step": step, "epoch": float(epoch), "samples": 9, "seconds": seconds, "mae": [0.2, 0.123][epoch - 1]}
            log.write(Event("evaluate", time + 5, scores))
    log.write(Event("stop", 1025.0, {"step": 4, "reason": "target", "seconds": 1.0, "target_reached": True}))
    log.close()
    assert complies(path, "cosmoflow") and read_log(path)[-1]["metadata"] == {"status": "success", "epoch_num": 2, "step_num": 4}


# ---- entries that depend on settings


def test_without_a_start_rate_the_base_is_the_peak_and_a_missing_setting_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    schedule = SETTINGS["step"]["schedule"] | {"start": 0.0}
    monkeypatch.setitem(SETTINGS, "step", SETTINGS["step"] | {"schedule": schedule})
    write_run_log(path := tmp_path / "mlperf.log", "cosmoflow", [0.12], device="cpu")
    values = {record["key"]: record["value"] for record in read_log(path)}
    assert (values["opt_base_learning_rate"], values["opt_learning_rate_warmup_factor"]) == (4e-3, 1.0)
    assert values["accelerators_per_node"] == 0 and complies(path, "cosmoflow")
    monkeypatch.setitem(SETTINGS, "step", {"optimizer": "sgd", "lr": 1.0, "schedule": {"start": 0.1}})
    with pytest.raises(ConfigError, match=r"needs the setting step\.schedule\.warmup .*, but this run has none"):
        write_run_log(tmp_path / "mlperf.log", "cosmoflow", [0.12])


def test_the_rate_of_a_3d_unet_drops_in_epochs_or_not_at_all(tmp_path: Path) -> None:
    schedule = "step.schedule={decay: steps, decay_at: [3000, 5000], decay_to: [0.5, 0.25]}"
    write_run_log(tmp_path / "steps.log", "unet3d", [0.91], schedule)
    values = {record["key"]: record["value"] for record in read_log(tmp_path / "steps.log")}
    assert values["opt_learning_rate_decay_boundary_epochs"] == [3000, 5000] and values["opt_learning_rate_decay_factor"] == 0.5
    assert complies(tmp_path / "steps.log", "unet3d")
    write_run_log(tmp_path / "cosine.log", "unet3d", [0.91], "step.schedule.decay=cosine")
    assert not any(record["key"].startswith("opt_learning_rate_decay") for record in read_log(tmp_path / "cosine.log"))
    assert not complies(tmp_path / "cosine.log", "unet3d")
    with pytest.raises(ConfigError, match=r"counts step\.schedule\.warmup in epochs; set step\.schedule\.unit=epochs"):
        write_run_log(tmp_path / "unit.log", "unet3d", [0.91], "step.schedule={unit: steps, held: false}")


# ---- checkpoints judged after the run


def test_the_first_checkpoint_that_reaches_all_goals_ends_the_run(tmp_path: Path) -> None:
    path, benchmark = tmp_path / "mlperf.log", load_benchmark("stable_diffusion")
    steps = write_run_log(path, "stable_diffusion", [0.3, 0.25, 0.2], "train.target=0.2")  # a low loss is no success
    before = read_log(path)
    assert not any(record["key"] == "eval_accuracy" for record in before) and not complies(path, "stable_diffusion")
    assert before[-1]["metadata"]["status"] == "aborted"

    def judge(n: int, scores: dict[str, float]) -> tuple[bool, tuple[str, int, int]]:
        reached = judge_checkpoint(path, benchmark, steps * n, 1001.0 + 10 * n, scores, 30_000)
        last = [record for record in read_log(path) if record["key"] == "run_stop"]
        assert len(last) == 1 and read_log(path)[-1] == last[0]
        return reached, (last[0]["metadata"]["status"], last[0]["metadata"]["step_num"], last[0]["time_ms"])

    assert judge(1, {"fid": 60.0, "clip_cosine": 0.1499}) == (False, ("aborted", 3 * steps, 1_036_000))
    assert judge(3, SCORES[2]) == (True, ("success", 3 * steps, 1_031_000))
    assert judge(2, SCORES[1]) == (True, ("success", 2 * steps, 1_021_000))
    rcp = import_module("mlperf_logging.rcp_checker.rcp_checker")
    assert rcp.read_submission_file(str(path), "5.0.0", False) == (0, 1_024_000, 512, "stable_diffusion")
    assert judge(3, SCORES[2]) == (True, ("success", 2 * steps, 1_021_000))  # judged again: its entries are not repeated
    assert judge(2, {"fid": 90.1, "clip_cosine": 0.2}) == (False, ("success", 3 * steps, 1_031_000))
    assert judge(3, {"fid": 90.0, "clip_cosine": 0.149})[1][0] == "aborted"
    scores = [(r["metadata"]["step_num"], r["metadata"]["epoch_num"], r["metadata"]["metric"], r["value"])
              for r in read_log(path) if r["key"] == "eval_accuracy"]  # fmt: skip
    assert sorted(scores) == [
        (steps, 1, "CLIP", 0.1499), (steps, 1, "FID", 60.0), (2 * steps, 2, "CLIP", 0.2), (2 * steps, 2, "FID", 90.1),
        (3 * steps, 3, "CLIP", 0.149), (3 * steps, 3, "FID", 90.0),
    ]  # fmt: skip
    assert not complies(path, "stable_diffusion")


def test_only_the_log_of_a_run_that_has_ended_is_judged(tmp_path: Path) -> None:
    path, benchmark = tmp_path / "mlperf.log", load_benchmark("stable_diffusion")
    steps = write_run_log(path, "stable_diffusion", [0.3])
    with pytest.raises(DataError, match=r"mlperf\.log: No such file or directory; .* if report\.sinks has mlperf"):
        judge_checkpoint(tmp_path / "other" / "mlperf.log", benchmark, steps, 1.0, SCORES[0], 3)
    text = path.read_text()
    for broken in (text.replace('"run_stop"', '"epoch_stop"'), text.replace('"stable_diffusion"', '"flux1"')):
        path.write_text(broken)
        with pytest.raises(DataError, match="not the log of a finished run of stable_diffusion"):
            judge_checkpoint(path, benchmark, steps, 1.0, SCORES[0], 3)
