"""`hpcai bench gpu`: times and FLOPs of known inputs, names, and failing variants."""

import inspect
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import config
from hpcai.cli import apps, bench
from hpcai.cli.bench import gpu_kernels, gpu_steps, timing
from hpcai.cli.benchmarks import find_workload
from hpcai.kernels import attention, triton_support
from tests.reference_data import load_json

# ---- clocks


def test_gaps_are_idle_times_of_more_than_20_microseconds() -> None:
    # Out of order, nested, overlapping; an idle gap of 10 us, then one of 30.
    spans = [(100.0, 160.0), (0.0, 50.0), (10.0, 20.0), (40.0, 60.0), (70.0, 70.0)]
    assert timing.idle_shares(spans) == pytest.approx((30 / 160, 40 / 160))
    assert timing.idle_shares(spans, above=30.0)[0] == 0, "30 is not more than 30"
    assert timing.idle_shares(spans, above=5.0) == pytest.approx((40 / 160, 40 / 160))
    assert timing.idle_shares([(5.0, 5.0)]) == (0, 0) and timing.idle_shares([(0.0, 4.0)]) == (0, 0)


def test_flops_of_a_layer_are_those_of_its_matrix_products() -> None:
    batch, inputs, outputs = 6, 10, 4
    layer, x = nn.Linear(inputs, outputs), torch.randn(batch, inputs)
    product = 2 * batch * inputs * outputs
    assert timing.count_flops(lambda: layer(x)) == product
    assert timing.count_flops(lambda: layer(x).sum().backward()) == 2 * product, "the input has no gradient"
    assert timing.count_flops(lambda: layer(x.requires_grad_()).sum().backward()) == 3 * product
    image = torch.randn(2, 3, 8, 8)
    assert timing.count_flops(lambda: nn.Conv2d(3, 5, 3, padding=1)(image)) == 2 * 2 * 64 * 5 * 3 * 9
    into, a = torch.zeros(4, 4), torch.randn(4, 7)
    assert timing.count_flops(lambda: into.addmm_(a, a.T)) == 2 * 4 * 4 * 7, "torch's counter omits this operation"
    cubes = torch.randn(3, 4, 4)
    assert timing.count_flops(lambda: cubes.baddbmm_(cubes, cubes)) == 3 * 2 * 4 * 4 * 4


def test_kernels_are_counted_by_their_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "MISSING", None)
    triton = []
    monkeypatch.setattr(attention, "_fused", lambda qkvg: triton.append(triton_support.is_supported(SimpleNamespace(is_cuda=True))))
    rows, entries, heads, channels = 2, 8, 2, 4
    qkvg, gate_bias = torch.randn(1, rows, entries, 4, heads, channels), torch.zeros(heads * channels)
    mask = torch.ones(1, rows, entries)
    flops = timing.count_flops(lambda: attention.gated_attention(qkvg, gate_bias, mask))
    assert flops == 2 * (2 * rows * heads * entries * entries * channels), "q k and p v"
    assert triton == [False] and triton_support.MISSING is None, "Triton is available again"


def test_a_window_has_one_time_per_run() -> None:
    calls: list[int] = []
    assert len(timing.time_window(calls.append, 3)) == 3 and calls == [0, 1, 2]
    assert set(timing.peak_rates(torch.device("cpu"))) == {"matrix_tflops", "copy_gb_s"}
    assert timing.graph_bytes() == 0 and timing.profile(calls.append, 1) == {}


class Event:
    def __init__(self, name: str, first: int, last: int, kind: Any = torch.autograd.DeviceType.CUDA, marked: bool = False) -> None:
        self.name, self.device_type, self.is_user_annotation = (lambda value=value: value for value in (name, kind, marked))
        self.start_ns, self.duration_ns = lambda: first * 1000, lambda: (last - first) * 1000


def test_a_profile_has_gaps_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [Event("mm", 0, 40), Event("copy", 140, 150), Event("mm", 150, 200), Event("step", 0, 200, marked=True)]
    events.append(Event("aten::mm", 30, 130, torch.autograd.DeviceType.CPU))
    ran: list[int] = []

    profile = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(torch.profiler, "profile", lambda **kwargs: nullcontext(profile))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(timing, "synchronize", lambda: None)
    result = timing.profile(ran.append, 2)
    assert ran == [0, 1] and result["gaps_percent"] == result["idle_percent"] == 50.0 and result["launches"] == 2
    assert result["costly"] == [["mm", 0.045, 1.0], ["copy", 0.005, 0.5]]
    events[:] = events[-2:]
    assert "no kernel" in timing.profile(ran.append, 1)["left_out_trace"]


# ---- names


