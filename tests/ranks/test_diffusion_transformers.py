"""DiT, Flux and SD3 sharded over ``tensor``, weights and optimizer over replicas: the same training as on one rank."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hpcai.dist.mesh import Mesh
from hpcai.models.diffusion.condition import Condition
from hpcai.models.diffusion.config import DiffusionConfig
from hpcai.models.diffusion.model import Diffusion
from hpcai.models.diffusion.parallel import parallelize
from hpcai.nn.deferred_init import deferred
from hpcai.parallel import lora
from hpcai.settings import LoRAConfig, StepConfig
from hpcai.train.step import Step
from tests.ranks.training import Case, check_sharded_equals_full

DIT: dict[str, Any] = {"inputs": 2, "outputs": 2, "size": 4, "layers": 2, "heads": 4, "head": 3, "classes": 3}
FLUX: dict[str, Any] = {
    "inputs": 8, "double": 1, "single": 2, "heads": 4, "head": 6, "tokens": 5, "pooled": 3, "turned": (2, 2, 2),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dit": DIT, "dit, dropped classes": {**DIT, "dropout": 0.4, "recompute": "layers"}, "flux": FLUX,
    "flux, guided": {**FLUX, "guidance": True, "recompute": "selective"},
    "sd3": {"inputs": 2, "outputs": 2, "size": 6, "positions": 3, "layers": 3, "heads": 4, "head": 3, "tokens": 5, "pooled": 3,
            "dual_attention": (0, 2), "recompute": "selective"},
}  # fmt: skip


class Batch(NamedTuple):
    x: Tensor
    time: Tensor
    target: Tensor
    classes: Tensor | None = None
    tokens: Tensor | None = None
    pooled: Tensor | None = None
    guidance: Tensor | None = None


def batch(mesh: Mesh, step: int, cfg: dict[str, Any]) -> Batch:
    """Return the samples of a replica, of four in all."""
    draw, axis = torch.Generator().manual_seed(step), mesh["replicate"]

    def own(values: Tensor) -> Tensor:
        return values.chunk(axis.size)[axis.rank]

    def normal(*shape: int) -> Tensor:
        return own(torch.randn(4, *shape, generator=draw, dtype=torch.float64))

    x, target, time = normal(2, 4, 4), normal(2, 4, 4), own(torch.rand(4, generator=draw, dtype=torch.float64))
    if "classes" in cfg:
        return Batch(x, 1000 * time, target, own(torch.randint(0, cfg["classes"], (4,), generator=draw)))
    guidance = time + 1 if "guidance" in cfg else None
    return Batch(x, time, target, None, normal(3, cfg["tokens"]), normal(cfg["pooled"]), guidance)


def loss(model: nn.Module, part: Batch) -> dict[str, Tensor]:
    condition = Condition(classes=part.classes, tokens=part.tokens, pooled=part.pooled, guidance=part.guidance)
    return {"loss": (model(part.x, part.time, condition) - part.target).square().mean()}


def new_model(name: str) -> Any:
    return Diffusion(DiffusionConfig(**{"unet": None, name.partition(",")[0]: MODELS[name]})).network


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    torch.manual_seed(5)  # equal class dropout on all ranks
    with deferred(seed):  # each rank initializes its shard of the same weights
        model = parallelize(new_model(case["model"]), mesh)
        if case.get("adapters"):
            lora.adapt(model, LoRAConfig(rank=3, targets=("to_q", "to_out.0", "add_v_proj", "proj_out", "net.2", "net.0.proj")))
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    settings: dict[str, Any] = {"precision": "fp64", "optimizer": "adamw", "weight_decay": 0.1, "clip": 0.5, "ema_decay": 0.9}
    return Step(model, loss, StepConfig(**settings, eps=1e-3, capture="none", shard=case.get("shard", "none")), mesh)


def batches(mesh: Mesh, case: Case, first: int, steps: int) -> list[Batch]:
    return [batch(mesh, number, MODELS[case["model"]]) for number in range(first, first + steps)]


@pytest.mark.parametrize("axes", [{"tensor": 4}, {"replicate": 2, "tensor": 2}], ids=str)
def test_sharded_equals_full(axes: dict[str, int]) -> None:
    cases: list[Case] = [{"model": name} for name in MODELS] + [{"model": "flux", "adapters": True}]
    if "replicate" in axes:  # replicas would drop different classes
        pairs = [(name, "weights") for name in ("dit", "flux, guided", "sd3")] + [("dit", "none"), ("flux, guided", "optimizer")]
        cases = [{"model": name, "shard": shard} for name, shard in pairs]
        cases += [{"model": "flux", "adapters": True, "shard": "weights"}]
    check_sharded_equals_full(axes, cases, new_step, batches)
