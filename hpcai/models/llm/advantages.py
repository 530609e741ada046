"""Advantages of sampled answers: functions of arrays on the host, before a training step. Results are tensors.

P prompts, G answers of each, B sequences, T tokens
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hpcai.errors import DataError
from hpcai.models.llm.alignment_config import KLConfig


def group_advantages(rewards: Any, scale: Literal["group", "batch", "none"] = "group", eps: float = 1e-4) -> tuple[Tensor, int]:
    """Return rewards [P, G] minus the mean of their group (GRPO, Shao et al. 2024), and the number of uniform groups: their rewards
    are equal, and advantages 0.

    ``scale``: Divide by the standard deviation of the group, or of all rewards, plus ``eps``; Dr. GRPO (Liu et al. 2025) does not.
    REINFORCE++ with baseline (Hu et al. 2025) is ``whiten`` of advantages without a scale. Raises DataError for rewards that are
    not finite.
    """
    rewards = _finite_rewards(rewards, "prompt", "sample")
    uniform = (rewards == rewards[:, :1]).all(1, keepdim=True)
    values = rewards - rewards.mean(1, keepdim=True)
    if scale != "none":
        values = values / ((rewards.std(1, keepdim=True) if scale == "group" else rewards.std()) + eps)
    return values.masked_fill(uniform, 0), int(uniform.sum())


def leave_one_out(rewards: Any) -> tuple[Tensor, int]:
    """Return rewards [P, G] minus the mean of the others of their group (RLOO, Ahmadian et al. 2024), and the number of uniform
    groups. Raises DataError for rewards that are not finite, and for groups of one."""
    values, uniform_groups = group_advantages(rewards, "none")
    if (answers := values.shape[1]) < 2:
        raise DataError("each prompt has one answer, and leave-one-out needs others; sample two or more of each prompt")
    return values * (answers / (answers - 1)), uniform_groups


def kl_rewards(scores: Any, log_probs: Any, reference_log_probs: Any, mask: Any, beta: float) -> Tensor:
    """Return rewards of tokens [B, T]: -beta times the log-ratio of policy and reference, plus the score [B] of a sequence at its
    last token of ``mask`` (Ziegler et al. 2019). Raises DataError for scores that are not finite, and for sequences of no token."""
    scores, mask = _finite_rewards(scores, "sequence"), torch.as_tensor(mask)
    if len(empty := (~mask.any(1)).nonzero()):
        raise DataError(f"sequence {int(empty[0])} has no token to reward; leave it out of the batch")
    rewards = torch.where(mask, -beta * (torch.as_tensor(log_probs) - torch.as_tensor(reference_log_probs)), 0.0)
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(1, keepdim=True)
    return rewards.scatter_add(1, last, scores[:, None].to(rewards.dtype))


def gae(rewards: Any, values: Any, mask: Any, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates (Schulman et al. 2016) and returns, [B, T] each, 0 outside of ``mask``.

    ``rewards``, ``values``, ``mask`` [B, T]: of one sequence in each row; ``mask`` has the tokens of the policy. Others between
    them, such as results of tools, take no time. Raises DataError for rewards that are not finite.
    """
    rewards, values, mask = _finite_rewards(rewards, "sequence", "token"), torch.as_tensor(values), torch.as_tensor(mask)
    advantages = torch.zeros_like(values)
    advantage = next_value = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        estimate = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * advantage
        advantage, next_value = (torch.where(mask[:, t], *pair) for pair in ((estimate, advantage), (values[:, t], next_value)))
        advantages[:, t] = advantage.where(mask[:, t], 0)
    return advantages, (advantages + values).where(mask, 0)


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """Return count, sum and sum of squares of ``values`` in ``mask``, for ``whiten``: add them over ranks.   [3] float64"""
    kept = values.double().where(mask, 0)
    return torch.stack((mask.sum().double(), kept.sum(), kept.square().sum()))


def whiten(values: Tensor, mask: Tensor, total: Tensor, eps: float = 1e-8) -> Tensor:
    """Return ``values`` with mean 0 and variance 1 over all samples, whose ``moments`` are ``total``; 0 outside of ``mask``."""
    mean = total[1] / total[0]
    variance = (total[2] - total[0] * mean.square()).clamp(min=0) / (total[0] - 1).clamp(min=1)
    return ((values.double() - mean) * torch.rsqrt(variance + eps)).to(values.dtype).where(mask, 0)


class KLController:
    """The coefficient ``beta`` of ``kl_rewards``: fixed, or adaptive, so that the divergence approaches ``cfg.target`` (Ziegler et
    al. 2019, section 2.2)."""

    def __init__(self, cfg: KLConfig) -> None:
        self.cfg, self.beta = cfg, cfg.beta

    def update(self, kl: float, sequences: int) -> None:
        """Update ``beta`` after ``sequences`` with the mean divergence ``kl``, in nats of a sequence."""
        if self.cfg.target is not None:
            self.beta *= 1 + min(max(kl / self.cfg.target - 1, -0.2), 0.2) * sequences / self.cfg.horizon

    def state_dict(self) -> dict[str, float]:
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.beta = float(state["beta"])


def _finite_rewards(rewards: Any, *dims: str) -> Tensor:
    rewards = torch.as_tensor(rewards)
    rewards = rewards if rewards.is_floating_point() else rewards.double()
    if len(wrong := (~rewards.isfinite()).nonzero().tolist()):
        where = ", ".join(f"{name} {index}" for name, index in zip(dims, wrong[0]))
        raise DataError(f"{where}: the reward is {float(rewards[tuple(wrong[0])])}, expected a finite number; mend its function")
    return rewards
