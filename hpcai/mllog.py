"""The MLPerf log: ``:::MLLOG {...}`` lines, as the compliance checkers of MLPerf HPC 3.0 and MLPerf Training 4.0 want them.

The training loop knows nothing of it. A benchmark is a table below: which setting, found by its dotted path in the `start`
event, is logged under which key, and which metric of an `evaluate` event is the benchmark's own. Keys and rules: the files
``hpc_3.0.0/*.yaml`` and ``training_4.0.0/*.yaml`` of mlcommons/logging, and the rules of mlcommons/training_policies.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from hpcai.errors import ConfigError
from hpcai.log import Event, Lines, resumed

PREFIX = ":::MLLOG "
REQUIRED = object()


class Row(NamedTuple):
    """An MLLOG key, the setting that holds its value (or how settings give it), and the value where the run has no such setting."""

    key: str
    setting: str | Callable[[Callable[[str], Any]], Any]
    otherwise: Any = REQUIRED


class Benchmark(NamedTuple):
    """What one benchmark logs beside the common lines."""

    rows: tuple[Row, ...]
    metric: str                                          # of an `evaluate` event
    metric_key: str


# Paths that begin with "run" name what the start of the run tells, such as run.parameters.
SUBMISSION = (
    Row("submission_org", "report.submission.org", "reference"),
    Row("submission_division", "report.submission.division", "closed"),
    Row("submission_status", "report.submission.status", "onprem"),
    Row("submission_platform", "report.submission.platform", None),            # None: the world and the device of the run
)


def _first_rate(setting: Callable[[str], Any]) -> float:
    """MLPerf's base rate is where the warm-up starts; base x factor is the peak."""
    start = setting("step.schedule.start")
    return start if start and setting("step.schedule.warmup") else setting("step.lr")


def _rise(setting: Callable[[str], Any]) -> float:
    return setting("step.lr") / _first_rate(setting)


def _lamb(value: Any) -> Callable[[Callable[[str], Any]], Any]:
    """What LAMB's rule has, and no other optimizer's."""
    return lambda setting: value if setting("step.optimizer") == "lamb" else None


def _steps(path: str) -> Callable[[Callable[[str], Any]], Any]:
    """A length of the schedule, in steps."""
    return _counted(path, "steps")


def _counted(path: str, unit: str) -> Callable[[Callable[[str], Any]], Any]:
    def found(setting: Callable[[str], Any]) -> Any:
        if setting("step.schedule.unit") != unit and setting(path):
            raise ConfigError(f"the MLPerf log of this benchmark counts {path} in {unit}; set step.schedule.unit={unit}")
        return setting(path)

    return found


def _kind(setting: Callable[[str], Any]) -> Any:
    return {"steps": "multistep", "cosine": "cosine_annealing"}.get(setting("step.schedule.decay"))


def _factor(setting: Callable[[str], Any]) -> Any:
    """The one by which each milestone multiplies the rate."""
    factors = setting("step.schedule.decay_to") if setting("step.schedule.decay") == "steps" else ()
    return factors[0] if factors else None


def _drops(row: Callable[[Callable[[str], Any]], Any]) -> Callable[[Callable[[str], Any]], Any]:
    """Nothing where the rate slopes, for which MLPerf Training has no key: its checker then misses a line."""
    return lambda setting: row(setting) if setting("step.schedule.decay") in ("none", "steps") else None


def _of(decay: str, row: Callable[[Callable[[str], Any]], Any]) -> Callable[[Callable[[str], Any]], Any]:
    return lambda setting: row(setting) if setting("step.schedule.decay") == decay else None


