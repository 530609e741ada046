"""Claims of docs/benchmarks.md and the README on speed and memory, measured on this machine. Other load only adds time, so one run
of several within the bound is enough."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcai import dist, log
from hpcai.cli import apps
from hpcai.cli.bench.timing import alternate
from hpcai.cli.benchmarks import find_workload
from hpcai.settings import StepConfig, TrainConfig
from hpcai.train import Step, fit
from hpcai.train.auto_settings import has_fast_bf16
from tests.apps.universes import write_universes
from tests.ranks.launch import on_ranks

pytestmark = pytest.mark.timing
ROOT = Path(__file__).resolve().parents[2]
Rows = list[dict[str, Any]]
UNET = "model.window=[64, 64, 64]"
ANGLES = ("detached", "conservative")
STEPS = [  # the least speedup of a step over the reference, and overrides
    *(("cosmoflow", 1.3, [f"model.size={size}", f"data.batch={batch}"]) for size, batch in ((64, 1), (64, 4), (128, 1))),
    ("deepcam", 1.0, ["model.divide=1", "height=384", "width=576"]),
    ("unet3d", 1 / 1.05, [UNET]),
    *(("opencatalyst", 2.0, [f"model.angles={angles}", "data.batch=4"]) for angles in ANGLES),
    ("openfold", 1.0, ["model.blocks=4", "features.crop=64"]),
]
MEMORY = [  # the largest ratio of the memory of training to that of the reference, and overrides
    ("cosmoflow", 1.0, ["model.size=128"]),
    ("deepcam", 1.01, ["model.divide=1", "height=384", "width=576"]),
    ("unet3d", 1.15, [UNET]),
    *(("opencatalyst", 0.75, [f"model.angles={angles}", "data.batch=4"]) for angles in ANGLES),
]


def retry(is_good: Callable[[Any], bool], measure: Callable[[], Any]) -> None:
    results = []
    for _ in range(5):
        results.append(measure())
        if is_good(results[-1]):
            return
    raise AssertionError(results)


def run_bench(*args: str) -> dict[str, Any]:
    """Return the JSON that ``hpcai bench`` prints with one thread."""
    code = "import sys; from hpcai.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "bench", *args, "--json"]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("app", "min_speedup", "overrides"), STEPS)
def test_a_step_is_faster_than_that_of_the_reference(app: str, min_speedup: float, overrides: list[str]) -> None:
    def is_good(row: dict[str, Any]) -> bool:
        return min(value for name, value in row.items() if name.endswith("_over_ours")) >= min_speedup

    retry(is_good, lambda: run_bench(app, "steps", *overrides)["steps"][0])


def test_deepcam_is_much_faster_with_auto_precision() -> None:
    if not has_fast_bf16(torch.device("cpu")):
        pytest.skip("this CPU does not compute in bfloat16 at full speed")
    args = ("deepcam", "steps", "model.divide=1", "data.batch=2", "--precision", "auto")
    retry(lambda row: row["plain_over_ours"] >= 1.3, lambda: run_bench(*args)["steps"][0])


@pytest.mark.parametrize(("app", "max_ratio", "overrides"), MEMORY)
def test_training_needs_no_more_memory_than_the_reference(app: str, max_ratio: float, overrides: list[str]) -> None:
    row = run_bench(app, "memory", *overrides)["memory"][0]
    assert row["ours_over_plain"] <= max_ratio, row


def test_the_loop_costs_less_than_2_percent() -> None:
    """``fit`` against zero_grad, forward, backward and update within the same steps: times of two separate loops differ by 5 %,
    depending on the page tables."""
    workload, mesh = find_workload("cosmoflow"), dist.single_process()
    cfg: Any = workload.complete_settings(workload.load(["model.size=64"]))
    batch = workload.random_batch(cfg, range(cfg.data.batch), mesh.device)
    step = Step(workload.build(cfg, mesh, workload.available_switches(cfg, mesh)), workload.loss, cfg.step, mesh)
    spent = [0.0]

    @contextmanager
    def clock() -> Iterator[None]:
        start = time.process_time()
        yield
        spent[0] += time.process_time() - start

    def forward_backward(model: Any, part: Any) -> Any:
        values = workload.loss(model, part)
        values["loss"].backward()
        return values

    step.reducer.zero_grad, step.forward_backward = clock()(step.reducer.zero_grad), clock()(forward_backward)  # type: ignore[method-assign]
    step.optimizer.step = clock()(step.optimizer.step)  # type: ignore[method-assign]

    def overhead() -> float:
        spent[0], start = 0.0, time.process_time()
        fit(step, [batch], TrainConfig(steps=25, report_every=25, collect_every=None))  # collects garbage at its start
        return (time.process_time() - start) / spent[0] - 1

    overhead()
    retry(lambda fraction: fraction < 0.02, lambda: statistics.median(overhead() for _ in range(5)))


def test_auto_precision_is_no_slower_than_a_plain_loop() -> None:
    args = ("cosmoflow", "steps", "model.size=32", "--precision", "auto")
    retry(lambda row: row["plain_over_ours"] >= 1.0, lambda: run_bench(*args)["steps"][0])


def test_the_network_of_opencatalyst_is_built_within_a_second() -> None:
    workload, mesh = find_workload("opencatalyst"), dist.single_process()
    cfg: Any = workload.load(["model.angles=detached"])

    def build() -> float:
        start = time.process_time()
        workload.build(cfg, mesh, workload.available_switches(cfg, mesh))
        return time.process_time() - start

    retry(lambda seconds: seconds < 1, build)


# ---- the parts of a step


def build_parameters(millions: float = 10.0) -> nn.ParameterList:
    """Return about ``millions`` million parameters, with the sizes of five convolutions and three dense layers."""
    shares = (0.0004, 0.006, 0.023, 0.09, 0.36, 0.5, 0.02)
    return nn.ParameterList([torch.randn(size) for share in shares for size in (int(share * millions * 1e6), 64)])


def test_update_and_average_in_one_pass_are_twice_as_fast_as_separate_ones() -> None:
    step = Step(build_parameters(), lambda model, batch: {}, StepConfig(ema_decay=0.999, optimizer="adam"), dist.single_process())
    parameters = build_parameters()
    step.reducer.zero_grad()
    for parameter in (*step.model.parameters(), *parameters):
        parameter.grad = torch.randn_like(parameter) if parameter.grad is None else parameter.grad.normal_()
    means = [parameter.detach().clone() for parameter in parameters]
    adam = torch.optim.Adam(parameters, lr=1e-3, foreach=False)

    def update_and_average() -> None:
        adam.step()
        with torch.no_grad():
            for mean, parameter in zip(means, parameters):
                mean.lerp_(parameter, 0.001)

    step.optimizer.lr.fill_(1e-3)
    runs = {"torch": update_and_average, "ours": partial(step.optimizer.step, None, torch.zeros(()))}
    retry(lambda seconds: seconds["torch"] >= 2.0 * seconds["ours"], lambda: alternate(runs, 7))


def step_seconds(mesh: dist.Mesh, evaluate: str | None) -> float:
    """Return the median wall seconds between steps on an emulated accelerator, which computes for 50 ms while the host sleeps."""
    times: list[float] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        times.append(time.perf_counter())
        time.sleep(0.05)
        return {"loss": model(batch).square().mean()}

    def metric(model: nn.Module, batch: torch.Tensor) -> dict[str, Any]:
        time.sleep(0.05)
        return {"error": (model(batch).square().sum(), len(batch))}

    kwargs: Any = {} if evaluate is None else {"validation": [torch.randn(8, 512)] * 5, "evaluate": metric}
    cfg = TrainConfig.model_validate({"steps": 40, "evaluate": evaluate or "wait"})
    fit(Step(nn.Linear(512, 512), loss, StepConfig(), mesh), [torch.randn(8, 512)] * 10, cfg, **kwargs)
    return statistics.median(b - a for a, b in pairwise(times)) if times else 0.0


@pytest.mark.parametrize(("evaluate", "axes"), [("background", {"replicate": 1}), ("wait", {"replicate": 1, "evaluate": 1})])
def test_evaluation_does_not_lengthen_steps(evaluate: str, axes: dict[str, int]) -> None:
    def measure() -> tuple[float, float]:
        runs = [(on_ranks({"replicate": 1}, step_seconds, None)[0], on_ranks(axes, step_seconds, evaluate)[0]) for _ in range(3)]
        return min(baseline for baseline, _ in runs), min(evaluated for _, evaluated in runs)

    retry(lambda seconds: seconds[1] <= 1.02 * seconds[0], measure)


# ---- reading samples: CPU seconds and refaults hold on any machine


def read_bench(folder: Path, part: str, *args: str) -> Rows:
    rows: Rows = run_bench("data", "--directory", str(folder), part, *args)[part]
    assert list(folder.iterdir()) == [], "no files are left behind"
    return rows


@pytest.mark.skipif(shutil.which("fio") is None, reason="no fio (make fio)")
def test_the_direct_reader_is_as_fast_as_fio(tmp_path: Path) -> None:
    for part, least in (("direct", 0.95), ("rows", 0.8)):
        run = partial(read_bench, tmp_path, part, "--gib", "1")
        retry(lambda rows, least=least: all(row["ours_over_fio"] >= least for row in rows), run)


def test_samples_are_read_no_slower_than_by_peers_in_a_third_of_the_cpu_time_of_torch(tmp_path: Path) -> None:
    """On a disk as fast as memory, h5py alone, which makes no batches, reaches the disk's rate too: there the bound is 0.8."""

    def is_good(rows: Rows) -> bool:
        fast = all(row["ours_over_it"] >= (0.8 if row["loader"] == "h5py alone" else 1) for row in rows if row["loader"] != "ours")
        seconds, torch_seconds = (
            [row["cpu_s_gib"] for row in rows if row["loader"] == name] for name in ("ours", "torch DataLoader")
        )
        return fast and all(ours <= other / 3 for ours, other in zip(seconds, torch_seconds))

    retry(is_good, lambda: read_bench(tmp_path, "peers", "--gib", "0.5", "--repeats", "3"))


