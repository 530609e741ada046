"""Losses of alignment: reinforcement learning of a policy, its critic and its reward model, and preferences.

    step = Step(model, partial(policy_loss, cfg=PolicyConfig(normalization="sequence")), cfg.step, mesh)

The model returns log-probabilities of tokens and never materializes logits: there is no entropy bonus, which needs them. Ranks of
``context`` gather the outputs of all tokens by an all-reduce, and compute the same loss.   B rows, T tokens of each but the first
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hpcai.errors import ConfigError, DataError
from hpcai.models.llm.alignment_config import PolicyConfig, PreferenceConfig
from hpcai.models.llm.objective import document_positions, router_metrics
from hpcai.nn.lm_head import IGNORE_INDEX

Metrics = dict[str, Any]
_POLICY, _PREFERENCE = PolicyConfig(), PreferenceConfig()


class RolloutBatch(NamedTuple):
    """Sampled sequences. Column t of a field [B, T] is about ``tokens[:, t + 1]``, and counts if ``loss_mask`` has this token."""

    tokens: Tensor  # [B, T + 1] int64
    loss_mask: Tensor  # [B, T + 1] whether the policy sampled a token; the first of a sequence is none
    old_log_probs: Tensor  # [B, T] before the update, by ``token_log_probs``
    advantages: Tensor  # [B, T], or [B, 1] of rows with one sequence
    documents: Tensor | None = None  # [B, T + 1] sequence of each token of packed rows, which bounds attention
    reference_log_probs: Tensor | None = None  # [B, T] of the reference model
    engine_log_probs: Tensor | None = None  # [B, T] by which the generation engine sampled
    returns: Tensor | None = None  # [B, T] for a critic
    old_values: Tensor | None = None  # [B, T] before the update, by ``token_values``
    rewards: Tensor | None = None  # [B] of rows with one sequence, for metrics


class PreferenceBatch(NamedTuple):
    """Pairs of answers to a prompt, in rows: chosen, rejected, chosen, ..."""

    tokens: Tensor  # [2 B, T + 1] int64
    loss_mask: Tensor  # [2 B, T + 1] whether a token is one of the answer
    reference_log_probs: Tensor | None = None  # [2 B] of answers, by ``answer_log_probs`` of the reference model
    margin: Tensor | None = None  # [2 B] for a reward model, by how much rewards should differ; that of chosen rows counts


def token_log_probs(model: Any, batch: Any, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of each token of ``loss_mask``, 0 of others, for logits divided by ``temperature``.   [B, T]

    Raises ConfigError if the model in training mode adds a z-loss to it."""
    if model.training and model.cfg.z_loss:
        raise ConfigError(f"model.z_loss is {model.cfg.z_loss:g}, which is no part of log-probabilities; set it to 0 for alignment")
    targets = batch.tokens[:, 1:].where(batch.loss_mask[:, 1:], IGNORE_INDEX)
    kwargs = {} if temperature == 1.0 else {"temperature": temperature}
    return -_of_all_tokens(model, batch.tokens[:, :-1], targets, getattr(batch, "documents", None), **kwargs)


def token_values(model: Any, batch: RolloutBatch) -> Tensor:
    """Return the value by a ``Critic`` of the state before each of ``tokens[:, 1:]``.   [B, T]"""
    return _of_all_tokens(model, batch.tokens[:, :-1], None, batch.documents)


def answer_log_probs(model: Any, batch: PreferenceBatch) -> Tensor:
    """Return the log-probability of each answer.   [2 B]"""
    return token_log_probs(model, batch).sum(1)


def answer_rewards(model: Any, batch: PreferenceBatch) -> Tensor:
    """Return the value by a ``Critic`` of the last token of each answer. The model reads all T + 1 tokens.   [2 B]"""
    columns = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    last = (batch.loss_mask * columns).amax(1, keepdim=True)
    return _of_all_tokens(model, batch.tokens, None, None).gather(1, last)[:, 0]


def _of_all_tokens(model: Any, tokens: Tensor, targets: Tensor | None, documents: Tensor | None, **kwargs: Any) -> Tensor:
    """Return the output of the model, of the tokens of all ranks of ``context``.   [B, T]"""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    documents = None if documents is None else documents[:, : tokens.shape[1]]
    positions = columns[None] if documents is None else document_positions(documents)
    output = model(tokens, targets, positions, documents, **kwargs)
    if output.shape == tokens.shape:
        return output
    local = model.local_tokens(columns[None])[0]
    return model.all_reduce(output.new_zeros(tokens.shape).index_copy(1, local, output))


