"""Settings of the alignment of language models, by reinforcement learning and by preferences. This module does not import torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeFloat, PositiveFloat, PositiveInt, Rate, Settings
from hpcai.models.llm.config import EngineConfig, SamplingConfig


class PolicyConfig(Settings):
    """The clipped objective of a policy: PPO (Schulman et al. 2017), GRPO (Shao et al. 2024), DAPO (Yu et al. 2025), Dr. GRPO (Liu
    et al. 2025) or GSPO (Zheng et al. 2025)."""

    clip_low: Rate = 0.2
    """the ratio of probabilities, new to old, is clipped at 1 - clip_low"""
    clip_high: PositiveFloat = 0.2
    """the ratio is clipped at 1 + clip_high (DAPO: 0.28)"""
    normalization: Literal["token", "sequence", "constant"] = "token"
    """token: mean over all tokens of the global batch (DAPO); sequence: mean over the tokens of a sequence, then over sequences
    (GRPO); constant: sum over the tokens of a sequence divided by ``length``, then mean over sequences (Dr. GRPO)"""
    length: PositiveInt | None = None
    """divisor of normalization: constant, such as the maximum length of an answer in tokens"""
    ratio: Literal["token", "sequence"] = "token"
    """ratio of each token, or of a sequence: the geometric mean over its tokens (GSPO, with much smaller clips)"""
    beta: NonNegativeFloat = 0.0
    """coefficient of the Kullback-Leibler divergence from the reference, by the estimator k3 (Schulman 2020)"""
    importance_cap: PositiveFloat | None = None
    """cap of the weight of a token, its probability by the old policy over that by the generation engine (truncated importance
    sampling, Yao et al. 2025); null: no weights"""
    temperature: PositiveFloat = 1.0
    """temperature of sampling, by which logits are divided"""
    value_clip: PositiveFloat | None = 0.2
    """critic: values are clipped to this distance from the old ones, and the larger error counts; null: no clipping"""
    vf_coef: PositiveFloat = 0.1
    """ppo: coefficient of the critic's loss"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.length is None) == (self.normalization == "constant"):
            problem = f"length is {self.length or 'null'}, and normalization {self.normalization}"
            raise ValueError(f"{problem}; give a length with constant, and with no other")
        return self


class PreferenceConfig(Settings):
    """The loss of a policy on pairs of answers."""

    loss: Literal["dpo", "ipo"] = "dpo"
    """dpo: Rafailov et al. 2023; ipo: Azar et al. 2023, with log-probabilities per token"""
    beta: PositiveFloat = 0.1
    """factor of rewards (DPO); regularization (IPO, there tau)"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """dpo: fraction of pairs whose labels are assumed to be exchanged (conservative DPO, Mitchell 2023)"""
    sft: NonNegativeFloat = 0.0
    """coefficient of the mean cross entropy of the tokens of a chosen answer (RPO, Pang et al. 2024)"""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing is {self.label_smoothing:g}, which ipo does not have; set it to 0, or loss to dpo")
        return self


class KLConfig(Settings):
    """The coefficient of the divergence from the reference in rewards (Ziegler et al. 2019)."""

    beta: NonNegativeFloat = 0.1
    """coefficient, or its first value"""
    target: PositiveFloat | None = None
    """divergence of a sequence, in nats, which an adaptive coefficient keeps; null: fixed coefficient"""
    horizon: PositiveInt = 10_000
    """sequences in which the coefficient adapts"""


class RewardConfig(Settings):
    """The reward of an answer: by one of a function, a program and a model."""

    function: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")] | None = None
    """``module:name`` of a Python function with trl's arguments: function(prompts=[...], completions=[...], **columns of the
    prompts) -> one number for each"""
    program: tuple[str, ...] = ()
    """command that reads a JSON object with prompt, completion and the columns, and writes a number; it is run for each answer"""
    model: Path | None = None
    """folder or file of a reward model with the tokens of the policy"""
    timeout: PositiveFloat = 60.0
    """seconds of a call of the function, or of the program, at most"""
    workers: PositiveInt = 4
    """programs that run at the same time, on each model replica"""
    on_failure: Literal["stop", "zero"] = "stop"
    """stop: a reward that is not finite, an exception or the time limit ends the run; zero: the reward is 0, logged and counted"""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(map(bool, (self.function, self.program, self.model))) > 1:
            raise ValueError("more than one of function, program and model is given; give one")
        return self


class RolloutConfig(Settings):
    """Iterations of generation and update, by trl's names. An iteration samples answers of prompts, and updates the policy with
    them."""

    prompts: PositiveInt = 32
    """prompts of an iteration, over all replicas"""
    num_generations: PositiveInt = 8
    """sampled answers of each prompt"""
    num_mini_batches: PositiveInt = 1
    """optimizer steps in which an iteration's answers are used once, each with a part of its prompts"""
    num_ppo_epochs: PositiveInt = 1
    """number of times that the answers are used"""
    epoch: PositiveInt | None = None
    """prompts between two evaluations; null: all"""
    staleness: Literal[0, 1] = 0
    """1: answers are sampled during the updates of the iteration before, by a copy of the weights at its start"""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """grpo: divide by the standard deviation of the rewards of a prompt, of the iteration, or not (Dr. GRPO)"""
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """ppo: discount of rewards"""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """ppo: lambda of generalized advantage estimation"""
    kl: KLConfig = KLConfig()
    """ppo: divergence from the reference in rewards"""
    sampling: SamplingConfig = SamplingConfig(temperature=1.0)
    validation: SamplingConfig = SamplingConfig()
    """of the answers that are evaluated"""
    engine: Literal["hpcai", "vllm"] = "hpcai"
    """vllm: generate with vLLM, an extra"""
    sizes: EngineConfig = EngineConfig()
    """of the engine; `cache_tokens` null: those of `max_num_seqs` answers of the longest prompt"""
    pad_to: PositiveInt = 8
    """lengths of batches, in tokens, are rounded up to a multiple of this"""
    samples: PositiveInt = 2
    """answers of each iteration in the reports, to be read"""

    @model_validator(mode="after")
    def _samples(self) -> Self:
        if not self.sampling.temperature:
            raise ValueError("sampling.temperature is 0, with which all answers of a prompt are equal; set it to more, such as 1")
        return self
