"""The networks, losses and data of an alignment."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from apps.align.data import read_pairs, read_prompts
from apps.align.settings import ROLLOUT_METHODS, Config
from hpcai import train
from hpcai.dist import Mesh
from hpcai.errors import ConfigError
from hpcai.models import llm
from hpcai.models.llm.load import override_settings, read_settings
from hpcai.models.llm.rollouts import policy_of
from hpcai.models.llm.text import stop_tokens
from hpcai.nn.deferred_init import deferred, materialize
from hpcai.train.checkpoint_reader import step_number


def complete_settings(cfg: Config) -> Config:
    """Return ``cfg`` with the model of ``start.weights``. Raises ConfigError for a setting that differs from it."""
    return cfg.model_copy(update={"model": override_settings(cfg.start.weights, cfg.model)})


def build_step(cfg: Config, mesh: Mesh) -> train.Step:
    """Return the step, with the weights of ``start``."""
    with train.seeds(cfg.train.seed):
        model = _new_model(cfg, mesh)
        pipeline = None if cfg.method == "ppo" else llm.build_pipeline(model, mesh)
        if cfg.method == "ppo":
            llm.load_deferred(model.policy, cfg.start.weights)
            llm.load_deferred(model.critic, cfg.start.critic or cfg.start.weights)
        else:
            llm.load_deferred(model, cfg.start.weights)
            model = model if cfg.lora is None else llm.adapt(model, cfg.lora)
    policy = cfg.policy.model_copy(update={"temperature": cfg.rollout.sampling.temperature})
    loss: Any = partial(llm.actor_critic_loss if cfg.method == "ppo" else llm.policy_loss, cfg=policy)
    if cfg.method in ("dpo", "ipo"):
        loss = partial(llm.preference_loss, cfg=llm.PreferenceConfig(**cfg.preference.model_dump() | {"loss": cfg.method}))
    return train.Step(model, llm.reward_loss if cfg.method == "reward" else loss, cfg.step, mesh, pipeline=pipeline)


def _new_model(cfg: Config, mesh: Mesh) -> Any:
    """Return a model of the kind that is trained, whose weights are not read."""
    policy = llm.parallelize((llm.Critic if cfg.method == "reward" else llm.LLM)(cfg.model), mesh)
    if cfg.method != "ppo":
        return policy
    return llm.ActorCritic(policy, llm.parallelize(llm.Critic(cfg.model), mesh), cfg.rollout.kl.beta)


def _frozen(cfg: Config, step: train.Step, weights: Path, kind: type[llm.LLM] = llm.LLM) -> llm.Network:
    """Return a network that is not trained, sharded as the policy."""
    with deferred(cfg.train.seed):
        model = llm.parallelize(kind(read_settings(weights)), step.mesh)
    pipeline = llm.build_pipeline(model, step.mesh)
    dtype = torch.float64 if cfg.step.precision == "fp64" else next(step.model.parameters()).dtype
    materialize(llm.load_deferred(model, weights), step.mesh.device, dtype=dtype).eval().requires_grad_(False)
    if cfg.rollout.staleness and cfg.method in ROLLOUT_METHODS:
        model = step.mesh.background_copy(model)
    return llm.Network(model, pipeline)


def _generator(cfg: Config, step: train.Step) -> llm.Network | None:
    """Return a network with weights of its own if the step cannot sample with its own: they are sharded, or change meanwhile."""
    if not cfg.rollout.staleness and not (step.cfg.shard == "weights" and step.mesh["replicate"].size > 1):
        return None
    with deferred(cfg.train.seed):
        model = _new_model(cfg, step.mesh)
        pipeline = None if cfg.method == "ppo" else llm.build_pipeline(model, step.mesh)
        model = model if cfg.lora is None else llm.adapt(model, cfg.lora)
    materialize(model, step.mesh.device, dtype=next(step.model.parameters()).dtype).requires_grad_(False)
    return llm.Network(step.mesh.background_copy(model) if cfg.rollout.staleness else model, pipeline)


def build_data(cfg: Config, step: train.Step, run: train.Run) -> tuple[Any, Any, Any, llm.Rollouts | None]:
    """Return the training data, the validation data, their metric, and the rollouts that evaluate held-out prompts, if any."""
    mesh, data, tokenizer = step.mesh, cfg.data, llm.Tokenizer.load(cfg.start.tokenizer or cfg.start.weights)
    if tokenizer.size > cfg.model.vocabulary:
        raise ConfigError(f"{tokenizer.where}: has ids up to {tokenizer.size - 1}, the model {cfg.model.vocabulary} entries")
    needs_reference = cfg.method in ("ppo", "dpo", "ipo") or (cfg.method in ROLLOUT_METHODS and cfg.policy.beta > 0)
    reference = _frozen(cfg, step, cfg.start.reference or cfg.start.weights) if needs_reference else None
    held_out = read_prompts(data.directory / str(data.validation), tokenizer, mesh) if cfg.is_evaluated else []
    held_out, rollouts, is_rollout = held_out[: data.validation_prompts], None, cfg.method in ROLLOUT_METHODS
    policy_of(step.model).tokenizer = tokenizer
    if is_rollout or held_out:
        reward = llm.Rewards(cfg.reward) if cfg.reward.model is None else _frozen(cfg, step, cfg.reward.model, llm.Critic)
        prompts = read_prompts(data.directory / data.prompts, tokenizer, mesh) if is_rollout else held_out
        alone = {"prompts": mesh["replicate"].size, "num_mini_batches": 1, "staleness": 0}  # it only evaluates
        sizes = cfg.rollout if is_rollout else cfg.rollout.model_copy(update=alone)
        rollouts = llm.Rollouts(
            step, prompts, reward, sizes, tokenizer, method=cfg.method if is_rollout else "grpo",
            stop=sorted(stop_tokens(policy_of(step.model)) | tokenizer.turn_ends), seed=cfg.train.seed, reference=reference,
            generator=_generator(cfg, step), directory=run.directory, oldest=lambda: _oldest(run), emit=run.reports.emit,
        )  # fmt: skip
    validation = rollouts.validation(held_out) if rollouts and held_out else None
    metric: Any = rollouts.score if rollouts and held_out else None
    if is_rollout:
        return rollouts, validation, metric, rollouts if held_out else None
    pairs = read_pairs(data.directory / data.pairs, tokenizer, mesh)
    training = llm.Preferences(step, pairs, data.batch, reference=reference, pad_to=cfg.rollout.pad_to, seed=cfg.train.seed)
    if cfg.method == "reward" and data.validation_pairs is not None:
        validation = training.validation(read_pairs(data.directory / data.validation_pairs, tokenizer, mesh))
        return training, validation, llm.reward_loss, None
    return training, validation, metric, rollouts


def _oldest(run: train.Run) -> int:
    """Return the step of the oldest checkpoint, or 0."""
    paths = run.checkpoints.paths() if run.checkpoints else []
    return step_number(paths[0]) if paths else 0