def test_cases_are_listed_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for part, case in (("apps", "openfold-crop-256"), ("kernels", "attention-triangle")):
        assert bench.main(["gpu", "--list", part]) == 0
        names = capsys.readouterr().out.splitlines()
        assert case in names and len(set(names)) == len(names) and not any(" " in name for name in names)


@pytest.mark.parametrize(("args", "message"), load_json("refused/gpu_benches"))
def test_an_unknown_name_is_refused(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["gpu", *args])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", apps.with_part("benchmarks"))
def test_published_configurations_are_read_from_the_files(name: str) -> None:
    app = find_workload(name)
    assert app.gpu_cases, "an app declares its GPU cases"
    for case in app.gpu_cases:
        path = Path(inspect.getfile(type(app))).parent / "configs" / case.yaml
        for variant, flags in gpu_steps.VARIANTS.items():
            for step in case.step_variants:
                cfg: Any = config.load(app.settings, path, [*gpu_steps._BASE_OVERRIDES, *case.overrides, *flags, *step])
                assert cfg.step.capture == ("whole" if "captured" in variant else "none")
        plain: Any = config.load(app.settings, path)
        assert cfg.step.optimizer == plain.step.optimizer and cfg.step.lr == plain.step.lr and cfg.step.clip == plain.step.clip
        assert case.published and case.published.samples_per_s > 0 and case.goal
        assert any(host in case.published.source for host in ("github.com/mlcommons", "docs.nvidia.com"))


# ---- failures


def test_a_variant_that_raises_is_a_row_and_the_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {
        "eager": RuntimeError("no such kernel\nand more"), "captured": torch.OutOfMemoryError("CUDA out of memory. Tried"),
        "compiled": ZeroDivisionError(),
    }  # fmt: skip

    def measure(self: gpu_steps.StepBenchmark, variant: str) -> dict[str, Any]:
        if variant in problems:
            raise problems[variant]
        return {"ms": 1.0}

    nothing: Any = None
    monkeypatch.setattr(gpu_steps.StepBenchmark, "_measure", measure)
    benchmark = gpu_steps.StepBenchmark("app-one", nothing, nothing, nothing)
    first, *rest = [benchmark.row(variant) for variant in gpu_steps.VARIANTS]
    assert first == {"case": "app-one", "variant": "eager", "failed": "RuntimeError: no such kernel"}
    assert all(row["left_out"].startswith("there is no GPU") for row in rest)
    benchmark.on_gpu = True
    monkeypatch.setattr(gpu_steps, "close_all", lambda: None)
    rows = {variant: benchmark.row(variant) for variant in gpu_steps.VARIANTS}
    assert rows["captured"]["failed"] == "out of memory" and rows["compiled"]["failed"] == "ZeroDivisionError: no message"
    assert rows["tf32"] == {"case": "app-one", "variant": "tf32", "ms": 1.0}


def test_backend_flags_are_restored() -> None:
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(KeyError), gpu_steps._restore_backend_flags():
        torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = not before[0]
        raise KeyError
    assert (torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32) == before


def test_rows_of_a_killed_case_are_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stdout = json.dumps({"bench": "gpu", "part": "apps", "torch": "2", "rows": [{"case": "a", "variant": "eager", "ms": 1.0}]})

    def run(command: list[str], timeout: float, **kwargs: Any) -> Any:
        if "'a'" in command[-1]:
            raise subprocess.TimeoutExpired(command, timeout, output=f'{{"rows": []}}\n{stdout}\n{{"bench": "gp'.encode())
        return SimpleNamespace(returncode=-11, stdout="", stderr="Segmentation fault")

    monkeypatch.setattr(timing.subprocess, "run", run)
    monkeypatch.setattr(gpu_steps, "cases", lambda: ["a", "b"])
    assert bench.main(["gpu", "apps", "--json", "--limit", "7"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bench"] == "gpu" and result["torch"] == "2" and result["rows"] == [
        {"case": "a", "variant": "eager", "ms": 1.0}, {"part": "apps", "case": "a", "failed": "killed after 7 s"},
        {"part": "apps", "case": "b", "failed": "Segmentation fault"},
    ]  # fmt: skip
    monkeypatch.setattr(gpu_steps, "cases", lambda: ["b"])
    assert bench.main(["gpu", "apps"]) == 1 and "b Segmentation fault" in capsys.readouterr().out, "nothing was measured"


def test_bytes_of_each_tensor_once() -> None:
    x = torch.randn(10, requires_grad=True)
    assert gpu_kernels.bytes_once(x, [x], False) == 80 and gpu_kernels.bytes_once(x, [x], True) == 80 + 40 + 80 + 40
