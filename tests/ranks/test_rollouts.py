"""Rollouts, their scores and the training with them are those of one rank on several, and resume on another number of ranks."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcai.dist.mesh import Mesh
from hpcai.models import llm
from hpcai.nn.deferred_init import deferred, materialize
from hpcai.settings import CheckpointConfig, ReportConfig, RunConfig, StepConfig, TrainConfig
from hpcai.train import Run, Step, evaluate, fit
from tests.ranks.language_model import LLAMA
from tests.ranks.launch import on_ranks
from tests.ranks.shards import check_equal, gather_full
from tests.ranks.training import training_state

BYTES = llm.Tokenizer.byte_level()
PROMPTS = [llm.Prompt(f"{n}" * (1 + n % 3), BYTES.encode(f"{n}" * (1 + n % 3)), {}) for n in range(8)]
STEPS = 5


def count_low(prompts: list[str], completions: list[str]) -> list[float]:
    return [sum(letter < "d" for letter in text) / 5 for text in completions]


def network(mesh: Mesh, seed: int, kind: type[llm.LLM] = llm.LLM) -> Any:
    with deferred(seed):
        model = llm.parallelize(kind(llm.LLMConfig(**LLAMA | {"vocabulary": 257})), mesh)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    return model


def trained(mesh: Mesh, method: str) -> tuple[Any, Any]:
    policy = network(mesh, 0)
    if method == "ppo":
        return llm.ActorCritic(policy, network(mesh, 1, llm.Critic), 0.1), None
    return policy, llm.build_pipeline(policy, mesh)


def new_rollouts(mesh: Mesh, method: str, staleness: int, shard: str, directory: str = "") -> llm.Rollouts:
    def real(model: Any) -> Any:
        return materialize(model, "cpu", dtype=torch.float64).requires_grad_(False).eval()

    model, pipeline = trained(mesh, method)
    loss: Any = llm.actor_critic_loss if method == "ppo" else partial(llm.policy_loss, cfg=llm.PolicyConfig(beta=0.1))
    cfg: Any = {"shard": shard if mesh["replicate"].size > 1 else "none"}
    settings = StepConfig(precision="fp64", lr=0.02, clip=1.0, accumulate=2, eps=1e-5, **cfg)
    step = Step(model, loss, settings, mesh, pipeline=pipeline)
    generator, frozen = None, network(mesh, 2)
    reference = llm.Network(real(frozen) if mesh["pipeline"].size == 1 else frozen, llm.build_pipeline(frozen, mesh))
    if mesh["pipeline"].size > 1:
        real(frozen)
    if staleness or (shard == "weights" and mesh["replicate"].size > 1):
        copy, stages = trained(mesh, method)
        generator = llm.Network(mesh.background_copy(real(copy)) if staleness else real(copy), stages)
        reference = llm.Network(mesh.background_copy(reference.model), reference.pipeline) if staleness else reference
    sampling = llm.SamplingConfig(temperature=0.9, most=6)
    kwargs: Any = {"scale_rewards": "batch", "staleness": staleness, "sampling": sampling, "validation": sampling}
    engine = llm.EngineConfig(max_num_seqs=3, block_size=4)
    sizes = llm.RolloutConfig(prompts=4, num_generations=2, num_mini_batches=2, sizes=engine, **kwargs)
    return llm.Rollouts(
        step, PROMPTS, llm.Rewards(llm.RewardConfig(), count_low), sizes, BYTES, method=method, stop=[256, 97], generator=generator,
        reference=reference, directory=Path(directory) if directory else None,
    )  # fmt: skip


def train(mesh: Mesh, method: str, staleness: int, shard: str) -> tuple[Any, list[Any]]:
    rollouts = new_rollouts(mesh, method, staleness, shard)
    validation = rollouts.validation(PROMPTS[:6])
    result = fit(rollouts.step, rollouts, TrainConfig(steps=STEPS, report_every=1), validation=validation, evaluate=rollouts.score)
    names = ("reward", "length", "kl_k1", "reference_kl_k1", "entropy")
    return training_state(rollouts.step), [[each[name] for name in names] for each in result] + [result.evaluations[-1].values]


@cache
def full(method: str, staleness: int) -> Any:
    return train(Mesh({}), method, staleness, "none")


@pytest.mark.parametrize(
    ("axes", "method", "staleness", "shard"),
    [
        ({"tensor": 2}, "ppo", 0, "none"), ({"context": 2}, "grpo", 0, "none"),
        ({"pipeline": 2}, "grpo", 0, "none"), ({"replicate": 2}, "grpo", 1, "optimizer"), ({"replicate": 2}, "rloo", 0, "weights"),
        ({"replicate": 2, "tensor": 2}, "ppo", 1, "weights"),
    ],
    ids=str,
)  # fmt: skip
def test_sharded_equals_full(axes: dict[str, int], method: str, staleness: int, shard: str) -> None:
    expected_state, expected = full(method, staleness)
    ranks = on_ranks(axes, train, method, staleness, shard)
    check_equal(gather_full([state for state, _ in ranks]), gather_full([expected_state]), 1e-9)
    for _, values in ranks:
        for actual, wanted in zip(values, expected, strict=True):
            assert actual == pytest.approx(wanted, abs=1e-9)


def train_files(mesh: Mesh, directory: str, steps: int, staleness: int) -> Any:
    rollouts = new_rollouts(mesh, "grpo", staleness, "optimizer", directory)
    settings = RunConfig(report=ReportConfig(directory=Path(directory), sinks=()), checkpoint=CheckpointConfig(every_steps=1))
    with Run("test", settings, mesh) as run:
        fit(rollouts.step, rollouts, TrainConfig(steps=steps), run=run)
    return training_state(rollouts.step)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_resumes_between_updates_on_another_number_of_ranks(staleness: int, tmp_path: Path) -> None:
    """A run of one process ends in the middle of an iteration, and two replicas go on."""
    train_files(Mesh({}), str(tmp_path), 3, staleness)
    ranks = on_ranks({"replicate": 2}, train_files, str(tmp_path), STEPS, staleness)
    check_equal(gather_full(ranks), gather_full([full("grpo", staleness)[0]]), 1e-9)


def evaluate_only(mesh: Mesh) -> Any:
    rollouts = new_rollouts(mesh, "grpo", 0, "none")
    return evaluate(rollouts.step, rollouts.score, rollouts.validation(PROMPTS[:5]))


def test_held_out_prompts_are_scored_once_by_replicas_of_unequal_numbers() -> None:
    expected = evaluate_only(Mesh({}))
    assert all(values == pytest.approx(expected) for values in on_ranks({"replicate": 2}, evaluate_only))