BENCHMARKS = {
    "deepcam": Benchmark(
        rows=(
            Row("seed", "train.seed"),
            Row("gradient_accumulation_frequency", "step.accumulate"),
            Row("batchnorm_group_size", "batchnorm_group"),
            Row("opt_name", lambda setting: {"adam": "Adam", "adamw": "AdamW", "lamb": "LAMB"}.get(setting("step.optimizer"))),
            Row("opt_lr", "step.lr"),
            Row("opt_betas", "step.betas"),
            Row("opt_eps", "step.eps"),
            Row("opt_weight_decay", "step.weight_decay"),
            Row("opt_bias_correction", _lamb(True)),
            Row("opt_grad_averaging", _lamb(True)),
            Row("opt_max_grad_norm", lambda setting: setting("step.clip") if setting("step.optimizer") == "lamb" else None),
            Row("scheduler_type", _kind),
            Row("scheduler_lr_warmup_steps", _steps("step.schedule.warmup")),
            Row("scheduler_lr_warmup_factor", _rise),
            Row("scheduler_milestones", _of("steps", _steps("step.schedule.decay_at"))),
            Row("scheduler_decay_rate", _factor),
            Row("scheduler_t_max", _of("cosine", _steps("step.schedule.length"))),
            Row("scheduler_eta_min", _of("cosine", lambda setting: setting("step.schedule.floor") * setting("step.lr"))),
            Row("target_quality", "train.target", None),
        ),
        metric="iou",
        metric_key="eval_accuracy",
    ),
    "cosmoflow": Benchmark(
        rows=(
            Row("seed", "train.seed"),
            Row("opt_name", "step.optimizer"),
            Row("opt_base_learning_rate", _first_rate),
            Row("opt_learning_rate_warmup_epochs", "step.schedule.warmup"),
            Row("opt_learning_rate_warmup_factor", _rise),
            Row("opt_learning_rate_decay_boundary_epochs", "step.schedule.decay_at"),
            Row("opt_learning_rate_decay_factor", "step.schedule.decay_to"),
            Row("opt_weight_decay", "step.weight_decay"),
            Row("dropout", "model.dropout"),
            Row("target_quality", "train.target", None),
        ),
        metric="mae",
        metric_key="eval_error",
    ),
    "oc20": Benchmark(
        rows=(
            Row("seed", "train.seed"),
            Row("gradient_accumulation_frequency", "step.accumulate"),
            Row("opt_name", lambda setting: {"adam": "Adam", "adamw": "AdamW", "lamb": "LAMB"}.get(setting("step.optimizer"))),
            Row("opt_base_learning_rate", "step.lr"),                          # here the base is the peak
            Row("opt_learning_rate_warmup_steps", _steps("step.schedule.warmup")),
            Row("opt_learning_rate_warmup_factor", lambda setting: setting("step.schedule.start") / setting("step.lr")),
            Row("opt_learning_rate_decay_boundary_steps", _of("steps", _steps("step.schedule.decay_at"))),
            Row("opt_learning_rate_decay_factor", _factor),
            Row("target_quality", "train.target", None),
        ),
        metric="force_mae",
        metric_key="eval_error",
    ),
    "openfold": Benchmark(
        rows=(
            Row("seed", "train.seed"),
            Row("gradient_accumulation_steps", "step.accumulate"),
            Row("target_avg_lddt_ca_value", "train.target", None),
            Row("train_max_pdb_release_date", "data.released_until"),
            Row("val_min_cameo_submission_date", "data.validation_from"),
            Row("val_max_cameo_submission_date", "data.validation_until"),
            Row("val_max_sequence_length", "data.validation_residues"),
            Row("val_every_iters", lambda setting: setting("run.steps_per_epoch") * setting("train.evaluate_every")),
            Row("model_parameters_count", "run.parameters"),
            Row("init_checkpoint_sha256sum", "start.sha256", None),
            Row("train_sequence_crop_size", "features.crop"),
            Row("num_recycling_iters", "features.recycles"),
            Row("max_msa_clusters", "features.clusters"),
            Row("max_extra_msa", "features.extra"),
            Row("templates_enabled", lambda setting: setting("features.templates") > 0),
            Row("max_templates", "features.templates"),
            Row("fape_loss_weight", "objective.fape"),
            Row("fape_loss_backbone_weight", lambda setting: 0.5),             # what hpcai.models.openfold.objective has
            Row("fape_loss_sidechain_weight", lambda setting: 0.5),
            Row("supervised_chi_loss_weight", "objective.chi"),
            Row("distogram_loss_weight", "objective.distogram"),
            Row("masked_msa_loss_weight", "objective.masked_msa"),
            Row("plddt_loss_weight", "objective.plddt"),
            Row("opt_name", lambda setting: setting("step.optimizer").title()),
            Row("opt_adam_beta_1", lambda setting: setting("step.betas")[0]),
            Row("opt_adam_beta_2", lambda setting: setting("step.betas")[1]),
            Row("opt_adam_epsilon", "step.eps"),
            Row("opt_weight_decay", "step.weight_decay"),
            Row("opt_amsgrad", lambda setting: False),
            Row("opt_gradient_clipping", lambda setting: setting("step.clip") is not None),
            Row("opt_gradient_clip_norm", "step.clip", None),
            Row("swa_enabled", lambda setting: setting("step.average") is not None),
            Row("swa_decay_rate", "step.average", None),
            Row("opt_base_learning_rate", "step.lr"),
            Row("opt_learning_rate_warmup_init", "step.schedule.start"),
            Row("opt_learning_rate_warmup_steps", _steps("step.schedule.warmup")),
            Row("initial_training_dataloader_type",
                lambda setting: f"InitialTrainingDataloader{'PQ' if setting('data.order') == 'ready' else 'PT'}"),
        ),
        metric="lddt",
        metric_key="eval_accuracy",
    ),
    "unet3d": Benchmark(
        rows=(
            Row("seed", "train.seed"),
            Row("gradient_accumulation_steps", "step.accumulate"),
            Row("opt_name", "step.optimizer"),
            Row("opt_base_learning_rate", "step.lr"),                          # Training's base is the peak
            Row("opt_momentum", lambda setting: setting("step.momentum") if setting("step.optimizer") == "sgd" else None),
            Row("opt_weight_decay", "step.weight_decay"),
            Row("opt_learning_rate_warmup_epochs", _counted("step.schedule.warmup", "epochs")),
            Row("opt_learning_rate_decay_boundary_epochs", _drops(_counted("step.schedule.decay_at", "epochs"))),
            Row("opt_learning_rate_decay_factor", _drops(lambda setting: _factor(setting) or 1.0)),
            Row("oversampling", "data.augment.foreground"),
            Row("training_input_shape", "model.window"),
            Row("validation_input_shape", "model.window"),
            Row("validation_overlap", "model.overlap"),
            Row("target_quality", "train.target", None),
        ),
        metric="mean_dice",
        metric_key="eval_accuracy",
    ),
}


