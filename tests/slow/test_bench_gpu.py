"""`hpcai bench gpu` where there is no GPU: every case of every app, and every kernel, at tiny sizes."""

import contextlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcai.cli import bench
from hpcai.cli.bench import gpu_kernels, gpu_steps
from hpcai.cli.benchmarks import find_workload
from hpcai.data import Endless
from hpcai.train.capture import batch_signature

pytestmark = pytest.mark.usefixtures("one_thread")
MEASURED = {
    "samples", "batch", "samples_s", "ms", "spread_percent", "windows", "tflop", "tflops", "of_rate", "host_ms", "ready_s", "loss",
    "joules_per_sample", "loader_samples_s", "loader_lost_percent", "finite",
}  # fmt: skip


def measured(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert bench.main(["gpu", *words, "--tiny", "--repeats", "1", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found: dict[str, Any] = lines[-1]
    rows = found["rows"]
    assert [line["rows"] for line in lines] == [rows[: 1 + i] for i in range(len(rows))] + [rows], "what is known is told at once"
    assert found["bench"] == "gpu" and found["tiny"] and found["matrix_tflops"] > 0 and found["copy_gb_s"] > 0 and found["torch"]
    return found


_CLAIM = "openfold-crop-256-all-kept"  # takes the longest, and is a form of another one


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.claim] * (x == _CLAIM)) for x in gpu_steps.cases()])
def test_a_published_step(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "apps", "--case", name)
    eager, *others = found["rows"]
    assert found["part"] == "apps" and eager["case"] == name and eager["variant"] == "eager" and "failed" not in eager
    assert eager.keys() >= MEASURED and eager["finite"] and eager["loader_samples_s"] > 0 and eager["loss"] > 0
    assert eager["samples_s"] == pytest.approx(eager["batch"] / eager["ms"] * 1e3, rel=1e-3) and eager["tflop"] > 1e-6
    if "each_ms" in eager:
        assert len(eager["each_ms"]) == 4 and sum(eager["each_ms"]) / 4 == pytest.approx(eager["ms"], rel=1e-3)
    assert [row["variant"] for row in others] == gpu_steps.variants()[1:]
    assert all(row["left_out"] == "there is no GPU: this process computes on cpu" for row in others)


@pytest.mark.parametrize("name", gpu_steps.cases())
def test_batches_of_the_loader_have_the_shapes_of_those_on_the_device(name: str) -> None:
    """Otherwise a captured step would be captured once more, or refused."""
    app, case = gpu_steps._cases()[name]
    made = gpu_steps.StepBenchmark(name, find_workload(app), case, SimpleNamespace(tiny=True))
    known = [batch_signature(batch) for batch in made.batches]
    assert len(set(map(str, known))) == len(case.step_variants)
    cfg = made.workload.write_files(made.settings("eager", case.step_variants[-1]), 4, ("train",))
    with made.workload.loader(cfg, made.mesh, "train", name="train", sampler=Endless(4, 2 * cfg.data.batch)) as loader:
        assert [batch_signature(batch) for batch in loader.epoch(0)] == [known[len(case.step_variants) - 1]] * 2


