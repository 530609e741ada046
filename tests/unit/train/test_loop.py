"""The training loop in one process: use in a notebook, steps of reports and evaluations, stop reasons."""

import logging
import os
import signal
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist, log, train
from hpcai.cli.report import main as report
from hpcai.cli.report import read_run
from hpcai.config import Settings
from hpcai.errors import CheckpointError, ConfigError, DataError, DivergedError
from hpcai.settings import CheckpointConfig, ReportConfig, StepConfig, TrainConfig
from hpcai.train import loop, shard_file
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import read_tensors
from hpcai.train.throughput import peak_flops
from tests.ranks.launch import on_ranks
from tests.report_runs import page_text


def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": (model(batch) - 1).square().mean()}


def metric(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    assert not model.training
    return {"error": ((model(batch) - 1).abs().sum(), len(batch))}


def new_step(lr: float = 0.05) -> train.Step:
    torch.manual_seed(0)
    return train.Step(nn.Linear(3, 1), loss, StepConfig(optimizer="sgd", lr=lr), dist.single_process())


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, generator=generator) for _ in range(count)]


class Config(Settings):
    report: ReportConfig
    checkpoint: CheckpointConfig = CheckpointConfig()
    model: int = 1


def new_run(path: Path, **overrides: Any) -> train.Run:
    cfg = Config(report=ReportConfig(directory=path, sinks=()), checkpoint=CheckpointConfig(**overrides))
    return train.Run("test", cfg, dist.single_process())


def fit(path: Path, cfg: TrainConfig, step: train.Step | None = None, **kwargs: Any) -> train.Result:
    """Train in a new run in ``path``, or resume the one that is there."""
    with new_run(path) as run:
        return train.fit(step or new_step(), batches(), cfg, run=run, **kwargs)


def read_events(path: Path) -> list[dict]:
    return log.read_metrics(path / "metrics.jsonl")


def test_in_a_notebook() -> None:
    handlers = list(logging.getLogger().handlers)
    result = train.fit(new_step(), batches(), TrainConfig(steps=20, report_every=5))
    assert result.reason == "finished" and result.exit_code == 0
    assert [report.step for report in result] == [5, 10, 15, 20]
    assert result.reports[-1]["loss"] < 0.5 * result.reports[0]["loss"]
    assert logging.getLogger().handlers == handlers, "a notebook keeps its own logging"


