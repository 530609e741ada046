"""One step of each app at the size that its benchmark is run at, by its published settings: it fits, and its loss is finite.

Samples are random, as ``hpcai bench`` has them. pytest -m full chooses these tests, -m 'not full' leaves them out.
"""

from typing import Any, NamedTuple

import pytest
import torch

from hpcai import config, dist
from hpcai.cli.trial import find
from hpcai.train.step import Step
from tests.gpu.machine import DEVICE, GRAPH, ON_GPU, wait

pytestmark = pytest.mark.full


class Case(NamedTuple):
    app: str
    settings: str
    whole: tuple[str, ...]
    """what one GPU has of a published batch, and the size of its random samples"""
    tiny: tuple[str, ...]
    """a size for a CPU, where this file is only tried"""


CASES = [
    Case("cosmoflow", "batch512", ("data.batch=4",), ("model.size=32", "model.filters=4", "data.batch=2")),
    Case("deepcam", "batch2048", ("data.batch=8", "height=768", "width=1152"),
         ("model.divide=16", "model.middle=1", "data.batch=2", "height=96", "width=144")),
    Case("unet3d", "gpu1", ("data.batch=2",), ("model.window=[32, 32, 32]", "model.filters=[4, 8, 8]")),
    Case("opencatalyst", "batch2048", ("data.batch=16", "data.shapes=few", "data.balance=none"),
         ("data.batch=1", "data.shapes=few", "data.balance=none", "model.hidden=16", "model.output=16", "model.interaction=8",
          "model.blocks=1")),
    Case("openfold", "batch256", ("data.batch=1", "features.crop=256"),
         ("data.batch=1", "features.crop=16", "features.clusters=4", "features.extra=6", "features.recycles=0", "model.blocks=1",
          "model.extra.blocks=1")),
]  # fmt: skip


def settings(case: Case) -> Any:
    """The published ones, and with them what the random samples need."""
    trial, path = find(case.app).settings, f"apps/{case.app}/configs/{case.settings}.yaml"
    words = [*(case.whole if ON_GPU else case.tiny), "data.stage=null", "data.shards=1", "step.precision=bf16"]
    published = config.load(trial.__mro__[1], path, [word for word in words if "." in word.split("=")[0]])
    names = type(published).model_fields
    own = [word for word in words if word.split("=")[0].split(".")[0] not in names]
    return config.load(trial, None, own).model_copy(update={name: getattr(published, name) for name in names})


@pytest.mark.parametrize("capture", ["none", "whole"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.app)
def test_a_step_of_published_size_fits_and_is_finite(case: Case, capture: str) -> None:
    if case.app == "openfold" and capture != "none" and not ON_GPU:
        pytest.skip("one_hot reads its input on a CPU")
    subject, cfg, mesh = find(case.app), settings(case), dist.alone(DEVICE)
    cfg = subject.known(cfg)
    batch = subject.random_batch(cfg, range(cfg.data.batch), mesh.device)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = subject.build(cfg, mesh, subject.whole(cfg, mesh))
    step_cfg = cfg.step.model_copy(update={"capture": capture, "accumulate": 1})
    step = Step(model, subject.loss, step_cfg, mesh, counts=subject.counted, graph=GRAPH)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    found = [step(batch, 1e-3)["loss"] for _ in range(4)]
    step.check()
    losses = [float(x[0] / x[1] if isinstance(x, tuple) else x) for x in found]
    assert all(0 < loss < 1e6 for loss in losses), losses
    changed = sum(not torch.equal(x, p) for x, p in zip(before, step.model.parameters()))
    assert changed > 0.5 * len(before), f"{changed} of {len(before)} parameters were changed"
    if ON_GPU:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(3):
            step(batch, 1e-4)
        end.record()
        wait()
        peak, room = torch.cuda.max_memory_allocated(), torch.cuda.get_device_properties(DEVICE).total_memory
        took = f"{begin.elapsed_time(end) / 3:.1f} ms a step, {peak / 2**30:.1f} of {room / 2**30:.0f} GiB"
        print(f"{case.app}, capture {capture}: {took}")
        assert peak < room