def policy_loss(model: Any, batch: RolloutBatch, cfg: PolicyConfig = _POLICY) -> Metrics:
    """Return the clipped objective, with the mean over the global batch of ``cfg.normalization``, and metrics, as (sum, count).

    Means over tokens: ``ratio``, new to old probability; ``clipped_low`` and ``clipped_high``, whether a token has no gradient for
    this clip; ``kl_k1`` and ``kl_k3``, two estimates of the divergence from the old policy (Schulman, "Approximating KL
    divergence", 2020); ``reference_kl_k1`` and ``reference_kl_k3``, from the reference; ``entropy``, estimated by the sampled
    tokens; ``capped``, whether the importance weight is above its cap. Sequences without a token of ``loss_mask`` do not count.
    Means over rows, if the batch has rewards: ``reward`` and ``length``, in tokens.
    Raises ConfigError for settings that need what the batch or the model does not have.
    """
    _check_experts(model, cfg.normalization == "token")
    for setting, field in ("beta", "reference_log_probs"), ("importance_cap", "engine_log_probs"):
        if getattr(cfg, setting) and getattr(batch, field) is None:
            raise ConfigError(f"{setting} needs {field}, which the batch does not have; give them, or no {setting}")
    mask, current = batch.loss_mask[:, 1:], token_log_probs(model, batch, cfg.temperature)
    advantages = batch.advantages.where(mask, 0)
    log_ratio = token_log_ratio = (current - batch.old_log_probs).where(mask, 0)
    lengths, sequences = _sum_sequences(mask.to(current.dtype), batch.documents)
    if cfg.ratio == "sequence":
        log_ratio = _sum_sequences(log_ratio, batch.documents)[0] / lengths.clamp(min=1)
    ratio = log_ratio.exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high) * advantages)
    metrics = {
        "ratio": ratio, "clipped_low": (ratio < 1 - cfg.clip_low) & (advantages < 0),
        "clipped_high": (ratio > 1 + cfg.clip_high) & (advantages > 0), "kl_k1": -token_log_ratio,
        "kl_k3": token_log_ratio.expm1() - token_log_ratio, "entropy": -current,
    }  # fmt: skip
    if cfg.importance_cap and batch.engine_log_probs is not None:
        weights = (batch.old_log_probs - batch.engine_log_probs).where(mask, 0).exp()
        losses, metrics["capped"] = losses * weights.clamp(max=cfg.importance_cap), weights > cfg.importance_cap
    if batch.reference_log_probs is not None:
        difference = (batch.reference_log_probs - current).where(mask, 0)
        metrics["reference_kl_k1"], metrics["reference_kl_k3"] = -difference, difference.expm1() - difference
        losses = losses + cfg.beta * metrics["reference_kl_k3"] if cfg.beta else losses
    divisor: Any = {"token": 1, "sequence": lengths.clamp(min=1), "constant": cfg.length}[cfg.normalization]
    count = mask.sum().to(current.dtype) if cfg.normalization == "token" else sequences
    means = _means(metrics, mask)
    if batch.rewards is not None:
        rows = torch.full_like(count, len(mask))
        means |= {"reward": (batch.rewards.sum(), rows), "length": (mask.sum().to(count.dtype), rows)}
    return {"loss": ((losses / divisor).where(mask, 0).sum(), count), **means, **router_metrics(model)}


def actor_critic_loss(model: Any, batch: RolloutBatch, cfg: PolicyConfig = _POLICY) -> Metrics:
    """Return ``policy_loss`` plus ``cfg.vf_coef`` times ``value_loss`` of an ``ActorCritic``, the metric ``value_loss``.
    Raises ConfigError unless the objective is a mean over tokens, as that of the critic is."""
    if cfg.normalization != "token":
        raise ConfigError(f"policy.normalization is {cfg.normalization}, but a critic has a mean over tokens; set it to token")
    policy, value = policy_loss(model.part("policy"), batch, cfg), value_loss(model.part("critic"), batch, cfg)
    error, count = value.pop("loss")
    total = policy["loss"][0] + cfg.vf_coef * error
    values = {name if name.startswith("value") else f"value_{name}": each for name, each in value.items()}
    return policy | values | {"loss": (total, count), "value_loss": (error.detach(), count)}


