"""A step of each app at the published size and settings of its benchmark fits into memory and has a finite loss.

Samples are random, as in ``hpcai bench gpu``. pytest -m full selects these tests, -m 'not full' excludes them.
"""

from types import SimpleNamespace

import pytest
import torch

from hpcai.cli.bench import gpu_steps
from hpcai.cli.benchmarks import find_workload
from hpcai.train.step import Step
from tests.gpu.device import DEVICE, GRAPH, ON_GPU, synchronize

pytestmark = pytest.mark.full
CASES = "cosmoflow-batch-4", "deepcam-batch-8", "unet3d-batch-2", "opencatalyst-batch-16", "openfold-crop-256"


@pytest.mark.parametrize("variant", ["eager", "captured"])
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_published_size_fits_and_is_finite(name: str, variant: str) -> None:
    if name.startswith("openfold") and variant != "eager" and not ON_GPU:
        pytest.skip("one_hot reads its input on a CPU")
    app, case = gpu_steps.cases()[name]
    bench = gpu_steps.StepBenchmark(name, find_workload(app), case, SimpleNamespace(tiny=not ON_GPU))
    workload, mesh, cfg, batch = bench.workload, bench.mesh, bench.settings(variant), bench.batches[0]
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = workload.build(cfg, mesh, workload.available_switches(cfg, mesh))
    step = Step(model, workload.loss, cfg.step, mesh, counts=workload.counts, graph=GRAPH)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    results = [step(batch, 1e-3)["loss"] for _ in range(4)]
    step.check()
    losses = [float(x[0] / x[1] if isinstance(x, tuple) else x) for x in results]
    assert all(0 < loss < 1e6 for loss in losses), losses
    changed = sum(not torch.equal(x, p) for x, p in zip(before, step.model.parameters()))
    assert changed > 0.5 * len(before), f"{changed} of {len(before)} parameters have changed"
    if ON_GPU:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(3):
            step(batch, 1e-4)
        end.record()
        synchronize()
        peak, total = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(DEVICE).total_memory
        summary = f"{begin.elapsed_time(end) / 3:.1f} ms a step, {peak / 2**30:.1f} of {total / 2**30:.0f} GiB"
        print(f"{name}, {variant}: {summary}")
        assert peak < total
