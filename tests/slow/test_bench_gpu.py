"""`hpcai bench gpu` without a GPU: every case of every app, and every kernel, at tiny sizes."""

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

MEASURED = {
    "samples", "batch", "samples_s", "ms", "spread_percent", "windows", "tflop", "tflops", "of_rate", "host_ms", "ready_s", "loss",
    "joules_per_sample", "loader_samples_s", "loader_lost_percent", "finite",
}  # fmt: skip


def run_bench_gpu(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert bench.main(["gpu", *args, "--tiny", "--repeats", "1", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    table: dict[str, Any] = lines[-1]
    rows = table["rows"]
    assert [line["rows"] for line in lines] == [rows[: 1 + i] for i in range(len(rows))] + [rows], "each row is printed at once"
    assert table["bench"] == "gpu" and table["tiny"] and table["matrix_tflops"] > 0 and table["copy_gb_s"] > 0 and table["torch"]
    return table


_FIRST = {app: name for name, (app, _) in reversed(gpu_steps.cases().items())}  # others have another batch
del _FIRST["openfold"]  # it takes as long as all others
_CLAIMS = [name for name in gpu_steps.cases() if name not in _FIRST.values() and "fp8" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.claim] * (x in _CLAIMS)) for x in gpu_steps.cases()])
def test_a_published_step(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = run_bench_gpu(capsys, "apps", "--case", name)
    eager, *others = table["rows"]
    assert table["part"] == "apps" and eager["case"] == name and eager["variant"] == "eager" and "failed" not in eager
    assert eager.keys() >= MEASURED and eager["finite"] and eager["loader_samples_s"] > 0 and eager["loss"] > 0
    assert eager["samples_s"] == pytest.approx(eager["batch"] / eager["ms"] * 1e3, rel=1e-3) and eager["tflop"] > 1e-6
    if "each_ms" in eager:
        assert len(eager["each_ms"]) == 4 and sum(eager["each_ms"]) / 4 == pytest.approx(eager["ms"], rel=1e-3)
    assert [row["variant"] for row in others] == [*gpu_steps.VARIANTS][1:]
    assert all(row["left_out"] == "there is no GPU: this process computes on cpu" for row in others)


@pytest.mark.slow
@pytest.mark.parametrize("name", gpu_steps.cases())
def test_batches_of_the_loader_have_the_shapes_of_those_on_the_device(name: str) -> None:
    """A captured step would otherwise be captured again, or refused."""
    app, case = gpu_steps.cases()[name]
    benchmark = gpu_steps.StepBenchmark(name, find_workload(app), case, SimpleNamespace(tiny=True))
    signatures = [batch_signature(batch) for batch in benchmark.batches]
    assert len(set(map(str, signatures))) == len(case.step_variants)
    cfg = benchmark.workload.write_files(benchmark.settings("eager", case.step_variants[-1]), 4, ("train",))
    with benchmark.workload.loader(cfg, benchmark.mesh, "train", name="train", sampler=Endless(4, 2 * cfg.data.batch)) as loader:
        assert [batch_signature(batch) for batch in loader.epoch(0)] == [signatures[len(case.step_variants) - 1]] * 2


@pytest.mark.parametrize("kernel", gpu_kernels.KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_is_timed_with_its_peers(kernel: gpu_kernels.Kernel, capsys: pytest.CaptureFixture[str]) -> None:
    table = run_bench_gpu(capsys, "kernels", "--case", f"{kernel.name}-{next(iter(kernel.sizes))}")
    rows = table["rows"]
    assert table["part"] == "kernels" and [row["form"] for row in rows] == [*kernel.implementations()] * len(kernel.dtypes)
    assert not [row for row in rows if "failed" in row] and rows[0]["over_ours"] == 1.0
    times = {"forward_ms", "both_ms"} if kernel.has_backward else {"forward_ms"}
    for row in rows:
        assert "left_out" in row or (row.keys() >= {*times, "over_ours", "of_copy", "graph"} and not row["graph"])


COMPARED = [kernel for kernel in gpu_kernels.KERNELS if len(kernel.implementations()) > 1 and not kernel.name.startswith("philox")]


@pytest.mark.parametrize("kernel", COMPARED, ids=lambda kernel: kernel.name)
def test_implementations_of_a_kernel_agree(kernel: gpu_kernels.Kernel) -> None:
    """In value and in each gradient."""
    results = {}
    for name, function in kernel.implementations().items():
        inputs = kernel.inputs(gpu_kernels.RandomInputs(torch.device("cpu"), torch.float32, 99), *kernel.tiny)
        with contextlib.suppress(gpu_kernels.LeftOutError), torch.set_grad_enabled(kernel.has_backward):
            result = function(*inputs)
            results[name] = [result.detach().float()]
            if kernel.has_backward:
                leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
                results[name] += torch.autograd.grad(result, leaves, torch.arange(1.0, result.numel() + 1).sin().view(result.shape))
    assert len(results) > 1 and "ours" in results
    for tensors in results.values():
        for actual, expected in zip(tensors, results["ours"], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=3e-6 * float(expected.abs().max()))


def test_a_gpu_adds_fields_to_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that only runs on a GPU, on an emulated one."""
    joules = iter(range(100))
    monkeypatch.setattr(gpu_steps, "GpuCounters", lambda device: SimpleNamespace(read=lambda: {"energy_j": 8.0 * next(joules)}))
    monkeypatch.setattr(gpu_steps, "_LOADER_VARIANTS", ("eager",))
    monkeypatch.setattr(gpu_steps, "ENERGY_S", 0.05)
    monkeypatch.setattr(gpu_steps, "LOADER_S", 0.05)
    monkeypatch.setattr(gpu_steps, "WINDOW_S", 0.05)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 10**9)
    graph_bytes = iter((10**9, 10**9 + 5 * 10**8))
    monkeypatch.setattr(gpu_steps.timing, "graph_bytes", lambda: next(graph_bytes))
    monkeypatch.setattr(gpu_steps.timing, "profile", lambda run, count: {"gaps_percent": 0.1, "turns": count})
    app, case = gpu_steps.cases()["cosmoflow-batch-4"]
    options = SimpleNamespace(tiny=True, repeats=2, seconds=9.0, rates={"matrix_tflops": 0.1})
    benchmark = gpu_steps.StepBenchmark("cosmoflow-batch-4", find_workload(app), case, options)
    benchmark.on_gpu = True
    row = benchmark._measure("eager")
    options.tiny = False  # as at a published size, which the row compares with the published figure
    row |= benchmark._rate_row([[0.01], [0.02], [0.04]], 4, 1e9)
    assert row["peak_gb"] == 3.0 and row["graphs_gb"] == 0.5 and row["gaps_percent"] == 0.1 and row["turns"] == 3
    assert row["joules_per_sample"] > 0 and row["loader_samples_s"] > 0 and row["finite"]
    assert row["ms"] == 20.0 and row["spread_percent"] == 150.0 and row["tflops"] == 0.05 and row["of_rate"] == 0.5
    assert row["over"] == round(200 / 224, 3) and row["asked"] == 300 and "MLPerf HPC v3.0" in row["published_by"]
    monkeypatch.setattr(gpu_steps.timing, "graph_bytes", lambda: 0)
    monkeypatch.setattr(gpu_steps.timing, "count_flops", None)
    monkeypatch.setattr(type(benchmark.workload), "loader", None)
    options.tiny = True
    benchmark = gpu_steps.StepBenchmark("cosmoflow-batch-4", find_workload(app), case, options)
    row = benchmark._measure("eager")
    assert row["ms"] > 0 and row["tflop"].startswith("not counted: TypeError") and row["loader"].startswith("failed: TypeError")


@pytest.mark.parametrize("fails", [False, True])
def test_calls_of_a_kernel_are_timed_in_a_graph_that_takes_long_enough(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    class Graph:
        def __init__(self, *args: Any) -> None:
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
    monkeypatch.setattr(gpu_kernels.timing, "time_window", lambda run, count: [4e-5] * count)
    seconds, captured = gpu_kernels.seconds_per_call(called.append, 3, 2)
    if fails:
        assert seconds == pytest.approx(4e-5) and not captured
    else:
        assert called == [*range(51), -1] and seconds == pytest.approx(4e-5 / 51) and captured, "2 ms are 50 calls on three inputs"