def value_loss(model: Any, batch: RolloutBatch, cfg: PolicyConfig = _POLICY) -> Metrics:
    """Return half the squared error of a ``Critic``, clipped as in PPO, and means over tokens of ``value``, ``returns`` and
    ``clipped``, whether the value is beyond the clip, as (sum, count). Raises ConfigError if the batch has no returns."""
    clip, old, returns = cfg.value_clip, batch.old_values, batch.returns
    if returns is None or (clip is not None and old is None):
        raise ConfigError("a critic needs returns, and with value_clip old_values, which the batch does not have; give them")
    mask, current = batch.loss_mask[:, 1:], token_values(model, batch)
    losses, metrics = (current - returns).where(mask, 0).square(), {"value": current, "returns": returns}
    if clip is not None and old is not None:
        change = (current - old).where(mask, 0)
        clipped, metrics["clipped"] = old + change.clamp(-clip, clip), change.abs() > clip
        losses = torch.maximum(losses, (clipped - returns).where(mask, 0).square())
    loss = losses.sum() / 2, mask.sum().to(current.dtype)
    return {"loss": loss, **_means(metrics, mask), **router_metrics(model)}


def reward_loss(model: Any, batch: PreferenceBatch) -> Metrics:
    """Return the negative log-likelihood of pairs by the rewards of a ``Critic`` (Bradley and Terry 1952), and these rewards, as
    (sum, count) over pairs."""
    _check_experts(model, False)
    chosen, rejected = _pairs(answer_rewards(model, batch))
    margin = 0.0 if batch.margin is None else _pairs(batch.margin)[0]
    return _of_pairs({"loss": -F.logsigmoid(chosen - rejected - margin)}, chosen, rejected)


def preference_loss(model: Any, batch: PreferenceBatch, cfg: PreferenceConfig = _PREFERENCE) -> Metrics:
    """Return the loss of DPO or IPO, with ``cfg.sft`` also ``sft_loss`` of chosen answers, and implicit rewards, beta times the
    log-ratio of policy and reference, as (sum, count) over pairs. Raises ConfigError without log-probabilities of the reference."""
    _check_experts(model, False)
    if batch.reference_log_probs is None:
        raise ConfigError("preferences need reference_log_probs, which the batch does not have; give those of the first policy")
    answers, lengths = answer_log_probs(model, batch), batch.loss_mask[:, 1:].sum(1).clamp(min=1)
    log_ratios = answers - batch.reference_log_probs
    chosen, rejected = _pairs(cfg.beta * log_ratios)
    if cfg.loss == "dpo":
        margin, smooth = chosen - rejected, cfg.label_smoothing
        losses = -(1 - smooth) * F.logsigmoid(margin) - smooth * F.logsigmoid(-margin)
    else:
        of_tokens = _pairs(log_ratios / lengths)
        losses = (of_tokens[0] - of_tokens[1] - 1 / (2 * cfg.beta)).square()
    sft = {"sft_loss": _pairs(-answers / lengths)[0]} if cfg.sft else {}
    return _of_pairs({"loss": losses + cfg.sft * sum(sft.values()), **sft}, chosen, rejected)


def _sum_sequences(x: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum over the sequence of each token, and the number of sequences whose sum is positive.   [B, T] -> [B, T], []"""
    if documents is None:
        sums = x.sum(1, keepdim=True)
        return sums.expand_as(x), (sums > 0).sum().to(x.dtype)
    sequence = (documents.diff(dim=1) != 0).cumsum(1)
    sums = x.new_zeros(len(x), x.shape[1] + 1).scatter_add(1, sequence, x)
    return sums.gather(1, sequence), (sums > 0).sum().to(x.dtype)


def _check_experts(model: Any, per_token: bool) -> None:
    experts = model.cfg.experts
    if not per_token and model.training and experts is not None and (experts.balance_loss or experts.z_loss):
        problem = "experts.balance_loss and experts.z_loss count once per token, and this loss per sequence or pair"
        raise ConfigError(f"{problem}; set both to 0 (bias_update_rate balances without a loss), or normalization to token")


def _pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    if len(x) % 2:
        raise DataError(f"a micro-batch has {len(x)} rows, expected pairs of a chosen and a rejected one; take an even number")
    return x[0::2], x[1::2]


def _means(metrics: dict[str, Tensor], mask: Tensor) -> Metrics:
    return {name: (x.detach().where(mask, 0).sum(), mask.sum()) for name, x in metrics.items()}


def _of_pairs(losses: dict[str, Tensor], chosen: Tensor, rejected: Tensor) -> Metrics:
    c, r = chosen.detach(), rejected.detach()
    metrics = losses | {"chosen_reward": c, "rejected_reward": r, "reward_margin": c - r, "accuracy": c > r}
    return {name: (x.sum(), torch.full_like(c[0], len(c))) for name, x in metrics.items()}
