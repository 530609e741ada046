"""Steps on one GPU: captured steps equal eager ones, resume and profile, and have the claimed speed."""

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist
from hpcai.dist.host import GpuCounters
from hpcai.models import cosmoflow
from hpcai.settings import CheckpointConfig, StepConfig
from hpcai.train import rng
from hpcai.train.capture import _WARMUP_STEPS as WARM
from hpcai.train.capture import batch_signature
from hpcai.train.checkpoint import Checkpoints
from hpcai.train.checkpoint_reader import Progress
from hpcai.train.profile import Profile, span
from hpcai.train.step import Step
from tests.gpu.device import DEVICE, cuda_only
from tests.gpu.test_cosmoflow import make_batch, new_step

CASES = [
    {"optimizer": "sgd", "clip": 1.0, "ema_decay": 0.9},
    {"optimizer": "adamw", "precision": "bf16", "accumulate": 2},
    {"optimizer": "adamw", "precision": "bf16-params", "moments": "bf16", "ema_decay": 0.9},
    {"optimizer": "lamb", "ema_decay": 0.9},
    {"optimizer": "adamw", "ema_decay": 0.9},
    {"optimizer": "lars", "precision": "bf16-params"},
    {"optimizer": "muon", "precision": "bf16-params", "muon_names": ("dense*.weight",)},
]


@pytest.mark.parametrize("mode", ["forward", "whole"])
@pytest.mark.parametrize("overrides", CASES, ids=str)
def test_captured_is_eager(mode: str, overrides: dict[str, Any]) -> None:
    torch.backends.cudnn.deterministic = True
    eager, captured = new_step(**overrides), new_step(capture=mode, **overrides)
    for i in range(9):
        batch, lr = make_batch(i, 2 if i in (3, 5, 7) else 4), 1e-3 / (i + 1)
        losses = [step(batch, lr)["loss"].item() for step in (eager, captured)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-2 if "precision" in overrides else 1e-4)
    assert eager.optimizer.count == captured.optimizer.count == 9
    assert captured._capture is not None and captured._capture.recorded() == 2
    captured.check()


def test_dropout_differs_between_replays_and_recording_leaves_no_trace() -> None:
    step = new_step(dropout=0.5, capture="whole", ema_decay=0.9)
    batch, capture = make_batch(0), step._capture
    for _ in range(WARM):
        step(batch, 0.0)
    assert capture is not None and capture.recorded() == 0
    before = {name: t.clone() for name, t in step.optimizer.weights().items()}  # type: ignore[union-attr]
    state = rng.state()
    assert capture._record(capture._slots[batch_signature(batch)], batch) is not None
    assert all(torch.equal(before[name], t) for name, t in step.optimizer.weights().items())  # type: ignore[arg-type]
    assert all(torch.equal(x, state[name]) for name, x in rng.state().items() if "gauss" not in name)
    assert step.optimizer.count == WARM
    assert len({step(batch, 0.0)["loss"].item() for _ in range(5)}) == 5


def test_a_captured_run_resumes(tmp_path: Path) -> None:
    torch.backends.cudnn.deterministic = True
    step = new_step(capture="whole", optimizer="adamw")
    for i in range(WARM + 1):
        step(make_batch(i))
    Checkpoints(tmp_path, CheckpointConfig(), step.mesh).save(step, Progress(step=WARM + 1))
    expected = [step(make_batch(i))["loss"].item() for i in range(WARM + 2)]
    resumed = new_step(capture="whole", optimizer="adamw")
    Checkpoints(tmp_path, CheckpointConfig(), resumed.mesh).resume(resumed)
    assert [resumed(make_batch(i))["loss"].item() for i in range(WARM + 2)] == pytest.approx(expected, rel=1e-5)


@cuda_only
def test_batches_from_the_host_are_copied_into_the_graph() -> None:
    step, eager = new_step(capture="whole"), new_step()
    for i in range(WARM + 3):
        batch = make_batch(i)
        pinned = cosmoflow.Batch(batch.counts.cpu().pin_memory(), batch.target.cpu().pin_memory())
        assert step(pinned)["loss"].item() == pytest.approx(eager(batch)["loss"].item(), rel=1e-4)


@cuda_only
def test_compiled_is_close_to_eager() -> None:
    eager, compiled = new_step(), new_step(compile="whole")
    for i in range(3):
        assert compiled(make_batch(i))["loss"].item() == pytest.approx(eager(make_batch(i))["loss"].item(), rel=1e-3)
    assert compiled.news()[0].startswith("compiled") and list(compiled.model.state_dict()) == list(eager.model.state_dict())


@cuda_only
def test_readings_of_the_gpu_and_a_trace_of_chosen_steps(tmp_path: Path) -> None:
    import gzip

    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    readings = GpuCounters(DEVICE).read()
    assert readings["power_w"] > 10 and 10 < readings["temperature_c"] < 110 and readings["memory_used_gb"] > 0
    step = new_step()
    with Profile(tmp_path, (2, 3), step.mesh) as profile:
        for i in range(1, 5):
            with span("mine"):
                step(make_batch(i))
            profile.after_step(i)
    with gzip.open(tmp_path / "profile/rank-0000.json.gz") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert names.count("mine") >= 2 and any("conv" in name.lower() or "gemm" in name.lower() for name in names)


@cuda_only
@pytest.mark.parametrize(("capture", "parts"), [("none", {"forward", "backward", "update"}), ("whole", {"graph"})])
def test_the_parts_of_a_measured_step_have_times_of_the_gpu(capture: str, parts: set[str]) -> None:
    step = new_step(capture=capture)
    for i in range(WARM + 2):
        if i == WARM + 1:
            step.clock.measure_next_step()
        step(make_batch(0))
    torch.cuda.synchronize()
    seconds, measured = step.clock.end_interval(WARM + 2, step.clock.take_marks())
    assert set(step.clock.device_seconds) - {"reduce"} == parts <= set(measured)
    assert 0 < sum(step.clock.device_seconds.values()) < seconds


def mean_square(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"loss": model(x).float().square().mean()}


@cuda_only
@pytest.mark.timing
def test_a_captured_step_of_small_operations_is_faster_and_leaves_no_gaps() -> None:
    from hpcai.cli.bench import timing

    seconds, traces = {}, {}
    x = torch.randn(1, 64, 64, device=DEVICE)
    for capture in ("none", "whole"):
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        cfg = StepConfig.model_validate({"precision": "bf16-params", "capture": capture, "ema_decay": 0.999})
        step = Step(nn.TransformerEncoder(layer, 24, enable_nested_tensor=False), mean_square, cfg, dist.single_process(DEVICE))

        def run(i: int, step: Step = step) -> None:
            step(x)

        timing.time_window(run, 10)
        seconds[capture], traces[capture] = statistics.median(timing.time_window(run, 50)), timing.profile(run, 20)
    assert seconds["none"] >= 1.5 * seconds["whole"] and traces["whole"]["gaps_percent"] < 1.0, (seconds, traces)


@cuda_only
@pytest.mark.timing
def test_the_update_runs_at_the_speed_of_memory() -> None:
    from hpcai.cli.bench import gpu_kernels, timing

    options = SimpleNamespace(tiny=False, repeats=7, variants=["ours", "torch"], rates=timing.peak_rates(DEVICE))
    rows = [row for row in gpu_kernels.measure("adam-93-million", options) if "left_out" not in row]
    assert all(row["of_copy"] >= 0.85 for row in rows if row["form"] == "ours"), rows
    assert all(row["over_ours"] >= 1.0 for row in rows), rows
