"""Settings of the alignment of language models, by reinforcement learning and by preferences. This module does not import torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpcai.config import NonNegativeFloat, PositiveFloat, PositiveInt, Rate, Settings


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