def value_of(row: Row, settings: Mapping[str, Any]) -> Any:
    """The value that ``row`` logs for a run with ``settings``; ConfigError where it is required and missing."""

    def setting(path: str) -> Any:
        found: Any = settings
        for name in path.split("."):
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is None and row.otherwise is REQUIRED:
            raise ConfigError(f"the MLPerf log needs the setting {path} for its key {row.key}, but this run has none; set it")
        return row.otherwise if found is None else found

    return setting(row.setting) if isinstance(row.setting, str) else row.setting(setting)


class MlperfLog:
    """``mlperf.log``: the lines of one run of ``benchmark``; ``echo`` gets them too.

    Epochs count from 1. A run is a success when it reached its target, and aborted otherwise, also where an error ends it.
    """

    def __init__(self, path: Path, benchmark: str, echo: TextIO | None = None) -> None:
        self.path = path
        self.benchmark = BENCHMARKS[benchmark]
        self.name = benchmark
        self.echo = echo
        self._lines: Lines | None = None
        self._began: float | None = None                 # time of the first event of any kind: the program is up
        self._per_epoch = 1
        self._open = 0                                   # the epoch that has started and not stopped, or 0
        self._runs = False
        self._last = 0                                   # step of the last event

    def write(self, event: Event) -> None:
        self._began = self._began or event.time
        if event.kind == "start":
            self._start(event)
        elif self._lines is not None and event.kind in ("epoch", "evaluate", "stop"):
            getattr(self, f"_{event.kind}")(event)
        self._last = max(self._last, event.fields.get("step") or 0)

    def close(self) -> None:
        """Of a run that has not stopped something broke it."""
        if self._runs:
            self._stop(Event("stop", time.time(), {"step": self._last}))
        if self._lines is not None:
            self._lines.close()

    def _line(self, at: float, kind: str, key: str, value: Any = None, **metadata: Any) -> None:
        # NaN stays Python's NaN here: the checker reads with Python's json and compares numbers
        record = {"namespace": "", "time_ms": round(at * 1000), "event_type": kind, "key": key, "value": value}
        line = PREFIX + json.dumps(record | {"metadata": metadata})
        assert self._lines is not None
        self._lines.append(line)
        if self.echo is not None:
            self.echo.write(line + "\n")
            self.echo.flush()

    def _start(self, event: Event) -> None:
        get, at = event.fields.get, event.time
        settings = {**(get("settings") or {}), "run": event.fields}
        values = {row.key: value_of(row, settings) for row in (*SUBMISSION, *self.benchmark.rows)}
        self._per_epoch = max(1, int(get("steps_per_epoch") or 1))
        goes_on = get("resumed_from") is not None and self.path.exists()
        self._lines = resumed(self.path, get("resumed_from"), self._later, PREFIX)
        self._runs, self._last = True, get("resumed_from") or 0
        if goes_on:                                      # one header in a run's log, however many lives the run has
            return
        world, nodes = int(get("world") or 1), int(get("nodes") or 1)
        device = str(get("device") or "unknown device")
        values["submission_platform"] = values["submission_platform"] or f"{world} x {device}"
        values |= {
            "submission_benchmark": self.name,
            "number_of_nodes": nodes,
            "accelerators_per_node": 0 if "cpu" in device.lower() else world // nodes,
            "number_of_ranks": world,
            "global_batch_size": get("global_batch"),
            "train_samples": get("train_samples"),
            "eval_samples": get("validation_samples"),
        }
        # False: this program drops no page cache; a job script that does so logs its own line
        self._line(self._began or at, "POINT_IN_TIME", "cache_clear", False)
        self._line(self._began or at, "INTERVAL_START", "init_start")
        for key, value in values.items():
            if value is not None:
                self._line(at, "POINT_IN_TIME", key, value)
        self._line(at, "INTERVAL_END", "init_stop")
        self._line(at, "INTERVAL_START", "run_start")

    def _epoch(self, event: Event) -> None:
        self._end_epoch(event.time, event.fields["step"])
        self._open = event.fields["epoch"] + 1
        self._line(event.time, "INTERVAL_START", "epoch_start", epoch_num=self._open, step_num=event.fields["step"])

    def _end_epoch(self, at: float, step: int) -> None:
        if self._open:
            self._line(at, "INTERVAL_END", "epoch_stop", epoch_num=self._open, step_num=step)
        self._open = 0

    def _evaluate(self, event: Event) -> None:
        """An evaluation after the last step of an epoch is outside the epoch, any other one is inside."""
        step, began = event.fields["step"], event.time - (event.fields.get("seconds") or 0)
        where = {"epoch_num": math.ceil(step / self._per_epoch), "step_num": step}
        if step % self._per_epoch == 0 and self._open == where["epoch_num"]:
            self._end_epoch(began, step)
        self._line(began, "INTERVAL_START", "eval_start", **where)
        if (error := event.fields.get(self.benchmark.metric)) is not None:
            self._line(event.time, "POINT_IN_TIME", self.benchmark.metric_key, error, **where)
        self._line(event.time, "INTERVAL_END", "eval_stop", **where)

    def _stop(self, event: Event) -> None:
        self._end_epoch(event.time, event.fields["step"])
        status = "success" if event.fields.get("target_reached") else "aborted"
        where = {"epoch_num": math.ceil(event.fields["step"] / self._per_epoch), "step_num": event.fields["step"]}
        self._line(event.time, "INTERVAL_END", "run_stop", status=status, **where)
        self._runs = False

    def _later(self, record: dict[str, Any], step: int) -> bool:
        """An unfinished epoch starts again, and a run that goes on has not stopped."""
        at, epoch = (record["metadata"].get(name, 0) for name in ("step_num", "epoch_num"))
        unfinished = record["key"] in ("epoch_start", "epoch_stop") and epoch > step // self._per_epoch
        return at > step or unfinished or record["key"] == "run_stop"