# ---- startup


def least_seconds(*args: str) -> tuple[float, str]:
    """Return the least seconds of five runs of Python, and their output."""
    seconds, command = [], [sys.executable, *args]
    for _ in range(5):
        start = time.perf_counter()
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        seconds.append(time.perf_counter() - start)
    return min(seconds), output


@pytest.mark.parametrize(
    "code, limit", [("import hpcai", 0.3), ("import hpcai.settings, hpcai.models.cosmoflow, hpcai.train, hpcai.dist", 0.6)]
)
def test_importing_costs_little(code: str, limit: float) -> None:
    assert least_seconds("-c", code)[0] < limit


@pytest.mark.parametrize("app", apps.with_part("settings"))
def test_help_is_printed_within_a_second(app: str) -> None:
    seconds, output = least_seconds("-m", f"apps.{app}", "--help")
    assert seconds < 1.0 and "step.lr" in output


def test_four_processes_make_their_first_step_within_fifteen_seconds(tmp_path: Path) -> None:
    args = [f"data.directory={write_universes(tmp_path / 'data')}", "data.batch=8", "train.epochs=null", "train.steps=2"]
    args += ["apps/cosmoflow/configs/small.yaml", f"report.directory={tmp_path / 'run'}"]
    command = [Path(sys.executable).with_name("mpiexec"), "-n", "4", sys.executable, "-m", "apps.cosmoflow", *args]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    (event,) = [event for event in log.read_metrics(tmp_path / "run/metrics.jsonl") if event["kind"] == "startup"]
    assert event["step"] == 1 and event["seconds"] < 15, event
