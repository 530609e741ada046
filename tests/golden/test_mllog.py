"""The MLPerf log of a run passes the checkers of MLPerf HPC 3.0 and Training 4.0 to 6.1, which notice what is missing."""

import io
import json
import math
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hpcai import config
from hpcai.errors import ConfigError, DataError
from hpcai.log import Event
from hpcai.mllog import PREFIX, Benchmark, MlperfLog, judge, value_of

APPS = Path(__file__).resolve().parents[2] / "apps"
compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")

NAMES = ("cosmoflow", "deepcam", "opencatalyst", "openfold", "unet3d")


def benchmark(app: str) -> Benchmark:
    found: Benchmark = import_module(f"apps.{app}.mlperf").BENCHMARK
    return found


SETTINGS: dict[str, Any] = {
    "model": {"dropout": 0.5},
    "step": {"optimizer": "sgd", "lr": 4e-3, "weight_decay": 0.0,
             "schedule": {"warmup": 2.0, "start": 1e-3, "decay_at": (4.0, 6.0), "decay_to": (0.25, 0.0625)}},
    "train": {"seed": 7, "target": 0.124, "metric": "mae"},
}
START = {
    "name": "small", "settings": SETTINGS, "world": 8, "nodes": 2, "device": "NVIDIA H200", "parameters": 8907556, "steps": 8,
    "steps_per_epoch": 2, "epochs": 4, "global_batch": 32, "train_samples": 64, "validation_samples": 16, "resumed_from": None,
}


def life(path: Path, errors: list[float], first: int = 0, reason: str = "target", echo: io.StringIO | None = None,
         **start: Any) -> None:
    """Epochs of two steps from epoch ``first`` on, one per entry of ``errors``, as the training loop tells them."""
    log, now = MlperfLog(path, benchmark("cosmoflow"), echo), 1000.0 + 100 * first
    log.write(Event("note", now - 5, {"text": "the model is built"}))
    log.write(Event("start", now, START | start))
    for epoch, error in enumerate(errors, start=first):
        step = 2 * epoch + 2
        log.write(Event("epoch", now, {"epoch": epoch, "step": step - 2}))
        log.write(Event("train", now + 8, {"step": step, "epoch": epoch + 1.0, "loss": 0.1}))
        log.write(Event("evaluate", now + 10, {"step": step, "epoch": epoch + 1.0, "samples": 9, "seconds": 2.0, "mae": error}))
        log.write(Event("checkpoint", now + 11, {"step": step, "path": "x", "seconds": 0.1, "bytes": 1}))
        now += 12
    log.write(Event("stop", now, {"step": step, "reason": reason, "seconds": 1.0, "target_reached": reason == "target"}))
    log.close()


def complies(path: Path) -> bool:
    return compliance.main(str(path), "hpc_3.0.0/common.yaml", compliance.make_checker("hpc", "3.0.0", True, False))[0]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(PREFIX)) for line in path.read_text().splitlines()]


def test_the_lines_of_a_run(tmp_path: Path) -> None:
    """The whole log, by hand: keys, values, epoch numbers and times."""
    path, echo = tmp_path / "mlperf.log", io.StringIO()
    life(path, [0.2, 0.123], echo=echo)
    assert echo.getvalue() == path.read_text()
    found = records(path)
    assert {record["key"]: record["value"] for record in found if record["event_type"] == "POINT_IN_TIME"} == {
        "cache_clear": False, "submission_org": "reference", "submission_division": "closed", "submission_status": "onprem",
        "submission_platform": "8 x NVIDIA H200", "submission_benchmark": "cosmoflow", "number_of_nodes": 2,
        "accelerators_per_node": 4, "number_of_ranks": 8, "global_batch_size": 32, "train_samples": 64, "eval_samples": 16,
        "seed": 7, "opt_name": "sgd", "opt_base_learning_rate": 1e-3, "opt_learning_rate_warmup_epochs": 2.0,
        "opt_learning_rate_warmup_factor": 4.0, "opt_learning_rate_decay_boundary_epochs": [4.0, 6.0],
        "opt_learning_rate_decay_factor": [0.25, 0.0625], "opt_weight_decay": 0.0, "dropout": 0.5, "target_quality": 0.124,
        "eval_error": 0.123,
    }
    spans = [(r["key"], r["time_ms"], r["metadata"].get("epoch_num")) for r in found if r["event_type"] != "POINT_IN_TIME"]
    assert spans == [
        ("init_start", 995_000, None), ("init_stop", 1_000_000, None), ("run_start", 1_000_000, None),
        ("epoch_start", 1_000_000, 1), ("epoch_stop", 1_008_000, 1), ("eval_start", 1_008_000, 1), ("eval_stop", 1_010_000, 1),
        ("epoch_start", 1_012_000, 2), ("epoch_stop", 1_020_000, 2), ("eval_start", 1_020_000, 2), ("eval_stop", 1_022_000, 2),
        ("run_stop", 1_024_000, 2),
    ]
    assert found[-1]["metadata"]["status"] == "success"


