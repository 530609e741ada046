"""Losses of policies, preferences, critics and reward models are those of one rank on several, where sequences are sharded, too."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.models.llm import LLM, Critic, LLMConfig, PolicyConfig, PreferenceBatch, PreferenceConfig, RolloutBatch
from hpcai.nn.deferred_init import deferred
from hpcai.settings import StepConfig
from hpcai.train.step import Step
from tests.ranks.language_model import LLAMA
from tests.ranks.training import Case, check_sharded_equals_full

POLICY = PolicyConfig(normalization="sequence", ratio="sequence", beta=0.3, importance_cap=1.1, temperature=0.7)
LOSSES: dict[str, Any] = {
    "policy": partial(llm.policy_loss, cfg=POLICY), "dr_grpo": partial(llm.policy_loss, cfg=PolicyConfig(normalization="constant", length=9)),
    "preference": partial(llm.preference_loss, cfg=PreferenceConfig(sft=0.5)), "value": llm.value_loss, "reward": llm.reward_loss,
}  # fmt: skip


def new_step(mesh: Mesh, case: Case, seed: int = 0) -> Step:
    with deferred(seed):
        model = llm.parallelize((Critic if case["loss"] in ("value", "reward") else LLM)(LLMConfig(**LLAMA)), mesh)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    cfg = StepConfig(precision="fp64", capture="none", accumulate=2, clip=0.5, eps=1e-5, shard=case.get("shard", "none"))
    return Step(model, LOSSES[case["loss"]], cfg, mesh, pipeline=llm.build_pipeline(model, mesh))


def batches(mesh: Mesh, case: Case, first: int, steps: int) -> list[Any]:
    """Return the rows of this replica, of eight in all; those of rollouts have several sequences."""
    return [batch(mesh["replicate"], case["loss"], step) for step in range(first, first + steps)]


def batch(axis: Any, loss: str, step: int) -> RolloutBatch | PreferenceBatch:
    generator = torch.Generator().manual_seed(step)
    is_pairs, columns = loss in ("preference", "reward"), 16 if loss == "reward" else 17
    tokens = torch.randint(0, LLAMA["vocabulary"], (8, columns), generator=generator)
    mask = torch.rand(8, columns, generator=generator) < 0.6
    noise = torch.randn(5, 8, 16, generator=generator, dtype=torch.float64)
    if is_pairs:
        fields: Any = [tokens, mask, 3 * noise[0, :, 0] - 40, noise[1, :, 0].abs()]
    else:
        documents = (torch.rand(8, 17, generator=generator) < 0.2).cumsum(1)
        mask &= nn.functional.pad(documents.diff(dim=1) == 0, (1, 0))
        fields = [tokens, mask, noise[0] * 0.3 - 3, noise[1], documents, noise[2] * 0.3 - 3, noise[3] * 0.3 - 3, noise[4], noise[1]]
    return (PreferenceBatch if is_pairs else RolloutBatch)(*(x.chunk(axis.size)[axis.rank] for x in fields))


@pytest.mark.parametrize(
    "axes", [{"tensor": 2}, {"context": 2}, {"pipeline": 2}, {"replicate": 2}, {"context": 2, "tensor": 2}], ids=str
)
def test_sharded_equals_full(axes: dict[str, int]) -> None:
    cases: list[Case] = [{"loss": loss} for loss in LOSSES]
    if "replicate" in axes:
        cases = [case | {"shard": "weights" if number % 2 else "optimizer"} for number, case in enumerate(cases)]
    check_sharded_equals_full(axes, cases, new_step, batches, () if "replicate" in axes else ("loss",))