@pytest.mark.parametrize("kernel", gpu_kernels.KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_beside_its_peers(kernel: gpu_kernels.Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "kernels", "--case", f"{kernel.name}-{next(iter(kernel.sizes))}")
    rows = found["rows"]
    assert found["part"] == "kernels" and [row["form"] for row in rows] == [*kernel.implementations()] * len(kernel.dtypes)
    assert not [row for row in rows if "failed" in row] and rows[0]["over_ours"] == 1.0
    times = {"forward_ms", "both_ms"} if kernel.has_backward else {"forward_ms"}
    for row in rows:
        assert "left_out" in row or (row.keys() >= {*times, "over_ours", "of_copy", "graph"} and not row["graph"])


COMPARED = [one for one in gpu_kernels.KERNELS if len(one.implementations()) > 1 and not one.name.startswith("philox")]


@pytest.mark.parametrize("kernel", COMPARED, ids=lambda kernel: kernel.name)
def test_forms_of_a_kernel_are_one_function(kernel: gpu_kernels.Kernel) -> None:
    """In value and in each gradient."""
    found = {}
    for form, function in kernel.implementations().items():
        inputs = kernel.inputs(gpu_kernels.RandomInputs(torch.device("cpu"), torch.float32, 99), *kernel.tiny)
        with contextlib.suppress(gpu_kernels.LeftOutError), torch.set_grad_enabled(kernel.has_backward):
            result = function(*inputs)
            found[form] = [result.detach().float()]
            if kernel.has_backward:
                learnt = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
                found[form] += torch.autograd.grad(result, learnt, torch.arange(1.0, result.numel() + 1).sin().view(result.shape))
    assert len(found) > 1 and "ours" in found
    for tensors in found.values():
        for value, ours in zip(tensors, found["ours"], strict=True):
            torch.testing.assert_close(value, ours, rtol=1e-5, atol=3e-6 * float(ours.abs().max()))


def test_what_a_gpu_adds_to_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines that only a GPU reaches, with a GPU that is emulated."""
    joules = iter(range(100))
    monkeypatch.setattr(gpu_steps, "GpuCounters", lambda device: SimpleNamespace(read=lambda: {"energy_j": 8.0 * next(joules)}))
    monkeypatch.setattr(gpu_steps, "_LOADER_VARIANTS", ("eager",))
    monkeypatch.setattr(gpu_steps, "ENERGY_S", 0.05)
    monkeypatch.setattr(gpu_steps, "LOADER_S", 0.05)
    monkeypatch.setattr(gpu_steps, "WINDOW_S", 0.05)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**9)
    held = iter((10**9, 10**9 + 5 * 10**8))
    monkeypatch.setattr(gpu_steps.clocks, "graph_bytes", lambda: next(held))
    monkeypatch.setattr(gpu_steps.clocks, "profile", lambda run, count: {"gaps_percent": 0.1, "turns": count})
    app, case = gpu_steps._cases()["cosmoflow-batch-4"]
    given = SimpleNamespace(tiny=True, repeats=2, seconds=9.0, rates={"matrix_tflops": 0.1})
    made = gpu_steps.StepBenchmark("cosmoflow-batch-4", find_workload(app), case, given)
    made.on_gpu = True
    row = made._measure("eager")
    given.tiny = False  # as of a published size, whose figure then stands beside it
    row |= made._rate_row([[0.01], [0.02], [0.04]], 4, 1e9)
    assert row["peak_gb"] == 3.0 and row["graphs_gb"] == 0.5 and row["gaps_percent"] == 0.1 and row["turns"] == 3
    assert row["joules_per_sample"] > 0 and row["loader_samples_s"] > 0 and row["finite"]
    assert row["ms"] == 20.0 and row["spread_percent"] == 150.0 and row["tflops"] == 0.05 and row["of_rate"] == 0.5
    assert row["over"] == round(200 / 224, 3) and row["asked"] == 300 and "MLPerf HPC v3.0" in row["published_by"]
    monkeypatch.setattr(gpu_steps.clocks, "graph_bytes", lambda: 0)
    monkeypatch.setattr(gpu_steps.StepBenchmark, "_count_flops", None)
    monkeypatch.setattr(type(made.workload), "loader", None)
    given.tiny = True
    made = gpu_steps.StepBenchmark("cosmoflow-batch-4", find_workload(app), case, given)
    row = made._measure("eager")
    assert row["ms"] > 0 and row["tflop"].startswith("not counted: TypeError") and row["loader"].startswith("failed: TypeError")


@pytest.mark.parametrize("fails", [False, True])
def test_calls_of_a_kernel_are_timed_in_a_graph_that_takes_long_enough(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    class Graph:
        def __init__(self, *given: Any) -> None:
            pass

        def warm_up(self, function: Any) -> None:
            function()

        def capture(self, function: Any) -> None:
            if fails:
                raise RuntimeError("operation not permitted when stream is capturing")
            called.clear()
            function()

        def replay(self) -> None: ...

        def reset(self) -> None:
            called.append(-1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("graph_pool_handle", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(gpu_kernels, "CudaGraph", Graph)
    monkeypatch.setattr(gpu_kernels.clocks, "time_window", lambda run, count: [4e-5] * count)
    seconds, captured = gpu_kernels.seconds_per_call(called.append, 3, 2)
    if fails:
        assert seconds == pytest.approx(4e-5) and not captured
    else:
        assert called == [*range(51), -1] and seconds == pytest.approx(4e-5 / 51) and captured, "2 ms are 50 calls, of three sets"