def test_the_public_checker_passes(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    life(path, [0.2, math.nan, 0.123])
    words = ["--usage", "hpc", "--ruleset", "3.0.0", "--werror", "--log_output", str(tmp_path / "checker.log"), str(path)]
    run = subprocess.run([sys.executable, "-m", "mlperf_logging.compliance_checker", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "closed_cosmoflow.yaml" in run.stderr and "SUCCESS" in run.stderr


@pytest.mark.parametrize("key", [
    "cache_clear", "init_start", "init_stop", "run_start", "run_stop", "epoch_start", "epoch_stop", "eval_error", "submission_org",
    "submission_division", "submission_benchmark", "submission_platform", "submission_status", "train_samples", "eval_samples",
    "number_of_nodes", "accelerators_per_node", "global_batch_size", "opt_name", "opt_base_learning_rate",
    "opt_learning_rate_warmup_epochs", "opt_learning_rate_warmup_factor", "opt_learning_rate_decay_boundary_epochs",
    "opt_learning_rate_decay_factor",
])
def test_the_checker_misses_every_key_that_is_left_out(key: str, tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    life(path, [0.2, 0.123])
    lines = [line for line in path.read_text().splitlines() if f'"key": "{key}"' not in line]
    assert len(lines) < len(records(path))
    path.write_text("\n".join(lines))
    assert not complies(path)


def test_a_missed_target_is_aborted_and_does_not_comply(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    life(path, [0.2, 0.125], reason="finished")
    assert records(path)[-1]["metadata"]["status"] == "aborted"
    assert not complies(path)


def test_a_resumed_run_has_one_header_and_every_epoch_once(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    life(path, [0.3, 0.25], reason="signal")
    life(path, [0.2], first=2, reason="error", resumed_from=4)
    life(path, [0.21, 0.12], first=2, resumed_from=4)    # the third epoch of the second life is lost
    found = records(path)
    assert [r["metadata"]["epoch_num"] for r in found if r["key"] == "epoch_start"] == [1, 2, 3, 4]
    assert [r["metadata"]["epoch_num"] for r in found if r["key"] == "epoch_stop"] == [1, 2, 3, 4]
    assert [r["value"] for r in found if r["key"] == "eval_error"] == [0.3, 0.25, 0.21, 0.12]
    assert [r["metadata"]["status"] for r in found if r["key"] == "run_stop"] == ["success"]
    assert complies(path)


def test_a_run_resumed_inside_an_epoch_starts_that_epoch_again(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    life(path, [0.3, 0.25], reason="signal")
    log = MlperfLog(path, benchmark("cosmoflow"))
    log.write(Event("start", 2000.0, START | {"resumed_from": 3}))
    log.write(Event("epoch", 2000.0, {"epoch": 1, "step": 3}))
    assert [(r["key"], r["metadata"]["epoch_num"]) for r in records(path) if r["key"].startswith("epoch")] == [
        ("epoch_start", 1), ("epoch_stop", 1), ("epoch_start", 2)]
    log.close()


def test_without_a_start_rate_the_base_is_the_peak(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    schedule = SETTINGS["step"]["schedule"] | {"start": 0.0}
    life(path, [0.12], settings=SETTINGS | {"step": SETTINGS["step"] | {"schedule": schedule}}, device="cpu")
    values = {record["key"]: record["value"] for record in records(path)}
    assert (values["opt_base_learning_rate"], values["opt_learning_rate_warmup_factor"]) == (4e-3, 1.0)
    assert values["accelerators_per_node"] == 0
    assert complies(path)


def test_a_setting_that_the_log_needs_is_named(tmp_path: Path) -> None:
    settings = SETTINGS | {"step": {"optimizer": "sgd", "lr": 1.0, "schedule": {"start": 0.1}}}
    with pytest.raises(ConfigError, match=r"needs the setting step\.schedule\.warmup .*, but this run has none"):
        life(tmp_path / "mlperf.log", [0.12], settings=settings)


def test_every_table_is_well_formed() -> None:
    steps = ["step.schedule={unit: steps, decay: steps, length: null, decay_at: [800], decay_to: [0.1]}"]
    for name in NAMES:
        entries = benchmark(name).entries
        assert len({entry.key for entry in entries}) == len(entries)
        settings = import_module(f"apps.{name}.settings").Config
        words = [[], steps] if name == "deepcam" else [[]]
        yaml = APPS / "openfold" / "configs" / "batch128.yaml" if name == "openfold" else None  # it asks for days of release
        runs = [config.load(settings, yaml, each).model_dump(mode="json") | {"run": START} for each in words]
        for entry in entries:  # LAMB's lines and those of one decay are for runs with them
            assert any(value_of(entry, run) is not None for run in runs), entry.key


@pytest.mark.parametrize("seconds", [3.0, 9.0])
def test_an_evaluation_that_training_did_not_wait_for_complies(tmp_path: Path, seconds: float) -> None:
    """Its lines come in a later epoch, with the step whose weights it scored, and so does the end of the run."""
    path = tmp_path / "mlperf.log"
    log = MlperfLog(path, benchmark("cosmoflow"), None)
    log.write(Event("note", 995.0, {"text": "the model is built"}))
    log.write(Event("start", 1000.0, START))
    for epoch in range(3):
        now, step = 1000.0 + 10 * epoch, 2 * epoch
        log.write(Event("epoch", now, {"epoch": epoch, "step": step}))
        if epoch:
            found = {"step": step, "epoch": float(epoch), "samples": 9, "seconds": seconds, "mae": [0.2, 0.123][epoch - 1]}
            log.write(Event("evaluate", now + 5, found))
    log.write(Event("stop", 1025.0, {"step": 4, "reason": "target", "seconds": 1.0, "target_reached": True}))
    log.close()
    assert complies(path)
    last = records(path)[-1]
    assert last["metadata"] == {"status": "success", "epoch_num": 2, "step_num": 4}


# ---- MLPerf Training: the 3D U-Net

YAML = APPS / "unet3d" / "configs"


def trained(path: Path, dice: list[float], *words: str, ends: bool = True) -> None:
    """Epochs of three steps on eight GPUs, one per entry of ``dice``."""
    settings = config.load(import_module("apps.unet3d.settings").Config, YAML / "node.yaml", words).model_dump(mode="json")
    start = {"name": "unet3d", "settings": settings, "steps": 30000, "steps_per_epoch": 3, "global_batch": 56, "train_samples": 168,
             "validation_samples": 42}  # fmt: skip
    log, now, step = MlperfLog(path, benchmark("unet3d")), 1000.0, 0
    log.write(Event("start", now, START | start))
    for epoch, value in enumerate(dice):
        log.write(Event("epoch", now, {"epoch": epoch, "step": step}))
        step += 3
        log.write(Event("train", now + 8, {"step": step, "epoch": epoch + 1.0, "loss": 0.1, "dice": 0.5}))
        found = {"dice_kidney": 0.96, "dice_tumour": 0.86, "loss": 0.2, "mean_dice": value}
        log.write(Event("evaluate", now + 10, {"step": step, "epoch": epoch + 1.0, "samples": 42, "seconds": 1.0, **found}))
        now += 10
    if ends:
        reached = dice[-1] >= 0.908
        reason = "target" if reached else "finished"
        log.write(Event("stop", now, {"step": step, "reason": reason, "seconds": 1.0, "target_reached": reached}))
    log.close()


def complies_with_training(path: Path) -> bool:
    checker = compliance.make_checker("training", "4.0.0", True, False)
    return bool(compliance.main(str(path), "training_4.0.0/common.yaml", checker)[0])


def test_the_training_checker_passes_a_3d_unet(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    trained(path, [0.5, 0.9, 0.9081])
    words = ["--usage", "training", "--ruleset", "4.0.0", "--werror", "--log_output", str(tmp_path / "checker.log"), str(path)]
    run = subprocess.run([sys.executable, "-m", "mlperf_logging.compliance_checker", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "closed_unet3d.yaml" in run.stderr and "SUCCESS" in run.stderr
    found = records(path)
    points = {record["key"]: record["value"] for record in found if record["event_type"] == "POINT_IN_TIME"}
    said = {
        "submission_benchmark": "unet3d", "global_batch_size": 56, "train_samples": 168, "eval_samples": 42, "seed": 0,
        "gradient_accumulation_steps": 1, "opt_name": "sgd", "opt_base_learning_rate": 2.0, "opt_momentum": 0.9,
        "opt_weight_decay": 0.0, "opt_learning_rate_warmup_epochs": 1000, "opt_learning_rate_decay_boundary_epochs": [],
        "opt_learning_rate_decay_factor": 1.0, "oversampling": 0.4, "training_input_shape": [128] * 3,
        "validation_input_shape": [128] * 3, "validation_overlap": 0.5, "target_quality": 0.908, "eval_accuracy": 0.9081,
    }  # fmt: skip
    assert {key: points[key] for key in said} == said
    assert [record["metadata"]["epoch_num"] for record in found if record["key"] == "eval_accuracy"] == [1, 2, 3]


@pytest.mark.parametrize("key", [
    "cache_clear", "init_start", "init_stop", "run_start", "run_stop", "epoch_start", "epoch_stop", "eval_start", "eval_stop",
    "eval_accuracy", "submission_org", "submission_division", "submission_benchmark", "submission_platform", "submission_status",
    "train_samples", "eval_samples", "global_batch_size", "seed", "gradient_accumulation_steps", "opt_name",
    "opt_base_learning_rate", "opt_momentum", "opt_weight_decay", "opt_learning_rate_warmup_epochs",
    "opt_learning_rate_decay_boundary_epochs", "opt_learning_rate_decay_factor", "oversampling", "training_input_shape",
    "validation_input_shape", "validation_overlap",
])  # fmt: skip
def test_the_training_checker_misses_every_key_that_is_left_out(key: str, tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    trained(path, [0.5, 0.91])
    lines = [line for line in path.read_text().splitlines() if f'"key": "{key}"' not in line]
    assert len(lines) < len(records(path))
    path.write_text("\n".join(lines))
    assert not complies_with_training(path)


def test_the_training_checker_sees_a_missed_target(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    trained(path, [0.5, 0.907])
    assert records(path)[-1]["metadata"]["status"] == "aborted"
    assert not complies_with_training(path)


def test_the_rate_of_a_3d_unet_drops_in_epochs_or_not_at_all(tmp_path: Path) -> None:
    steps = "step.schedule={decay: steps, decay_at: [3000, 5000], decay_to: [0.5, 0.25]}"
    trained(tmp_path / "steps.log", [0.91], steps)
    values = {record["key"]: record["value"] for record in records(tmp_path / "steps.log")}
    assert values["opt_learning_rate_decay_boundary_epochs"] == [3000, 5000] and values["opt_learning_rate_decay_factor"] == 0.5
    assert complies_with_training(tmp_path / "steps.log")
    trained(tmp_path / "cosine.log", [0.91], "step.schedule.decay=cosine")
    assert not any(record["key"].startswith("opt_learning_rate_decay") for record in records(tmp_path / "cosine.log"))
    assert not complies_with_training(tmp_path / "cosine.log")
    with pytest.raises(ConfigError, match=r"counts step\.schedule\.warmup in epochs; set step\.schedule\.unit=epochs"):
        trained(tmp_path / "unit.log", [0.91], "step.schedule={unit: steps, held: false}")


def test_a_run_that_an_error_ends_is_aborted_and_may_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    trained(path, [0.5, 0.01], ends=False)
    last = records(path)[-1]
    assert (last["key"], last["metadata"]) == ("run_stop", {"status": "aborted", "epoch_num": 2, "step_num": 6})
    assert sum(record["key"] == "run_stop" for record in records(path)) == 1
    log = MlperfLog(path, benchmark("unet3d"))
    settings = import_module("apps.unet3d.settings").Config().model_dump(mode="json")
    log.write(Event("start", 2000.0, START | {"settings": settings, "steps_per_epoch": 3, "resumed_from": 3}))
    assert not any(record["key"] == "run_stop" or record["metadata"].get("step_num", 0) > 3 for record in records(path))
    log.write(Event("stop", 2001.0, {"step": 6, "reason": "target", "seconds": 1.0, "target_reached": True}))
    log.close()
    assert [record["metadata"]["status"] for record in records(path) if record["key"] == "run_stop"] == ["success"]


def test_an_error_in_a_real_run_ends_its_log(tmp_path: Path) -> None:
    from hpcai import dist, train

    report = f"report={{directory: {tmp_path}, sinks: [mlperf]}}"
    cfg = config.load(import_module("apps.unet3d.settings").Config, YAML / "small.yaml", [report])
    with pytest.raises(RuntimeError), train.Run("unet3d", cfg, dist.alone(), benchmark("unet3d")) as run:
        run.reports.emit("start", **START | {"settings": run.settings})
        run.reports.emit("epoch", epoch=0, step=0)
        raise RuntimeError
    keys = [(record["key"], record["metadata"].get("status")) for record in records(tmp_path / "mlperf.log")]
    assert keys[-2:] == [("epoch_stop", None), ("run_stop", "aborted")]


# ---- OpenFold


def test_the_checker_passes_openfold(tmp_path: Path) -> None:
    """With the settings of the benchmark, over evaluations every 40 steps, and the data and weights that it fixes."""
    path = tmp_path / "mlperf.log"
    yaml = APPS / "openfold" / "configs" / "batch128.yaml"
    settings = config.load(import_module("apps.openfold.settings").Config, yaml, []).model_dump(mode="json")
    start = {"name": "openfold", "settings": settings, "steps": 2000, "steps_per_epoch": 40, "global_batch": 128,
             "train_samples": 594_595, "validation_samples": 180, "parameters": 93_229_082}  # fmt: skip
    log, now = MlperfLog(path, benchmark("openfold")), 1000.0
    log.write(Event("start", now, START | start))
    for epoch, value in enumerate([0.7, 0.78, 0.801]):
        log.write(Event("epoch", now, {"epoch": epoch, "step": 40 * epoch}))
        now += 10
        found = {"step": 40 * epoch + 40, "epoch": epoch + 1.0, "samples": 9, "seconds": 1.0, "lddt": value}
        log.write(Event("evaluate", now, found))
    log.write(Event("stop", now, {"step": 120, "reason": "target", "seconds": 1.0, "target_reached": True}))
    log.close()
    words = ["--usage", "hpc", "--ruleset", "3.0.0", "--werror", "--log_output", str(tmp_path / "checker.log"), str(path)]
    run = subprocess.run([sys.executable, "-m", "mlperf_logging.compliance_checker", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "closed_openfold.yaml" in run.stderr and "SUCCESS" in run.stderr


# ---- MLPerf Training: language models

LANGUAGE = {
    "llama31_8b": ("llama31-8b", [4.0, 3.31, 3.29], {
        "global_batch_size": 32, "eval_samples": 1024, "max_sequence_length": 8192, "opt_name": "adamw", "max_steps": 1_200_000,
        "opt_learning_rate_warmup_steps": 512, "opt_learning_rate_decay_steps": 1_199_488, "opt_end_learning_rate": 5e-5,
        "gradient_accumulation_steps": 4, "micro_batch_size": 1, "tensor_parallelism": 1,
        "lowest_numerical_precision_in_linear": "bfloat16",
    }),
    "llama2_70b_lora": ("llama2-70b-lora", [1.1, 0.94, 0.924], {
        "global_batch_size": 8, "eval_samples": 173, "lora_rank": 16, "lora_alpha": 32.0, "opt_base_learning_rate": 4e-4,
        "opt_learning_rate_training_steps": 1024, "opt_gradient_clip_norm": 0.3, "tensor_parallelism": 4, "micro_batch_size": 1,
    }),
}  # fmt: skip

# What the checker does not look for in any of them, and in the second.
NOT_ASKED = {"accelerators_per_node", "number_of_nodes", "number_of_ranks", "seed", "submission_status", "target_accuracy"}
OF_LORA = {"max_sequence_length", "opt_learning_rate_warmup_steps", "opt_name"}


def said(path: Path, name: str, losses: list[float]) -> None:
    """The run of a benchmark on eight GPUs, which is evaluated once in an epoch."""
    from apps.llm.mlperf import BENCHMARKS
    from apps.llm.settings import Config

    cfg = config.load(Config, APPS / f"llm/configs/{LANGUAGE[name][0]}.yaml", [])
    assert cfg.benchmark == name and cfg.data.epoch is not None and cfg.data.validation_rows is not None
    steps, batch = cfg.data.epoch // cfg.data.batch, cfg.data.batch
    start = {"name": "llm", "settings": cfg.model_dump(mode="json"), "steps": cfg.train.steps, "steps_per_epoch": steps,
             "global_batch": batch, "train_samples": 3901, "validation_samples": cfg.data.validation_rows}  # fmt: skip
    log, now = MlperfLog(path, BENCHMARKS[name]), 1000.0
    log.write(Event("start", now, START | start))
    for epoch, loss in enumerate(losses):
        log.write(Event("epoch", now, {"epoch": epoch, "step": steps * epoch}))
        now += 10
        where = {"step": steps * (epoch + 1), "epoch": epoch + 1.0, "samples": 9, "seconds": 1.0}
        log.write(Event("evaluate", now, where | {"loss": loss}))
    assert cfg.train.target is not None
    reached = losses[-1] <= cfg.train.target
    log.write(Event("stop", now, {"step": steps * len(losses), "reason": "x", "seconds": 1.0, "target_reached": reached}))
    log.close()


def complies_with_language(path: Path) -> bool:
    checker = compliance.make_checker("training", "6.1.0", True, False)
    return bool(compliance.main(str(path), "training_6.1.0/common.yaml", checker)[0])


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_training_checker_passes_language_models(name: str, tmp_path: Path) -> None:
    path, (_, losses, expected) = tmp_path / "mlperf.log", LANGUAGE[name]
    said(path, name, losses)
    words = ["--usage", "training", "--ruleset", "6.1.0", "--werror", "--log_output", str(tmp_path / "checker.log"), str(path)]
    run = subprocess.run([sys.executable, "-m", "mlperf_logging.compliance_checker", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"closed_{name}.yaml" in run.stderr and "SUCCESS" in run.stderr
    found = records(path)
    points = {record["key"]: record["value"] for record in found if record["event_type"] == "POINT_IN_TIME"}
    assert {key: points[key] for key in expected} == pytest.approx(expected)
    samples = [record["metadata"]["samples_count"] for record in found if record["key"] == "eval_accuracy"]
    each = {"llama31_8b": 12_288, "llama2_70b_lora": 384}[name]
    assert samples == [each, 2 * each, 3 * each]

    said(path.with_name("missed.log"), name, losses[:-1])
    assert not complies_with_language(path.with_name("missed.log"))
    keys = {record["key"] for record in found} - NOT_ASKED - (OF_LORA if name == "llama2_70b_lora" else set())
    for key in sorted(keys):
        left = [line for line in path.read_text().splitlines() if f'"key": "{key}"' not in line]
        path.with_name("less.log").write_text("\n".join(left))
        assert not complies_with_language(path.with_name("less.log")), key


# ---- MLPerf Training: diffusion

PICTURES = {  # settings, rules, what is evaluated in turn, what the log says, and what the checker does not look for
    "flux1": ("flux", "6.1.0", [0.7, 0.5861, 0.586], {
        "global_batch_size": 1024, "eval_samples": 29_696, "evaluation_frequency": 262_144, "opt_name": "adamw",
        "opt_base_learning_rate": 2.5e-4, "opt_learning_rate_warmup_steps": 800, "opt_adamw_beta_2": 0.95, "micro_batch_size": 128,
        "opt_adamw_weight_decay": 0.1, "opt_gradient_clip_norm": 1.0, "lowest_numerical_precision_in_comm": "bfloat16",
    }, NOT_ASKED),
    "stable_diffusion": ("sd2-node", "5.0.0", [0.3, 0.25, 0.2], {
        "global_batch_size": 512, "eval_samples": 30_000, "opt_name": "adamw", "opt_base_learning_rate": 1.25e-7,
        "opt_learning_rate_warmup_steps": 1000, "opt_adamw_beta_1": 0.9, "opt_adamw_epsilon": 1e-8, "opt_adamw_weight_decay": 0.01,
    }, NOT_ASKED | {"submission_org", "submission_platform"}),
}  # fmt: skip
MARKS = [{"fid": 120.0, "clip_cosine": 0.1}, {"fid": 90.0, "clip_cosine": 0.15}, {"fid": 70.0, "clip_cosine": 0.17}]


def drawn(path: Path, name: str, losses: list[float], *words: str) -> tuple[Benchmark, int]:
    """The run of a benchmark on eight GPUs, an evaluation and a checkpoint in each epoch; steps of one."""
    from apps.diffusion.mlperf import BENCHMARKS
    from apps.diffusion.settings import Config

    cfg = config.load(Config, APPS / f"diffusion/configs/{PICTURES[name][0]}.yaml", words)
    assert cfg.benchmark == name and cfg.data.epoch is not None
    steps = cfg.data.epoch // cfg.data.batch
    start = {"name": "diffusion", "settings": cfg.model_dump(mode="json"), "steps": cfg.train.steps, "steps_per_epoch": steps,
             "global_batch": cfg.data.batch, "train_samples": 1_099_776, "validation_samples": 29_696}  # fmt: skip
    log, now = MlperfLog(path, BENCHMARKS[name]), 1000.0
    log.write(Event("start", now, START | start))
    for epoch, loss in enumerate(losses):
        log.write(Event("epoch", now, {"epoch": epoch, "step": steps * epoch}))
        now += 10
        where = {"step": steps * (epoch + 1), "epoch": epoch + 1.0, "samples": 9, "seconds": 1.0}
        log.write(Event("evaluate", now, where | {"loss": loss, "loss_1": 0.1}))
        log.write(Event("checkpoint", now + 1, {"step": where["step"], "path": "x", "seconds": 1.0, "bytes": 1}))
    reached = cfg.train.target is not None and losses[-1] <= cfg.train.target
    log.write(Event("stop", now, {"step": steps * len(losses), "reason": "x", "seconds": 1.0, "target_reached": reached}))
    log.close()
    return BENCHMARKS[name], steps


def judged(path: Path, marks: list[dict[str, float]]) -> list[bool]:
    """A run of Stable Diffusion, whose checkpoints are then judged in turn."""
    own, steps = drawn(path, "stable_diffusion", [0.3, 0.25, 0.2])
    return [judge(path, own, steps * n, 1001.0 + 10 * n, found, 30_000) for n, found in enumerate(marks, 1)]


def complies_with(path: Path, rules: str) -> bool:
    checker = compliance.make_checker("training", rules, True, False)
    return bool(compliance.main(str(path), f"training_{rules}/common.yaml", checker)[0])


@pytest.mark.parametrize("name", PICTURES)
def test_the_training_checker_passes_diffusion(name: str, tmp_path: Path) -> None:
    path, (_, rules, losses, expected, not_asked) = tmp_path / "mlperf.log", PICTURES[name]
    if name == "flux1":
        drawn(path, name, losses)
    else:
        assert judged(path, MARKS) == [False, True, True]
    words = ["--usage", "training", "--ruleset", rules, "--werror", "--log_output", str(tmp_path / "checker.log"), str(path)]
    run = subprocess.run([sys.executable, "-m", "mlperf_logging.compliance_checker", *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert f"closed_{name}.yaml" in run.stderr and "SUCCESS" in run.stderr
    found = records(path)
    points = {record["key"]: record["value"] for record in found if record["event_type"] == "POINT_IN_TIME"}
    assert {key: points[key] for key in expected} == pytest.approx(expected)
    each = {"flux1": 262_144, "stable_diffusion": 512_000}[name]
    samples = [record["metadata"]["samples_count"] for record in found if record["key"] == "eval_accuracy"]
    assert sorted({*samples}) == [each, 2 * each, 3 * each]
    rcp = import_module("mlperf_logging.rcp_checker.rcp_checker")  # which compares with the reference's convergence
    converged = {"flux1": 3 * each, "stable_diffusion": 2 * each}[name]
    assert rcp.read_submission_file(str(path), rules, False) == (0, converged, expected["global_batch_size"], name)

    for key in sorted({record["key"] for record in found} - not_asked):
        left = [line for line in path.read_text().splitlines() if f'"key": "{key}"' not in line]
        path.with_name("less.log").write_text("\n".join(left))
        assert not complies_with(path.with_name("less.log"), rules), key


def test_the_training_checker_sees_a_missed_loss(tmp_path: Path) -> None:
    drawn(tmp_path / "mlperf.log", "flux1", [0.7, 0.5861])
    assert not complies_with(tmp_path / "mlperf.log", "6.1.0")


def test_the_first_checkpoint_that_reaches_all_goals_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    own, steps = drawn(path, "stable_diffusion", [0.3, 0.25, 0.2], "train.target=0.2")  # a loss makes no success
    before = records(path)
    assert not any(record["key"] == "eval_accuracy" for record in before) and not complies_with(path, "5.0.0")
    assert before[-1]["metadata"]["status"] == "aborted"

    def ends(n: int, found: dict[str, float]) -> tuple[bool, tuple[str, int, int]]:
        reached = judge(path, own, steps * n, 1001.0 + 10 * n, found, 30_000)
        last = [record for record in records(path) if record["key"] == "run_stop"]
        assert len(last) == 1 and records(path)[-1] == last[0]
        return reached, (last[0]["metadata"]["status"], last[0]["metadata"]["step_num"], last[0]["time_ms"])

    assert ends(1, {"fid": 60.0, "clip_cosine": 0.1499}) == (False, ("aborted", 3 * steps, 1_030_000))
    assert ends(3, MARKS[2]) == (True, ("success", 3 * steps, 1_031_000))
    assert ends(2, MARKS[1]) == (True, ("success", 2 * steps, 1_021_000))
    assert ends(3, MARKS[2]) == (True, ("success", 2 * steps, 1_021_000))  # again: its lines are there once
    assert ends(2, {"fid": 90.1, "clip_cosine": 0.2}) == (False, ("success", 3 * steps, 1_031_000))
    assert ends(3, {"fid": 90.0, "clip_cosine": 0.149})[1][0] == "aborted"
    found = [(r["metadata"]["step_num"], r["metadata"]["epoch_num"], r["metadata"]["metric"], r["value"])
             for r in records(path) if r["key"] == "eval_accuracy"]  # fmt: skip
    assert sorted(found) == [
        (steps, 1, "CLIP", 0.1499), (steps, 1, "FID", 60.0), (2 * steps, 2, "CLIP", 0.2), (2 * steps, 2, "FID", 90.1),
        (3 * steps, 3, "CLIP", 0.149), (3 * steps, 3, "FID", 90.0),
    ]  # fmt: skip
    assert not complies_with(path, "5.0.0")


@pytest.mark.parametrize("marks", [
    MARKS[1:2], [MARKS[0], {"fid": 90.5, "clip_cosine": 0.3}], [MARKS[0], {"fid": 9.0, "clip_cosine": 0.1}],
])
def test_the_training_checker_sees_too_few_or_too_bad_checkpoints(marks: list[dict[str, float]], tmp_path: Path) -> None:
    judged(tmp_path / "mlperf.log", marks)
    assert not complies_with(tmp_path / "mlperf.log", "5.0.0")


def test_only_the_log_of_a_run_that_has_ended_is_judged(tmp_path: Path) -> None:
    path = tmp_path / "mlperf.log"
    own, steps = drawn(path, "stable_diffusion", [0.3])
    with pytest.raises(DataError, match=r"mlperf\.log: No such file or directory; .* where report\.sinks has mlperf"):
        judge(tmp_path / "other" / "mlperf.log", own, steps, 1.0, MARKS[0], 3)
    whole = path.read_text()
    for broken in (whole.replace('"run_stop"', '"epoch_stop"'), whole.replace('"stable_diffusion"', '"flux1"')):
        path.write_text(broken)
        with pytest.raises(DataError, match="not the log of a run of stable_diffusion that has ended"):
            judge(path, own, steps, 1.0, MARKS[0], 3)