def test_from_fit_to_a_loss_are_nine_calls() -> None:
    names: list[str] = []

    def record_stack(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        names[:] = [frame.name for frame in traceback.extract_stack()]
        return loss(model, batch)

    step = train.Step(nn.Linear(3, 1), record_stack, StepConfig(optimizer="sgd", lr=0.1), dist.single_process())
    train.fit(step, batches(), TrainConfig(steps=1))
    assert len(calls := names[names.index("fit") :]) <= 9, f"{calls}: one more layer between fit and the loss"


def test_a_report_is_the_mean_of_its_steps() -> None:
    step, losses = new_step(), []
    original = step.forward_backward
    step.forward_backward = lambda model, batch: (values := original(model, batch), losses.append(values["loss"].item()))[0]
    result = train.fit(step, batches(), TrainConfig(steps=7, report_every=4))
    assert [report.step for report in result] == [4, 7]
    assert result.reports[0]["loss"] == pytest.approx(sum(losses[:4]) / 4, rel=1e-6)
    assert result.reports[1]["loss"] == pytest.approx(sum(losses[4:]) / 3, rel=1e-6)


@pytest.mark.parametrize(("begin", "steps"), [(None, [6, 12, 15]), (3, [9, 15])])
def test_evaluation_every_second_epoch_from_a_given_one_and_at_the_end(tmp_path: Path, begin: int | None, steps: list[int]) -> None:
    cfg = TrainConfig(epochs=5, evaluate_every=2, evaluate_from=begin)
    result = fit(tmp_path, cfg, validation=batches(2), evaluate=metric)
    assert [report.step for report in result.evaluations] == steps
    step = new_step()
    saved = read_tensors(max((tmp_path / "checkpoints").glob("step-*")))
    step.model.load_state_dict({name: saved[f"model/{name}"] for name in step.model.state_dict()})
    expected = sum((step.model(b) - 1).abs().sum().item() for b in batches(2)) / 8
    assert result.evaluations[-1]["error"] == pytest.approx(expected, rel=1e-6)
    kinds = [e["kind"] for e in read_events(tmp_path)]
    assert kinds[0] == "start" and kinds[-1] == "stop" and kinds.count("checkpoint") == 5 and kinds.count("epoch") == 5


def test_a_non_finite_metric_is_reported(tmp_path: Path) -> None:
    def non_finite(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        power = torch.tensor([2.0, 0.0]), lambda power: {"power_0": power[0], "power_1": 1 / power[1]}
        return {"error": (torch.tensor(1.0), 1), "dice": (torch.tensor(float("nan")), 1), "spectrum": power}

    result = fit(tmp_path, TrainConfig(epochs=1), validation=batches(2), evaluate=non_finite)
    assert result.exit_code == 0
    notes = [e["text"] for e in read_events(tmp_path) if e["kind"] == "note" and "evaluation of step 3" in e["text"]]
    assert len(notes) == 1 and "dice is nan, power_1 is inf, though the loss is finite; look at" in notes[0]
    assert "error" not in notes[0] and "power_0" not in notes[0]
    (scores,) = [e for e in read_events(tmp_path) if e["kind"] == "evaluate"]
    assert scores["power_0"] == 4 and log.select_metrics(scores).keys() >= {"error", "power_0"} and "spectrum" not in scores


COLLAPSES = [("higher", [0.5, 0.25, 0.0]), ("lower", [3.0, 5.0, 8.0]), ("higher", [0.5, 0.25, float("nan")])]


@pytest.mark.parametrize(("better", "values"), COLLAPSES)
def test_a_run_whose_metric_is_hopeless_stops_with_a_reason(tmp_path: Path, better: str, values: list[float]) -> None:
    remaining = iter(values)

    def collapsing(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        return {"dice": (torch.tensor(next(remaining)), 1)}

    settings: dict[str, Any] = {"better": better, "hopeless": {"higher": 0.1, "lower": 7.0}[better]}
    cfg = TrainConfig(epochs=9, metric="dice", **settings)
    with pytest.raises(DivergedError, match=r"step 9: dice is .* has diverged; lower step.lr"):
        fit(tmp_path, cfg, validation=batches(1), evaluate=collapsing)
    assert [e["dice"] for e in read_events(tmp_path) if e["kind"] == "evaluate"][:2] == values[:2]
    last = read_events(tmp_path)[-1]
    assert (last["kind"], last["reason"], last["step"], last["target_reached"]) == ("stop", "diverged", 9, False)


def test_the_target_ends_the_run_and_a_second_start_does_nothing(tmp_path: Path) -> None:
    cfg = TrainConfig(epochs=50, metric="error", target=0.5)
    kwargs = {"validation": batches(), "evaluate": metric}
    first = fit(tmp_path, cfg, **kwargs)
    assert first.reason == "target" and first.evaluations[-1]["error"] <= 0.5 < first.evaluations[-2]["error"]
    assert read_events(tmp_path)[-1]["target_reached"] is True
    second = fit(tmp_path, cfg, **kwargs)
    assert second.reason == "target" and second.progress.step == first.progress.step and not second.reports
    assert any("nothing is left to do" in e.get("text", "") for e in read_events(tmp_path))


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_metric_equal_to_the_target_reaches_it(better: str) -> None:
    kwargs = {"validation": batches(), "evaluate": metric}
    first = train.fit(new_step(), batches(), TrainConfig(epochs=1), **kwargs).evaluations[0]["error"]
    cfg = TrainConfig(epochs=3, metric="error", target=first, better=better)
    result = train.fit(new_step(), batches(), cfg, **kwargs)
    assert result.reason == "target" and result.progress.step == 3


def test_a_failed_checkpoint_is_reported_and_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = iter([True, True, False])
    write = Checkpoints._write

    def sometimes(self: Checkpoints, *args: Any) -> str:
        return "No space left on device" if next(failures, False) else write(self, *args)

    monkeypatch.setattr(Checkpoints, "_write", sometimes)
    result = fit(tmp_path, TrainConfig(epochs=4))
    assert result.reason == "finished" and result.progress.step == 12
    notes = [e["text"] for e in read_events(tmp_path) if e["kind"] == "note"]
    assert len(notes) == 2 and all("No space left on device; there is no checkpoint yet" in text for text in notes)

    monkeypatch.setattr(Checkpoints, "_write", lambda *_: "No space left on device")
    with pytest.raises(CheckpointError, match="No space left"):
        fit(tmp_path / "b", TrainConfig(epochs=1))


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write of step 2 lasts until step 3 ends: the checkpoint has the weights of step 2. The save of step 4 waits for it."""
    third, write, step = threading.Event(), shard_file.write, new_step()
    weights: dict[int, list[torch.Tensor]] = {}

    def slow(*args: Any) -> bytes:
        assert third.wait(30)
        time.sleep(0.3)
        return write(*args)

    monkeypatch.setattr(shard_file, "write", slow)
    original = step.forward_backward

    def forward_backward(model: nn.Module, batch: Any) -> Any:
        weights[step.count] = [p.detach().clone() for p in model.parameters()]
        if step.count == 3:
            third.set()
        return original(model, batch)

    step.forward_backward = forward_backward
    with new_run(tmp_path, every_steps=2, keep=3) as run:
        train.fit(step, batches(8), TrainConfig(steps=5), run=run)
    saved = read_tensors(tmp_path / "checkpoints" / "step-00000002")
    for (name, _), before in zip(step.model.named_parameters(), weights[2]):
        assert torch.equal(saved[f"model/{name}"], before) and not torch.equal(weights[3][0], weights[2][0])
    logged = [(e["kind"], e.get("step")) for e in read_events(tmp_path) if e["kind"] in ("checkpoint", "train")]
    assert logged.index(("checkpoint", 2)) < logged.index(("checkpoint", 4)) < logged.index(("checkpoint", 5))
    assert any("s until the checkpoint of step 2 was written" in e.get("text", "") for e in read_events(tmp_path))


def test_a_run_that_fails_first_finishes_the_checkpoint_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, step = shard_file.write, new_step()
    monkeypatch.setattr(shard_file, "write", lambda *args: (time.sleep(0.5), write(*args))[1])
    original = step.forward_backward
    step.forward_backward = lambda model, batch: original(model, batch) if step.count < 3 else 1 / 0  # type: ignore[return-value]
    with new_run(tmp_path, every_steps=2) as run, pytest.raises(ZeroDivisionError):
        train.fit(step, batches(8), TrainConfig(steps=4), run=run)
    assert (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").exists()


def test_contradictions_are_refused() -> None:
    step, cfg = new_step(), TrainConfig(steps=2, metric="mae", target=0.1)
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        train.fit(step, batches(), cfg)
    with pytest.raises(ConfigError, match="both evaluate and validation"):
        train.fit(step, batches(), TrainConfig(steps=1), evaluate=metric)
    with pytest.raises(ConfigError, match="train.metric is 'mae', but the evaluated metrics are error"):
        train.fit(step, batches(), cfg, evaluate=metric, validation=batches())
    with pytest.raises(DataError, match="no batch"):
        train.fit(step, [], TrainConfig(steps=1))


def interrupted_step(number: signal.Signals, when: int) -> train.Step:
    """Return a step that sends a signal to this process in its ``when``-th forward pass."""
    step = new_step()
    original = step.forward_backward

    def forward_backward(model: nn.Module, batch: Any) -> Any:
        if step.count == when - 1:
            os.kill(os.getpid(), number)
        return original(model, batch)

    step.forward_backward = forward_backward
    return step


def test_a_signal_stops_at_a_step_boundary(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    result = fit(tmp_path, TrainConfig(steps=20), interrupted_step(signal.SIGUSR2, 5))
    assert (result.reason, result.exit_code, result.progress.step) == ("signal", 85, 5)
    assert signal.getsignal(signal.SIGUSR2) == before
    assert any(e.get("text") == "stopped by SIGUSR2" for e in read_events(tmp_path))
    assert fit(tmp_path, TrainConfig(steps=20)).progress.step == 20


@pytest.mark.parametrize("when, reason", [(4, "signal"), (6, "finished")])
def test_a_complete_checkpoint_is_never_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: int, reason: str) -> None:
    """A signal right after a save, or at the last step: replacing the newest checkpoint would leave none for an instant."""
    saved: list[int] = []
    async_save = Checkpoints.async_save
    monkeypatch.setattr(
        Checkpoints, "async_save", lambda self, step, progress: (saved.append(progress.step), async_save(self, step, progress))[1]
    )
    step = interrupted_step(signal.SIGTERM, when)
    with new_run(tmp_path, every_steps=1) as run:
        result = train.fit(step, batches(8), TrainConfig(steps=6), run=run, validation=batches(1), evaluate=metric)
    assert result.reason == reason and len(result.evaluations) == (reason == "finished")
    assert saved == list(range(1, when + 1))


def test_without_settings_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train.fit(new_step(), batches(), TrainConfig(steps=2), run=train.Run("x", None, dist.single_process()))
    cfg = Config(report=ReportConfig(sinks=()))
    train.fit(new_step(), batches(), TrainConfig(steps=2), run=train.Run("x", cfg, dist.single_process()))
    assert not list(tmp_path.iterdir())


def test_gpu_readings_and_samples_per_joule_are_in_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meter:
        def __init__(self, device: torch.device) -> None:
            self.energy = 0.0

        def read(self) -> dict[str, float]:
            self.energy += 6.0
            return {"power_w": 300.0, "energy_j": self.energy, "temperature_c": 50.0}

    monkeypatch.setattr(loop, "GpuCounters", Meter)
    result = fit(tmp_path, TrainConfig(epochs=2, report_every=3))
    rows = [event for event in read_events(tmp_path) if event["kind"] == "train"]
    assert [row["gpu_energy_j"] for row in rows] == [6.0, 12.0] and rows[0]["gpu_power_w"] == 300.0
    expected = 3 * len(batches()[0]) / 6.0
    assert all(row["gpu_samples_per_joule"] == pytest.approx(expected) for row in rows)
    assert "gpu_power_w" not in result.reports[0].values and "gpu_power_w" not in log.select_metrics(rows[0])
    assert report([str(tmp_path)]) in (0, None) and "Power" in (tmp_path / "report.html").read_text()


def test_units_per_second_and_mfu_are_in_the_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "peak_flops", lambda cfg, mesh: 2e9)
    cfg, cost = Config(report=ReportConfig(directory=tmp_path)), train.SampleCost({"tokens": 256}, 4e3, "6 a weight")
    with train.Run("test", cfg, dist.single_process(), cost=cost) as run:
        result = train.fit(new_step(), batches(), TrainConfig(steps=2), run=run)
    start, row = (next(event for event in read_events(tmp_path) if event["kind"] == kind) for kind in ("start", "train"))
    rate = row["samples_per_second"]
    assert row["tokens_per_second"] == pytest.approx(256 * rate) and row["mfu"] == pytest.approx(4e3 * rate / 2e9)
    assert (start["flops_per_sample"], start["peak_flops"]) == (4e3, 2e9) and "mfu" not in result.reports[0].values
    assert f"{log.format_rate(256 * rate, 'tokens')}  MFU {100 * row['mfu']:.1f} %" in capsys.readouterr().out
    scalars = log.name_scalars(log.Event("train", 0.0, row))
    assert scalars["train/tokens_per_second"] == row["tokens_per_second"] and scalars["train/mfu"] == row["mfu"]
    page = page_text(read_run(tmp_path))
    assert "tokens/s; MFU " in page and " of 0.002 TFLOP/s (data sheet); 4e-09 TFLOP a sample, 6 a weight" in page


PEAKS: list[tuple[str, dict[str, Any], float | None]] = [
    ("NVIDIA H200", {"precision": "bf16"}, 989), ("NVIDIA H200", {"precision": "bf16-params", "matmul": "fp8"}, 1979),
    ("NVIDIA A100-SXM4-40GB", {"tf32": True}, 156), ("NVIDIA H200", {}, None), ("NVIDIA H200", {"precision": "fp64"}, None),
    ("NVIDIA H200 MIG 1g.18gb", {"precision": "bf16"}, None), ("cpu", {"precision": "bf16"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "teraflops"), PEAKS)
def test_the_peak_is_that_of_known_gpus_in_the_precision_of_products(
    name: str, settings: dict[str, Any], teraflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: Any = SimpleNamespace(device=torch.device("cpu" if name == "cpu" else "cuda"), world=8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(StepConfig(**settings), mesh) == (None if teraflops is None else 8e12 * teraflops)


class Watts:
    """Counters of processors that have used 30 J."""

    unreadable = "energy_uj: Permission denied"

    def poll(self) -> None:
        pass

    def joules(self) -> dict[str, float]:
        return {"cpu": 30.0}


def test_the_energy_of_a_run_is_reported_and_summed_over_its_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RaplCounters", Watts)
    for epochs in (1, 2):
        fit(tmp_path, TrainConfig(epochs=epochs))
    records = [event for event in read_events(tmp_path) if event["kind"] == "energy"]
    samples = len(batches()) * len(batches()[0])
    assert [(record["joules"], record["cpu_joules"], record["samples"]) for record in records] == [(30.0, 30.0, samples)] * 2
    assert all("gpu_joules" not in record and record["joules_per_sample"] == 30.0 / samples for record in records)
    assert [(record["gpus"], record["nodes_counted"], record["nodes"]) for record in records] == [(0, 1, 1)] * 2
    notes = [event["text"] for event in read_events(tmp_path) if event["kind"] == "note"]
    assert sum("not counted, since this user cannot read it: energy_uj: Permission denied" in text for text in notes) == 2
    assert report([str(tmp_path)]) in (0, None)
    assert f"60 J, {60 / (2 * samples):.4g} J a sample (processors 60 J; counted: processors of 1 of 1 nodes)" in (
        tmp_path / "report.html").read_text()


def _train_on_nodes(mesh: Any, directory: str) -> None:
    """Train on three ranks. Ranks 0 and 1 share a node with counters and have GPU meters; rank 2 is on a node without counters."""
    class Meter:
        def __init__(self, device: torch.device) -> None:
            pass

        def read(self) -> dict[str, float]:
            return {"energy_j": 100.0 + mesh.rank, "power_limit_w": 700.0 - 100 * mesh.rank} if mesh.rank < 2 else {}

    loop.GpuCounters, loop.RaplCounters = Meter, Watts  # type: ignore[assignment,misc]
    Watts.joules = lambda self: {"cpu": 7.0, "memory": 1.0} if mesh.rank < 2 else {}  # type: ignore[method-assign]
    loop.socket.gethostname = lambda: "b" if mesh.rank == 2 else "a"
    run = train.Run("x", Config(report=ReportConfig(directory=Path(directory), sinks=())), mesh)
    step = train.Step(nn.Linear(3, 1), loss, StepConfig(optimizer="sgd", lr=0.05), mesh)
    train.fit(step, batches(), TrainConfig(epochs=1), run=run)
    run.reports.close()


def test_energy_is_summed_over_gpus_and_nodes(tmp_path: Path) -> None:
    on_ranks({"replicate": 3}, _train_on_nodes, str(tmp_path), fresh=True)
    (energy,) = [event for event in read_events(tmp_path) if event["kind"] == "energy"]
    expected = {"gpu_joules": 201.0, "cpu_joules": 7.0, "memory_joules": 1.0, "joules": 209.0}
    expected |= {"gpus": 2, "world": 3, "nodes_counted": 1, "nodes": 2, "gpu_limits_w": [600.0, 700.0]}
    assert {key: energy[key] for key in expected} == expected


def test_a_run_without_its_cap_on_power_does_not_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train.power_cap is 300 W, but NVML cannot read"):
        fit(tmp_path / "run", TrainConfig(epochs=1, power_cap=300))
    assert not list((tmp_path / "run").iterdir())


def slow_metric(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
    time.sleep(0.05)
    return metric(model, batch)


def test_a_target_reached_in_the_background_ends_the_run_with_the_evaluated_step(tmp_path: Path) -> None:
    cfg = TrainConfig(epochs=2000, report_every=1, evaluate="background", metric="error", target=1e9)
    result = fit(tmp_path, cfg, validation=batches(), evaluate=slow_metric)
    stop = next(event for event in read_events(tmp_path) if event["kind"] == "stop")
    assert result.reason == stop["reason"] == "target" and stop["target_reached"]
    assert stop["step"] == result.evaluations[0].step == 3 < result.progress.step < 6000
    notes = [event["text"] for event in read_events(tmp_path) if event["kind"] == "note"]
    assert any("by the weights of step 3" in text for text in notes)


def test_a_pending_evaluation_is_reported_before_a_signal_ends_the_run(tmp_path: Path) -> None:
    def interrupt(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGUSR1)
        return slow_metric(model, batch)

    run = new_run(tmp_path)
    cfg = TrainConfig(epochs=2000, report_every=5000, evaluate="background")
    result = train.fit(new_step(), batches(), cfg, validation=batches(), evaluate=interrupt, run=run)
    assert result.reason == "signal" and [r.step for r in result.evaluations][:1] == [3]
