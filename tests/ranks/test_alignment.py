"""Losses of policies, preferences, critics and reward models are those of one rank on several, and in a captured step."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm import LLM, Critic, LLMConfig, PolicyConfig, PreferenceBatch, PreferenceConfig, RolloutBatch
from hpcai.nn.deferred_init import deferred
from hpcai.settings import StepConfig
from hpcai.train.capture import _WARMUP_STEPS as WARMUP
from hpcai.train.step import Step
from tests.cpu_graph import CPUGraph, NoHostRead
from tests.ranks.language_model import LLAMA
from tests.ranks.training import Case, check_sharded_equals_full

POLICY = PolicyConfig(normalization="sequence", ratio="sequence", beta=0.3, importance_cap=1.1, temperature=0.7)
LOSSES: dict[str, Any] = {
    "policy": partial(llm.policy_loss, cfg=POLICY), "preference": partial(llm.preference_loss, cfg=PreferenceConfig(sft=0.5)),
    "value": llm.value_loss, "reward": llm.reward_loss,
}  # fmt: skip


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    with deferred(seed):
        model = llm.parallelize((Critic if case["loss"] in ("value", "reward") else LLM)(LLMConfig(**LLAMA)), mesh)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    settings = {"capture": "none", "optimizer": "adamw"} | {name: case[name] for name in ("capture", "shard") if name in case}
    cfg = StepConfig(precision="fp64", accumulate=2, clip=0.5, eps=1e-5, **settings)
    return Step(model, LOSSES[case["loss"]], cfg, mesh, pipeline=llm.build_pipeline(model, mesh), graph=CPUGraph)


def batches(mesh: Mesh, case: Case, first: int, steps: int) -> list[Any]:
    """Return the rows of this replica, of eight in all; those of rollouts have several sequences."""
    axis = mesh["replicate"]
    return [type(b)(*(x.chunk(axis.size)[axis.rank] for x in b)) for b in (batch(case["loss"], first + n) for n in range(steps))]


def batch(loss: str, step: int) -> RolloutBatch | PreferenceBatch:
    generator, columns = torch.Generator().manual_seed(step), 16 if loss == "reward" else 17
    tokens = torch.randint(0, LLAMA["vocabulary"], (8, columns), generator=generator)
    mask = torch.rand(8, columns, generator=generator) < 0.6
    noise = torch.randn(5, 8, 16, generator=generator, dtype=torch.float64)
    if loss in ("preference", "reward"):
        return PreferenceBatch(tokens, mask, 3 * noise[0, :, 0] - 40, noise[1, :, 0].abs())
    documents, log_probs = (torch.rand(8, 17, generator=generator) < 0.2).cumsum(1), 0.3 * noise - 3
    mask &= pad(documents.diff(dim=1) == 0, (1, 0))
    further = log_probs[2], log_probs[3], noise[4], noise[1], noise[0, :, 0]
    return RolloutBatch(tokens, mask, log_probs[0], noise[1], documents, *further)


@pytest.mark.parametrize(
    "axes", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}, {"replicate": 2}, {"context": 2, "tensor": 2}], ids=str
)
def test_sharded_equals_full(axes: dict[str, int]) -> None:
    cases: list[Case] = [{"loss": loss} for loss in LOSSES]
    if "replicate" in axes:
        cases = [case | {"shard": "weights" if number % 2 else "optimizer"} for number, case in enumerate(cases)]
    check_sharded_equals_full(axes, cases, new_step, batches, () if "replicate" in axes else ("loss",))


@pytest.mark.parametrize("loss", ["policy", "value"])
def test_captured_equals_eager(loss: str) -> None:
    """The host reads nothing. Rows have one sequence: on a CPU, attention within documents would read them."""
    eager, captured = (new_step(Mesh({}), {"loss": loss, "capture": capture}) for capture in ("none", "whole"))
    for each in batches(Mesh({}), {"loss": loss}, 0, WARMUP + 2):
        each = each._replace(documents=None) if hasattr(each, "documents") else each
        with NoHostRead():
            values = eager(each, 0.05)
        torch.testing.assert_close(captured(each, 0.05), values, rtol=1e-11, atol=1e-11)
    assert captured._capture is not None and captured._capture.recorded() == 1
